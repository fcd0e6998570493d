import argparse
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks import harness, tune
from benchmarks.bench_index_scores import FORMATS as FORMATS_OF_KEYS
from helpers import layer_cases, slow
from helpers.layer_cases import KERNEL, LENGTHS, RATES, draw_histories, draw_norms, flat, run
from helpers.schedules import assert_same_bytes
from pallas_kernels import tilings
from pallas_kernels.flush_write import tiling as flush_tiling
from pallas_kernels.flush_write import triton_gpu
from pallas_kernels.flush_write.tiling import Tiling
from pallas_kernels.index_topk import scores_tiling, select_mosaic_gpu
from pallas_kernels.sparse_attention import kernel_shapes

FILES = sorted((pathlib.Path(pk.__file__).parent / "data" / "tilings").glob("*.json"))
ENTRY = {
    "op": "flush_hca",
    "shape": {"windows": 64, "tokens": 8192},
    "tiling": {"channels": 256},
    "us": 12.5,
    "formula_us": 15.0,
}
KINDS_OF_TILING = {
    "flush_csa": flush_tiling.Tiling,
    "flush_hca": flush_tiling.Tiling,
    "index_scores": scores_tiling.Tiling,
    "select_top_k": select_mosaic_gpu.Tiling,
    "sparse_attention": kernel_shapes.Tiling,
}


def file_of(*entries):
    return json.dumps({"jax": "0.11.2", "date": "2026-01-31", "entries": entries})


@pytest.fixture
def measured(monkeypatch):
    """Gives the device tilings, for as long as a test runs."""

    def measure(*entries):
        monkeypatch.setattr(tilings, "device_kind", lambda: "NVIDIA H200")
        monkeypatch.setattr(tilings, "_load", lambda device: tilings.parse(file_of(*entries)))

    return measure


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_shipped_is_valid(path):
    for (op, _), tiling in tilings.parse(path.read_text()).items():
        names = {field.name for field in dataclasses.fields(KINDS_OF_TILING[op])}
        assert tiling.keys() <= names


def test_a_measured_tiling_overrides_the_fields_it_names(measured):
    measured(ENTRY)
    formula = Tiling(warps=8, channels=64, pool_warps=2, chunk=24)
    assert flush_tiling.choose_hca(64, 8192) == dataclasses.replace(formula, channels=256)
    assert flush_tiling.choose_csa(64, 8192) == Tiling(warps=4)


@pytest.mark.parametrize(
    ("windows", "tokens", "found"),
    [(33, 4097, 256), (64, 8192, 256), (65, 8192, 64), (32, 8192, 64), (64, 8193, 64)],
)
def test_an_entry_speaks_for_sizes_up_to_its_power_of_two(measured, windows, tokens, found):
    measured(ENTRY)
    assert flush_tiling.choose_hca(windows, tokens).channels == found


def test_without_a_gpu_or_a_file_the_formula_is_taken(monkeypatch):
    formula = Tiling(warps=8, channels=64, pool_warps=2, chunk=24)
    assert flush_tiling.choose_hca(64, 8192) == formula
    monkeypatch.setattr(tilings, "device_kind", lambda: "NVIDIA Nothing 9")
    assert flush_tiling.choose_hca(64, 8192) == formula
    assert tilings.file_name("NVIDIA H200") == "nvidia_h200.json"


@pytest.mark.parametrize(("windows", "apart"), [(64, False), (2047, False), (2048, True)])
def test_compressors_of_many_windows_are_flushed_apart(windows, apart):
    assert flush_tiling.choose_csa(windows, 4 * windows).apart == apart


@pytest.mark.parametrize(
    ("windows", "tokens", "channels"),
    [(1, 16, 64), (66, 8448, 64), (67, 8576, 0), (66, 1055, 0), (64, 64, 0)],
)
def test_few_long_windows_are_pooled_by_several_programs(windows, tokens, channels):
    """Not those of a decode step, of a token each."""
    assert flush_tiling.choose_hca(windows, tokens).channels == channels


def test_index_scores_and_the_selection_are_tuned_too(measured):
    measured(
        ENTRY
        | {
            "op": "index_scores",
            "shape": {"tokens": 1, "tiles": 64, "bits": 4},
            "tiling": {"tiles": 3},
        },
        ENTRY
        | {"op": "select_top_k", "shape": {"entries": 65536, "k": 512}, "tiling": {"tile": 8192}},
    )
    assert scores_tiling.choose_tiling(1, 60, mxfp4=True).tiles == 3
    assert select_mosaic_gpu.choose_stages(60000, 512)[0].tile == 8192


def splits_of(programs, tiles):
    return kernel_shapes.choose_tiling(programs, tiles, num_cores=132, dim=512).splits


