"""Calls of an engine's arrays as bytes, which process 0 sends to the others of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable
from typing import Any

from flax import serialization

STOP, BUILT = "stop", "built"
CALLS: dict[str, Callable[..., Any]] = {}
"""What can be told, by name: methods that are marked `every_process`."""


def every_process[F: Callable[..., Any]](call: F) -> F:
    """Marks a method that every process of a mesh makes; it stays as it is.

    Its arguments are trees, whose classes its annotations name, and after them plain values.
    """
    CALLS[call.__name__] = call
    return call


def pack(name: str, *arguments: Any, **options: Any) -> bytes:
    """A call as bytes: arrays and plain values, and nothing that could run."""
    states = [serialization.to_state_dict(argument) for argument in arguments]
    numbered = {str(number): state for number, state in enumerate(states)}
    told = {"name": name, "arguments": numbered, "options": options}
    return serialization.msgpack_serialize(told)


def unpack(message: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    """The call's name, its arguments, and those that are given by name."""
    call: Any = serialization.msgpack_restore(message)
    name, numbered = call["name"], call["arguments"]
    states = [numbered[str(number)] for number in range(len(numbered))]
    kinds = _trees_of(CALLS[name]) if name in CALLS else ()
    trees = [
        serialization.from_state_dict(_blank(kind), state)
        for kind, state in zip(kinds, states, strict=False)
    ]
    return name, [*trees, *states[len(kinds) :]], call["options"]


@functools.cache
def _trees_of(call: Callable[..., Any]) -> tuple[type, ...]:
    """Classes of the trees that a call takes."""
    kinds = typing.get_type_hints(call).values()
    return tuple(itertools.takewhile(dataclasses.is_dataclass, kinds))


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
