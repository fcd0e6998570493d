"""serve_step: the one step of the engine, for prompts, decoding, drafts and snapshots alike.

A row's tokens are prompt tokens, or its last drawn token followed by drafts. The step runs them
all, draws what comes after each token that asks for it, keeps drafts as far as they are what was
drawn, and takes back the rest. A draft is kept exactly when it equals the token that would have
been drawn without it, so that speculation changes neither tokens nor their distribution: the
noise of a draw follows from the request's seed and the token's position.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dsv4_jax.cache.commit import Staged, commit
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import empty_staged
from dsv4_jax.cache.snapshots import SnapshotPlan, SnapshotStore, save_snapshots
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import BY_ROW, on_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import run_layers
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.draft_ahead import draft_ahead
from dsv4_jax.step.draws import DrawnCounts, Logprobs, TokenMasks, draw
from dsv4_jax.step.propose import propose, stage_context
from dsv4_jax.step.sampling import MAX_LOGPROBS, Sampling
from dsv4_jax.step.step import check_call, pad_tokens, run_step, trunk_logits
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.weights import with_activations

LAST_DRAWN = -1
"""In the place of a token id: the last token that the step before drew for this row."""
FIRST_DRAFT = -2
"""In the place of a token id: the step before's first guess for this row; -3 is the second."""


@flax.struct.dataclass(kw_only=True)
class ServeInput:
    """The whole input of `serve_step`.

    Attributes:
      step: the tokens. With the output of the step before, `LAST_DRAWN`, `FIRST_DRAFT` and what is
        below stand for tokens that the host has not read yet.
      num_checked: i32[B], a row's last tokens after which one is drawn: 1 and its drafts; at most
        draft_tokens + 1.
      next_token_ids: i32[B], the token after a row's last one where it is known, of a prompt that
        goes on; -1 where the drawn one is next.
      sampling: settings of each row.
      snapshots: boundaries to keep.
      counts: what rows have drawn before, for their penalties; None is nothing.
      masks: which tokens rows may draw, n at least what the step draws of a row; None is all.
      num_steps: i32[B], steps that a row makes in `plain_decode_steps`; None elsewhere.
      least_survival: f32[B], of DSpark stages: drafts that the step before guessed are checked as
        far as the chance that all of them are kept is at least this; None, or 0, checks all.
    """

    step: StepInput
    num_checked: jax.Array
    next_token_ids: jax.Array
    sampling: Sampling
    snapshots: SnapshotPlan
    counts: DrawnCounts | None = None
    masks: TokenMasks | None = None
    num_steps: jax.Array | None = None
    least_survival: jax.Array | None = None


