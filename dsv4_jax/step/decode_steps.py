"""Several decode steps of the engine in one call, of which the host launches one program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.snapshots import SnapshotStore
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import BY_ROW, on_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.serve_step import plain_decode_step, serve_step
from dsv4_jax.step.serve_values import (
    FIRST_DRAFT,
    LAST_DRAWN,
    ServeInput,
    ServeOutput,
    fill_in,
)
from dsv4_jax.step.step import check_call
from pallas_kernels.common.addressing import drop_absent


@on_mesh(("cache", BY_ROW))
def plain_decode_steps(
    params: DSV4Params,
    cache: ModelCache,
    serve_input: ServeInput,
    last: ServeOutput | None = None,
    *,
    config: DSV4Config,
    num_steps: int,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, ServeOutput]:
    """`plain_decode_step` several times, each of which takes what the one before it drew.

    Where settings need the host between two tokens, as penalties, grammars and log-probabilities
    do, it is not for them. Stop tokens are the host's: what a row draws after one is to be thrown
    away.

    Args:
      params: model parameters.
      cache: the cache before the call; its tables hold blocks for all tokens.
      serve_input: what to run. A row makes the first `ServeInput.num_steps` steps and is idle in
        the others.
      last: as in `serve_step`.
      config: the model.
      num_steps: n, static.
      activations: as in `decode_step`.

    Returns:
      The cache, and the drawn tokens, n columns of them.

    Raises:
      ValueError: as in `serve_step`.
    """
    step_input = fill_in(serve_input.step_input, last)
    check_call(params, cache, step_input, config, activations, num_steps=num_steps)
    row = jnp.maximum(step_input.request_ids, 0)

    def draw_next(
        carry: tuple[ModelCache, jax.Array], number: jax.Array
    ) -> tuple[tuple[ModelCache, jax.Array], tuple[jax.Array, jax.Array]]:
        cache, token_ids = carry
        now = dataclasses.replace(
            _rows_of(step_input, number, serve_input), token_ids=token_ids, engram=None
        )
        cache, output = plain_decode_step(
            params,
            cache,
            dataclasses.replace(serve_input, step_input=now, num_steps=None),
            config=config,
            activations=activations,
        )
        drawn = output.token_ids[:, 0]
        return (cache, jnp.maximum(drawn, 0)[row]), (drawn, output.num_kept)

    numbers = jnp.arange(num_steps, dtype=jnp.int32)
    (cache, _), (drawn, num_kept) = jax.lax.scan(draw_next, (cache, step_input.token_ids), numbers)
    no_drafts = jnp.zeros((drawn.shape[1], 0), jnp.int32)
    logprobs = None if last is None else last.logprobs
    return cache, ServeOutput.of(drawn.T, jnp.sum(num_kept, axis=0), no_drafts, logprobs)


jit_plain_decode_steps = jax.jit(
    plain_decode_steps,
    static_argnames=("config", "num_steps", "activations"),
    donate_argnames=("cache", "last"),
    keep_unused=True,
    compiler_options=decode_options(),
)
"""`plain_decode_steps`, jitted; the old cache is gone, and so is `last`."""


@on_mesh(("cache", "store", BY_ROW))
def serve_rounds(
    params: DSV4Params,
    cache: ModelCache,
    store: SnapshotStore,
    serve_input: ServeInput,
    last: ServeOutput,
    *,
    config: DSV4Config,
    draft_tokens: int,
    num_steps: int,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, SnapshotStore, ServeOutput]:
    """`serve_step` several times, for rows that only decode, with drafts.

    Each takes what the one before it drew and guessed, and checks as many drafts of a row as
    `serve_input` has of it. It is for the same rows as `plain_decode_steps`, and leaves the same to
    the host.

    Args:
      params: model parameters.
      cache: the cache before the call; its tables hold blocks for all tokens.
      store: snapshots. A boundary is kept by the step that crosses it.
      serve_input: what to run. A row takes part in the first `ServeInput.num_steps` steps.
      last: what the call before gave.
      config: the model, with a draft.
      draft_tokens: k, 1 or more; static.
      num_steps: n, static.
      activations: as in `decode_step`.

    Returns:
      The cache, the store, and what all steps drew.

    Raises:
      ValueError: as in `serve_step`.
    """
    assert serve_input.num_steps is not None
    num_steps_of, named = serve_input.num_steps, _named_rows(serve_input.step_input)

    def serve_next(
        carry: tuple[ModelCache, SnapshotStore, ServeOutput], number: jax.Array
    ) -> tuple[
        tuple[ModelCache, SnapshotStore, ServeOutput], tuple[jax.Array, jax.Array, jax.Array]
    ]:
        cache, store, last = carry
        now = _rows_of(serve_input.step_input, number, serve_input)
        token_ids = jnp.where(number == 0, now.token_ids, named)
        cache, store, output = serve_step(
            params,
            cache,
            store,
            dataclasses.replace(
                serve_input,
                step_input=dataclasses.replace(now, token_ids=token_ids),
                num_steps=None,
            ),
            last,
            config=config,
            draft_tokens=draft_tokens,
            activations=activations,
        )
        drawn = output.token_ids[:, : draft_tokens + 1], output.num_kept, output.num_drafts[:, 0]
        # A row that has made its steps keeps the guesses of its last one.
        goes_on = number < num_steps_of
        left = ServeOutput.of(
            drawn[0],
            output.num_kept,
            jnp.where(goes_on[:, None], output.draft_token_ids, last.draft_token_ids),
            last.logprobs,
            last=last,
            confidence=None
            if output.confidence is None
            else jnp.where(goes_on[:, None], output.confidence, last.confidence),  # type: ignore[arg-type]
        )
        return (cache, store, left), drawn

    numbers = jnp.arange(num_steps, dtype=jnp.int32)
    (cache, store, left), (drawn, num_kept, num_drafts) = jax.lax.scan(
        serve_next, (cache, store, last), numbers
    )
    output = ServeOutput.of(
        jnp.moveaxis(drawn, 0, 1).reshape(drawn.shape[1], -1),
        jnp.sum(num_kept, axis=0),
        left.draft_token_ids,
        last.logprobs,
        num_drafts=num_drafts.T,
        confidence=left.confidence,
    )
    return cache, store, output


jit_serve_rounds = jax.jit(
    serve_rounds,
    static_argnames=("config", "draft_tokens", "num_steps", "activations"),
    donate_argnames=("cache", "store", "last"),
    keep_unused=True,
    compiler_options=decode_options(),
)
"""`serve_rounds`, jitted; the old cache and store are gone, and so is `last`."""


def _rows_of(step_input: StepInput, number: jax.Array, serve_input: ServeInput) -> StepInput:
    """The rows that take part in a step of that number."""
    assert serve_input.num_steps is not None
    row = jnp.maximum(step_input.request_ids, 0)
    takes_part = number < serve_input.num_steps[row]
    request_ids = jnp.where(takes_part, step_input.request_ids, -1)
    return dataclasses.replace(step_input, request_ids=request_ids)


def _named_rows(step_input: StepInput) -> jax.Array:
    """i32[T]: in the place of each token, the name of what the step before drew or guessed."""
    num_rows, row = step_input.request_slots.shape[0], step_input.request_ids
    order = jnp.arange(row.shape[0], dtype=jnp.int32)
    first = jnp.full(num_rows, row.shape[0], jnp.int32)
    first = first.at[drop_absent(row, num_rows)].min(order, mode="drop")
    after = order - first[jnp.maximum(row, 0)]
    return jnp.where(after == 0, LAST_DRAWN, FIRST_DRAFT + 1 - after)
