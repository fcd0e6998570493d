"""From token ids to logits: embedding, every layer's block, head.

`run_layers` runs the blocks on a cache; `forward.py` runs them over whole sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.selection import selected_width
from dsv4_jax.cache.candidates import count_blocks
from dsv4_jax.cache.commit import commit_tokens
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, NewTokens, put_layer
from dsv4_jax.cache.token_ids import keep_token_ids
from dsv4_jax.collectives import join_rows, rows_of_a_device, sum_over_model, take_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, Segment, layer_schedule, split_into_segments
from dsv4_jax.config.upper_layers import upper_layers
from dsv4_jax.engram import EngramRows
from dsv4_jax.linear import linear
from dsv4_jax.mesh import MODEL, axis_size, place_on
from dsv4_jax.model.block import make_block_entries, run_block
from dsv4_jax.model.engram import look_up_call, write_rows
from dsv4_jax.model.hyper_connections import Residual, collapse_streams
from dsv4_jax.model.layer_params import HyperConnectionParams, layer_of, without_source
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.some_rows import pick, pick_call, pick_residual, spread
from dsv4_jax.peers import using
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.norm_rope import rms_norm


def embed(params: DSV4Params, token_ids: jax.Array, config: DSV4Config) -> jax.Array:
    """i32[...] -> [..., S, D]: the embedding, once per stream."""
    with using(params.peers):
        embedded = checkpoint_name(look_up(params.embed, token_ids), "embed")
    return jnp.broadcast_to(
        embedded[..., None, :], (*token_ids.shape, config.hc_mult, config.hidden_size)
    )


def look_up(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows of the embedding [V, D] by token id; on a mesh `table` is this device's part of it."""
    if axis_size(MODEL) == 1:
        return table[token_ids]
    own = token_ids - place_on(MODEL) * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    rows = table[jnp.clip(own, 0, table.shape[0] - 1)]
    return sum_over_model(jnp.where(is_own[..., None], rows, 0))


class TrunkOutput(NamedTuple):
    """What the trunk gives for a call.

    Attributes:
      cache: the cache after the call; lengths are not advanced.
      staged: tokens that are still to be committed, by attention type; None if there are none.
      streams: [T, S, D], residual streams before the head; [T, 1, D], what the last sublayer's
        weights make of them, where `config.shifted_streams`.
      means: [T, K, D], the streams' means after each target layer, or before it where
        `config.shifted_streams`; None without targets.
    """

    cache: ModelCache
    staged: Mapping[str, Family] | None
    streams: jax.Array
    means: jax.Array | None


