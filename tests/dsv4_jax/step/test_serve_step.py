"""The compiled serving step: everything donated, nothing copied, nothing written by idle rows."""

import contextlib
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.step_input import index_call
from dsv4_jax.serving.device.idle_steps import IdleStep
from dsv4_jax.serving.schedule.scheduler import StepPlan
from dsv4_jax.step.serve_step import _next_tokens, jit_serve_step, serve_step
from helpers.serving import BUCKET, SIZES, make_engine, params, prompt, rows_at


def idle_call(engine):
    """The arguments of a step without rows."""
    arrays = engine.loop.runner.devices
    patch = mock.patch.object(arrays, "launcher", side_effect=InterruptedError)
    with patch as launcher, contextlib.suppress(InterruptedError):
        engine.loop.runner.run_idle(IdleStep("idle", StepPlan.idle(BUCKET)))
    program, *arguments = launcher.call_args.args
    assert program is jit_serve_step
    return (arrays.params, *arguments), launcher.call_args.kwargs | {"config": engine.config}


def test_the_serving_step_donates_all_and_copies_no_leaf():
    """Known bugs B12, B22: also with drafts, staged rows and snapshots in the step."""
    engine = make_engine()
    args, options = idle_call(engine)
    compiled = jit_serve_step.lower(*args, **options).compile()
    *_, last = args
    donated = (engine.cache, engine.loop.runner.devices.store, last)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(donated))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    names = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8", "int32": "s32"}
    leaves = {
        (names[leaf.dtype.name], leaf.size)
        for leaf in jax.tree.leaves((engine.cache.paged, engine.loop.runner.devices.store))
    }
    copies = re.findall(r"= (\w+)\[([\d,]*)\]\S* copy\(", compiled.as_text())
    sizes = [
        (dtype, int(np.prod([int(n) for n in dims.split(",") if n]))) for dtype, dims in copies
    ]
    assert not [copy for copy in sizes if copy in leaves]


def test_a_step_without_drafts_takes_a_cache_with_layers_of_a_draft():
    """Unrolled too, where the draft's layer stages nothing."""
    (params, cache, store, given, _), options = idle_call(make_engine())
    options = options | {"draft_tokens": 0}
    for weights in (params, ds.unstack_layers(params)):
        made, _, output = jax.eval_shape(
            functools.partial(serve_step, **options), weights, cache, store, given
        )
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, cache)
        assert output.columns.shape == (SIZES["max_requests"], 3)


def test_an_idle_step_changes_nothing():
    engine, rng = make_engine(), np.random.default_rng(0)
    engine.submit(prompt(rng, 30), max_new_tokens=3)
    engine.step()

    def everything():
        """Bytes: places of the store that nobody has written hold NaN."""
        leaves = jax.tree.leaves((engine.cache, engine.loop.runner.devices.store))
        return [np.array(leaf).tobytes() for leaf in leaves]

    before = everything()
    engine.loop.runner.run_idle(IdleStep("idle", StepPlan.idle(BUCKET)))
    assert everything() == before


def test_draft_rows_follow_from_the_tokens_before_a_boundary_alone():
    """The ring of the draft block below 128 is the same whatever the token at 128 is."""
    rng = np.random.default_rng(1)
    text, rows = prompt(rng, 128), []
    for token in (1, 2):
        engine = make_engine(overlap=False)
        request = engine.submit([*text, token, 5, 6], max_new_tokens=9, stop_token_ids=())
        rope = rows_at(engine, request, 129)["swa.window.rope"][-1]  # positions 115 .. 130
        rows.append(np.asarray(rope, np.float32))
    np.testing.assert_array_equal(rows[0][:13], rows[1][:13])
    assert np.all(np.any(rows[0][13:] != rows[1][13:], axis=1))


@pytest.mark.slow
def test_the_draft_is_that_of_the_whole_history():
    """`forward_draft` over the same history gives the first guess."""
    engine = make_engine(cache_format="fp8_ue8m0", overlap=False)
    rng = np.random.default_rng(2)
    text = prompt(rng, 20)
    request_id = engine.submit(text, max_new_tokens=9, stop_token_ids=())
    engine.step()
    request = engine.requests[request_id]
    ids = jax.numpy.asarray([text], jax.numpy.int32)
    options = {"config": engine.config, "cache_format": "fp8_ue8m0"}
    streams = jax.jit(ds.model.forward_streams, static_argnames=("config", "cache_format"))(
        params(), ids, **options
    )
    following = jax.numpy.asarray([[*text[1:], int(request.known[-1])]], jax.numpy.int32)
    logits = jax.jit(ds.model.forward_draft, static_argnames=("config", "cache_format"))(
        params(), streams, following, **options
    )
    assert request.drafts[0] == int(np.argmax(logits[0, -1]))


def test_the_token_after_each_kept_one():
    """Of a prompt that goes on and of a row that keeps one token of two, with padding after it."""
    row = jnp.asarray([1, 1, 1, 0, 0, -1], jnp.int32)
    call = engine_call(row).keep(jnp.asarray([1, 3], jnp.int32))
    found = _next_tokens(jnp.asarray([11, 12, 13, 21, 22, 0]), call, jnp.asarray([29, 14]))
    np.testing.assert_array_equal(found[:4], [12, 13, 14, 29])


def engine_call(request_ids):
    """Indices of a call of two rows, of 7 tokens each before it."""
    return index_call(
        jnp.full(2, 7, jnp.int32),
        jnp.zeros((2, 1), jnp.int32),
        ds.StepInput(token_ids=request_ids, request_ids=request_ids, request_slots=jnp.arange(2)),
        block_tokens=128,
        max_row_tokens=len(request_ids),
    )
