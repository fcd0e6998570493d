"""One step on the cache, for one token per request or thousands, taken at once or staged.

Every function here is pure: a cache goes in and a new one comes out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dsv4_jax import checks
from dsv4_jax.cache.commit import Staged, advance
from dsv4_jax.cache.empty_cache import check_cache
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import empty_staged, stacked
from dsv4_jax.cache.shardings import STAGED
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import DATA, MODEL, on_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.check_params import check_params
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import head, run_layers
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.weights import ACTIVATIONS, with_activations

_ROW_MULTIPLE = 8
"""On a CPU, XLA's loops round the rows after the last whole eight otherwise than the others.

Measured with jax 0.12 at T = 33 to 49, by up to 7e-7; not at T up to 20. A token's result would
depend on its place in the call. So a call of more than eight rows has a multiple of eight.
"""


def run_step(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    config: DSV4Config,
    *,
    max_row_tokens: int | None = None,
) -> tuple[ModelCache, CallIndices, jax.Array]:
    """Runs all layers and commits: the new cache, the call's indices, the streams [T, S, D].

    The caller has checked its arguments (`check_call`). T is that of `pad_tokens`.
    """
    step_input = pad_tokens(step_input)
    call = cache.index(step_input, max_row_tokens=max_row_tokens)
    engram = step_input.engram
    ran = run_layers(params, cache, step_input.token_ids, call, None, config, engram_rows=engram)
    return advance(ran.cache, call), call, ran.streams


def check_call(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    config: DSV4Config,
    activations: str,
    *,
    num_steps: int = 1,
) -> None:
    """Refuses what a step cannot run; values of arrays outside jit alone.

    Raises:
      ValueError: an argument is of another type, shape or dtype, or a value out of range, or
        `params` or `cache` are of another model.
    """
    checks.instance("config", config, DSV4Config)
    checks.instance("params", params, DSV4Params)
    check_cache(config, cache)
    if DATA not in jax.sharding.get_abstract_mesh().manual_axes:  # else these are a device's parts
        check_params(config, params)
    checks.choice("activations", activations, ACTIVATIONS)
    cache.check_input(step_input, vocab_size=config.vocab_size, num_steps=num_steps)


@on_mesh(("cache", STAGED, P(DATA, MODEL)))
def stage_step(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    *,
    config: DSV4Config,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, Staged, jax.Array]:
    """A step that can be taken back: lengths, rings and states stay as they were.

    Entries of the windows that close are written, beyond the lengths, where nobody sees them until
    they are committed or overwritten. The tables must hold blocks for all tokens.

    Args:
      params: model parameters.
      cache: the cache before the call.
      step_input: any ragged mix of tokens.
      config: the model.
      activations: as in `decode_step`.

    Returns:
      The cache, what `commit` needs, and f32[T, V], logits of every token; zeros for padding.

    Raises:
      ValueError: a field of `step_input` has a wrong shape or dtype, a value is out of range, or
        there are no such activations.
    """
    check_call(params, cache, step_input, config, activations)
    params = with_activations(params, activations)
    num_tokens, step_input = step_input.token_ids.shape[0], pad_tokens(step_input)
    call = cache.index(step_input)
    cache, new_tokens, streams, _ = run_layers(
        params,
        cache,
        step_input.token_ids,
        call,
        empty_staged(cache.state, call.positions.shape[0]),
        config,
        engram_rows=step_input.engram,
    )
    assert new_tokens is not None
    logits = trunk_logits(params, mask_rows(streams, call.segment_ids >= 0), config)
    staged = Staged(
        new_tokens={attn: stacked(family) for attn, family in new_tokens.items()}, call=call
    )
    return cache, staged, logits[:num_tokens]


def pad_tokens(step_input: StepInput) -> StepInput:
    """The same call with padding at its end, of a size at which a token's place changes no bit."""
    spare = _spare_rows(step_input.token_ids.shape[0])
    if not spare:
        return step_input
    return dataclasses.replace(
        step_input,
        token_ids=jnp.pad(step_input.token_ids, (0, spare)),
        request_ids=jnp.pad(step_input.request_ids, (0, spare), constant_values=-1),
        engram=jax.tree.map(
            lambda leaf: jnp.pad(leaf, [(0, spare)] + [(0, 0)] * (leaf.ndim - 1)), step_input.engram
        ),
    )


def pad_places(places: jax.Array | None) -> jax.Array | None:
    """i32[U] with -1 at its end, likewise; None stays None."""
    if places is None:
        return None
    return jnp.pad(places, (0, _spare_rows(len(places))), constant_values=-1)


def trunk_logits(params: DSV4Params, streams: jax.Array, config: DSV4Config) -> jax.Array:
    """[n, S, D] -> f32[n, V], on a number of rows at which a row's place changes no bit.

    Streams of zeros give logits of zero.
    """
    num_rows = streams.shape[0]
    padded = jnp.pad(streams, ((0, _spare_rows(num_rows)), (0, 0), (0, 0)))
    return head(params.hc_head, params.norm, params.head, padded, config)[:num_rows]


def _spare_rows(num_rows: int) -> int:
    return -num_rows % _ROW_MULTIPLE if num_rows > _ROW_MULTIPLE else 0


def mask_rows(values: jax.Array, live: jax.Array) -> jax.Array:
    """Zeros where not live: [n, ...] and bool[n]."""
    return jnp.where(live.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