@flax.struct.dataclass(kw_only=True)
class ServeOutput:
    """What a step gives back to the host.

    Attributes:
      columns: i32[B, 2n + 1], n drawn tokens, how many tokens of the call stay, n - 1 drafts, and
        how many drafts were checked, side by side: one array goes to the host faster than four. n
        is k + 1, or what `plain_decode_steps` draws.
      logprobs: of the drawn tokens, [B, k + 1]; None where they were left on the device. Calls of
        several steps have none, and leave what was there.
      confidence: f32[B, k], of DSpark drafts the logit of the chance that each is kept if those
        before it are; None of others.
    """

    columns: jax.Array
    logprobs: Logprobs | None
    confidence: jax.Array | None = None

    @classmethod
    def of(
        cls,
        token_ids: jax.Array,
        num_kept: jax.Array,
        draft_token_ids: jax.Array,
        logprobs: Logprobs | None,
        *,
        last: ServeOutput | None = None,
        num_drafts: jax.Array | None = None,
        confidence: jax.Array | None = None,
    ) -> ServeOutput:
        """Fields as the properties have them, widened to those of `last`, whose place it takes."""
        if last is not None and (spare := last.token_ids.shape[1] - token_ids.shape[1]):
            token_ids = jnp.pad(token_ids, ((0, 0), (0, spare)), constant_values=-1)
            draft_token_ids = jnp.pad(draft_token_ids, ((0, 0), (0, spare)))
        num_drafts = jnp.zeros_like(num_kept) if num_drafts is None else num_drafts
        parts = [token_ids, num_kept[:, None], draft_token_ids, num_drafts[:, None]]
        columns = jnp.concatenate(parts, axis=1)
        return cls(columns=columns, logprobs=logprobs, confidence=confidence)

    @classmethod
    def empty(
        cls,
        num_rows: int,
        draft_tokens: int,
        vocab_size: int,
        *,
        num_steps: int = 1,
        has_confidence: bool = False,
    ) -> ServeOutput:
        """Of no step: what the first one is given as that of the step before.

        Args:
          num_rows: B.
          draft_tokens: k.
          vocab_size: of the model.
          num_steps: the most that a call makes.
          has_confidence: the drafts are those of DSpark stages.
        """
        width = num_rows, draft_tokens + 1
        shape = (*width, min(MAX_LOGPROBS, vocab_size))
        return cls(
            columns=jnp.zeros((num_rows, 2 * max(draft_tokens + 1, num_steps) + 1), jnp.int32),
            logprobs=Logprobs(
                drawn=jnp.zeros(width, jnp.float32),
                token_ids=jnp.zeros(shape, jnp.int32),
                top=jnp.zeros(shape, jnp.float32),
            ),
            confidence=jnp.zeros((num_rows, draft_tokens)) if has_confidence else None,
        )

    @property
    def token_ids(self) -> jax.Array:
        """i32[B, n], drawn tokens in order; -1 after the last one."""
        return self.columns[:, : self.columns.shape[1] // 2]

    @property
    def num_kept(self) -> jax.Array:
        """i32[B], tokens of the call that stay in the cache."""
        return self.columns[:, self.columns.shape[1] // 2]

    @property
    def draft_token_ids(self) -> jax.Array:
        """i32[B, n - 1], guesses at what follows the last drawn token; of k drafts."""
        return self.columns[:, self.columns.shape[1] // 2 + 1 : -1]

    @property
    def num_drafts(self) -> jax.Array:
        """i32[B], drafts of the call that were checked."""
        return self.columns[:, -1]


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
    step_input = fill_in(serve_input.step, last)
    check_call(params, cache, step_input, config, activations)
    params = with_activations(params, activations)
    step_input = pad_tokens(step_input)
    num_tokens = step_input.token_ids.shape[0]
    call, num_checked = cut_drafts(
        cache.index(step_input), step_input.token_ids, serve_input, last, draft_tokens
    )
    dspark = config.dspark if draft_tokens else None
    cache, new_tokens, streams, means = run_layers(
        params,
        cache,
        step_input.token_ids,
        call,
        empty_staged(cache.state, call.positions.shape[0]),
        config,
        targets=() if dspark is None else dspark.target_layers,
    )
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
        serve_input.counts,
        serve_input.masks,
        config,
    )
    live = (call.row_slots >= 0) & (call.row_counts > 0)
    num_kept = call.row_counts - num_checked + 1 + num_accepted
    num_kept = jnp.where(live, num_kept, 0)
    kept = call.keep(num_kept)
    drafts, confidence = jnp.zeros((call.row_slots.shape[0], 0), jnp.int32), None
    last_drawn = jnp.take_along_axis(drawn, num_accepted[:, None], axis=1)[:, 0]
    follows = serve_input.next_token_ids
    if means is not None:
        new_tokens = stage_context(params, cache, new_tokens, call, means, config)
    elif draft_tokens:
        following = jnp.where(follows >= 0, follows, last_drawn)
        row = jnp.maximum(kept.segment_ids, 0)
        is_last = kept.positions - kept.lengths == kept.row_counts[row] - 1
        next_ids = jnp.where(is_last, following[row], jnp.roll(step_input.token_ids, -1))
        new_tokens, drafts = draft_ahead(
            params,
            cache,
            new_tokens,
            kept,
            jnp.clip(next_ids, 0, config.vocab_size - 1),
            streams,
            serve_input.sampling,
            serve_input.counts,
            config=config,
            draft_tokens=draft_tokens,
        )
    snapshots = _crossed(serve_input.snapshots, call.row_lengths)
    store = save_snapshots(store, cache.state, new_tokens, kept, snapshots)
    cache = commit(cache, Staged(new_tokens=new_tokens, call=call), num_kept)
    if means is not None:
        block = propose(
            params,
            cache,
            jnp.where(live & (follows < 0), call.row_slots, -1),
            call.row_lengths + num_kept,
            last_drawn,
            serve_input.sampling,
            serve_input.counts,
            config=config,
        )
        drafts = block.token_ids[:, :draft_tokens]
        confidence = block.confidence[:, :draft_tokens]
    order = jnp.arange(draft_tokens + 1, dtype=jnp.int32)[None]
    shown = (order <= num_accepted[:, None]) & live[:, None]
    token_ids = jnp.where(shown, drawn, -1)
    output = ServeOutput.of(
        token_ids,
        num_kept,
        drafts,
        logprobs,
        last=last,
        num_drafts=jnp.where(live, num_checked - 1, 0),
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
    step_input = fill_in(serve_input.step, last)
    check_call(params, cache, step_input, config, activations)
    params = with_activations(params, activations)
    cache, call, streams = run_step(params, cache, step_input, config, max_row_tokens=1)
    token = jnp.maximum(call.row_offsets, 0)
    logits = trunk_logits(params, streams[token], config)
    live = (call.row_slots >= 0) & (call.row_counts > 0)
    no_drafts = jnp.zeros((call.row_slots.shape[0], 0), jnp.int32)
    drawn, logprobs = draw(
        logits[:, None],
        serve_input.sampling,
        call.row_lengths[:, None] + 1,
        serve_input.counts,
        no_drafts,
        config.idea.sampler,
        serve_input.masks,
    )
    token_ids = jnp.where(live[:, None], drawn, -1)
    return cache, ServeOutput.of(token_ids, call.row_counts, no_drafts, logprobs, last=last)


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


def fill_in(step_input: StepInput, last: ServeOutput | None) -> StepInput:
    """The same call, with the tokens of the step before where it names them.

    Args:
      step_input: the call; its rows are those of the step before.
      last: what that drew; None changes nothing.
    """
    if last is None:
        return step_input
    count = jnp.sum(last.token_ids >= 0, axis=1, dtype=jnp.int32)
    place = jnp.maximum(count - 1, 0)[:, None]
    drawn = jnp.take_along_axis(last.token_ids, place, axis=1)
    # Column j is what stands for token id -1 - j.
    given = jnp.maximum(jnp.concatenate([drawn, last.draft_token_ids], axis=1), 0)
    row = jnp.clip(step_input.request_ids, 0, given.shape[0] - 1)
    column = jnp.clip(-1 - step_input.token_ids, 0, given.shape[1] - 1)
    token_ids = jnp.where(step_input.token_ids < 0, given[row, column], step_input.token_ids)
    return dataclasses.replace(step_input, token_ids=token_ids)


def cut_drafts(
    call: CallIndices,
    token_ids: jax.Array,
    serve_input: ServeInput,
    last: ServeOutput | None,
    draft_tokens: int,
) -> tuple[CallIndices, jax.Array]:
    """Leaves out drafts that are too unlikely to be kept; they become padding.

    Which drafts are checked changes no answer. Confidences are those of the step before, and are
    looked at only where a row's drafts are those that it guessed.

    Args:
      call: the call's indices.
      token_ids: i32[T].
      serve_input: what to run.
      last: what the step before gave.
      draft_tokens: k, the most drafts of a row.

    Returns:
      The call, and i32[B], a row's last tokens after which one is drawn.
    """
    num_checked, least = serve_input.num_checked, serve_input.least_survival
    if last is None or last.confidence is None or least is None:
        return call, num_checked
    order = jnp.arange(draft_tokens, dtype=jnp.int32)[None]
    first = call.row_offsets + call.row_counts - num_checked + 1
    here = jnp.clip(first[:, None] + order, 0, token_ids.shape[0] - 1)
    is_draft = order < num_checked[:, None] - 1
    guessed = last.draft_token_ids[:, :draft_tokens]
    is_known = jnp.all(~is_draft | (token_ids[here] == guessed), axis=1)
    survival = jnp.cumprod(jax.nn.sigmoid(last.confidence), axis=1)
    is_worth = is_draft & ((survival >= least[:, None]) | ~is_known[:, None])
    cut = num_checked - 1 - jnp.sum(is_worth, axis=1, dtype=jnp.int32)
    return call.keep(call.row_counts - cut), num_checked - cut


def _crossed(plan: SnapshotPlan, row_lengths: jax.Array) -> SnapshotPlan:
    """The boundaries that were not reached before the call: another step has kept those."""
    before = row_lengths[jnp.clip(plan.rows, 0, row_lengths.shape[0] - 1)]
    return dataclasses.replace(plan, places=jnp.where(plan.ends > before, plan.places, -1))


def verify_drafts(
    logits: jax.Array,
    token_ids: jax.Array,
    positions: jax.Array,
    num_checked: jax.Array,
    sampling: Sampling,
    counts: DrawnCounts | None,
    masks: TokenMasks | None,
    config: DSV4Config,
) -> tuple[jax.Array, jax.Array, Logprobs]:
    """Draws after each checked token, and counts the drafts that were drawn.

    Args:
      logits: f32[B, k + 1, V], after each checked token.
      token_ids: i32[B, k + 1], the checked tokens: the last one known, then drafts.
      positions: i32[B, k + 1], of those tokens.
      num_checked: i32[B], how many count.
      sampling: settings of each row.
      counts: what rows have drawn before, the last known token included; None is nothing.
      masks: which tokens rows may draw; None is all.
      config: the model.

    Returns:
      i32[B, k + 1], the drawn tokens; i32[B], how many drafts are kept: the first n of the drawn
      tokens are the first n drafts, and the one after them is drawn too; and log-probabilities.
    """
    drafts = token_ids[:, 1:]
    sampler = config.idea.sampler
    drawn, logprobs = draw(logits, sampling, positions + 1, counts, drafts, sampler, masks)
    order = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    agrees = (drawn[:, :-1] == drafts) & (order < num_checked[:, None] - 1)
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return drawn, accepted, logprobs
