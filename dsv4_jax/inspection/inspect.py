"""inspect: reads one request out of a cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.attention.selection import Selection, Selector, select_by_score
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.schema import LayerCacheSchema
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.inspection.request_view import LayerView, RequestView
from dsv4_jax.mesh import find_mesh
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.step import stage_step
from pallas_kernels.common.codecs import Codec, Planes


def inspect(
    cache: ModelCache,
    slot: int,
    *,
    params: DSV4Params | None = None,
    config: DSV4Config | None = None,
    next_token: int | None = None,
) -> RequestView:
    """What a cache holds of one request; the cache is left as it is.

    Args:
      cache: a cache of one device.
      slot: slot of the request.
      params: model parameters, for the entries that a next token selects; None leaves that out.
      config: the model, beside `params`.
      next_token: the token that would follow, beside `params`. It is run and not kept.

    Returns:
      Plain arrays, and a picture of each layer with `plot`.

    Raises:
      ValueError: there is no such slot, the cache is on several devices, only some of `params`,
        `config` and `next_token` are given, or they do not fit the cache.
    """
    checks.instance("cache", cache, ModelCache)
    slot = checks.integer("slot", slot, 0, cache.max_requests - 1)
    mesh = find_mesh(cache)
    if mesh is not None and mesh.size > 1:
        raise ValueError(f"inspect reads a cache of one device, and this one has {mesh.size}")
    given = [value is not None for value in (params, config, next_token)]
    if any(given) and not all(given):
        raise ValueError(
            "params, config and next_token must be given together, or none of them, got "
            f"{params is not None=}, {config is not None=} and {next_token=}"
        )
    length = int(cache.length_tokens[slot])
    selections: dict[int, np.ndarray] = {}
    if params is not None and config is not None and next_token is not None:
        selections = _find_selections(cache, slot, params, config, next_token)
    table = np.asarray(cache.block_table[slot])
    num_blocks = -(-length // cache.block_tokens) if cache.paged else 0
    layers = [
        _read_layer(cache, schema, slot, length, table, selections.get(schema.layer_idx))
        for schema in cache.schemas
    ]
    return RequestView(
        slot=slot,
        length_tokens=length,
        block_tokens=cache.block_tokens,
        block_table=table[:num_blocks],
        layers=tuple(layers),
    )


def _read_layer(
    cache: ModelCache,
    schema: LayerCacheSchema,
    slot: int,
    length: int,
    table: np.ndarray,
    selected: np.ndarray | None,
) -> LayerView:
    """One layer; what the length does not make readable becomes NaN and -1."""
    state, layer, ratio = cache.state[schema.attn_type], schema.family_idx, schema.compression_ratio
    ring_positions = _positions(np.arange(length), schema.swa_window_size, schema.swa_window_size)
    window = {name: plane[layer, slot] for name, plane in state.window.items()}
    ring = np.asarray(schema.format.ring.decode(window, schema.entry_head_dim))
    tail_positions = np.zeros(0, np.int32)
    tail_values = tail_scores = running = np.zeros((0, 0), np.float32)
    if state.tail is not None:
        open_tokens = np.arange(max((length // ratio - 1) * ratio, 0), length)
        tail_positions = _positions(open_tokens, 2 * ratio, 2 * ratio)
        tail_values, tail_scores = (
            _where(tail_positions >= 0, np.asarray(state.tail[name][layer, slot]))
            for name in ("values", "scores")
        )
    if state.running is not None:
        running = np.asarray(state.running[layer, slot])
        running = _where(np.full(len(running), length % ratio > 0), running)
    entries = index_keys = np.zeros((0, 0), np.float32)
    numbers = np.zeros(0, np.int32)
    per_block = schema.entries_per_block
    if per_block:
        pool = cache.paged[schema.entry_family]
        numbers = np.arange(length // ratio, dtype=np.int32)
        read = functools.partial(
            _read_blocks, layer=schema.entry_idx, table=table, count=len(numbers)
        )
        entries = read(pool.entries, schema.format.entry, schema.entry_head_dim)
        index_keys = np.zeros((len(numbers), 0), np.float32)
        if pool.index_keys is not None:
            index_keys = read(pool.index_keys, schema.format.index_key, schema.indexer_head_dim)
    return LayerView(
        layer_idx=schema.layer_idx,
        attn_type=schema.attn_type.value,
        compression_ratio=ratio,
        ring_positions=ring_positions,
        ring=_where(ring_positions >= 0, ring),
        cursor=length % schema.swa_window_size,
        tail_positions=tail_positions,
        tail_values=tail_values,
        tail_scores=tail_scores,
        running=running,
        entries=entries,
        index_keys=index_keys,
        blocks=table[numbers // per_block] if per_block else numbers,
        offsets=numbers % per_block if per_block else numbers,
        entries_per_block=per_block,
        selected=None if selected is None else selected[: len(numbers)],
    )


def _read_blocks(
    planes: Planes, codec: Codec, dim: int, *, layer: int, table: np.ndarray, count: int
) -> np.ndarray:
    """f32[count, dim], the first rows of a request's blocks.

    Whole blocks are decoded, a power of two of them, so that few lengths compile anything.
    """
    per_block = jax.tree.leaves(planes)[0].shape[2]
    num_blocks = -(-count // per_block)
    padded = min(1 << max(num_blocks - 1, 0).bit_length(), len(table))
    blocks = np.maximum(table[:padded], 0)
    stored = {name: plane[layer, blocks] for name, plane in planes.items()}
    return np.asarray(codec.decode(stored, dim)).reshape(-1, dim)[:count]


def _positions(tokens: np.ndarray, count: int, rows: int) -> np.ndarray:
    """i32[rows], which of the last `count` tokens, by position, lies in row `position % rows`."""
    held = np.full(rows, -1, np.int32)
    last = tokens[-count:]
    held[last % rows] = last
    return held


def _where(live: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(live[:, None], values, np.float32(np.nan))


# What a step selects is heard from inside of it: layers of a repeating pattern are one loop.
_heard: list[np.ndarray] = []


@functools.cache
def _hearing(selector: Selector) -> Selector:
    """The same selector, which lets `_heard` know; one function for each, or it compiles anew."""

    def hear(selection: Selection) -> jax.Array:
        mask = selector(selection)
        jax.debug.callback(lambda mask: _heard.append(np.asarray(mask)), mask[0, 0], ordered=True)
        return mask

    return hear


@functools.partial(jax.jit, static_argnames="config")
def _stage(params: Any, cache: ModelCache, step: StepInput, config: DSV4Config) -> jax.Array:
    return stage_step(params, cache, step, config=config)[2]


def _find_selections(
    cache: ModelCache, slot: int, params: DSV4Params, config: DSV4Config, next_token: int
) -> dict[int, np.ndarray]:
    """{layer: bool[E]}, what the next token would attend to in each CSA layer."""
    checks.instance("params", params, DSV4Params)
    checks.instance("config", config, DSV4Config)
    if config.sources is not None:
        raise NotImplementedError(
            "selections are not read of a DeepSeek-V4.1 model, whose layers share them, yet; leave "
            "params, config and next_token out"
        )
    token = checks.integer("next_token", next_token, 0, config.vocab_size - 1)
    step = StepInput(
        token_ids=jnp.array([token], jnp.int32),
        request_ids=jnp.array([0], jnp.int32),
        request_slots=jnp.array([slot], jnp.int32),
    )
    cache.check_input(step, vocab_size=config.vocab_size)
    selector = _hearing(config.idea.selector or select_by_score)
    idea = dataclasses.replace(config.idea, selector=selector)
    _heard.clear()
    jax.block_until_ready(_stage(params, cache, step, idea.applied_to(config)))
    jax.effects_barrier()
    layers = [s.layer_idx for s in cache.schemas if s.indexer_top_k]
    own = [layer for layer in layers if layer not in config.index_reuse]
    return dict(zip(own, _heard, strict=True))
