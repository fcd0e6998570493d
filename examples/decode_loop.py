"""A decode loop of your own: two prompts, one cache, one jitted step.

    python examples/decode_loop.py

The cache is a value. `jit_prefill` and `jit_decode_step` take one and return the next; the old one
is donated, so that memory holds one cache.
"""

import argparse
import pathlib

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import dsv4_jax as ds

PROMPTS = ["The import statement", "A for loop"]
CONTEXT = 512
"""Tokens that a request has room for, prompt and answer together."""


def main(argv: list[str] | None = None) -> list[str]:
    """Prints and returns what each prompt gets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default=str(ds.SHIPPED_CHECKPOINT), help="a directory")
    parser.add_argument("--tokens", type=int, default=60, help="to draw for each prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)

    config, params = ds.load_checkpoint(args.checkpoint, progress=False)
    params = ds.unstack_layers(params, donate=True)  # on a GPU: no weights are copied in a step
    tokenizer = Tokenizer.from_file(str(pathlib.Path(args.checkpoint) / "tokenizer.json"))
    num_rows = len(PROMPTS)
    cache = ds.init_cache(config, max_requests=num_rows, max_context_tokens=CONTEXT)
    slots = jnp.arange(num_rows, dtype=jnp.int32)  # each row keeps its place in the cache
    sampling = ds.make_sampling(num_rows, temperature=args.temperature, seed=7)

    # Prompts of all rows lie one after the other, padded to one size, so that one program serves
    # prompts of any length. Padding belongs to row -1.
    prompt_ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    rows = np.repeat(np.arange(num_rows), [len(ids) for ids in prompt_ids])
    room = (0, 128 - len(rows))
    step_input = ds.StepInput(
        token_ids=jnp.asarray(np.pad(np.concatenate(prompt_ids), room), jnp.int32),
        request_ids=jnp.asarray(np.pad(rows, room, constant_values=-1), jnp.int32),
        request_slots=slots,
    )
    cache, logits = ds.jit_prefill(params, cache, step_input, config=config)

    # A draw's noise follows from its seed and from the position of the token that is drawn.
    token_ids = ds.sample(logits, sampling, cache.length_tokens[slots])
    drawn: list[list[int]] = [[] for _ in PROMPTS]
    live = np.ones(num_rows, bool)
    for _ in range(args.tokens):
        for row in np.flatnonzero(live):
            drawn[row].append(int(token_ids[row]))
            live[row] = drawn[row][-1] not in config.eos_token_ids
        if not live.any():
            break
        rows = jnp.where(jnp.asarray(live), slots, -1)  # a row that has ended goes idle
        step_input = ds.StepInput(token_ids=token_ids, request_ids=rows, request_slots=slots)
        del logits  # else XLA puts the next ones elsewhere, and writes its CUDA graphs anew
        cache, logits = ds.jit_decode_step(params, cache, step_input, config=config)
        token_ids = ds.sample(logits, sampling, cache.length_tokens[slots])

    texts = [tokenizer.decode(ids) for ids in drawn]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt!r} -> {text!r}")
    return texts


if __name__ == "__main__":
    ds.use_compilation_cache()  # the second run starts sooner
    ds.set_xla_flags()  # what GPUs want of XLA; before the first array
    main()
