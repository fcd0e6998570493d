"""What the next step runs of the requests that have slots: rows, sizes, and how many steps."""

from __future__ import annotations

import numpy as np

from dsv4_jax.allocator.pool_plan import PoolPlan
from dsv4_jax.serving.requests.calls import UndoLog
from dsv4_jax.serving.schedule.flight import Outlook
from dsv4_jax.serving.schedule.pace import Pace
from dsv4_jax.serving.schedule.scheduler import RowNeed, StepPlan, plan_decoding
from dsv4_jax.serving.sizing import EnginePlan


def make_plan(
    outlook: Outlook, engine: EnginePlan, pace: Pace, *, makes_several: bool
) -> tuple[StepPlan, np.ndarray]:
    """Plans a step.

    Args:
      outlook: what requests hold before it.
      engine: sizes of the engine.
      pace: chooses the size of a step that holds prompts.
      makes_several: one call may make several steps of these requests.

    Returns:
      The plan, and i64[n], for each of its rows the number of its request in `outlook.running`.
    """
    running, pending, pools = outlook.running, outlook.num_pending, engine.pools
    assert np.all(pending[outlook.goes_on] > 0), f"nothing to run: {pending}"
    wanted = np.flatnonzero(outlook.goes_on)
    slots = running.slots[wanted]
    shards = slots // pools.max_requests
    if np.all(pending[wanted] == 1):
        most_steps = np.ones_like(outlook.lengths)
        if makes_several:
            most_steps = _most_steps(outlook, pools, is_plain=engine.step_sizes.is_plain)
        plan = plan_decoding(
            slots,
            outlook.num_drafts[wanted],
            shards,
            most_steps=most_steps[wanted],
            steps_per_call=engine.steps_per_call,
            sizes=pace.sizes,
        )
    else:
        needs: list[list[RowNeed]] = [[] for _ in range(engine.data_shards)]
        for index, shard in zip(wanted.tolist(), shards.tolist(), strict=True):
            needs[shard].append(_need(outlook, index))
        lengths = np.zeros(engine.data_shards * pools.max_requests, np.int32)
        lengths[running.slots] = outlook.lengths
        plan = pace.choose(needs, lengths)
    if np.array_equal(plan.rows.slots, slots):
        return plan, wanted
    place_of = np.zeros(engine.data_shards * pools.max_requests, np.int32)
    place_of[running.slots] = np.arange(len(running))
    return plan, place_of[plan.rows.slots]


def note_rests(plan: StepPlan, outlook: Outlook, places: np.ndarray, undo: UndoLog) -> int:
    """Notes of requests how far upper layers rest in a step that is about to be launched.

    Args:
      plan: the step.
      outlook: what requests hold before it.
      places: i64[n], as `make_plan` gave them.
      undo: where the change in progress saves what it changes of requests.

    Returns:
      Tokens for which they rest.
    """
    ends = outlook.lengths[places] + plan.rows.num_tokens
    for row in plan.rows.rests.nonzero()[0].tolist():
        request = outlook.running.requests[places[row]]
        undo.save(request)
        request.upper_from = int(ends[row])
    return int(plan.rows.num_tokens[plan.rows.rests].sum())


def _most_steps(outlook: Outlook, pools: PoolPlan, *, is_plain: bool) -> np.ndarray:
    """i32[n], steps of one call that each running request can take part in, at least 1.

    None passes the end of a request, whatever it keeps of its drafts, nor, of plain steps, a
    boundary that may be worth a snapshot, which is taken between two calls.
    """
    left = outlook.running.totals - outlook.num_known
    most = np.maximum(1, left // (1 + outlook.num_drafts))
    if is_plain and pools.num_snapshots:
        most = np.minimum(most, pools.block_tokens - outlook.lengths % pools.block_tokens)
    return most


def _need(outlook: Outlook, index: int) -> RowNeed:
    """What a running request waits for."""
    request, pending = outlook.running.requests[index], int(outlook.num_pending[index])
    if pending > 1 and request.reading is not None:
        count, rests = request.reading.next_part(int(outlook.lengths[index]))
        if count is not None and count < pending:
            return RowNeed(request.slot, count, 0, draws=False, rests=rests)
    if pending > 1 and request.followers:  # they fork before the last token
        return RowNeed(request.slot, pending - 1, 0, draws=False)
    return RowNeed(request.slot, pending, int(outlook.num_drafts[index]))
