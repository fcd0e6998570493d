"""How long steps with prompts take, learned from those that have run."""

from __future__ import annotations

import collections
import dataclasses
import math

from dsv4_jax.serving.schedule.call_load import CallLoad
from dsv4_jax.step.call_cost import base_seconds, reach_seconds
from dsv4_jax.step.draft_worth import StepCost

TRUSTED = 3
"""Measurements of a kind of step after which they alone say how long it takes."""

KEPT = 7
"""The last measurements of a kind, of which the median counts: a pause of the host moves none."""

CONTEXT_STEP = 4
"""Contexts of a kind of step lie within such a factor, from `LEAST_CONTEXT` on."""
LEAST_CONTEXT = 16_384


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Steps that share their measurements: one program, contexts of one order."""

    size: int
    context: int
    rests: bool

    @classmethod
    def of(cls, load: CallLoad) -> _Kind:
        context = max(load.reach / max(load.tokens, 1) / LEAST_CONTEXT, 1.0)
        order = math.floor(math.log(context, CONTEXT_STEP))
        return cls(load.size, order, load.upper is not None)

    def distance(self, other: _Kind) -> tuple[float, int, bool]:
        """How far another kind is: by its size, of one size by its context, then by its layers."""
        size, context = abs(math.log(self.size / other.size)), abs(self.context - other.context)
        return size, context, self.rests != other.rests


class StepTimes:
    """How long steps with prompts take: arithmetic, times what it was wrong by for their kind.

    A kind without measurements takes the correction of the nearest one that has some. With fewer
    than `TRUSTED` the lesser of both counts: what was slow once, as a program's first launch is,
    is tried again. No clock is read here, so that a simulation learns as a server does. A call that
    is interrupted has learned its measurement or has changed nothing.
    """

    def __init__(self, cost: StepCost, num_devices: int = 1, *, upper_share: float = 0.0) -> None:
        """Starts from arithmetic alone.

        Args:
          cost: what a device reads and multiplies in a step.
          num_devices: those that share what tokens read of the cache.
          upper_share: share of the layers that may rest.
        """
        self._cost, self._num_devices, self._upper_share = cost, num_devices, upper_share
        # In the order in which their kinds were measured last.
        self._errors: dict[_Kind, collections.deque[float]] = {}

    def predict(self, load: CallLoad) -> float:
        """Seconds that a step is going to take."""
        kind = _Kind.of(load)
        own = self._errors.get(kind)
        if own is None:
            error = self._error_beside(kind)
        elif len(own) < TRUSTED:
            error = min(middle(own), self._error_beside(kind))
        else:
            error = middle(own)
        return self._seconds(error, load)

    def by_arithmetic(self, load: CallLoad) -> float:
        """Seconds whatever was measured; beside others of its kind they say which is longer."""
        return self._base(load) + self._reach(load)

    def by_latest(self, load: CallLoad) -> float:
        """Seconds by what the latest steps of another kind took, if there were any."""
        return self._seconds(self._latest_error(_Kind.of(load)), load)

    def knows(self, load: CallLoad) -> bool:
        """Whether measurements of its own kind alone say how long a step takes."""
        return len(self._errors.get(_Kind.of(load), ())) >= TRUSTED

    def learn(self, load: CallLoad, seconds: float) -> None:
        """A step took so long."""
        kind = _Kind.of(load)
        faster = seconds / self.by_arithmetic(load)
        error = faster if faster < 1 else (seconds - self._reach(load)) / self._base(load)
        errors = collections.deque([*self._errors.get(kind, ()), error], maxlen=KEPT)
        others = {one: own for one, own in self._errors.items() if one != kind}
        self._errors = others | {kind: errors}  # one store, since a call may be interrupted

    def doubt(self, load: CallLoad) -> None:
        """Leaves a kind one measurement, so that it is tried again if others say that it fits."""
        kind = _Kind.of(load)
        if (own := self._errors.get(kind)) is not None:
            kept = min(middle(own), self._latest_error(kind))
            self._errors[kind] = collections.deque([kept], maxlen=KEPT)

    def _seconds(self, error: float, load: CallLoad) -> float:
        """A faster device is so in all; what makes one slower is not taken to grow with context."""
        scale = min(error, 1.0)
        return error * self._base(load) + scale * self._reach(load)

    def _error_beside(self, kind: _Kind) -> float:
        """That of the nearest other kind, of equals the latest, or its own, or 1."""
        others = [one for one in reversed(self._errors) if one != kind]
        if others:
            return middle(self._errors[min(others, key=kind.distance)])
        return middle(self._errors[kind]) if kind in self._errors else 1.0

    def _latest_error(self, kind: _Kind) -> float:
        """That of the other kind that was measured last, or its own, or 1."""
        others = [one for one in self._errors if one != kind]
        return middle(self._errors[others[-1]]) if others else self._error_beside(kind)

    def _base(self, load: CallLoad) -> float:
        whole = base_seconds(self._cost, load.tokens, load.size)
        if load.upper is None:
            return whole
        upper = base_seconds(self._cost, min(load.tokens, load.upper), load.upper)
        return whole + self._upper_share * (upper - whole)

    def _reach(self, load: CallLoad) -> float:
        lower = 1.0 if load.upper is None else 1 - self._upper_share
        return reach_seconds(self._cost, lower * load.reach / self._num_devices)


def middle(values: collections.deque[float]) -> float:
    """The median, of two the lesser."""
    return sorted(values)[(len(values) - 1) // 2]