def run_layers(
    params: DSV4Params,
    cache: ModelCache,
    token_ids: jax.Array,
    call: CallIndices,
    staged: Mapping[str, Family] | None,
    config: DSV4Config,
    *,
    targets: tuple[int, ...] = (),
    engram_rows: EngramRows | None = None,
    upper: jax.Array | None = None,
) -> TrunkOutput:
    """The trunk on a cache: every layer appends, selects and attends.

    Layers of a repeating pattern are scanned, with the cache in the carry; layers that have arrays
    of their own (`unstack_layers`) are unrolled.

    Args:
      params: model parameters.
      cache: the cache before the call.
      token_ids: i32[T].
      call: the call's indices.
      staged: None commits the call's tokens layer by layer. Else it receives them, by attention
        type, and rings and states stay as they were; layers may be separate where all are unrolled.
      config: the model.
      targets: layers, ascending, after which a DSpark draft reads the streams.
      engram_rows: what the call's tokens read of the Engram tables; None looks them up, where the
        host has the tables by a callback.
      upper: i32[U], of a staged call, the places of tokens that `upper_layers` run too, ascending,
        then -1; all of a row's are among them or none is. Entries are made of all tokens. Streams
        and means of the others are zeros, and so is what those layers stage of them. None runs all
        layers of all tokens.
    """
    rows = None
    if config.engram is not None:
        rows = engram_rows or look_up_call(params, cache, token_ids, call, config)
        cache, staged = keep_token_ids(cache, staged, token_ids, call)
    streams = embed(params, token_ids, config)
    residual = start_residual(streams, shifted=config.shifted_streams)
    num_rows, schedule = token_ids.shape[0], layer_schedule(config)
    lower, higher = _halves(schedule, config, upper, staged)
    carry = (cache, staged, residual, *_nothing_selected(cache, num_rows, config))
    part = Part(lower, token_ids, call, rows)
    carry, means = _run_part(part, params, carry, targets, config)
    if upper is not None:
        with using(params.peers):
            means = [join_rows(mean, num_rows) for mean in means]
            carry = _make_entries(higher[0], part, params, carry, config)
            cache, staged, residual, *_ = carry
            residual = pick_residual(residual, upper, num_rows)
        carry = (cache, staged, residual, *_nothing_selected(cache, len(upper), config))
        rows = jax.tree.map(lambda leaf: pick(leaf, upper), rows)
        part = Part(higher, pick(token_ids, upper), pick_call(call, upper), rows, upper, num_rows)
        carry, more = _run_part(part, params, carry, targets, config)
        with using(params.peers):
            means += [part.spread(join_rows(mean, len(upper))) for mean in more]
    cache, staged, residual, *_ = carry
    with using(params.peers):
        joined = join_rows(jnp.stack(means, axis=1), num_rows) if means else None
        streams = part.spread(join_rows(residual.before_head(), len(part.token_ids)))
        return TrunkOutput(cache, staged, streams, joined)


class Part(NamedTuple):
    """Layers, and the tokens that they run.

    Attributes:
      specs: the layers.
      token_ids: i32[U].
      call: indices of these tokens.
      rows: what they read of the Engram tables.
      places: i32[U], where they lie in the whole call of T tokens; None where they are all of it.
      num_rows: T, where they are not.
    """

    specs: tuple[LayerSpec, ...]
    token_ids: jax.Array
    call: CallIndices
    rows: EngramRows | None
    places: jax.Array | None = None
    num_rows: int = 0

    def spread[Tree](self, tree: Tree) -> Tree:
        """What tokens gave, [U, ...], at their places in the whole call."""
        if self.places is None:
            return tree
        places = self.places
        return jax.tree.map(lambda leaf: spread(leaf, places, self.num_rows), tree)


def _halves(
    schedule: tuple[LayerSpec, ...],
    config: DSV4Config,
    upper: jax.Array | None,
    staged: Mapping[str, Family] | None,
) -> tuple[tuple[LayerSpec, ...], tuple[LayerSpec, ...]]:
    """Layers that all tokens run, and those that some do.

    Raises:
      ValueError: some are to run less, and the model has no such layers.
    """
    if upper is None:
        return schedule, ()
    halves = upper_layers(config)
    if halves is None:
        raise ValueError(
            "upper must be None of a model all of whose layers make entries of their own, got "
            f"i32{list(upper.shape)}"
        )
    assert staged is not None, "rings take the tokens of all rows together"
    return schedule[: halves.first], schedule[halves.first :]


def _run_part(
    part: Part,
    params: DSV4Params,
    carry: Carry,
    targets: tuple[int, ...],
    config: DSV4Config,
) -> tuple[Carry, list[jax.Array]]:
    """Runs some layers, and takes the means of the streams at those that are targets."""
    means = []
    for segment in _segments(part.specs, targets):
        first, last = segment.pattern[0], segment.pattern[-1]
        if config.shifted_streams and first.layer_idx in targets:
            layer = layer_of(params.layers[first.kind], first.kind_idx)
            residual = write_rows(layer, carry[2], part.rows, first, config)
            means.append(mean_of_streams(residual.written()))
        carry = _run_segment(segment, part, params, carry, config)
        is_target = last.layer_idx in targets and segment.repeats == 1
        if is_target and not config.shifted_streams:
            means.append(mean_of_streams(carry[2].written()))
    return carry, means


