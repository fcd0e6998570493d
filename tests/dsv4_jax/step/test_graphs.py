"""A decode step gives the same bits in whatever order XLA runs the launches of a CUDA graph."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench.decode_case import CaseSetup, DecodeCase
from dsv4_jax.bench.weights import random_params

STEPS = 40
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def small(config, layers, **changes):
    return dataclasses.replace(
        config,
        layer_types=config.layer_types[:layers],
        router_types=config.router_types[:layers],
        num_mtp_layers=0,
        **changes,
    )


def decode(config, params, *, batch, context, steps, options=None):
    """Logits of greedy steps and the leaves of the cache after them, as bytes."""
    case = DecodeCase(
        batch=batch, context=context, bucket_context=context, cache_format="fp8_ue8m0"
    )
    setup = CaseSetup(config, case)
    cache, call = setup.fill(), setup.step_input
    step = ds.jit_decode_step.lower(params, cache, call, config=config).compile(options)
    found = []
    for _ in range(steps):
        cache, logits = step(params, cache, call)
        call = dataclasses.replace(call, token_ids=jnp.argmax(logits, axis=-1).astype(jnp.int32))
        found.append(np.asarray(logits).tobytes())
    return found, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]


@pytest.mark.slow
def test_a_changed_bit_is_seen():
    config = small(ds.DSV4Config.tiny(), 2)
    params = random_params(config)
    sizes = {"batch": 2, "context": 256, "steps": 2}
    logits, cache = decode(config, params, **sizes)
    assert decode(config, params, **sizes) == (logits, cache)
    assert len(set(logits)) == 2
    norm = params.norm.at[0].multiply(1.01)
    others, same = decode(config, dataclasses.replace(params, norm=norm), **sizes)
    assert others[0] != logits[0]
    assert len(same) == len(cache)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "context"), [(1, 4096), (8, 16_384), (64, 16_384), (256, 2048)])
def test_concurrent_graphs_change_no_bit(batch, context):
    config = small(ds.DSV4Config.flash(), 8, num_routed_experts=64)
    params = random_params(config, weights="released")
    sizes = {"batch": batch, "context": context, "steps": STEPS}
    serial = decode(config, params, **sizes)
    assert len(set(serial[0])) > 1
    assert decode(config, params, options=CONCURRENT, **sizes) == serial
