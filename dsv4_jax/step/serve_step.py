"""serve_step: the one step of the engine, for prompts, decoding, drafts and snapshots alike.

A row's tokens are prompt tokens, or its last drawn token followed by drafts. The step runs them
all, draws what comes after each token that asks for it, keeps drafts as far as they are what was
drawn, and takes back the rest. A draft is kept exactly when it equals the token that would have
been drawn without it, so that speculation changes neither tokens nor their distribution: the
noise of a draw follows from the request's seed and the token's position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dsv4_jax.cache.commit import commit_layers
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, empty_staged, separate_layers, stacked
from dsv4_jax.cache.snapshots import SnapshotPlan, SnapshotStore, save_snapshots
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import BY_ROW, on_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import run_layers
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.check_drafts import cut_drafts, verify_drafts
from dsv4_jax.step.plain_step import plain_draw, plain_trunk
from dsv4_jax.step.propose import propose, read_tokens, stage_context, target_layers
from dsv4_jax.step.serve_values import ServeInput, ServeOutput, count_last, fed_rows, fill_in
from dsv4_jax.step.step import check_call, pad_places, pad_tokens, trunk_logits
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.weights import with_activations


@on_mesh(("cache", "store", BY_ROW))
def serve_step(
    params: DSV4Params,
    cache: ModelCache,
    store: SnapshotStore,
    serve_input: ServeInput,
    last: ServeOutput | None = None,
    *,
    config: DSV4Config,
    draft_tokens: int,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, SnapshotStore, ServeOutput]:
    """One step of any mix of rows.

    Args:
      params: model parameters.
      cache: the cache before the step; its tables hold blocks for all tokens.
      store: snapshots.
      serve_input: what to run.
      last: what the step before gave, of the same rows; None where the host gives every token.
      config: the model; with a draft if `draft_tokens` is above 0.
      draft_tokens: k, the most drafts of a row; static.
      activations: as in `decode_step`.

    Returns:
      The cache, the store and what was drawn.

    Raises:
      ValueError: a field has a wrong shape or dtype, or there are no such activations.
    """
    counts = count_last(serve_input.counts, fed_rows(serve_input.step_input), last)
    step_input = fill_in(serve_input.step_input, last)
    check_call(params, cache, step_input, config, activations)
    params = with_activations(params, activations)
    step_input = pad_tokens(step_input)
    num_tokens = step_input.token_ids.shape[0]
    call, num_checked = cut_drafts(
        cache.index(step_input), step_input.token_ids, serve_input, last, draft_tokens
    )
    ran = run_layers(
        params,
        cache,
        step_input.token_ids,
        call,
        _blank_staged(params, cache, call.positions.shape[0]),
        config,
        targets=target_layers(config) if draft_tokens else (),
        engram_rows=step_input.engram,
        upper=pad_places(serve_input.upper),
    )
    cache, new_tokens, streams, _ = ran
    assert new_tokens is not None
    first = call.row_offsets + call.row_counts - num_checked
    checked = jnp.clip(
        first[:, None] + jnp.arange(draft_tokens + 1, dtype=jnp.int32)[None], 0, num_tokens - 1
    )
    logits = trunk_logits(params, streams[checked.reshape(-1)], config)
    drawn, num_accepted, logprobs = verify_drafts(
        logits.reshape(*checked.shape, -1),
        step_input.token_ids[checked],
        call.positions[checked],
        num_checked,
        serve_input.sampling,
        counts,
        serve_input.masks,
        config,
    )
    live = (call.row_slots >= 0) & (call.row_counts > 0)
    num_kept = call.row_counts - num_checked + 1 + num_accepted
    num_kept = jnp.where(live, num_kept, 0)
    kept = call.keep(num_kept)
    drafts, confidence, read = jnp.zeros((call.row_slots.shape[0], 0), jnp.int32), None, None
    last_drawn = jnp.take_along_axis(drawn, num_accepted[:, None], axis=1)[:, 0]
    follows = serve_input.next_token_ids
    if draft_tokens:
        following = jnp.where(follows >= 0, follows, last_drawn)
        next_ids = _next_tokens(step_input.token_ids, kept, following)
        next_ids = jnp.clip(next_ids, 0, config.vocab_size - 1)
        read = read_tokens(params, ran, next_ids, call, config)
        new_tokens = stage_context(params, cache, new_tokens, call, read, config)
    snapshots = _crossed(serve_input.snapshots, call.row_lengths)
    rows = {attn: stacked(family) for attn, family in new_tokens.items()}
    store = save_snapshots(store, cache.state, rows, kept, snapshots)
    # Snapshots are made of rings before the commit, which guesses wait for: unordered, XLA would
    # copy the rings whole.
    store, state = jax.lax.optimization_barrier((store, cache.state))
    cache = dataclasses.replace(cache, state=state)
    cache = commit_layers(cache, new_tokens, kept)
    if read is not None:
        drafts, confidence = propose(
            params,
            cache,
            jnp.where(live & (follows < 0), call.row_slots, -1),
            call.row_lengths + num_kept,
            last_drawn,
            read[jnp.maximum(call.row_offsets + num_kept - 1, 0)],
            serve_input.sampling,
            counts,
            config=config,
            draft_tokens=draft_tokens,
        )
    order = jnp.arange(draft_tokens + 1, dtype=jnp.int32)[None]
    shown = (order <= num_accepted[:, None]) & live[:, None]
    token_ids = jnp.where(shown, drawn, -1)
    output = ServeOutput.of(
        token_ids,
        num_kept,
        drafts,
        logprobs,
        last=last,
        num_drafts=jnp.where(live, num_checked - 1, 0)[:, None],
        confidence=confidence,
    )
    return cache, store, output


jit_serve_step = jax.jit(
    serve_step,
    static_argnames=("config", "draft_tokens", "activations"),
    donate_argnames=("cache", "store", "last"),
    keep_unused=True,  # of `last`, whose place the output takes
)
"""`serve_step`, jitted; the old cache and store are gone, and so is `last`."""

jit_serve_round = jax.jit(
    serve_step,
    static_argnames=("config", "draft_tokens", "activations"),
    donate_argnames=("cache", "store", "last"),
    keep_unused=True,
    compiler_options=decode_options(),
)
"""The same for rows that only decode: on a GPU, launches that do not need each other overlap."""


@on_mesh(("cache", BY_ROW))
def plain_decode_step(
    params: DSV4Params,
    cache: ModelCache,
    serve_input: ServeInput,
    last: ServeOutput | None = None,
    *,
    config: DSV4Config,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, ServeOutput]:
    """`serve_step` of one token per row without drafts and snapshots, committed as it goes."""
    cache, rows = plain_trunk(
        params, cache, serve_input.step_input, last, config=config, activations=activations
    )
    return cache, plain_draw(rows, serve_input.draws, last, config=config)


jit_plain_decode_step = jax.jit(
    plain_decode_step,
    static_argnames=("config", "activations"),
    donate_argnames=("cache", "last"),
    keep_unused=True,
    compiler_options=decode_options(),
)
"""`plain_decode_step`, jitted; the old cache is gone, and so is `last`.