@pytest.mark.parametrize(
    ("programs", "tiles", "splits"),
    [
        *[(1, 2, 2), (16, 2, 2), (32, 2, 1)],
        *[(1, 3, 3), (16, 3, 3), (32, 3, 1)],
        *[(1, 10, 10), (8, 10, 10), (32, 10, 4), (64, 10, 2), (128, 10, 1), (256, 10, 1)],
        *[
            (1, 18, 18),
            (4, 18, 18),
            (16, 18, 6),
            (128, 18, 1),
            (1, 130, 65),
            (64, 130, 2),
            (0, 1, 1),
        ],
    ],
)
def test_splits_of_attention_fill_the_cores_once(programs, tiles, splits):
    assert splits_of(programs, tiles) == splits


@pytest.mark.parametrize(
    ("most", "tiles", "splits"),
    [(4, 12, 4), (4, 10, 4), (4, 9, 3), (7, 16, 6), (100, 9, 9), (0, 16, 1)],
)
def test_measured_splits_of_attention_are_cut_evenly(measured, most, tiles, splits):
    shape = {"programs": 8, "tiles": 16}
    measured(ENTRY | {"op": "sparse_attention", "shape": shape, "tiling": {"splits": most}})
    assert splits_of(5, tiles) == splits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": 15.0}, "must beat the formula"),
        ({"us": "fast"}, "us of a tiling must be a float"),
        ({"shape": {"windows": 1.5}}, "shape of a tiling must hold whole numbers"),
        ({"device": "H200"}, "a tiling has"),
    ],
)
def test_an_entry_that_is_wrong_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        tilings.parse(file_of(ENTRY | change))


def test_two_entries_of_one_class_and_unknown_fields_are_refused(measured):
    with pytest.raises(ValueError, match="two tilings for"):
        tilings.parse(file_of(ENTRY, ENTRY | {"shape": {"windows": 60, "tokens": 8000}}))
    measured(ENTRY | {"tiling": {"stages": 2}})
    with pytest.raises(ValueError, match="tilings of flush_hca for NVIDIA H200"):
        flush_tiling.choose_hca(64, 8192)


def test_the_tuner_writes_what_is_read(tmp_path):
    slower = ENTRY | {"us": 13.0, "shape": {"windows": 60, "tokens": 8000}}
    other = ENTRY | {"op": "flush_csa", "tiling": {"apart": True}}
    tune.write("NVIDIA H200", [slower], tmp_path)
    tune.write("NVIDIA H200", [ENTRY, other], tmp_path)
    found = json.loads((tmp_path / "nvidia_h200.json").read_text())
    assert found["entries"] == [other, ENTRY]
    assert len(tilings.parse(json.dumps(found))) == 2


@dataclasses.dataclass(frozen=True)
class Step:
    """A tiling of `made_up_case`: what its calls add, and a name."""

    step: int
    name: int = 0


def made_up_case(formula, *candidates):
    sizes = {"windows": 64, "tokens": 8192}
    state, inputs = jnp.float32(0), [(jnp.float32(1),)]

    def make(tiling):
        if tiling.step == 0:
            raise ValueError("no such tiling")
        return lambda state, x: (state + tiling.step * x, ())

    return tune.Case("flush_hca", "one", sizes, formula, candidates, make, inputs, state, 8)


@pytest.fixture
def said(monkeypatch):
    """Says in turn how long calls take."""

    def say(*us):
        left = list(us)
        monkeypatch.setattr(harness.Loops, "median_us", lambda *_: left.pop(0))

    return say


def test_the_tuner_passes_by_candidates_that_fail_or_leave_other_bytes(said, capsys):
    said(10.0, 9.9, 5.0, 6.0)
    formula, *good = (Step(1, name) for name in range(4))
    case = made_up_case(formula, Step(0), good[0], Step(2), *good[1:])
    entry, failed = tune.tune(case, 4e12)
    assert failed
    assert entry["tiling"] == {"name": 2}
    assert (entry["us"], entry["formula_us"]) == (5.0, 10.0)
    lines = capsys.readouterr().out.splitlines()
    first_words = " ".join(line.split()[0] for line in lines[1:])
    assert first_words == "10.00 failed, 9.90 failed, 5.00 6.00"
    said(10.0, 9.8)
    assert tune.tune(made_up_case(formula, good[0]), 4e12) == (None, False)
    assert tune.tune(made_up_case(Step(0), formula), 4e12) == (None, True)


