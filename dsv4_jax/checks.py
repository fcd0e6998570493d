"""The boundary: what a caller passes becomes a checked, plain, immutable value, or a clear error.

Public functions and constructors take their arguments through these functions, once; past them
nothing is checked again. Types are exact: a bool is no number, a NumPy scalar is what it is worth,
an array is no scalar, a text is no list. Errors are `ValueError`: "name must be rule, got value".
"""

from __future__ import annotations

import itertools
import os
import pathlib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.core
import numpy as np

INT32_MAX = 2**31 - 1
"""The largest size, count or index that a device's i32 holds."""

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)
"""Below this, a device may take an f32 for 0 in one place and not in another."""

_SHORT = reprlib.Repr(maxstring=60, maxother=60, maxlist=8, maxtuple=8, maxdict=4, maxlong=60)


def shown(value: Any) -> str:
    """A value for an error message: its repr, shortened; of an array dtype and shape."""
    is_a_class = isinstance(value, type)  # whose attributes are not those of its values
    if not is_a_class and getattr(value, "ndim", 0) and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _SHORT.repr(value)
    except Exception:  # whatever the caller's own __repr__ raises
        return f"an object of type {type(value).__name__}"


def refuse(name: str, rule: str, value: Any, way_out: str = "") -> NoReturn:
    """Raises the error of an argument.

    Raises:
      ValueError: always.
    """
    raise ValueError(f"{name} must be {rule}, got {shown(value)}{way_out and f'; {way_out}'}")


def integer(
    name: str, value: Any, low: int | None = None, high: int | None = INT32_MAX, *, rule: str = ""
) -> int:
    """A plain int; None as a bound is none.

    Args:
      name: of the argument.
      value: an int or a NumPy integer.
      low: the least value.
      high: the largest value.
      rule: says what the bounds say; else they are given.

    Raises:
      ValueError: it is something else, a bool too, or out of range.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            refuse(name, "an integer", value)
        value = int.__index__(value) if isinstance(value, int) else int(value)
    if low is not None and value < low:
        refuse(name, rule or f"at least {low}", value)
    if high is not None and value > high:
        refuse(name, rule if rule and high != INT32_MAX else f"at most {high}", value)
    return value


def number(
    name: str, value: Any, low: float, high: float | None = None, *, rule: str = ""
) -> float:
    """A plain, finite float that an f32 holds.

    Args:
      name: of the argument.
      value: an int, a float, or a NumPy scalar of either kind.
      low: the least value.
      high: the largest value; None is that of f32.
      rule: says what the bounds say; else they are given.

    Raises:
      ValueError: it is something else, a bool too, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        refuse(name, "a number", value)
    plain = integer(name, value, high=None) if isinstance(value, int | np.integer) else float(value)
    if not plain >= low:  # NaN is not
        refuse(name, rule or f"at least {low}", value)
    if high is None and plain > FLOAT32_MAX:
        refuse(name, f"at most {FLOAT32_MAX:.7g} (float32)", value)
    if high is not None and plain > high:
        refuse(name, rule or f"at most {high}", value)
    return float(plain)


def share(name: str, value: Any) -> float:
    """A number above 0 and at most 1.

    Raises:
      ValueError: as of `number`.
    """
    rule = "above 0 and at most 1"
    plain = number(name, value, 0, 1, rule=rule)
    if plain == 0:
        refuse(name, rule, value)
    return plain


def flag(name: str, value: Any) -> bool:
    """A plain bool.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(value, bool | np.bool_):
        refuse(name, "True or False", value)
    return bool(value)


def text(name: str, value: Any, *, max_chars: int | None = None) -> str:
    """A plain str that UTF-8 can encode.

    Raises:
      ValueError: it is something else, or too long.
    """
    if not isinstance(value, str):
        refuse(name, "a text", value, "decode it" if isinstance(value, bytes) else "")
    value = str.__str__(value)
    if max_chars is not None and len(value) > max_chars:
        raise ValueError(
            f"{name} must have at most {max_chars} characters, got {len(value)}: {shown(value)}"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            refuse(name, "a text that UTF-8 can encode, without lone surrogates", value)
    return value


def path(name: str, value: Any) -> pathlib.Path:
    """A path of the file system, or what stands for one.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(value, str | os.PathLike):
        refuse(name, "a path", value, "decode it" if isinstance(value, bytes) else "")
    return pathlib.Path(value)


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of some texts.

    Raises:
      ValueError: it is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        refuse(name, f"one of {choices}", value)
    return str.__str__(value)


