"""Kinds of values that a field of a file may have: rules, which `read` takes a value by.

Types are exact, and ranges are such as all that is built on them holds. A `bool` is no number.
NumPy integers and floats are taken as the numbers that they are worth. Errors name the field by its
path in the file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dsv4_jax import checks, rules

SHOWN = 80
"""Characters of a value that a message shows."""


def show(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@dataclasses.dataclass(frozen=True)
class Whole(rules.Whole):
    """An integer from `least` to `most`; `told` says where `most` comes from."""

    least: int = 0
    most: int = checks.INT32_MAX

    def read(self, value: Any, name: str) -> int:
        """The value as an `int`; ValueError with the name otherwise."""
        if isinstance(value, bool | np.bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} must be a number (int), got {show(value)}")
        if value < self.least:
            raise ValueError(f"{name} must be at least {self.least}, got {show(value)}")
        if value > self.most:
            why = f" ({self.told})" if self.told else ""
            raise ValueError(f"{name} must be at most {self.most}{why}, got {show(value)}")
        return int(value)


@dataclasses.dataclass(frozen=True)
class Real(rules.Real):
    """A finite number from `least` to `most`; an integer is taken as well."""

    most: float = checks.FLOAT32_MAX

    def read(self, value: Any, name: str) -> float:
        """The value as it is, if it is an `int` or `float`; ValueError with the name otherwise."""
        numbers = int | float | np.integer | np.floating
        if isinstance(value, bool | np.bool) or not isinstance(value, numbers):
            raise ValueError(f"{name} must be a number (float), got {show(value)}")
        if not self.least <= value <= self.most:  # NaN neither
            raise ValueError(
                f"{name} must be a finite number from {self.least:g} to {self.most:g}, got "
                f"{show(value)}"
            )
        return value.item() if isinstance(value, np.generic) else value


@dataclasses.dataclass(frozen=True)
class Flag(rules.Flag):
    """True or false."""

    def read(self, value: Any, name: str) -> bool:
        """The value; ValueError with the name otherwise."""
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {show(value)}")
        return value


@dataclasses.dataclass(frozen=True)
class Word(rules.Word):
    """A text, one of `known` if there are any."""

    known: tuple[str, ...] = ()

    def read(self, value: Any, name: str) -> str:
        """The value; ValueError with the name otherwise."""
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text, got {show(value)}")
        if self.known and value not in self.known:
            raise ValueError(f"{name} must be among {list(self.known)}, got {show(value)}")
        return value


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list of at most `most` values of one kind."""

    item: Kind
    most: int

    def read(self, value: Any, name: str) -> list[Any]:
        """The values; ValueError with the name, and the place in the list, otherwise."""
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, got {show(value)}")
        if len(value) > self.most:
            raise ValueError(f"{name} must have at most {self.most} entries, got {len(value)}")
        return [self.item.read(each, f"{name}[{place}]") for place, each in enumerate(value)]


@dataclasses.dataclass(frozen=True)
class OneOrMore:
    """A value of a kind, or a list of them."""

    values: ListOf

    def read(self, value: Any, name: str) -> list[Any]:
        """The values as a list; ValueError with the name otherwise."""
        if isinstance(value, list | tuple):
            return self.values.read(value, name)
        return [self.values.item.read(value, name)]


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object of which some fields are declared; null is as good as absent."""

    kinds: dict[str, Kind]

    def read(self, value: Any, name: str) -> dict[str, Any]:
        """The declared fields that are there; ValueError with the name otherwise."""
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object of fields, got {show(value)}")
        return {
            field: kind.read(value[field], f"{name}.{field}" if name else field)
            for field, kind in self.kinds.items()
            if value.get(field) is not None
        }


Kind = Whole | Real | Flag | Word | ListOf | OneOrMore | Fields

MAX_I32 = checks.INT32_MAX
"""The largest integer of the device's counters and indices."""

_TINY, _HUGE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
POSITIVE = Real(_TINY, _HUGE)
"""Positive and finite in f32, and not rounded to zero there."""


def require(data: dict[str, Any], name: str) -> Any:
    """The field of that name; ValueError where it is missing."""
    if name not in data:
        raise ValueError(f"{name} is missing, which a DeepSeek-V4 config must have")
    return data[name]


def agree(name: str, value: Any, other_name: str, other: Any) -> None:
    """Raises ValueError if two fields are both there and say different things."""
    if value is not None and other is not None and value != other:
        raise ValueError(
            f"{name} and {other_name} contradict each other: {show(value)} and {show(other)}"
        )
