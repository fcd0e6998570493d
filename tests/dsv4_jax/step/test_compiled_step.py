"""What the compiled decode step does with memory, traces and the host."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers import configs

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def model():
    config = configs.scanned()
    return config, ds.init_params(config, jax.random.key(0))


def make_cache(config, **changes):
    sizes = {"max_requests": 5, "max_context_tokens": 512} | changes
    return ds.init_cache(config, **sizes)


def decode_input(tokens, live=(True, True, True)):
    rows = jnp.arange(len(tokens), dtype=jnp.int32)
    return ds.StepInput(
        token_ids=jnp.asarray(tokens, jnp.int32),
        request_ids=jnp.where(jnp.asarray(live), rows, -1),
        request_slots=rows,
    )


@pytest.fixture(scope="module")
def compiled(model):
    config, params = model
    cache = make_cache(config)
    lowered = ds.jit_decode_step.lower(params, cache, decode_input([1, 2, 3]), config=config)
    return cache, lowered.compile()


def copied_leaves(executable, cache):
    """Leaves of the pools and the block table that the optimised HLO copies whole."""
    names = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8", "int32": "s32"}
    leaves = {
        (names[leaf.dtype.name], leaf.size)
        for leaf in jax.tree.leaves((cache.state, cache.paged, cache.block_table))
    }
    copies = re.findall(r"= (\w+)\[([\d,]*)\]\S* copy\(", executable.as_text())
    sizes = [
        (dtype, int(np.prod([int(n) for n in dims.split(",") if n]))) for dtype, dims in copies
    ]
    return [copy for copy in sizes if copy in leaves]


@pytest.mark.slow
def test_every_byte_of_the_cache_is_donated(compiled):
    cache, executable = compiled
    assert executable.memory_analysis().alias_size_in_bytes == cache.memory_bytes()


@pytest.mark.slow
def test_no_leaf_of_the_cache_is_copied(compiled):
    """Known bugs B12, B22, B23: whole-cache copies and buffers that share bytes."""
    cache, executable = compiled
    assert copied_leaves(executable, cache) == []


@pytest.mark.slow
def test_decode_loop_copies_no_leaf_of_the_cache(model):
    config, params = model
    cache = make_cache(config)
    arguments = (params, cache, decode_input([1, 2, 3]), ds.make_sampling(3))
    executable = ds.jit_decode_loop.lower(*arguments, num_steps=4, config=config).compile()
    assert copied_leaves(executable, cache) == []
    assert executable.memory_analysis().alias_size_in_bytes == cache.memory_bytes()


@pytest.mark.slow
def test_copy_audit_would_notice_a_copy():
    """The same audit on a step that keeps the old cache alive finds copies."""
    config = dataclasses.replace(
        ds.DSV4Config.tiny(),
        layer_types=(ds.AttentionType.CSA,),
        router_types=(ds.RouterType.LEARNED,),
        num_mtp_layers=0,
    )
    params = ds.init_params(config, jax.random.key(0))
    cache = make_cache(config)

    def keeps_both(params, cache, step_input):
        new, logits = ds.decode_step(params, cache, step_input, config=config)
        return new, cache, logits

    lowered = jax.jit(keeps_both, donate_argnums=1).lower(params, cache, decode_input([1, 2, 3]))
    planes = len(jax.tree.leaves((cache.state, cache.paged)))
    assert len(copied_leaves(lowered.compile(), cache)) >= planes


@pytest.mark.slow
def test_one_trace_serves_300_steps_across_every_boundary(model):
    """First traced at position 0, where nothing closes (known bug B8); nothing goes to the host."""
    config, params = model
    cache = make_cache(config)

    @chex.assert_max_traces(n=1)
    def decode_step(params, cache, step_input):
        return ds.decode_step(params, cache, step_input, config=config)

    step = jax.jit(decode_step, donate_argnums=1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (300, 3))
    calls = [decode_input(row, (True, i >= 5, i % 2 == 0)) for i, row in enumerate(tokens)]
    last = None
    for i, call in enumerate(calls):
        with jax.transfer_guard("disallow"):
            cache, logits = step(params, cache, call)
        if i == 299:
            last = logits
    np.testing.assert_array_equal(cache.length_tokens, [300, 295, 150, 0, 0])
    history = jnp.asarray(tokens[None, 5:, 1], jnp.int32)
    forward = jax.jit(ds.forward, static_argnames=("config", "cache_format"))
    whole = forward(params, history, config=config, cache_format="fp8_ue8m0")
    assert int(jnp.argmax(last[1])) == int(jnp.argmax(whole[0, -1]))


@pytest.mark.slow
def test_donated_cache_is_gone(model, compiled):
    config, params = model
    cache = make_cache(config)
    new, _ = compiled[1](params, cache, decode_input([1, 2, 3]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((cache.state, cache.paged)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


@pytest.mark.slow
def test_jitted_and_op_by_op_steps_agree(model, compiled):
    """Known bug B11: what is compiled is what was written."""
    config, params = model
    call = decode_input([4, 5, 6], (True, False, True))
    plain, expected = ds.decode_step(params, make_cache(config), call, config=config)
    jitted, logits = compiled[1](params, make_cache(config), call)
    np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=0)
    np.testing.assert_array_equal(plain.length_tokens, jitted.length_tokens)


@pytest.mark.slow
def test_same_step_twice_gives_the_same_bits(model, compiled):
    """Known bug B7: fifty repeats, bitwise equal."""
    config, params = model
    call = decode_input([4, 5, 6])
    first = compiled[1](params, make_cache(config), call)
    for _ in range(50):
        again = compiled[1](params, make_cache(config), call)
        jax.tree.map(np.testing.assert_array_equal, again, first)


def test_public_results_have_their_shapes_and_dtypes(model):
    """Traced, not run: nothing in a step depends on values."""
    config, params = model
    cache = make_cache(config, cache_format="bf16")
    call, num_kept = decode_input([1, 2, 3]), jnp.asarray([1, 0, 1], jnp.int32)
    sampling = ds.make_sampling(3)

    def every_step(params, cache):
        decoded = ds.decode_step(params, cache, call, config=config)
        filled = ds.prefill(params, cache, call, config=config, all_logits=True)
        staged_cache, staged, logits = ds.stage_step(params, cache, call, config=config)
        kept = ds.commit(staged_cache, staged, num_kept)
        loop = ds.decode_loop(params, cache, call, sampling, num_steps=4, config=config)
        return decoded, filled, (staged_cache, logits), kept, loop

    decoded, filled, staged, kept, loop = jax.eval_shape(every_step, params, cache)
    for new, logits in (decoded, filled, staged):
        chex.assert_shape(logits, (3, config.vocab_size))
        chex.assert_type(logits, jnp.float32)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, cache)
    chex.assert_trees_all_equal_shapes_and_dtypes(kept, cache)
    chex.assert_trees_all_equal_shapes_and_dtypes(loop[0], cache)
    chex.assert_shape(loop[1], (3, 4))
    chex.assert_type([loop[1], cache.length_tokens, cache.block_table], jnp.int32)


def test_decode_step_refuses_what_is_not_one_token_per_row(model):
    config, params = model
    cache = make_cache(config)
    two = decode_input([1, 2, 3])
    short = ds.StepInput(
        token_ids=two.token_ids[:2],
        request_ids=two.request_ids[:2],
        request_slots=two.request_slots,
    )
    with pytest.raises(ValueError, match="one token per row"):
        ds.decode_step(params, cache, short, config=config)
    crossed = two.replace(request_ids=jnp.asarray([1, 0, 2], jnp.int32))
    with pytest.raises(ValueError, match="request_ids"):
        ds.decode_step(params, cache, crossed, config=config)
    with pytest.raises(ValueError, match=r"token_ids must be in 0\.\.95"):
        ds.decode_step(params, cache, decode_input([1, 96, 3]), config=config)
    with pytest.raises(ValueError, match="num_steps"):
        ds.decode_loop(params, cache, two, ds.make_sampling(3), num_steps=0, config=config)
