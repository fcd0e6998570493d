"""One attention layer on the cache, beside the same layer over the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.attention.csa import csa_attention
from dsv4_jax.attention.full_sequence import attend_full_sequence
from dsv4_jax.attention.hca import hca_attention
from dsv4_jax.attention.swa import swa_attention
from dsv4_jax.cache.commit import advance
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.model.trunk import keep
from helpers import tolerance
from helpers.arrays import on_device
from helpers.schedules import step_input
from pallas_kernels.common.formats import get_cache_format

CONFIG = ds.DSV4Config.tiny()  # W = 16, M = 4 and 32, K = 8
CACHED = {"swa": swa_attention, "csa": csa_attention, "hca": hca_attention}
T, LENGTH = 40, 120
CUTS = [40, 1, 1, 30, 7, 1, 40]
"""Of both requests together; windows close within calls and across them."""
ATOL = {"f32": tolerance.INTERMEDIATE, "fp8_ue8m0": 1e-2}
"""A code of E4M3 may round to its neighbour where two ways of summing differ in their last bit."""


@functools.cache
def case(kind, seed=0):
    """The first layer of a kind, and inputs f32[2, LENGTH, D] of unit variance."""
    params = ds.init_params(CONFIG, jax.random.key(seed), dtype=jnp.float32)
    spec = next(spec for spec in layer_schedule(CONFIG) if spec.attn == kind)
    x = np.random.default_rng(seed).normal(size=(2, LENGTH, CONFIG.hidden_size))
    attn = jax.tree.map(np.asarray, params).layer(spec).attn  # cut without a program for each leaf
    attn = jax.tree.map(lambda leaf: on_device(leaf, leaf.dtype), attn)
    return attn, spec, on_device(x, jnp.float32)


@functools.partial(jax.jit, static_argnames=("kind", "cache_format"))
def over_sequence(params, x, *, kind, cache_format):
    """[B, T, D] -> [B, T, D], without a cache."""
    fmt = get_cache_format(cache_format)
    spec = next(spec for spec in layer_schedule(CONFIG) if spec.attn == kind)
    return attend_full_sequence(params, x, spec, CONFIG, fmt)[1]


@functools.partial(jax.jit, static_argnames=("kind", "in_place"))
def _call(params, cache, step, x, *, kind, in_place):
    call = cache.index(step, max_row_tokens=1 if in_place else None)
    handle = cache.layer(ds.AttentionType(kind), 0, call, in_place=in_place)
    handle, new, y = CACHED[kind](params, x, handle, CONFIG)
    cache, _ = keep(cache, None, handle, new)
    return advance(cache, call), y


def on_cache(kind, cache_format, *, params=None, seed=0):
    """The same, call by call: prompts in pieces, then one token per request, written in place."""
    given, _, x = case(kind, seed)
    params = given if params is None else params
    cache = ds.init_cache(
        CONFIG, max_requests=2, max_context_tokens=LENGTH, cache_format=cache_format
    )
    out, done = np.zeros(x.shape, np.float32), 0
    rng = np.random.default_rng(seed)
    for number, size in enumerate([*CUTS, *[1] * 200]):
        rows = [0, 1] if size == 1 else [number % 2]
        counts = [0, 0]
        for row in rows:
            counts[row] = min(size, LENGTH - lengths(cache)[row])
        if not any(counts):
            if done == LENGTH:
                break
            continue
        step = step_input([[1] * n for n in counts], [0, 1], [0, 1], num_tokens=T, rng=rng)
        if max(counts) == 1:
            ids = on_device([row if counts[row] else -1 for row in (0, 1)], jnp.int32)
            step = dataclasses.replace(step, token_ids=jnp.ones(2, jnp.int32), request_ids=ids)
        owner = np.asarray(step.request_ids)
        tokens = np.full((len(owner), x.shape[-1]), np.nan, np.float32)
        starts = lengths(cache)
        for row in (0, 1):
            tokens[owner == row] = x[row, starts[row] : starts[row] + counts[row]]
        cache, y = _call(
            params, cache, step, jnp.asarray(tokens), kind=kind, in_place=max(counts) == 1
        )
        for row in (0, 1):
            out[row, starts[row] : starts[row] + counts[row]] = np.asarray(y)[owner == row]
        done = min(lengths(cache))
    return out


def check_on_cache(kind, cache_format):
    """Whatever the calls are: pieces of prompts, single tokens, windows cut by calls."""
    params, _, x = case(kind)
    expected = over_sequence(params, x, kind=kind, cache_format=cache_format)
    actual = on_cache(kind, cache_format)
    np.testing.assert_allclose(actual, expected, atol=ATOL[cache_format], rtol=0)


def lengths(cache):
    return [int(n) for n in cache.length_tokens]
