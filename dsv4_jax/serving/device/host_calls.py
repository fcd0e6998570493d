"""Calls of an engine's arrays as bytes, which process 0 sends to the others of a mesh."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from flax import serialization

from dsv4_jax.cache.slot_changes import SlotChanges
from dsv4_jax.cache.snapshots import SnapshotPlan
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.step.draws import DrawnCounts, TokenMasks
from dsv4_jax.step.sampling import FullSampling

STOP, BUILT = "stop", "built"
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "rebuild": (),
    "change": (SlotChanges,),
    "set_sampling": (FullSampling,),
    "set_counts": (DrawnCounts,),
    "set_masks": (TokenMasks,),
    "step": (StepInput, SnapshotPlan),
    "read": (),
    "save": (StepInput, SnapshotPlan),
    "scan": (),
}
"""Calls, and the trees that they take; plain values come after them."""


def pack(name: str, *arguments: Any) -> bytes:
    """A call as bytes: arrays and plain values, and nothing that could run."""
    states = [serialization.to_state_dict(one) for one in arguments]
    numbered = {str(number): state for number, state in enumerate(states)}
    return serialization.msgpack_serialize({"name": name, "arguments": numbered})


def unpack(message: bytes) -> tuple[str, list[Any]]:
    """The call's name and arguments."""
    found: Any = serialization.msgpack_restore(message)
    name, numbered = found["name"], found["arguments"]
    states = [numbered[str(number)] for number in range(len(numbered))]
    kinds = _ARGUMENTS.get(name, ())
    trees = [
        serialization.from_state_dict(_blank(kind), state)
        for kind, state in zip(kinds, states, strict=False)
    ]
    return name, [*trees, *states[len(kinds) :]]


def _blank(kind: Any) -> Any:
    """A tree of a class, with None in place of arrays."""
    types = typing.get_type_hints(kind)
    fields = {field.name: types[field.name] for field in dataclasses.fields(kind)}
    return kind(
        **{
            name: _blank(one) if dataclasses.is_dataclass(one) else None
            for name, one in fields.items()
        }
    )
