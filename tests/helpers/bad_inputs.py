"""Bad values for arguments, by the kind of argument, and which public functions have which.

A kind is a function of a random generator that gives a value that must be refused, and what of it
the message has to show.
"""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np

INT32_MAX = 2**31 - 1


class Opaque:
    """An object that is nothing that any argument wants."""

    def __repr__(self):
        return "<an opaque object>"


def scalar(value):
    """A value and its repr; of a long one only the beginning has to be shown."""
    plain = value.item() if isinstance(value, np.number) else value
    return value, repr(plain)[:20]


def array(value):
    """An array, of which the dtype has to be shown, or within a list its repr."""
    return value, f"{value.dtype}\0array("


def no_number(rng):
    """Values that are no number of any kind."""
    text = "".join(map(chr, rng.integers(32, 0x2FF, rng.integers(0, 6))))
    return [
        scalar(text),
        scalar(str(rng.integers(0, 100))),
        scalar(bytes(rng.integers(0, 256, 3).astype(np.uint8))),
        scalar(bool(rng.integers(0, 2))),
        scalar(np.bool_(True)),
        scalar(complex(0, float(rng.integers(0, 9)))),
        scalar([int(rng.integers(0, 100))]),
        scalar((1, 2)),
        scalar({"a": 1}),
        scalar({1}),
        scalar(Opaque()),
        array(rng.integers(0, 9, int(rng.integers(1, 4)))),
        (np.array(3), "array(3)\0[]\0 3"),
        scalar(int),
        scalar(pick(rng, [np.int32, np.complex64, jnp.int8])),  # classes with an array's names
        scalar(np.datetime64("2020-01-01")),
    ]


def pick(rng, values):
    return values[int(rng.integers(0, len(values)))]


def no_float(rng):
    return [
        *no_number(rng),
        scalar(float("nan")),
        scalar(float("inf")),
        scalar(-float("inf")),
        scalar(np.float32("nan")),
        scalar(np.float64("-inf")),
        (10 ** int(rng.integers(40, 300)), ""),
    ]


def integer(low=None, high=INT32_MAX, *, optional=False):
    """Values that are no integer from low to high."""

    def draw(rng):
        values = no_float(rng)[:-1]
        values += [scalar(float(rng.integers(1, 9))), scalar(float(rng.normal()))]
        values += [scalar(np.float32(rng.integers(1, 9))), scalar(np.float16(1.5))]
        if not optional:
            values.append(scalar(None))
        if low is not None:
            below = low - 1 - int(rng.integers(0, 1000))
            values += [scalar(below), scalar(np.int64(below)), scalar(low - 1)]
            values.append((-(10 ** int(rng.integers(70, 300))), "bits"))
        if high is not None:
            above = high + 1 + int(rng.integers(0, 1000))
            values += [scalar(above), scalar(high + 1), scalar(np.uint64(above))]
            values += [scalar(2**63), (10 ** int(rng.integers(70, 300)), "bits")]
        return pick(rng, values)

    return draw


def byte_count(low=None, high=INT32_MAX):
    """Values that are no number of bytes, which may be a text as well, such as "64" or "64GiB"."""
    draw_integer = integer(low, high)

    def draw(rng):
        while isinstance((drawn := draw_integer(rng))[0], str) and drawn[0].strip()[:1].isdigit():
            pass
        return drawn

    return draw


def number(low=None, high=None, *, above=False, optional=False):
    """Values that are no finite number from low to high."""

    def draw(rng):
        values = no_float(rng)
        if low is not None:
            values += [scalar(low - float(rng.random()) - 1e-3), scalar(low - 1)]
            values += [scalar(np.float64(low - 1))]
        if above:
            values += [scalar(low), scalar(float(low)), scalar(np.int8(low))]
        if high is not None:
            values += [scalar(high + float(rng.random()) + 1e-3), scalar(np.float32(high + 1))]
        else:
            values += [scalar(1e39), scalar(1e300)]
        if not optional:
            values.append(scalar(None))
        return pick(rng, values)

    return draw


def flag(*, optional=False):
    def draw(rng):
        values = [one for one in no_float(rng)[:-1] if not isinstance(one[0], bool | np.bool_)]
        values += [scalar(int(rng.integers(0, 3))), scalar(np.int32(1)), scalar("True")]
        return pick(rng, values if optional else [*values, scalar(None)])

    return draw