def _make_entries(
    spec: LayerSpec, part: Part, params: DSV4Params, carry: Carry, config: DSV4Config
) -> Carry:
    """The entries that a layer makes of all tokens; it neither attends nor writes to streams."""
    cache, staged, residual, selected, candidates = carry
    layer = layer_of(params.layers[spec.kind], spec.kind_idx)
    schema = cache.schemas[spec.layer_idx]
    handle = cache.layer(
        spec.attn, spec.family_idx, part.call, schema=schema, entry_idx=spec.entry_idx
    )
    with jax.named_scope(f"{spec.kind}_entries"):
        written = write_rows(layer, residual, part.rows, spec, config)
        handle, pending = make_block_entries(
            layer, written, handle, config, num_rows=len(part.token_ids)
        )
    cache = cache.with_layer(handle)
    if pending is not None:
        assert staged is not None
        family = schema.entry_family
        new = NewTokens(window={}, compressor=pending, indexer=None)
        staged = {**staged, family: put_layer(staged[family], spec.entry_idx, new)}
    return cache, staged, residual, selected, candidates


def _nothing_selected(
    cache: ModelCache, num_tokens: int, config: DSV4Config
) -> tuple[jax.Array | None, jax.Array | None]:
    """Where layers take over what others selected: i32[T, K], and i32[T, n] of candidates."""
    selected = candidates = None
    if config.index_reuse:
        max_entries = cache.max_context_tokens // config.csa_compression_ratio
        width = selected_width(max_entries, config)
        selected = jnp.zeros((num_tokens, width), jnp.int32)
    if config.sources is not None:
        selected = jnp.full((num_tokens, config.indexer_top_k), -1, jnp.int32)
        limit = config.sources.candidates
        if limit is not None:
            max_entries = cache.max_context_tokens // config.sources.ratios[limit.layer]
            if count := count_blocks(max_entries, limit):
                candidates = jnp.full((num_tokens, count), -1, jnp.int32)
    return selected, candidates


def mean_of_streams(streams: jax.Array) -> jax.Array:
    """[..., S, D] -> [..., D], summed in f32."""
    return jnp.mean(streams, axis=-2, dtype=jnp.float32).astype(streams.dtype)


def _segments(schedule: tuple[LayerSpec, ...], targets: tuple[int, ...]) -> tuple[Segment, ...]:
    """Segments of layers of the trunk, each target layer in one of its own."""
    first = schedule[0].layer_idx
    ends = {target + after - first for target in targets for after in (0, 1)}
    cuts = sorted({0, len(schedule)} | {end for end in ends if 0 < end < len(schedule)})
    parts = (schedule[start:end] for start, end in itertools.pairwise(cuts))
    return tuple(segment for part in parts for segment in split_into_segments(part))


def start_residual(streams: jax.Array, *, shifted: bool = False) -> Residual:
    """Of [T, S, D] those rows that this device has between sublayers; nothing is to be written."""
    own = take_rows(streams, rows_of_a_device(streams.shape[0]))
    return Residual.start(own, shifted=shifted)


Carry = tuple[ModelCache, Mapping[str, Family] | None, Residual, jax.Array | None, jax.Array | None]
"""Cache, staged rows, residual and, where layers take them over, entries that the last CSA layer
selected, and candidates."""


