"""Inputs from outside that are wrong somewhere, and what a clear answer to each of them holds.

Each strategy gives a `Case`: a file's bytes or a command line, with names and values of which a
refusal must hold at least one each.
"""

import copy
import json
import pathlib
from typing import NamedTuple

from hypothesis import strategies as st

DELETE = object()
DEEP = json.loads("[" * 80 + "]" * 80)
ODD = [
    None, True, False, 0, -0.0, -1, 1, 2, 3, 1.5, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30,
    1e-320, 1e39, 1e300, float("nan"), float("inf"), float("-inf"), "", "0", "4", "x", "nan",
    "\u0000", "\ud800", "../x", "/etc/passwd", "é" * 300, [], [1], [-1], [[1]], [None], ["x"],
    [1.5], {}, {"a": 1}, {"type": "x"}, DEEP,
]  # fmt: skip
"""JSON values that fields do not expect, and a few that some do."""


class Case(NamedTuple):
    """What is read, and what a refusal must name.

    Attributes:
      data: bytes of a file, or arguments of a command.
      names: of which a message holds one, besides the file; empty if none is known.
      value: as a message shows it; None if it need not.
    """

    data: bytes | list[str]
    names: tuple[str, ...] = ()
    value: str | None = None


def odd_values():
    """Any JSON value."""
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))
    nested = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=4,
    )
    return st.sampled_from(ODD) | st.sampled_from(ODD) | nested


def paths_of(document, path=()):
    """The path of every value in a JSON document but the document itself."""
    items = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield (*path, key)
        yield from paths_of(value, (*path, key))


def changed(document, path, value):
    """A copy with the value at a path replaced, or removed by DELETE."""
    document = copy.deepcopy(document)
    target = document
    for key in path[:-1]:
        target = target[key]
    if value is DELETE:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return document


def as_bytes(document):
    """JSON as Python writes it, with NaN and lone surrogates by their numbers."""
    return json.dumps(document).encode()


@st.composite
def broken_text(draw, data):
    """Bytes with some of them changed, cut off, repeated or put in."""
    place = draw(st.integers(0, len(data)))
    count = draw(st.integers(1, 40))
    return draw(
        st.sampled_from(
            [
                data[:place],
                data[:place] + data[place + count :],
                data[:place] + data[place : place + count] + data[place:],
                data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :],
                data[:place] + b"[" * 3000 + data[place:],
                data[:place] + b'{"a":' * 5000 + data[place:],
                data[:place] + b"9" * 5000 + data[place:],
                data[:place] + b"\xff\xfe" + data[place:],
                b"",
                b"\x00" * count,
                b"\xef\xbb\xbf" + data,
            ]
        )
    )


@st.composite
def changed_documents(draw, document, paths=None):
    """(document, path, value) with one value changed or removed."""
    path = draw(st.sampled_from(paths or list(paths_of(document))))
    value = draw(st.just(DELETE) | odd_values() | odd_values() | odd_values())
    return changed(document, path, value), path, value


def names_of(path):
    """The innermost field of a path, which a message about it must name."""
    return tuple(key for key in path if isinstance(key, str))[-1:]


@st.composite
def json_cases(draw, document, paths=None):
    """Bytes of a document, most of them JSON with one value changed."""
    if draw(st.integers(0, 4)) == 0:
        return Case(draw(broken_text(as_bytes(document))))
    found, path, value = draw(changed_documents(document, paths))
    has_parts = isinstance(value, list | dict)  # one of which may be what is named
    shown = None if value in (DELETE, None) or has_parts else repr(value)[:30]
    return Case(as_bytes(found), names_of(path), shown)


HEADER = {
    "__metadata__": {"format": "pt"},
    "layers.0.attn.wkv.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
    "layers.0.attn.wkv.scale": {"dtype": "F8_E8M0", "shape": [1, 1], "data_offsets": [64, 65]},
    "norm.weight": {"dtype": "F32", "shape": [3], "data_offsets": [65, 77]},
}
BODY = bytes(range(77))