def no_text(rng):
    return [one for one in no_float(rng)[:-1] if not isinstance(one[0], str)]


def text(limit=None, *, optional=False):
    def draw(rng):
        values = [*no_text(rng), scalar(int(rng.integers(0, 99))), ("a\ud800", "\\ud800")]
        if limit is not None:
            values.append(("x" * (limit + 1 + int(rng.integers(0, 99))), "xxx"))
        return pick(rng, values if optional else [*values, scalar(None)])

    return draw


def folder(*, optional=False):
    """Values that are no path."""

    def draw(rng):
        values = [*no_text(rng), scalar(int(rng.integers(0, 99))), scalar(""), ("a\0b", "a\\x00b")]
        return pick(rng, values if optional else [*values, scalar(None)])

    return draw


def choice(*, optional=False):
    def draw(rng):
        values = [*no_number(rng), scalar(1), scalar(1.5), scalar("fp6 "), scalar("FP8")]
        return pick(rng, values if optional else [*values, scalar(None)])

    return draw


def instance(*, optional=False):
    """Values that are no object of ours."""

    def draw(rng):
        values = [*no_float(rng)[:-1], scalar(1), scalar([]), scalar({}), scalar("x")]
        return pick(rng, values if optional else [*values, scalar(None)])

    return draw


def list_of(item, *, limit, good, optional=False, empty=True):
    """Lists with a bad item, lists that are too long or endless, and what is no list.

    Args:
      item: kind of the items.
      limit: the most items.
      good: an item that is good.
      optional: None is good.
      empty: an empty list is good.
    """

    def draw(rng):
        bad, shown = item(rng)
        before = [good] * int(rng.integers(0, 3))
        values = [one for one in no_number(rng) if not _is_list(one[0])]
        values += [scalar(1), scalar(1.5), scalar(float("nan"))]
        values += [([*before, bad], shown), ((*before, bad), shown), (iter([bad]), shown)] * 4
        shown = repr(good)[:12]
        values += [([good] * (limit + 1), shown), (itertools.repeat(good), shown)]
        if not empty:
            values += [scalar([]), scalar(())]
        return pick(rng, values if optional else [*values, scalar(None)])

    return draw


def biases(limit):
    """No mapping of token ids to numbers from -100 to 100, or too large a one."""
    token, bias = integer(0), number(-100, 100)

    def draw(rng):
        values = [one for one in no_number(rng) if not isinstance(one[0], dict)]
        values += [scalar(None), scalar(1), scalar([1, 2]), scalar([(1,)]), scalar([[1, 2, 3]])]
        for kind in (token, bias) * 5:
            bad, shown = kind(rng)
            if kind is bias:
                values += [({3: 1.0, 7: bad}, shown), ([(3, bad)], shown)]
            elif isinstance(bad, str | int | float):
                values.append(({bad: 1.0}, shown))
        values.append((dict.fromkeys(range(limit + 1), 1.0), "(0, 1.0)"))
        values.append(([(4, 1.0), (5, 1.0), (4, 2.0)], "(4, 1.0)"))
        return pick(rng, values)

    return draw


def seeds(num_rows):
    """Seeds of rows with a bad one among them, or with one too many."""
    item = scalar_only(integer(high=None))

    def draw(rng):
        bad, shown = item(rng)
        values = [([1] * (num_rows - 1) + [bad], shown), ((bad, *[1] * (num_rows - 1)), shown)]
        values += [(iter([bad] * num_rows), shown), ([7] * (num_rows + 1), "[7, 7")]
        return pick(rng, values)

    return draw


def scalar_only(kind):
    """A kind without values that are lists."""

    def draw(rng):
        while True:
            value, shown = kind(rng)
            if not _is_list(value) and not callable(value):
                return value, shown

    return draw


def ids(vocab_size):
    """No token ids, as a prompt."""

    def draw(rng):
        wrong = int(rng.integers(vocab_size, 2**40))
        values = [one for one in no_number(rng) if not _is_list(one[0])]
        values = [(one, "" if isinstance(one, str) else shown) for one, shown in values]
        values += [
            ([1, wrong], str(wrong)),
            ([-1], "-1"),
            ([wrong] * 3, str(wrong)),
            (np.array([1, wrong]), str(wrong)),
            (np.array([2**63 + 5], np.uint64), str(2**63 + 5)),
            (np.array([-2], np.int8), "-2"),
            ([2**70], "2**70"[:1]),
            scalar([True]),
            scalar([1, None]),
            scalar([[1]]),
            scalar([1.0]),
            scalar([float("nan")]),
            scalar(["a"]),
            scalar([]),
            scalar(None),
            array(np.zeros((1, 2), int)),
            array(np.zeros(2)),
            array(np.array([True])),
            scalar(1),
            scalar(float("nan")),
        ]
        return pick(rng, values)

    return draw


