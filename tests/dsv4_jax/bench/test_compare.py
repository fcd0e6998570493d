"""Rows of kernels beside baselines: what is printed and kept, and in which order."""

import functools
import json
import weakref

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.bench import compare
from helpers.arrays import on_device

INPUTS = [(on_device(n, jnp.float32),) for n in (1, 2, 4)]


def add_to_state(state, x):
    return state + x, state * x


def make_case(op, shape="8 x 8", *, function=add_to_state, make=None, **fields):
    make = make or (lambda: (jnp.float32(0), INPUTS))
    return compare.Case(op, shape, function, make, rounds=1, **fields)


def kept(path):
    return [(r["op"], r["shape"]) for r in json.loads(path.read_text())["rows"]]


def test_a_row_has_its_ratio_and_its_share():
    row = compare.row("gather", "8 x 8", 5.0, baseline="other", baseline_us=10.0, roofline_us=4.0)
    assert (row["ratio"], row["roofline_share"]) == (0.5, 0.8)


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, capsys):
    path = tmp_path / "results.json"
    made = []

    def make():
        made.append(1)
        if len(made) > 1:  # the first asks for shapes
            raise KeyboardInterrupt
        return jnp.float32(0), INPUTS

    with pytest.raises(KeyboardInterrupt):
        compare.measure([make_case("first"), make_case("second", make=make)], path)
    assert kept(path) == [("first", "8 x 8")]
    assert capsys.readouterr().out.splitlines()[-1].startswith("first ")


def refuse(*_):
    raise ValueError("no such kernel\nand more")


def fail_at_the_second_call():
    calls = []

    def make():
        calls.append(1)
        return refuse() if len(calls) > 1 else (jnp.float32(0), INPUTS)

    return make


@pytest.mark.parametrize(
    "fields",
    [{"function": refuse}, {"make": refuse}, {"make": fail_at_the_second_call()}],
    ids=["lowering", "shapes", "inputs"],
)
def test_a_row_that_fails_says_why_and_the_others_follow(tmp_path, capsys, fields):
    path = tmp_path / "results.json"
    assert compare.measure([make_case("bad", **fields), make_case("good")], path) == 1
    bad, good = json.loads(path.read_text())["rows"]
    assert bad["ours_us"] is None
    assert bad["failed"] == "ValueError: no such kernel"
    assert good["ours_us"] is not None
    assert "failed" not in good
    bad_line, good_line = capsys.readouterr().out.splitlines()[-2:]
    assert " ".join(bad_line.split()) == "bad 8 x 8 failed, ValueError: no such kernel"
    assert good_line.startswith("good ")


def test_a_baseline_that_fails_leaves_ours(tmp_path, capsys):
    path = tmp_path / "results.json"
    bad = make_case("bad", baseline="theirs", baseline_us=refuse)
    good = make_case("good", baseline="theirs", baseline_us=lambda: 2.0)
    assert compare.measure([good]) == 0
    assert compare.measure([bad, good], path) == 1
    rows = json.loads(path.read_text())["rows"]
    assert None not in [row["ours_us"] for row in rows]
    assert [row["baseline_us"] for row in rows] == [None, 2.0]
    bad_line, good_line = capsys.readouterr().out.splitlines()[-2:]
    assert bad_line.endswith("baseline failed, ValueError: no such kernel")
    assert "2.0" in good_line


def test_a_row_has_a_line_for_each_rival_and_keeps_them_all(tmp_path, capsys):
    path = tmp_path / "results.json"
    rivals = {"first": lambda: 2.0, "bad": refuse, "last": lambda: 4.0}
    assert compare.measure([make_case("op", rivals=rivals)], path) == 1
    [row] = json.loads(path.read_text())["rows"]
    assert (row["baseline"], row["baseline_us"]) == ("first", 2.0)
    bad, last = row["rivals"]
    assert bad["baseline_failed"] == "ValueError: no such kernel"
    assert (bad["baseline"], bad["baseline_us"]) == ("bad", None)
    assert (last["baseline"], last["baseline_us"]) == ("last", 4.0)
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert ["first" in lines[0], "bad" in lines[1], "last" in lines[2]] == [True] * 3


def test_rivals_follow_a_baseline(tmp_path):
    path = tmp_path / "results.json"
    case = make_case("op", baseline="theirs", baseline_us=lambda: 1.0, rivals={"b": lambda: 2.0})
    assert compare.measure([case], path) == 0
    [row] = json.loads(path.read_text())["rows"]
    assert row["baseline"] == "theirs"
    assert [rival["baseline"] for rival in row["rivals"]] == ["b"]


def test_all_is_compiled_and_then_timed_before_a_baseline_and_one_has_arrays_at_a_time():
    events, arrays = [], []

    def function(name, x):
        events.append(f"trace {name}")
        return x + 1

    def make(name):
        x = jnp.float32(0)
        if not isinstance(x, jax.core.Tracer):
            assert all(array() is None for array in arrays)
            arrays.append(weakref.ref(x))
            events.append(f"make {name}")
        return None, [(x,)]

    cases = [
        make_case(
            name,
            function=functools.partial(function, name),
            make=functools.partial(make, name),
            baseline_us=lambda: events.append(arrays[-1]() is None),
        )
        for name in "ab"
    ]
    assert compare.measure(cases) == 0
    assert events == ["trace a", "trace b", "make a", "make b", True, True]