def test_the_tuner_writes_after_every_case(said, tmp_path, monkeypatch):
    def flush_cases(args):
        yield made_up_case(Step(1), Step(1, name=1))
        raise KeyboardInterrupt

    said(10.0, 5.0)
    monkeypatch.setattr("sys.argv", ["tune", "--write"])
    monkeypatch.setattr(harness, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(tune, "flush_cases", flush_cases)
    monkeypatch.setattr(tune, "write", functools.partial(tune.write, folder=tmp_path))
    with pytest.raises(KeyboardInterrupt):
        tune.main()
    (path,) = tmp_path.iterdir()
    (entry,) = json.loads(path.read_text())["entries"]
    assert (entry["us"], entry["formula_us"]) == (5.0, 10.0)


@pytest.mark.parametrize("keys", ["MXFP4", "FP8"])
def test_the_tuner_compares_scores_with_the_formula_s(keys, measured, monkeypatch):
    """Not with what it wrote before; its candidates, run on a small call, give the same bits."""
    sizes = {"tokens": 1, "tiles": 2, "bits": 4 if keys == "MXFP4" else 8}
    measured(ENTRY | {"op": "index_scores", "shape": sizes, "tiling": {"groups": 2}})
    monkeypatch.setattr(tune, "SCORE_SHAPES", [(1, 128)])
    monkeypatch.setattr(tune.bench_index_scores, "FORMATS", {keys: FORMATS_OF_KEYS[keys]})
    with tune.formulas_alone():
        (case,) = tune.score_cases(argparse.Namespace(only="index_scores"))
    assert scores_tiling.choose_tiling(1, 2, keys == "MXFP4").groups == 2
    assert case.formula.groups > 2
    assert case.sizes == sizes
    with pk.gpu_interpreter():
        first, *others = (
            np.asarray(case.make(tiling)(*case.inputs[0])) for tiling in case.candidates[:2]
        )
    assert np.isfinite(first).all()
    for other in others:
        np.testing.assert_array_equal(first, other)


def attention_cases(monkeypatch, *shapes):
    if shapes:
        monkeypatch.setattr(tune, "ATTENTION_SHAPES", shapes)
    return tune.attention_cases(argparse.Namespace(only="sparse_attention"))


@pytest.mark.slow
def test_the_tuner_compares_splits_of_attention_with_the_formula_s(measured, monkeypatch):
    """Its candidates, run on a small call, give nearly the same outputs, and different bits."""
    sizes = {"programs": 1, "tiles": 3}
    measured(ENTRY | {"op": "sparse_attention", "shape": sizes, "tiling": {"splits": 2}})
    with tune.formulas_alone():
        (case,) = attention_cases(monkeypatch, ("hca", 1, 1, 64, 32))
    assert splits_of(1, 3) == 2
    assert (case.sizes, case.formula.splits) == (sizes, 3)
    assert [tiling.splits for tiling in case.candidates] == [1, 2]
    with pk.gpu_interpreter():
        expected, actual = (
            np.asarray(case.make(tiling)(*case.inputs[0]))
            for tiling in (case.formula, case.candidates[1])
        )
    case.compare(actual, expected)
    assert not np.array_equal(actual, expected)
    for wrong in (actual * 1.05, np.roll(actual, 1), np.full_like(actual, np.nan)):
        with pytest.raises(AssertionError, match="outputs are not those of the formula"):
            case.compare(wrong, expected)


def test_the_tuner_tries_every_equal_cut_or_those_of_most_splits(monkeypatch):
    monkeypatch.setattr(tune.bench_sparse_attention, "inputs", lambda *shape: shape)
    cases = list(attention_cases(monkeypatch))
    tried = {
        case.inputs: (case.formula.splits, *(tiling.splits for tiling in case.candidates))
        for case in cases
    }
    assert tried["csa", 8, 1, 64, 512] == (10, 1, 2, 3, 4, 5)
    assert tried["csa", 32, 1, 64, 512] == (4, 1, 2, 3, 5)
    assert tried["hca", 64, 1, 64, 32] == (1, 2, 3)
    assert tried["hca", 1, 1, 64, 8192] == (65, 12, 13, 15, 17, 19, 22, 26, 33, 44)
    assert tried["hca", 8, 1, 64, 8192] == (15, 10, 11, 12, 13, 17, 19, 22, 26, 33)
    kept = [tilings.classify(case.sizes) for case in cases if case.sizes]
    assert len(set(kept)) == len(kept) == len(cases) - 1


TILINGS = {
    "csa": [
        Tiling(warps=2),
        Tiling(warps=4, apart=True),
    ],
    "hca": [
        Tiling(warps=4, chunk=8, channels=4, pool_warps=2),
        Tiling(warps=4, chunk=3, channels=12, pool_warps=1),
    ],
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "tiling"),
    slow.all_but(
        [("hca", TILINGS["hca"][-1])],
        [(kind, tiling) for kind in RATES for tiling in TILINGS[kind]],
    ),
)
def test_every_tiling_of_a_flush_gives_the_same_bits(lane, kind, tiling, monkeypatch):
    """Windows cut by calls, several a call, and absent blocks, in launches of every kind."""
    rng = np.random.default_rng(0)
    histories, norms = draw_histories(rng, kind, LENGTHS), draw_norms(rng, kind, jnp.bfloat16)
    flush = functools.partial(
        run, "fp8_ue8m0", kind, histories, layer_cases.CUTS, norms, num_tokens=64, backend=KERNEL
    )
    expected, _ = flush()
    layer_cases.step.clear_cache()
    monkeypatch.setattr(triton_gpu, f"choose_{kind}", lambda *sizes: tiling)
    actual, _ = flush()
    layer_cases.step.clear_cache()
    assert_same_bytes(flat(jax.device_get(actual)), flat(expected))
