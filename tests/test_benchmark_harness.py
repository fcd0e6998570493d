"""What the benchmarks' loop does, and what they keep; times are not looked at."""

import functools
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    bench_append,
    bench_compress,
    bench_decode_rivals,
    bench_gather,
    bench_index_scores,
    bench_sparse_attention,
    bench_topk,
    harness,
)

INPUTS = [(jnp.float32(n),) for n in (1, 2, 4)]


def add_to_state(state, x):
    return state + x, state * x


def test_every_round_calls_with_every_input_in_order():
    loop = harness._loop(add_to_state, has_state=True)
    _, state, outs = loop(5, jnp.float32(0), INPUTS)
    assert state == 5 * 7
    np.testing.assert_array_equal(jnp.stack(outs), [28 * 1, 29 * 2, 31 * 4])


def test_a_loop_without_state_gives_the_last_results():
    _, state, outs = harness._loop(jnp.square, has_state=False)(3, None, INPUTS)
    assert state is None
    np.testing.assert_array_equal(jnp.stack(outs), [1, 4, 16])


def test_flushing_changes_no_result():
    flushed = harness._after_flush(add_to_state, has_state=True)
    loop = harness._loop(flushed, has_state=True)
    _, (lines, state), outs = loop(5, (jnp.zeros(8, jnp.uint32), 0.0), [(i,) for i in INPUTS])
    assert state == 5 * 7
    assert (lines == 15).all()
    np.testing.assert_array_equal(jnp.stack(outs), [28 * 1, 29 * 2, 31 * 4])


def test_a_state_is_not_the_callers_own_that_is_donated():
    state = jnp.float32(3)
    harness.median_us(add_to_state, INPUTS, state=state, rounds=1, repeats=1)
    assert state == 3


def test_a_function_is_traced_once_for_all_inputs_and_both_loops():
    calls = []

    def function(x):
        calls.append(x)
        return x + 1

    harness.median_us(function, INPUTS, rounds=1, repeats=1)
    assert len(calls) == 1


def make_case(op, shape="8 x 8", *, function=add_to_state, make=None, **fields):
    make = make or (lambda: (jnp.float32(0), INPUTS))
    return harness.Case(op, shape, function, make, rounds=1, **fields)


def kept(path):
    return [(r["op"], r["shape"]) for r in json.loads(path.read_text())["rows"]]


def test_a_row_replaces_that_of_its_op_and_shape(tmp_path):
    path = tmp_path / "results.json"
    old = [
        harness.row(op, shape, 10.0, limit_us=8.0)
        for op, shape in (("gather", "1 x 8"), ("gather", "8 x 8"), ("flush", "8 x 8"))
    ]
    new = harness.row("gather", "8 x 8", 5.0, rival="other", rival_us=10.0)
    for row in (*old, new, last := harness.row("gather", "9 x 9", 5.0)):
        harness.keep(row, path)
    assert json.loads(path.read_text())["rows"] == [old[0], new, old[2], last]
    assert (old[0]["limit_share"], new["ratio"]) == (0.8, 0.5)
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, capsys):
    path = tmp_path / "results.json"
    made = []

    def make():
        made.append(1)
        if len(made) > 1:  # the first asks for shapes
            raise KeyboardInterrupt
        return jnp.float32(0), INPUTS

    with pytest.raises(KeyboardInterrupt):
        harness.measure([make_case("first"), make_case("second", make=make)], path)
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
    assert harness.measure([make_case("bad", **fields), make_case("good")], path) == 1
    bad, good = json.loads(path.read_text())["rows"]
    assert bad["ours_us"] is None
    assert bad["failed"] == "ValueError: no such kernel"
    assert good["ours_us"] is not None
    assert "failed" not in good
    bad_line, good_line = capsys.readouterr().out.splitlines()[-2:]
    assert " ".join(bad_line.split()) == "bad 8 x 8 failed, ValueError: no such kernel"
    assert good_line.startswith("good ")


def test_a_rival_that_fails_leaves_ours(tmp_path, capsys):
    path = tmp_path / "results.json"
    bad = make_case("bad", rival="theirs", rival_us=refuse)
    good = make_case("good", rival="theirs", rival_us=lambda: 2.0)
    assert harness.measure([good]) == 0
    assert harness.measure([bad, good], path) == 1
    rows = json.loads(path.read_text())["rows"]
    assert None not in [row["ours_us"] for row in rows]
    assert [row["rival_us"] for row in rows] == [None, 2.0]
    bad_line, good_line = capsys.readouterr().out.splitlines()[-2:]
    assert bad_line.endswith("rival failed, ValueError: no such kernel")
    assert "2.0" in good_line


def test_all_is_compiled_and_then_timed_before_a_rival_and_one_has_arrays_at_a_time():
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
            rival_us=lambda: events.append(arrays[-1]() is None),
        )
        for name in "ab"
    ]
    assert harness.measure(cases) == 0
    assert events == ["trace a", "trace b", "make a", "make b", True, True]


BENCHMARKS = [
    (bench_append, 23),
    (bench_compress, 8),
    (bench_gather, 9),
    (bench_index_scores, 28),
    (bench_sparse_attention, 60),
    (bench_topk, 14),
]


@pytest.mark.parametrize(
    ("benchmark", "count"), BENCHMARKS, ids=[b.__name__.split(".")[-1] for b, _ in BENCHMARKS]
)
def test_a_benchmark_has_a_row_for_each_shape(monkeypatch, benchmark, count):
    """And its inputs are what its loops are compiled for."""
    found = []

    def measure(cases, path):
        found.extend(cases)
        return path

    monkeypatch.setattr("sys.argv", ["benchmark", "results.json"])
    monkeypatch.setattr(harness, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(harness, "measure", measure)
    assert benchmark.main() == "results.json"
    assert len({(case.op, case.shape) for case in found}) == len(found) == count
    specs, made = jax.eval_shape(found[0].make), found[0].make()

    def spec(x):
        return x.shape, x.dtype

    assert jax.tree.map(spec, specs) == jax.tree.map(spec, made)


def test_entries_that_attention_reads_ascend():
    chosen = bench_sparse_attention.choose(np.random.default_rng(0), 5, 8, 16)
    assert (np.diff(chosen) > 0).all()


def test_a_rivals_launches_are_summed_over_the_layers_of_flash():
    us = {"swa append": 5.0, "csa append": 10.0, "csa topk": 2.0, "hca attention": 20.0}
    found = bench_decode_rivals.summed(us) | {"batch": 64, "context": 16_384}
    assert found["layers"] == {"swa": 2, "csa": 21, "hca": 20}
    assert found["rival_ms"] == pytest.approx((2 * 5 + 21 * 12 + 20 * 20) / 1e3)
    row = {"batch": 64, "context": 16_384, "cache_part_ms": found["rival_ms"] / 2}
    compared = bench_decode_rivals.compared(found, [{"batch": 8, "context": 16_384}, row])
    assert compared["times_the_rivals_tokens"] == pytest.approx(2)
    assert compared["ours_tokens_per_s"] == pytest.approx(64 / row["cache_part_ms"] * 1e3)
    assert bench_decode_rivals.compared(found, []) == {}
