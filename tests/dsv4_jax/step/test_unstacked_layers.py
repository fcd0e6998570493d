"""Layers with arrays of their own: the same step, unrolled."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench.parts import cache_part, one_token_each, random_inputs
from helpers import configs

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def model():
    return configs.two_layers(ds.AttentionType.HCA)


def make_cache(config):
    return ds.init_cache(config, max_requests=3, max_context_tokens=512)


@pytest.fixture(scope="module")
def unrolled(model):
    config, params = model
    separate = ds.unstack_layers(params)
    cache = make_cache(config)
    call = one_token_each(config, 3)
    return separate, ds.jit_decode_step.lower(separate, cache, call, config=config).compile()


@pytest.mark.slow
def test_scanned_and_unrolled_steps_agree(model, unrolled):
    config, params = model
    separate, executable = unrolled
    call = one_token_each(config, 3)
    _, expected = ds.jit_decode_step(params, make_cache(config), call, config=config)
    _, logits = executable(separate, make_cache(config), call)
    np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_every_byte_is_donated_and_no_leaf_copied(model, unrolled):
    config, _ = model
    cache = make_cache(config)
    assert unrolled[1].memory_analysis().alias_size_in_bytes == cache.memory_bytes()
    assert large_copies(unrolled[1].as_text(), cache) == []


@pytest.mark.slow
def test_the_timed_cache_part_donates_and_copies_nothing(model):
    """Else the benchmark would time copies that a step does not make."""
    config, _ = model
    cache = make_cache(config)
    inputs = random_inputs(config, 3)
    call = one_token_each(config, 3)
    part = jax.jit(cache_part, static_argnames="config", donate_argnames=("cache", "inputs"))
    executable = part.lower(cache, inputs, call, config=config).compile()
    assert large_copies(executable.as_text(), cache) == []
    new, after = executable(cache, inputs, call)
    np.testing.assert_array_equal(new.length_tokens, [1, 1, 1])
    assert bool(jnp.all(jnp.isfinite(after.queries.astype(jnp.float32))))


def large_copies(hlo, cache):
    """Copies as large as some plane of a pool."""
    names = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8", "int32": "s32"}
    leaves = {
        (names[leaf.dtype.name], leaf.size) for leaf in jax.tree.leaves((cache.state, cache.paged))
    }
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* copy\(", hlo)
    sizes = [(kind, int(np.prod([int(n) for n in dims.split(",") if n]))) for kind, dims in found]
    return [size for size in sizes if size in leaves]


def test_unstacking_keeps_every_value_and_frees_the_stacks(model):
    config, _ = model
    params = ds.init_params(config, jax.random.key(1))
    kept = jax.tree.map(np.asarray, params)
    separate = ds.unstack_layers(params, donate=True)
    for spec in ds.layer_schedule(config):
        jax.tree.map(np.testing.assert_array_equal, separate.layer(spec), kept.layer(spec))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params.layers))
    again = ds.unstack_layers(separate)
    assert jax.tree.structure(again) == jax.tree.structure(separate)


def test_a_checkpoint_is_saved_from_stacked_layers(model, tmp_path):
    config, params = model
    with pytest.raises(ValueError, match="params"):
        ds.save_checkpoint(config, ds.unstack_layers(params), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
def test_an_engine_takes_layers_as_they_serve_it_best(model, monkeypatch, unroll):
    """On a GPU each has arrays of its own unless told otherwise; elsewhere they stay stacked."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if unroll else "cpu")
    sizes = {"max_requests": 1, "max_context_tokens": 128}
    assert is_unrolled(ds.Engine(*model, **sizes)) == unroll
    assert is_unrolled(ds.Engine(*model, unroll=not unroll, **sizes)) != unroll
    given = ds.Engine(model[0], ds.unstack_layers(model[1]), **sizes)
    assert is_unrolled(given)
    assert is_unrolled(ds.Engine.from_checkpoint(ds.SHIPPED_CHECKPOINT, **sizes)) == unroll
    assert not model[1].embed.is_deleted()


def is_unrolled(engine):
    return all(isinstance(layers, tuple) for layers in engine.params.layers.values())


@pytest.mark.slow
def test_an_engine_of_unrolled_layers_gives_the_same_tokens():
    """Prompts in chunks and single tokens, layers that would be scanned; in f32, no near ties."""
    config = dataclasses.replace(
        ds.DSV4Config.tiny(),
        layer_types=(ds.AttentionType.HCA,) * 2,
        router_types=(ds.RouterType.LEARNED,) * 2,
        num_mtp_layers=0,
    )
    params = ds.init_params(config, jax.random.key(0))
    prompts = [np.random.default_rng(0).integers(0, config.vocab_size, 60).tolist(), [5, 6]]
    stacked, unrolled = (
        ds.Engine(
            config, params, max_requests=2, max_context_tokens=128, prefill_tokens=(24,),
            decode_tokens=24, cache_format="f32", unroll=unroll,
        ).generate(prompts, max_new_tokens=12, stop_token_ids=())
        for unroll in (False, True)
    )  # fmt: skip
    assert unrolled == stacked
