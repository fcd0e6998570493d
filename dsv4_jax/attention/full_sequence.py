"""Attention over whole sequences at once, without a cache: for training and for checking.

It says the same as the cached layers by other means: plain softmaxes over whole windows, dense
masks, no rings. Only the formulas of scores and attention are shared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.attention.compressor import compress_sequence
from dsv4_jax.attention.indexer import index_weights, project_index_queries
from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import (
    Output,
    inverse_rope,
    output,
    project_input,
    rotated_queries,
    window_entry,
)
from dsv4_jax.attention.rope import rope_frequencies
from dsv4_jax.attention.selection import Selection, Selector, select, select_by_score
from dsv4_jax.attention.shared_entries import Shared, choose_candidates, make_entries
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec
from dsv4_jax.config.layer_types import AttentionType
from pallas_kernels.common.formats import CacheFormat
from pallas_kernels.common.norm_rope import rotate
from pallas_kernels.index_scores.reference import index_scores
from pallas_kernels.sparse_attention.reference import attend

NOTHING = Shared()
"""Of the first layer."""


def attend_full_sequence(
    params: AttentionParams,
    x: jax.Array,
    spec: LayerSpec,
    config: DSV4Config,
    fmt: CacheFormat,
    selector: Selector = select_by_score,
    shared: Shared = NOTHING,
) -> tuple[Shared, Output]:
    """One attention sublayer over tokens 0 .. T - 1.

    Args:
      params: parameters of the layer.
      x: [B, T, D], normed.
      spec: the layer: what it makes, and what it reads of others.
      config: the model.
      fmt: rounds what a cache of that format would round.
      selector: picks the entries of CSA layers.
      shared: what earlier layers left.

    Returns:
      What is left for later layers, and [B, T, D].

    Source: deepseek_v4.md sections 1.3, 2 and 3, and deepseek_v41.md sections 6 and 7.
    """
    frequencies = rope_frequencies(config, spec.attn)
    tokens = jnp.arange(x.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(tokens[None], x.shape[:2])
    latent, kv = project_input(params, x, config)
    q = rotated_queries(params, latent, positions, frequencies, config)
    window = fmt.round_window(
        window_entry(params, kv, positions, frequencies, config), config.rope_dim
    )
    age = tokens[:, None] - tokens[None]
    keys, valid = [window], [(age >= 0) & (age < config.sliding_window)]
    if spec.attn != AttentionType.SWA:
        if spec.makes_entries:
            made = _make_entries(params, x, spec, frequencies, config, fmt)
            shared = shared._replace(compressed=made[0], keys=made[1])
        assert shared.compressed is not None
        entries = shared.compressed
        visible = (tokens + 1) // spec.ratio
        mask = jnp.arange(entries.shape[1])[None] < visible[:, None]
        if spec.attn == AttentionType.CSA:
            if spec.makes_selection:
                assert shared.keys is not None
                scores = _scores(
                    params, x, latent, positions, frequencies, config, fmt, shared.keys
                )
                seen = jnp.broadcast_to(visible[None], x.shape[:2])
                selection = Selection(scores, seen, positions, config.indexer_top_k, q, entries)
                shared = _select(selection, spec, config, selector, shared)
            assert shared.selected is not None
            mask = mask[None] & shared.selected
        keys.append(entries)
        valid.append(mask)
    batch = x.shape[0]
    valid = [jnp.broadcast_to(v, (batch, *v.shape[-2:])) for v in valid]
    attended = attend(
        q,
        jnp.concatenate(keys, axis=1)[:, None],
        jnp.concatenate(valid, axis=-1),
        params.attn_sink,
        scale=config.head_dim**-0.5,
    )
    attended = inverse_rope(attended.astype(x.dtype), positions, frequencies)
    return shared, output(params, attended, config)


def _make_entries(
    params: AttentionParams,
    x: jax.Array,
    spec: LayerSpec,
    frequencies: jax.Array,
    config: DSV4Config,
    fmt: CacheFormat,
) -> tuple[jax.Array, jax.Array | None]:
    """Entries [B, E, C] and index keys [B, E, IC] as a cache gives them back; HCA has no keys."""
    keys = None
    if spec.shares:
        assert params.source is not None
        entries, keys = make_entries(params.source, x, frequencies, spec.ratio, config)
    else:
        assert params.compressor is not None
        entries = compress_sequence(params.compressor, x, frequencies, spec.attn, config)
        if spec.makes_selection:
            assert params.indexer is not None
            assert params.indexer.compressor is not None
            observed = jax.lax.stop_gradient(x)
            keys = compress_sequence(
                params.indexer.compressor, observed, frequencies, spec.attn, config, name="idx"
            )
    entries = fmt.round_entry(checkpoint_name(entries, "comp/entries"), config.rope_dim)
    if keys is not None:
        keys = fmt.round_index(checkpoint_name(keys, "idx/keys"))
    return entries, keys


def _select(
    selection: Selection,
    spec: LayerSpec,
    config: DSV4Config,
    selector: Selector,
    shared: Shared,
) -> Shared:
    """What a layer selects, among candidates where there are, and the candidates that it leaves."""
    if spec.makes_candidates:
        assert config.sources is not None
        assert config.sources.candidates is not None
        chosen = choose_candidates(selection, config.sources.candidates)
        shared = shared._replace(candidates=chosen)
    if spec.takes_candidates:
        assert shared.candidates is not None
        inside = jnp.where(shared.candidates, selection.scores, -jnp.inf)
        selected = select(selector, selection._replace(scores=inside), config.idea.max_selected)
        return shared._replace(selected=selected & shared.candidates)
    return shared._replace(selected=select(selector, selection, config.idea.max_selected))


def _scores(
    params: AttentionParams,
    x: jax.Array,
    latent: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    config: DSV4Config,
    fmt: CacheFormat,
    keys: jax.Array,
) -> jax.Array:
    """Index scores [B, T, E]; no gradient reaches the layer's input, which the indexer observes."""
    indexer = params.indexer
    assert indexer is not None
    x, latent = jax.lax.stop_gradient((x, latent))
    heads = project_index_queries(indexer, latent, config)
    heads = checkpoint_name(rotate(heads, positions[..., None], frequencies), "idx/q")
    index_q = fmt.round_index(heads)  # as `round_index_queries` gives them to a cached layer
    scores = index_scores(index_q, index_weights(indexer, x), keys[:, None])
    return checkpoint_name(scores, "idx/scores")
