"""StepInput, and the indices of one call that follow from it and the lengths."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.engram import EngramRows
from pallas_kernels.common.call import CallIndices


@flax.struct.dataclass(kw_only=True)
class StepInput:
    """The whole input of a step, the same for one token and for thousands.

    Attributes:
      token_ids: i32[T], tokens of all requests, each request's in order and next to each other.
      request_ids: i32[T], the row, 0 to B - 1, that a token belongs to; -1 is padding.
      request_slots: i32[B], slot of each row; -1 is an idle row. No slot twice.
      engram: what the tokens read of the Engram tables, [T, ...], zeros for padding, where the host
        has gathered it; None leaves that to the step, which in a program calls the host back. Of a
        model without tables it is None.
    """

    token_ids: jax.Array
    request_ids: jax.Array
    request_slots: jax.Array
    engram: EngramRows | None = None


def check_step_input(step_input: StepInput, *, vocab_size: int | None, num_slots: int) -> None:
    """Shapes and dtypes, and values too where they are at hand (outside jit).

    Raises:
      ValueError: a field has another shape or dtype, or a value out of range.
    """
    fields = ("token_ids", "request_ids", "request_slots")
    checks.instance("step_input", step_input, StepInput)
    for name in fields:
        array = getattr(step_input, name)
        if not hasattr(array, "dtype"):
            checks.refuse(name, "an array i32[n]", array, "pass it through jnp.asarray")
        if array.ndim != 1 or array.dtype != jnp.int32:
            raise ValueError(f"{name} must be i32 of rank 1, got {array.dtype}{list(array.shape)}")
    if step_input.token_ids.shape != step_input.request_ids.shape:
        raise ValueError(
            f"token_ids and request_ids must agree on T, got {step_input.token_ids.shape=} and "
            f"{step_input.request_ids.shape=}"
        )
    for leaf in jax.tree.leaves(step_input.engram):
        if leaf.shape[0] != step_input.token_ids.shape[0]:
            raise ValueError(
                "engram must have a row for each token, "
                f"{step_input.token_ids.shape[0]}, got {leaf.shape[0]}"
            )
    if not step_input.token_ids.shape[0] or not step_input.request_slots.shape[0]:
        raise ValueError("a step needs at least one token and one row; pad with request_ids -1")
    num_rows = step_input.request_slots.shape[0]
    checks.in_range("request_ids", step_input.request_ids, -1, num_rows)
    num_ids = checks.INT32_MAX if vocab_size is None else vocab_size
    checks.in_range("token_ids", step_input.token_ids, 0, num_ids)
    checks.in_range("request_slots", step_input.request_slots, -1, num_slots)
    checks.no_slot_twice("request_slots", step_input.request_slots)
    rows = checks.known_values(step_input.request_ids)
    if rows is not None:
        runs = rows[np.flatnonzero(np.diff(rows, prepend=-1))]
        if len(set(runs[runs >= 0])) < np.sum(runs >= 0):
            raise ValueError(
                f"request_ids must keep each row's tokens next to each other, got {rows}"
            )


def check_room(
    step_input: StepInput,
    length_tokens: jax.Array,
    block_table: jax.Array,
    *,
    block_tokens: int,
    needs_blocks: bool,
    num_steps: int = 1,
) -> None:
    """Refuses, outside jit, tokens that no block is there for: a step would drop them.

    Args:
      step_input: a call that `check_step_input` has passed.
      length_tokens: i32[NS], of the cache.
      block_table: i32[NS, LB], of the cache.
      block_tokens: tokens of a block.
      needs_blocks: some layer keeps entries in blocks.
      num_steps: how often the call is repeated, each time behind the last one.

    Raises:
      ValueError: a row's tokens do not fit behind what its slot holds.
    """
    arrays = (step_input.request_ids, step_input.request_slots, length_tokens, block_table)
    ids, slots, lengths, table = map(checks.known_values, arrays)
    if ids is None or slots is None or lengths is None or table is None:
        return
    counts = np.bincount(ids[ids >= 0], minlength=len(slots)) * num_steps
    for row in np.flatnonzero((slots >= 0) & (counts > 0)):
        slot = int(slots[row])
        blocks = (
            int(np.argmin(np.append(table[slot] >= 0, False))) if needs_blocks else len(table[slot])
        )
        length, added, room = int(lengths[slot]), int(counts[row]), blocks * block_tokens
        if length + added > room:
            raise ValueError(
                f"token_ids must fit into their slots' blocks, got {added} tokens for slot {slot}, "
                f"which holds {length} of {room}; give it blocks (update_slots or "
                "KVCacheManager.extend), or build a cache with a longer context"
            )


@functools.partial(jax.jit, static_argnames=("block_tokens", "max_row_tokens"), inline=True)
def index_call(
    length_tokens: jax.Array,
    block_table: jax.Array,
    step_input: StepInput,
    *,
    block_tokens: int,
    max_row_tokens: int,
) -> CallIndices:
    """Derives a call's indices.

    Args:
      length_tokens: i32[NS], of the cache.
      block_table: i32[NS, LB], of the cache.
      step_input: the call.
      block_tokens: tokens of a block; LB times this is the longest context.
      max_row_tokens: the most tokens a row can have.
    """
    num_tokens, num_rows = step_input.request_ids.shape[0], step_input.request_slots.shape[0]
    row = jnp.clip(step_input.request_ids, 0, num_rows - 1)
    slots = step_input.request_slots
    num_slots = length_tokens.shape[0]
    live = (slots >= 0) & (slots < num_slots)
    safe_slots = jnp.where(live, slots, 0)
    row_lengths = jnp.where(live, length_tokens[safe_slots], 0)
    member = (step_input.request_ids[:, None] == jnp.arange(num_rows)[None]) & live[None]
    offset = jnp.cumsum(member, axis=0)[jnp.arange(num_tokens), row] - 1
    positions = row_lengths[row] + offset
    valid = jnp.any(member, axis=1) & (positions < block_table.shape[1] * block_tokens)
    return CallIndices(
        segment_ids=jnp.where(valid, row, -1),
        slots=jnp.where(valid, safe_slots[row], -1),
        positions=jnp.where(valid, positions, 0),
        lengths=jnp.where(valid, row_lengths[row], 0),
        row_slots=jnp.where(live, slots, -1),
        row_lengths=row_lengths,
        row_counts=jnp.sum(member & valid[:, None], axis=0, dtype=jnp.int32),
        row_offsets=jnp.argmax(member, axis=0).astype(jnp.int32),
        block_table=jnp.where(live[:, None], block_table[safe_slots], -1),
        max_row_tokens=max_row_tokens,
    )
