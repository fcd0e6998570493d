"""Host time of a decode step: `python -m benchmarks.bench_host_step [options]`.

The device is a stand-in that answers at once, so that what is left of a step is the host's work:
planning, building inputs, counting, handing out tokens. Every request decodes; prompts have random
lengths, so that requests reach their block ends in different steps. Prints the CPU time of the
thread that steps, in ms a step. It needs no GPU.
"""

import argparse
import collections
import cProfile
import pstats
import time

import numpy as np

import dsv4_jax as ds
from dsv4_jax.step.serve_values import ServeOutput
from helpers.serving import byte_tokenizer, one_layer

CONTEXT, LONGEST_PROMPT = 640, 128


class InstantArrays:
    """In the place of `EngineArrays`: draws token 7 for every row, and accepts `kept` drafts."""

    def __init__(self, devices, kept):
        self.cache, self.store = devices.cache, devices.store
        self._slots = len(devices.cache.length_tokens)
        self._kept = kept
        self._outputs = collections.deque(maxlen=2)

    def launch(self, step_input, snapshots, num_checked, *_, **__):
        rows = step_input.request_ids
        counts = np.bincount(rows[rows >= 0], minlength=self._slots)
        accepted = np.minimum(self._kept, num_checked - 1)
        kept = np.where(counts > 0, counts - num_checked + 1 + accepted, 0)
        width = self.draft_tokens + 1
        order = np.arange(width)[None]
        drawn = np.where((order <= accepted[:, None]) & (counts > 0)[:, None], 7, -1)
        drafts = np.full((self._slots, width - 1), 7)
        checked = np.full((self._slots, 1), width - 1)
        columns = np.concatenate([drawn, kept[:, None], drafts, checked], axis=1).astype(np.int32)
        output = ServeOutput(columns=columns, logprobs=None, draft_tokens=width - 1)
        self._outputs.append(output)
        return output

    def read(self, back, *_):
        return self._outputs[-1 - back]

    def change(self, *_):
        pass

    set_sampling = set_counts = set_masks = save = rebuild = change


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=1000)
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokenizer", action="store_true", help="tokens have text")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    arguments = parser.parse_args()
    k, slots = arguments.draft_tokens, arguments.slots
    engine = ds.Engine(
        *one_layer(num_mtp_layers=int(k > 0)),
        max_requests=slots,
        max_context_tokens=CONTEXT,
        prefill_tokens=(max(4096, slots * (k + 1)),),
        draft_tokens=k,
        num_snapshots=2 * slots,
        tokenizer=byte_tokenizer() if arguments.tokenizer else None,
    )
    arrays = InstantArrays(engine.loop.runner.devices, kept=min(k, 1))
    arrays.draft_tokens = k
    engine.loop.runner.devices = arrays
    rng = np.random.default_rng(0)
    wanted = CONTEXT - LONGEST_PROMPT
    for length in rng.integers(1, LONGEST_PROMPT + 1, slots):
        engine.submit(
            rng.integers(0, 96, length).tolist(), max_new_tokens=wanted, stop_token_ids=(5,)
        )
    while min(request.num_drawn for request in engine.requests.values()) < 2:
        engine.step()
    profile, times = cProfile.Profile(), []
    for _ in range(arguments.steps):
        started = time.thread_time()
        if arguments.profile:
            profile.enable()
        tokens = engine.step()
        profile.disable()
        times.append(1000 * (time.thread_time() - started))
        assert len(tokens) >= slots
    assert engine.metrics.running == slots
    text = "text" if arguments.tokenizer else "no text"
    print(
        f"{slots} slots, {k} drafts, {text}: {np.mean(times):.3f} ms a step on average, "
        f"median {np.median(times):.3f}, 90 % below {np.quantile(times, 0.9):.3f}"
    )
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
