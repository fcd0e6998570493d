"""A step in flight: launched, and not read by the host; and what requests hold when it has ended.

While step n runs, the host plans step n + 1. Of a request in step n it knows then: how many tokens
the step appends without drafts, how many it draws, and at most how many drafts it keeps. So the
host plans by the most that can be, and the device by what is: a request's next tokens, their
positions and the number of drafts that are kept never leave it.

A look at the whole cache waits for the step in flight and counts what it did. Its tokens stay with
it until the next step all the same, so that looking changes nothing that a caller can see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from dsv4_jax.serving.schedule.call_load import CallLoad
from dsv4_jax.serving.schedule.running import Running
from dsv4_jax.serving.schedule.scheduler import StepPlan, StepRows
from dsv4_jax.serving.schedule.snapshot_policy import Boundary

type Read[T] = Callable[[], T]


@dataclasses.dataclass(eq=False)
class Flight[T]:
    """A step that was launched.

    Attributes:
      plan: what it runs.
      rows: what that is of each request.
      running: requests when it was launched.
      places: i64[n], of each row, the number of its request in `running`.
      boundaries: snapshots that it writes if it crosses them.
      read: waits for the step's result; None while its draws are not launched, since they wait
        for what the step before it drew.
      launched_s: when that was, in seconds.
      load: what its time depends on, where it holds prompts; else None.
      alive: bool[n], rows whose request still has the slot; what others give is thrown away.
      result: what it gave, once that has been read and counted.
      read_s: time of that, in seconds.
    """

    plan: StepPlan
    running: Running
    places: np.ndarray
    boundaries: list[Boundary]
    read: Read[T] | None
    launched_s: float
    load: CallLoad | None = None
    rows: StepRows = dataclasses.field(init=False)
    alive: np.ndarray = dataclasses.field(init=False)
    result: T | None = None
    read_s: float = 0.0

    def __post_init__(self) -> None:
        """All rows are alive."""
        self.rows = self.plan.rows
        self.alive = np.ones(len(self.places), bool)

    @property
    def slots(self) -> np.ndarray:
        """i32[n], slots of rows that are alive."""
        return self.rows.slots[self.alive]

    def holds_all_of(self, running: Running) -> bool:
        """Its rows are those of these requests, in order, and all are alive."""
        in_order = np.array_equal(self.places, np.arange(len(running)))
        return running is self.running and in_order and bool(self.alive.all())

    def forget(self, slot: int) -> None:
        """The request in a slot leaves it."""
        self.alive[self.rows.slots == slot] = False


@dataclasses.dataclass(frozen=True, eq=False)
class Outlook:
    """What running requests hold when the step in flight, if there is one, has ended.

    Arrays are in the order of `running`.

    Attributes:
      running: the requests.
      lengths: i32[n], tokens in the cache; of rows in flight with drafts, without those.
      spread: i32[n], so many tokens more may be there.
      num_known: i32[n], the most tokens that are known.
      num_pending: i32[n], known tokens that are not in the cache.
      num_drafts: i32[n], guesses at what follows them that the next step may check.
      is_fed: bool[n], the pending token and the drafts are on the device alone.
      goes_on: bool[n], the request does not end with the step in flight for its length.
      repeats: the step in flight is plain, its rows are those of `running`, and all go on: a plain
        step after it is the same again.
    """

    running: Running
    lengths: np.ndarray
    spread: np.ndarray
    num_known: np.ndarray
    num_pending: np.ndarray
    num_drafts: np.ndarray
    is_fed: np.ndarray
    goes_on: np.ndarray
    repeats: bool

    @property
    def waits(self) -> np.ndarray:
        """bool[n], what the request may draw next depends on tokens that the host has not read."""
        return self.running.has_grammar & self.is_fed & self.goes_on


def look(
    running: Running, lengths: np.ndarray, flight: Flight | None, *, draft_tokens: int
) -> Outlook:
    """What running requests hold when the step in flight has ended.

    Args:
      running: requests in slots now.
      lengths: i32[NS], tokens of each slot's request, without those of the step in flight.
      flight: the step in flight; None is none.
      draft_tokens: k.
    """
    slots, known = running.slots, running.num_known
    held = lengths[slots]
    none = np.zeros_like(known)
    spread, drawn, num_drafts = none, none, none
    repeats = flight is not None and flight.plan.is_plain
    if flight is not None:
        rows, alive = flight.rows, flight.alive
        columns = (rows.num_appended, np.where(rows.draws, rows.spread, 0), rows.num_drawn)
        if not flight.holds_all_of(running):
            repeats = False
            by_slot = np.zeros((3, len(lengths)), np.int32)
            by_slot[:, rows.slots[alive]] = [column[alive] for column in columns]
            columns = by_slot[:, slots]
        appended, spread, drawn = columns
        held = held + appended
        num_drafts = np.where(drawn > 0, draft_tokens, 0)
    is_fed = drawn > 0
    if draft_tokens and not is_fed.all():
        given = np.array([len(request.drafts) for request in running.requests], np.int32)
        num_drafts = np.where(is_fed, num_drafts, given)
    num_pending = np.where(is_fed, 1, known - held)
    least = known + drawn
    most = least + spread
    if draft_tokens:
        limit = np.where(running.speculates, running.totals - most - 1, 0)
        num_drafts = np.minimum(np.maximum(num_drafts, 0), np.maximum(limit, 0))
    goes_on = least < running.totals
    return Outlook(
        running=running,
        lengths=held,
        spread=spread,
        num_known=most,
        num_pending=num_pending,
        num_drafts=num_drafts,
        is_fed=is_fed,
        goes_on=goes_on,
        repeats=repeats and bool(goes_on.all()),
    )