def int_array(shape, low, high, *, unique=False, good=None):
    """Arrays of another rank, size or dtype, and with values out of range.

    Args:
      shape: of a good one.
      low: least value.
      high: the largest value, or None.
      unique: no value from 0 twice.
      good: a good one; else `low` everywhere.
    """
    start = np.full(shape, low, np.int32) if good is None else np.asarray(good, np.int32)

    def draw(rng):
        wrong = start.copy()
        bad = low - 1 - int(rng.integers(0, 99))
        if high is not None and rng.integers(0, 2):
            bad = high + 1 + int(rng.integers(0, 99))
        place = tuple(int(rng.integers(0, size)) for size in shape)
        wrong[place] = bad
        values = [(wrong, str(int(wrong[place])))] * 6
        values += [
            array(start.astype(np.float32)),
            array(start[None, None]),
            array(start.astype(bool)),
            scalar(None),
            scalar("x"),
            scalar(3),
            scalar(start.tolist()),
            scalar(Opaque()),
        ]
        if unique and shape[0] > 1:
            twice = start.copy()
            twice[:2] = 0
            values += [(twice, "0 0")] * 2
        return pick(rng, values)

    return draw


def float_array(shape):
    """What is no array of floats of a shape."""

    def draw(rng):
        good = np.ones(shape, np.float32)
        values = [*no_number(rng), scalar(1.0), scalar(float("nan"))]
        values = [one for one in values if not isinstance(one[0], np.ndarray)]
        values += [
            array(good[None]),
            array(good[..., :-1]),
            array(np.concatenate([good, good], axis=-1)),
            array(good.astype(np.int32)),
            array(good.astype(bool)),
            array(good.astype(np.complex64)),
            scalar(good.tolist()),
            scalar(None),
        ]
        return pick(rng, values)

    return draw


def _is_list(value):
    return isinstance(value, list | tuple | set) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """A public function with arguments that are good, and the kinds of those that can be bad.

    Attributes:
      name: for messages.
      function: what is called.
      good: arguments by name.
      kinds: by argument.
      names: other names by which a message may call an argument.
      free: parameters that take anything, with the reason in the table.
      star: the name of a `*argument`, which is given in its place.
    """

    name: str
    function: object
    good: dict
    kinds: dict
    names: dict = dataclasses.field(default_factory=dict)
    free: tuple = ()
    star: str | None = None

    def call(self, arguments):
        arguments = dict(arguments)
        star = [arguments.pop(self.star)] if self.star else []
        return self.function(*star, **arguments)


def shows(message, fragment):
    """Whether a message has what it must of a value, or one of several forms of that."""
    parts = fragment.split("\0")
    return any(
        part in message or "".join(part.split()) in "".join(message.split()) for part in parts
    )


def copied(value):
    """What a value must still be afterwards, as something that compares."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, list | tuple | dict | set):
        return repr(value)
    return None


def try_one(target, name, value, fragment):
    """Calls with one bad argument; what is wrong with how it was refused, or None."""
    before = copied(value)
    try:
        result = target.call(target.good | {name: value})
    except (ValueError, TypeError) as error:
        message = str(error)
        called = (name, *target.names.get(name, ()))
        if not any(one in message for one in called):
            return f"the message does not name {name}: {message}"
        if not shows(message, fragment):
            return f"the message does not show {fragment!r}: {message}"
        if len(message) > 2000:
            return f"the message has {len(message)} characters"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    else:
        return f"was accepted and gave {str(result)[:80]}"
    if copied(value) != before:
        return "has changed the value"
    return None


def cases(targets, count, seed):
    """`count` bad arguments, evenly over all: (target, name, value, what has to be shown)."""
    rng = np.random.default_rng(seed)
    places = [(target, name) for target in targets for name in target.kinds]
    for number in range(math.ceil(count / len(places))):
        for target, name in places[: count - number * len(places)]:
            yield target, name, *target.kinds[name](rng)
