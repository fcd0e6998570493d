"""The benchmarks' cases, each a row, and where their sizes stand; nothing is timed."""

import ast
import contextlib
import functools
import pathlib
import re
import sys
import types

import jax
import numpy as np
import pytest

from benchmarks import (
    baselines,
    bench_append,
    bench_block_linear,
    bench_compress,
    bench_decode_baselines,
    bench_draws,
    bench_expert_mlp,
    bench_gather,
    bench_gather_host_rows,
    bench_index_scores,
    bench_pack_rows,
    bench_sparse_attention,
    bench_topk,
)
from benchmarks.cases.product import FLASH, PRO, V41
from dsv4_jax.bench import compare, timing
from helpers import slow

BENCHMARKS = [
    (bench_append, 23),
    (bench_block_linear, 78),
    (bench_expert_mlp, 16),
    (bench_compress, 8),
    (bench_draws, 16),
    (bench_gather, 9),
    (bench_gather_host_rows, 4),
    (bench_index_scores, 28),
    (bench_pack_rows, 12),
    (bench_sparse_attention, 60),
    (bench_topk, 14),
]
QUICK = (bench_compress, bench_draws, bench_topk)

ROOT = pathlib.Path(__file__).parents[1]
OF_OPS = {"bench_collectives", "bench_compress", "layer_calls"}
"""Modules of `benchmarks` that time ops, beside those whose kernels they import."""
NO_SIZES_OF_CALLS = {
    "BYTES",
    "_WORKSPACE_BYTES",
    "TURNS",
    ("LAYERS", "ROUND_US"),
    "LIMIT_S",
    "_ASKING",
    ("COPIED_BYTES", "REPEATS"),
}
"""What else they assign: bytes, how often a call is repeated, seconds, what requests ask for."""
MODEL_SIZES = {
    value
    for config in (FLASH, PRO, V41)
    for value in vars(config).values()
    if type(value) is int and value >= 256
}


def sizes_of(node):
    """Whole numbers from 8 on."""
    constants = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return {value for value in constants if type(value) is int and value >= 8}


def sizes_of_models(*nodes):
    """Those that a model has; `range(256)` is all values of a byte."""
    every = [one for node in nodes for one in ast.walk(node)]
    called = [one for one in every if isinstance(one, ast.Call)]
    ranges = [one for one in called if getattr(one.func, "id", None) == "range"]
    spared = {id(one) for node in ranges for one in ast.walk(node)}
    numbers = [one for one in every if isinstance(one, ast.Constant) and id(one) not in spared]
    return {one.value for one in numbers if type(one.value) is int} & MODEL_SIZES


