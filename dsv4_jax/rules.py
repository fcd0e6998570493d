"""Rules: what a field may hold, as a value that stands on the field itself.

    min_p: Annotated[float, Ruled(Real(0, 1), http=Real(0, 1))] = 0.0

Who reads a field takes its range from there, and says in its own words what is wrong and where the
value came from: `check_fields` of what Python passes ("min_p must be ..."), `serve/fields.py` of a
body ("min_p: must be ..."), `cli/arguments.py` of a command line ("argument --min-p: must be ..."),
`config/kinds.py` of a file. So a field is declared once, and its range stands nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from dsv4_jax import checks


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`, None being no bound; `told` is the range in words."""

    least: int | None = None
    most: int | None = checks.INT32_MAX
    told: str = ""

    def check(self, name: str, value: Any) -> int:
        """The value as a plain int."""
        return checks.integer(name, value, self.least, self.most, rule=self.told)


@dataclasses.dataclass(frozen=True)
class Real:
    """A finite number from `least` to `most`, None being the largest f32; `told` as of `Whole`."""

    least: float
    most: float | None = None
    told: str = ""

    def check(self, name: str, value: Any) -> float:
        """The value as a plain float."""
        return checks.number(name, value, self.least, self.most, rule=self.told)


@dataclasses.dataclass(frozen=True)
class Share:
    """A number above 0 and at most 1."""

    def check(self, name: str, value: Any) -> float:
        """The value as a plain float."""
        return checks.share(name, value)


UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Of a number of bytes, as a text has them after it."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A number of bytes up to 2**62, or a text such as "64GiB", or perhaps "auto"."""

    has_auto: bool = False

    def check(self, name: str, value: Any) -> int | str:
        """The value as a plain int, or "auto"."""
        if isinstance(value, str):
            if self.has_auto and value == "auto":
                return value
            found = re.fullmatch(f"([0-9]{{1,15}})({'|'.join(UNITS)})", value)
            if found is None:
                rule = 'a number of bytes, such as 4096, "512MiB" or "64GiB"'
                checks.refuse(name, rule + ', or "auto"' * self.has_auto, value)
            value = int(found[1]) * UNITS[found[2]]
        return checks.integer(name, value, 0, 2**62)


@dataclasses.dataclass(frozen=True)
class Folder:
    """The path of a directory, as a text or a path."""

    def check(self, name: str, value: Any) -> str:
        """The value as a plain str."""
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str) or not path or "\0" in path:
            checks.refuse(name, "the path of a directory", value)
        return path


@dataclasses.dataclass(frozen=True)
class Flag:
    """True or false."""

    def check(self, name: str, value: Any) -> bool:
        """The value as a plain bool."""
        return checks.flag(name, value)


@dataclasses.dataclass(frozen=True)
class Word:
    """One of some texts; `also` are pairs of a text and the one of `known` that it stands for."""

    known: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()

    def named(self, text: str) -> str:
        """The text, or the one that it stands for."""
        return dict(self.also).get(text, text)

    def check(self, name: str, value: Any) -> str:
        """The value as a plain str."""
        known = self.named(value) if isinstance(value, str) else value
        return checks.choice(name, known, self.known)


@dataclasses.dataclass(frozen=True)
class ListOf:
    """At most `most` values of one rule; `of` says what they are, for errors."""

    item: Rule
    most: int
    of: str

    def check(self, name: str, value: Any) -> tuple[Any, ...]:
        """The values as plain ones."""
        values = checks.sequence(name, value, of=self.of, limit=self.most)
        return tuple(self.item.check(name, each) for each in values)


@dataclasses.dataclass(frozen=True)
class Texts:
    """At most `most` texts of 1 to `max_chars` characters."""

    most: int
    max_chars: int

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        """The texts as plain ones; an iterable of them comes in."""
        rule = "a list of texts, none empty"
        if isinstance(value, str):
            checks.refuse(name, rule, value)
        items = checks.sequence(name, value, of="texts", limit=self.most)
        if not all(isinstance(item, str) and item for item in items):
            checks.refuse(name, rule, items)
        return tuple(checks.text(name, item, max_chars=self.max_chars) for item in items)


@dataclasses.dataclass(frozen=True)
class NumberByToken:
    """A number from `least` to `most` for each of at most `count` token ids."""

    count: int
    least: float
    most: float

    def check(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        """Pairs of a token id and its number, by id; a mapping or pairs come in."""
        rule = "a mapping of token ids to numbers"
        items = value.items() if isinstance(value, Mapping) else value
        if not isinstance(value, Mapping | tuple | list):
            checks.refuse(name, rule, value)
        numbers = Real(self.least, self.most, f"{self.least:g} to {self.most:g}")
        pairs = []
        for pair in checks.sequence(name, items, of="tokens", limit=self.count):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                checks.refuse(name, rule, value)
            pairs.append((checks.integer(name, pair[0], 0), numbers.check(name, pair[1])))
        if len(dict(pairs)) < len(pairs):
            checks.refuse(name, "one number for each token id", value)
        return tuple(sorted(pairs))


@dataclasses.dataclass(frozen=True)
class Instance:
    """An object of a class."""

    kind: type

    def check(self, name: str, value: Any) -> Any:
        """The value itself."""
        return checks.instance(name, value, self.kind)


@dataclasses.dataclass(frozen=True)
class By:
    """What a function makes of a value, for what no rule above says."""

    function: Callable[[Any], Any]

    def check(self, name: str, value: Any) -> Any:
        """What the function gives; its errors name the field."""
        del name
        return self.function(value)


type Rule = (
    Whole
    | Real
    | Share
    | Bytes
    | Folder
    | Flag
    | Word
    | ListOf
    | Texts
    | NumberByToken
    | Instance
    | By
)


@dataclasses.dataclass(frozen=True)
class Ruled:
    """What is declared of a field beside its name, type and default, in its `Annotated` type.

    A field whose default is None may be None.

    Attributes:
      rule: what Python may pass.
      http: what a body may hold, under the field's name or one of the protocol's own; None if
        bodies have no such field.
      flag: what its option of a command line may be, where that is not `rule`.
      help: of that option; "" if there is none.
    """

    rule: Rule
    http: Rule | None = None
    flag: Rule | None = None
    help: str = ""


@functools.cache
def rules_of(kind: type) -> dict[str, Ruled]:
    """What is declared of the fields of a dataclass, in their order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {
        field.name: [
            one for one in getattr(hints[field.name], "__metadata__", ()) if isinstance(one, Ruled)
        ]
        for field in dataclasses.fields(kind)
    }
    return {name: ruled[0] for name, ruled in found.items() if ruled}


def check_fields(instance: Any) -> None:
    """Makes every field of a frozen dataclass a checked, plain value, as its rule says.

    Raises:
      ValueError: a field is of another type or out of range; it is named.
    """
    kind = type(instance)
    for name, ruled in rules_of(kind).items():
        value = getattr(instance, name)
        if value is not None or getattr(kind, name) is not None:
            object.__setattr__(instance, name, ruled.rule.check(name, value))