def instance[T](name: str, value: Any, kind: type[T]) -> T:
    """An object of a class of ours.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(value, kind):
        refuse(name, f"a {kind.__name__}", value)
    return value


def sequence(name: str, value: Any, *, of: str, limit: int) -> tuple[Any, ...]:
    """The items of any iterable but a text or a mapping, taken once.

    Args:
      name: of the argument.
      value: the iterable.
      of: what it has to hold, for the message.
      limit: the most items; no more than one beyond it is taken.

    Raises:
      ValueError: it is no such iterable, or holds more.
    """
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        value = np.asarray(value)  # one copy from the device, not one for each item
    if isinstance(value, str | bytes | bytearray | Mapping) or not _is_iterable(value):
        refuse(name, f"a list of {of}", value)
    items = tuple(itertools.islice(value, limit + 1))
    if len(items) > limit:
        raise ValueError(f"{name} must hold at most {limit} {of}, got more: {shown(items)}")
    return items


def array(name: str, value: Any, shape: tuple[int | None, ...], kinds: str = "i") -> None:
    """Refuses what is no array of that rank, those sizes and a dtype of those kinds.

    Args:
      name: of the argument.
      value: a NumPy or JAX array, traced or not.
      shape: sizes; None is any.
      kinds: NumPy's letters: "i" signed integers, "u" unsigned ones, "f" floats, "b" bool.

    Raises:
      ValueError: it is something else.
    """
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    if isinstance(value, np.generic | type) or not is_array:
        refuse(name, "an array", value, "pass it through jnp.asarray")
    sizes = tuple(value.shape)
    fits = len(sizes) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(sizes, shape, strict=False)
    )
    kind = np.dtype(value.dtype).kind
    if kind not in "iufb" and jax.numpy.issubdtype(value.dtype, np.floating):
        kind = "f"
    if not fits or kind not in kinds:
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        names = {"i": "integers", "u": "unsigned integers", "f": "floats", "b": "bools"}
        rule = f"an array [{wanted}] of {' or '.join(names[letter] for letter in kinds)}"
        raise ValueError(f"{name} must be {rule}, got {value.dtype}{list(sizes)}")


def same_arrays(name: str, value: Any, wanted: Any, of: str) -> None:
    """Refuses a tree whose structure, shapes or dtypes are not those of another one.

    Args:
      name: of the argument.
      value: its arrays, traced or not.
      wanted: the other tree; shapes do.
      of: whose arrays those are, for the message.

    Raises:
      ValueError: they differ; the first place where they do is named.
    """
    found, expected = _shapes_by_path(value), _shapes_by_path(wanted)
    if found != expected:
        path = next(path for path in {**expected, **found} if found.get(path) != expected.get(path))
        refuse(
            name,
            f"of arrays like those of {of}, {expected.get(path, 'absent')} at {path or 'its root'}",
            found.get(path),
        )


def not_deleted(name: str, value: Any) -> None:
    """Refuses a tree with arrays that are gone, as those are that a jitted step was given.

    Raises:
      ValueError: an array has been deleted or donated.
    """
    for leaf in jax.tree.leaves(value):
        is_traced = isinstance(leaf, jax.core.Tracer)
        if not is_traced and isinstance(leaf, jax.Array) and leaf.is_deleted():
            refuse(name, "of arrays that are still there", leaf, "use what the last step returned")


def _shapes_by_path(tree: Any) -> dict[str, str]:
    """The dtype and shape of each leaf that is an array, by its path."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        else type(leaf).__name__
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def known_values(array: Any) -> np.ndarray | None:
    """The values of an array, or None for one that is being traced.

    Outside `jit` values are checked, those on a device too: a call there runs operation by
    operation, beside which a wait for a few integers is short. Inside it nobody could hear.
    """
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def in_range(
    name: str, array: Any, low: int, high: int, *, where: np.ndarray | None = None
) -> None:
    """Refuses values outside low..high - 1, if they are known; `where` leaves some out.

    Raises:
      ValueError: a value is out of range.
    """
    values = known_values(array)
    if values is None:
        return
    wrong = (values < low) | (values >= high)
    wrong = values[wrong if where is None else wrong & where]
    if wrong.size:
        refuse(name, f"in {low}..{high - 1}", int(wrong.flat[0]))


def no_slot_twice(name: str, array: Any) -> None:
    """Refuses a slot that stands there twice, if they are known; -1 may.

    Raises:
      ValueError: one does.
    """
    slots = known_values(array)
    if slots is not None:
        slots = slots[slots >= 0]
        if len(np.unique(slots)) < len(slots):
            raise ValueError(f"{name} must hold no slot twice, got {slots}")


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
