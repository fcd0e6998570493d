"""A decode step gives the same bits in whatever order XLA runs the launches of a CUDA graph."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.bench.decode_case import CaseSetup, DecodeCase
from dsv4_jax.bench.weights import random_params
from helpers.configs import first_layers

STEPS = 40
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def decode(config, params, *, batch, context, steps, options=None):
    """Digests of the logits of greedy steps, and of the leaves of the cache after them."""
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
        found.append(digest(logits))
    return found, list(map(digest, jax.tree.leaves(cache)))


def digest(array):
    """Of the bytes: logits of 40 steps of 256 requests are 5 GB."""
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


@pytest.mark.slow
def test_a_changed_bit_is_seen():
    config = first_layers(ds.DSV4Config.tiny(), 2)
    params = random_params(config)
    sizes = {"batch": 2, "context": 256, "steps": 2}
    logits, cache = decode(config, params, **sizes)
    assert decode(config, params, options=CONCURRENT, **sizes) == (logits, cache)  # a CPU's is one
    assert len(set(logits)) == 2
    norm = params.norm.at[0].multiply(1.01)  # after all layers
    others, _ = decode(config, dataclasses.replace(params, norm=norm), **sizes)
    assert others[0] != logits[0]
    embed = params.embed.at[:, 0].multiply(1.1)
    _, others = decode(config, dataclasses.replace(params, embed=embed), **sizes)
    assert others != cache


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "context"), [(1, 4096), (8, 16_384), (64, 16_384), (256, 2048)])
def test_concurrent_graphs_change_no_bit(batch, context):
    config = first_layers(ds.DSV4Config.flash(), 8, num_routed_experts=64)
    params = random_params(config, weights="stored")
    sizes = {"batch": batch, "context": context, "steps": STEPS}
    serial = decode(config, params, **sizes)
    assert len(set(serial[0])) > 1
    assert decode(config, params, options=CONCURRENT, **sizes) == serial