@st.composite
def headers(draw):
    """safetensors files: entries changed, moved, twice or broken, bodies of other lengths."""
    text, names = as_bytes(HEADER), ()
    kind = draw(st.sampled_from(["field", "field", "text", "move", "length", "twice"]))
    if kind == "field":
        found, path, value = draw(changed_documents(HEADER))
        text, names = as_bytes(found), path[:1]
        if len(path) == 1 and value is DELETE:
            names = ()  # the hole shows at its neighbour
    elif kind == "text":
        text = draw(broken_text(text))
    elif kind == "move":
        found = copy.deepcopy(HEADER)
        for entry in list(found.values())[1:]:
            if draw(st.booleans()):
                entry["data_offsets"] = [draw(st.integers(-8, 90)) for _ in range(2)]
            if draw(st.integers(0, 3)) == 0:
                entry["shape"] = draw(st.lists(st.integers(-1, 2**65), max_size=12))
        text = as_bytes(found)
    elif kind == "twice":
        name = draw(st.sampled_from(list(HEADER)))
        text = text[:-1] + b", " + as_bytes({name: HEADER[name]})[1:-1] + b"}"
        names = (name,)
    size = draw(st.sampled_from([len(text)] * 8 + [0, 1, len(text) - 1, 2**31, 2**63, 2**64 - 1]))
    body = draw(st.sampled_from([BODY] * 8 + [BODY[:-1], BODY + b"x", b"", BODY * 3]))
    data = max(size, 0).to_bytes(8, "little") + text + body
    if kind == "length":
        data = draw(broken_text(data))
    if size != len(text) or body != BODY or kind == "length":
        names = ()  # whatever else is wrong may be said first
    return Case(data, names)


@st.composite
def indexes(draw):
    """Index files: names of files that lead elsewhere, are no texts or not there."""
    good = {
        "metadata": {"total_size": 77},
        "weight_map": {"a": "one.safetensors", "b": "two.safetensors"},
    }
    bad = [
        "../one.safetensors", "/etc/passwd", "one.safetensors/..", "", ".", "..", "sub/../../x",
        "C:\\x", "a\\..\\b", "\n", "link.safetensors", "nowhere", "x" * 300, "one.safetensors/",
        "config.json", "tokenizer.json", "model.safetensors.index.json",
    ]  # fmt: skip
    if draw(st.booleans()):
        name = draw(st.sampled_from(bad) | st.text(max_size=10))
        return Case(as_bytes({"weight_map": {"a": "one.safetensors", "b": name}}))
    case = draw(json_cases(good, [("weight_map",), ("weight_map", "a"), ("weight_map", "b")]))
    return case._replace(names=(), value=None)


def tokenizers(file: pathlib.Path):
    """Tokenizer files with a value changed outside of the vocabulary, or broken bytes."""
    document = json.loads(file.read_bytes())
    paths = [path for path in paths_of(document) if "vocab" not in path[:-1]]
    return json_cases(document, paths).map(lambda case: case._replace(names=(), value=None))


TEXTS = [
    "", " ", "-1", "0", "1", "1.5", "1e400", "-inf", "nan", "0x10", "1_0", "²", "٣", "x", "1,", ",",
    "1,,2", "9" * 30, "9" * 5000, "-" + "9" * 30, "1e-400", "\x00", "\udcff", "--", "None", "true",
    "/nope/x.json", "/", ".", "a" * 5000, "1,2,3", ",".join(["1"] * 100),
]  # fmt: skip
"""What options are given, besides texts and numbers at random."""


@st.composite
def command_lines(draw, options):
    """(command words, option, text) for one option of a command.

    Args:
      draw: hypothesis's.
      options: (words of a command that parse alone, an option that takes a value).
    """
    words, option = draw(st.sampled_from(options))
    text = draw(
        st.sampled_from(TEXTS)
        | st.text(max_size=8)
        | st.integers().map(str)
        | st.floats().map(str)
        | st.integers(-3, 2**33).map(str)
    )
    return words, option, text