It has compiler options, which JAX takes outside of other jitted functions alone.
"""


@on_mesh("store")
def save_reached(
    store: SnapshotStore, cache: ModelCache, step_input: StepInput, plan: SnapshotPlan
) -> SnapshotStore:
    """Keeps boundaries that requests stand at, between steps; `step_input` names the rows."""
    call = dataclasses.replace(
        cache.index(step_input), row_counts=jnp.zeros_like(step_input.request_slots)
    )
    return save_snapshots(store, cache.state, None, call, plan)


jit_save_reached = jax.jit(save_reached, donate_argnames="store")
"""`save_reached`, jitted; the old store is gone."""


def _blank_staged(params: DSV4Params, cache: ModelCache, num_tokens: int) -> Mapping[str, Family]:
    """What receives a call's tokens: of separate layers each for itself."""
    if all(isinstance(layers, tuple) for layers in params.layers.values()):
        return separate_layers(cache.state, num_tokens)
    return empty_staged(cache.state, num_tokens)


def _next_tokens(token_ids: jax.Array, kept: CallIndices, following: jax.Array) -> jax.Array:
    """i32[T], the token after each kept one; `following` i32[B] has those after the last."""
    row = jnp.maximum(kept.segment_ids, 0)
    is_last = kept.positions - kept.lengths == kept.row_counts[row] - 1
    return jnp.where(is_last, following[row], jnp.roll(token_ids, -1))


def _crossed(plan: SnapshotPlan, row_lengths: jax.Array) -> SnapshotPlan:
    """The boundaries that were not reached before the call: another step has kept those."""
    before = row_lengths[jnp.clip(plan.rows, 0, row_lengths.shape[0] - 1)]
    return dataclasses.replace(plan, places=jnp.where(plan.ends > before, plan.places, -1))
