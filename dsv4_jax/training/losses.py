"""Losses of the shipped checkpoint: next token, draft, and the distillation of the indexer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv4_jax.attention.selection import Selection, select_by_score, visible_entries
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.forward import forward, forward_streams
from dsv4_jax.model.mtp import forward_draft
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import head


def select_all(selection: Selection) -> jax.Array:
    """Every visible entry, without top-k."""
    return visible_entries(selection)


def select_at_random(selection: Selection) -> jax.Array:
    """As many entries as the indexer would take, drawn at random."""

    def noise(position: jax.Array) -> jax.Array:  # by position alone, however the call is cut
        entries = jnp.arange(selection.scores.shape[-1])
        key = jax.random.fold_in(jax.random.key(0), position)
        return jax.vmap(lambda entry: jax.random.uniform(jax.random.fold_in(key, entry)))(entries)

    scores = jax.vmap(jax.vmap(noise))(selection.positions)
    return select_by_score(selection._replace(scores=scores))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats per token: f32[..., V] and i32[...] -> f32[...]."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def index_divergence(selection: Selection) -> jax.Array:
    """KL from the attention an entry should get to what the index scores give it; a mean.

    The target is the attention over visible entries alone, averaged over heads. No gradient
    reaches it, and `attend_full_sequence` lets none through to the layer's input: only the indexer
    learns from this.
    """
    visible = visible_entries(selection)
    queries, entries = jax.lax.stop_gradient((selection.queries, selection.entries))
    logits = jnp.einsum("bthc,bec->bthe", queries, entries) * queries.shape[-1] ** -0.5
    logits = jnp.where(visible[:, :, None], logits, -1e30)
    target = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=2)
    scores = jax.nn.log_softmax(jnp.where(visible, selection.scores, -1e30), axis=-1)
    terms = jnp.where(visible, target * (jnp.log(target + 1e-9) - scores), 0.0)
    num_queries = jnp.sum(selection.visible > 0, dtype=jnp.float32)
    return jnp.sum(terms) / jnp.maximum(num_queries, 1.0)


def training_loss(
    params: DSV4Params,
    read_ids: jax.Array,
    token_ids: jax.Array,
    *,
    config: DSV4Config,
    dense: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum of all losses, and each by name.

    Args:
      params: model parameters.
      read_ids: i32[B, T + 2], the text as the model reads it.
      token_ids: i32[B, T + 2], the text as it should have been.
      config: the model.
      dense: bool[], CSA layers attend to every entry, not only to the selected ones.
    """
    divergences: list[jax.Array] = []

    def selector(selection: Selection) -> jax.Array:
        divergences.append(index_divergence(selection))
        return jnp.where(dense, select_all(selection), select_by_score(selection))

    following, after = token_ids[:, 1:-1], token_ids[:, 2:]
    streams = forward_streams(params, read_ids[:, :-2], config=config, selector=selector)
    logits = head(params.hc_head, params.norm, params.head, streams, config)
    losses = {
        "next": jnp.mean(cross_entropy(logits, following)),
        "index": sum(divergences, jnp.float32(0.0)) / max(len(divergences), 1),
    }
    total = losses["next"] + losses["index"]
    if params.mtp is not None:
        draft = forward_draft(params, streams, read_ids[:, 1:-1], config=config)
        losses["draft"] = jnp.mean(cross_entropy(draft, after))
        total = total + 0.3 * losses["draft"]
    return total, losses


def held_out_loss(
    params: DSV4Params,
    token_ids: jax.Array,
    *,
    config: DSV4Config,
    activations: str = DEFAULT_ACTIVATIONS,
) -> jax.Array:
    """Nats per token of i32[B, T + 1], a mean over the rows at each position: f32[T]."""
    logits = forward(params, token_ids[:, :-1], config=config, activations=activations)
    return jnp.mean(cross_entropy(logits, token_ids[:, 1:]), axis=0)