def assigned(tree):
    """{name, or names of a tuple: what a module assigns to it}."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            names = tuple(one.id for one in getattr(target, "elts", ()))
            found[getattr(target, "id", names)] = node.value
    return found


def what_makes(wanted, tree):
    """Functions and values of a module that a name in it is made of."""
    makers = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, value in assigned(tree).items():
        makers |= dict.fromkeys([name] if isinstance(name, str) else name, value)
    found, asked = {}, [wanted]
    while asked:
        if (name := asked.pop()) in makers and name not in found:
            found[name] = makers[name]
            asked += [node.id for node in ast.walk(makers[name]) if isinstance(node, ast.Name)]
    return found.values()


def spelt_in_a_benchmark(source):
    """Sizes that it has of its own."""
    tree = ast.parse(source)
    values = [value for name, value in assigned(tree).items() if name not in NO_SIZES_OF_CALLS]
    return sizes_of_models(tree).union(*map(sizes_of, values))


def spelt_in_compiled_cases(source):
    """Sizes that a test module has of its own for what is compiled."""
    tree = ast.parse(source)
    cases = assigned(tree)["AOT_CASES"]
    return sizes_of(cases) | sizes_of_models(*what_makes("AOT_CASES", tree))


def times_an_op(path):
    has_kernels = re.search(r"^(import|from) pallas_kernels", path.read_text(), re.MULTILINE)
    return path.stem in OF_OPS or bool(has_kernels and path.stem.startswith("bench_"))


def test_calls_that_are_timed_and_those_that_are_compiled_have_one_list_of_sizes():
    """In `benchmarks/cases`; a number here would be a second one."""
    benchmarks = [path for path in ROOT.glob("benchmarks/*.py") if times_an_op(path)]
    assert len(benchmarks) >= 14
    for path in benchmarks:
        assert not spelt_in_a_benchmark(path.read_text()), path
    modules = ROOT.glob("tests/pallas_kernels/*/*.py")
    having = [path for path in modules if "AOT_CASES" in path.read_text()]
    assert len({path.parent for path in having}) >= 17
    for path in having:
        assert not spelt_in_compiled_cases(path.read_text()), path


def test_a_second_list_of_sizes_is_found():
    assert spelt_in_a_benchmark("A = 7\nB, C = [(1, 9)], 8\nBYTES = 68") == {8, 9}
    assert spelt_in_a_benchmark("def case(rows):\n    return rows, 4096, range(256)") == {4096}
    small = "SHAPE = 12, 40\ndef make(n):\n    return n, 64, SHAPE\n"
    assert not spelt_in_compiled_cases(f"{small}AOT_CASES = [make(n) for n in (1, 7)]")
    assert spelt_in_compiled_cases(f"{small}AOT_CASES = [make(n) for n in (1, 8)]") == {8}
    large = "DIM = 7168\ndef inner():\n    return 512\ndef make(n):\n    return DIM, inner()\n"
    assert spelt_in_compiled_cases(f"{large}AOT_CASES = [make(1)]") == {512, 7168}


@pytest.mark.parametrize(
    ("benchmark", "count"),
    slow.all_but([case for case in BENCHMARKS if case[0] in QUICK], BENCHMARKS),
    ids=[b.__name__.split(".")[-1] for b, _ in BENCHMARKS],
)
def test_a_benchmark_has_a_row_for_each_shape(monkeypatch, benchmark, count):
    """And its inputs are what its loops are compiled for."""
    found = []

    def measure(cases, path):
        found.extend(cases)
        return path

    small = {"Flash": (8, 256, 128), "Pro": (8, 256, 256)}  # all experts would take gigabytes
    monkeypatch.setattr(bench_expert_mlp, "MODELS", small)
    monkeypatch.setattr("sys.argv", ["benchmark", "results.json"])
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(compare, "measure", measure)
    assert benchmark.main() == "results.json"
    assert len({(case.op, case.shape) for case in found}) == len(found) == count
    smallest = min(found, key=lambda case: case.roofline_us)
    specs, made = jax.eval_shape(smallest.make), smallest.make()

    def spec(x):
        return x.shape, x.dtype

    assert jax.tree.map(spec, specs) == jax.tree.map(spec, made)


def test_rows_are_left_out_by_a_pattern_of_op_and_shape(monkeypatch):
    found = []
    monkeypatch.setattr("sys.argv", ["benchmark", "--only", r"linear Pro .*: (1|64) x", "--cublas"])
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(compare, "measure", lambda cases, _: found.extend(cases))
    bench_block_linear.main()
    assert {case.shape.split(" ")[0] for case in found} == {"1", "64"}
    assert len(found) == 14
    for case in found:
        gated = case.op.startswith("swiglu")
        assert list(case.rivals) == ([] if gated else ["cuBLAS BF16"])
    shapes = [bench_block_linear.shape_of(case) for case in found]
    assert (64, 16, 1024, 4096) in shapes


@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param([], [], id="none", marks=pytest.mark.slow),
        pytest.param(
            ["--marlin", "a.so", "--library", "b.so"], ["vLLM Marlin"], id="Marlin",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--marlin", "a.so", "--library", "b.so", "--humming", "c", "--sum", "d.py"],
            ["vLLM Marlin", "vLLM Humming, FP8 rows", "vLLM Humming, BF16 rows"], id="both",
        ),
    ],
)  # fmt: skip
def test_experts_stand_beside_those_asked_for(monkeypatch, options, names):
    found = []
    monkeypatch.setattr("sys.argv", ["benchmark", *options])
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(compare, "measure", lambda cases, _: found.extend(cases))
    bench_expert_mlp.main()
    assert all(list(case.rivals) == names for case in found)


def test_what_is_held_is_made_once_for_its_arguments_even_if_it_fails(capsys):
    asked = []

    def make(number):
        asked.append(number)
        return 1 / number

    held = baselines.Held(make)
    assert [held.get(2), held.get(2), held.get(4)] == [0.5, 0.5, 0.25]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            held.get(0)
    assert held.get(1) == 1
    assert asked == [2, 4, 0, 1]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_entries_that_attention_reads_ascend():
    chosen = bench_sparse_attention.choose(np.random.default_rng(0), 5, 8, 16)
    assert (np.diff(chosen) > 0).all()


def test_launches_of_a_baseline_are_summed_over_the_layers_of_flash():
    us = {"swa append": 5.0, "csa append": 10.0, "csa topk": 2.0, "hca attention": 20.0}
    found = bench_decode_baselines.summed(us) | {"batch": 64, "context": 16_384}
    assert found["layers"] == {"swa": 2, "csa": 21, "hca": 20}
    assert found["baseline_ms"] == pytest.approx((2 * 5 + 21 * 12 + 20 * 20) / 1e3)
    row = {"batch": 64, "context": 16_384, "cache_part_ms": found["baseline_ms"] / 2}
    compared = bench_decode_baselines.compared(found, [{"batch": 8, "context": 16_384}, row])
    assert compared["times_the_baselines_tokens"] == pytest.approx(2)
    assert compared["ours_tokens_per_s"] == pytest.approx(64 / row["cache_part_ms"] * 1e3)
    assert bench_decode_baselines.compared(found, []) == {}


def test_a_baseline_is_measured_for_as_long_as_ours(monkeypatch):
    """On a clock that each replay of a graph, of two rounds of two calls, moves by 3 ms."""
    clock, recorded, replayed = [0.0], [], []

    class Graph:
        def replay(self):
            replayed.append(None)
            clock[0] += 3.0

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, other):
            return other.at - self.at

    @contextlib.contextmanager
    def graph(_, capture_error_mode):
        recorded.clear()
        yield

    cuda = types.SimpleNamespace(
        CUDAGraph=Graph, Event=Event, graph=graph, synchronize=lambda: None
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    calls = [functools.partial(recorded.append, number) for number in range(2)]
    assert baselines.median_us(calls, replays=2) == 750.0
    assert recorded == [0, 1, 0, 1]
    assert len(replayed) == 2 + 9 * 17, "9 measurements of 51 ms, and two replays before"