def _run_segment(
    segment: Segment, part: Part, params: DSV4Params, carry: Carry, config: DSV4Config
) -> Carry:
    call = part.call
    stacked = not any(isinstance(params.layers[spec.kind], tuple) for spec in segment.pattern)

    def run_pattern(carry: Carry, copy: jax.Array | int) -> tuple[Carry, None]:
        for spec in segment.pattern:
            kind_idx = spec.kind_idx + copy * segment.kind_stride(spec)
            family_idx = spec.family_idx + copy * segment.family_stride(spec)
            layer = layer_of(params.layers[spec.kind], kind_idx)
            if part.places is not None and spec.makes_entries:  # those are there already
                layer = without_source(layer)
            cache, staged, residual, selected, candidates = carry
            in_place = staged is None and call.max_row_tokens == 1
            shared, entry_idx = {}, family_idx
            if spec.shares:
                entry_idx = spec.entry_idx + copy * segment.entry_stride(spec)
                shared = {"schema": cache.schemas[spec.layer_idx], "entry_idx": entry_idx}
            handle = cache.layer(spec.attn, family_idx, call, in_place=in_place, **shared)
            if spec.index_source is not None or (spec.shares and spec.ratio):
                handle = dataclasses.replace(handle, selected=selected, candidates=candidates)
            with jax.named_scope(spec.kind):
                table = copy * segment.engram_stride
                residual = write_rows(layer, residual, part.rows, spec, config, table)
                handle, new, residual = run_block(
                    layer, residual, part.token_ids, handle, config, params.peers
                )
            new = part.spread(new)
            if handle.selected is not None:
                selected, candidates = handle.selected, handle.candidates
            kept = keep(cache, staged, handle, new, family_idx, entry_idx)
            carry = (*kept, residual, selected, candidates)
        return carry, None

    if segment.repeats == 1 or not stacked:
        for copy in range(segment.repeats):
            carry = run_pattern(carry, copy)[0]
        return carry
    return jax.lax.scan(run_pattern, carry, jnp.arange(segment.repeats))[0]


def keep(
    cache: ModelCache,
    staged: Mapping[str, Family] | None,
    handle: LayerCacheHandle,
    new: NewTokens | None,
    layer: jax.Array | int | None = None,
    entry_layer: jax.Array | int | None = None,
) -> tuple[ModelCache, Mapping[str, Family] | None]:
    """Commits a layer's new tokens, or stages them for a later commit; None has nothing to keep.

    `layer` and `entry_layer` are the handle's, static where tokens of layers are staged apart; None
    takes them as they are.
    """
    if new is None:
        return cache.with_layer(handle), staged
    cache, attn = cache.with_layer(handle), str(handle.schema.attn_type)
    parts = [(attn, handle.layer, layer, new)]
    if handle.entry_layer is not None and handle.schema.pending_tokens and new.compressor:
        # Of another family, which fewer layers have.
        window = dataclasses.replace(new, compressor=None)
        pending = NewTokens(window={}, compressor=new.compressor, indexer=None)
        other = handle.schema.entry_family, handle.entry_layer, entry_layer, pending
        parts = [(attn, handle.layer, layer, window), other]
    for family, number, static_number, tokens in parts:
        if staged is None:
            state = commit_tokens(cache.state[family], tokens, handle.call, layer=number)
            cache = dataclasses.replace(cache, state={**cache.state, family: state})
        else:
            index = number if static_number is None else static_number
            staged = {**staged, family: put_layer(staged[family], index, tokens)}
    return cache, staged


def head(
    hc_head: HyperConnectionParams | None,
    norm: jax.Array,
    weight: jax.Array,
    streams: jax.Array,
    config: DSV4Config,
) -> jax.Array:
    """[..., S, D] -> f32[..., V]; on a mesh of this device's part of the vocabulary.

    Without a hyper-connection of its own the streams are [..., 1, D], collapsed already.
    """
    collapsed = streams[..., 0, :]
    if hc_head is not None:
        collapsed = collapse_streams(hc_head, streams, config)
    return head_of_collapsed(norm, weight, collapsed, config)


def head_of_collapsed(
    norm: jax.Array, weight: jax.Array, collapsed: jax.Array, config: DSV4Config
) -> jax.Array:
    """[..., D] -> f32[..., V]; see `head`."""
    collapsed = checkpoint_name(collapsed, "head/collapsed")
    normed = checkpoint_name(rms_norm(collapsed, norm, eps=config.rms_norm_eps), "head/normed")
    return checkpoint_name(linear(normed, weight, dtype=jnp.float32), "logits")
