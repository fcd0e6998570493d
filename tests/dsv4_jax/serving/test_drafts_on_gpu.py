"""An engine with DSpark drafts on a GPU: its programs are compiled as they are when it serves."""

import functools

import pytest

import dsv4_jax as ds
from helpers.serving import byte_tokenizer, run_to_end

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TEXTS = ("def main():\n    ", "The for statement", "class Point:\n", "import os\n\nfor name in ")
SIZES = {"max_requests": 4, "max_context_tokens": 1024, "prefill_tokens": (24,)}


@functools.cache
def shipped():
    """The model that comes with the package, whose stages keep most of their drafts."""
    return ds.load_checkpoint(ds.SHIPPED_CHECKPOINT)


@functools.cache
def engine(steps_per_call, cut):
    config, params = shipped()
    return ds.Engine(
        config, params, tokenizer=byte_tokenizer(),
        draft_tokens=5, draft_cut=cut, steps_per_call=steps_per_call, **SIZES,
    )  # fmt: skip


def answers(steps_per_call=1, cut=False, *, speculates, temperature):
    """Of all texts at once; simple rows, so that `jit_serve_round` and `jit_serve_rounds` run."""
    one = engine(steps_per_call, cut)
    wanted = {"max_new_tokens": 150, "stop_token_ids": (), "temperature": temperature}
    ids = [
        one.submit(text, seed=seed, speculate=speculates, salt=str(speculates), **wanted)
        for seed, text in enumerate(TEXTS)
    ]
    return [each.token_ids for each in run_to_end(one, *ids)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("steps_per_call", "cut"), [(1, False), (1, True), (4, False), (4, True)])
def test_drafts_change_no_answer(temperature, steps_per_call, cut):
    without = answers(speculates=False, temperature=temperature)
    assert answers(steps_per_call, cut, speculates=True, temperature=temperature) == without
    assert engine(steps_per_call, cut).metrics.acceptance > 0.2
