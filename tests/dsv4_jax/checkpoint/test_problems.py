"""A refusal lists what is wrong by kind, in ten lines at most, and says how much there is."""

import pathlib

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint.files import StoredTensor
from dsv4_jax.checkpoint.inventory import read_inventory
from dsv4_jax.checkpoint.names import canonical_name
from dsv4_jax.checkpoint.problems import MAX_LINES, list_problems, shorten
from helpers.checkpoints import released_tensors, write_released
from helpers.dspark import TRUNK


def test_few_problems_are_all_listed_and_once():
    lines = [f"missing: tensor {n}" for n in range(MAX_LINES)]
    assert shorten(lines + lines[:3]) == lines
    message = list_problems(pathlib.Path("x"), lines[:2])
    assert message == "x does not fit its config.json:\n  missing: tensor 0\n  missing: tensor 1"


def test_many_of_one_kind():
    short = shorten([f"missing: tensor {n}" for n in range(12_345)])
    assert short[:9] == [f"missing: tensor {n}" for n in range(9)]
    assert short[9:] == ["missing: tensor 9; and 12,335 more: missing", "12,345 problems in all"]


def test_every_kind_is_shown():
    kinds = ("missing", "unexpected", "wrong shape", "damaged")
    lines = [f"{kind}: {n}" for kind in kinds for n in range(500)] + ["twice: a", "a word alone"]
    short = shorten(lines)
    assert len(short) == MAX_LINES + 1
    for kind in kinds:
        assert any(line.startswith(kind) and f"more: {kind}" in line for line in short)
    assert {"twice: a", "a word alone", "2,002 problems in all"} <= set(short)


def test_more_kinds_than_lines():
    assert len(shorten([f"kind {n}: x" for n in range(30)])) == MAX_LINES + 1


def test_a_checkpoint_of_another_model_is_refused_in_few_lines(tmp_path):
    tensors = {f"other.{n}": np.zeros(4, np.float32) for n in range(300)}
    tensors |= {n: a for n, a in released_tensors(TRUNK).items() if "layers.3" not in n}
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        ds.load_checkpoint(write_released(tmp_path, TRUNK, tensors), progress=False)
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_LINES + 2
    assert sum("missing: layers.3" in line for line in lines) >= 4
    assert sum("unexpected: other." in line for line in lines) >= 4
    assert lines[-1].endswith("problems in all")


def test_a_large_checkpoint_is_refused_by_its_headers_alone(tmp_path, monkeypatch):
    """A missing tensor is told at once, not after all bytes of the others have been looked at."""
    tensors = released_tensors(TRUNK)
    tensors["layers.1.attn.wq_a.scale"].view(np.uint8)[0, 0] = 255
    del tensors["norm.weight"]
    folder = write_released(tmp_path, TRUNK, tensors)
    with pytest.raises(ValueError, match=r"damaged: scale of layers\.1\.attn\.wq_a"):
        ds.load_checkpoint(folder, progress=False)
    monkeypatch.setattr("dsv4_jax.checkpoint.sources.CHECKED_BYTES", 1000)
    monkeypatch.setattr(StoredTensor, "read", None)
    with pytest.raises(ValueError, match=r"missing: norm\.weight \[64\]$"):
        ds.load_checkpoint(folder, progress=False)


def test_a_name_is_taken_apart_once_however_often_it_is_looked_at(tmp_path):
    """There are 149,782 in Pro, and commands look at the headers again before they load."""
    tensors = released_tensors(TRUNK)
    folder = write_released(tmp_path, TRUNK, tensors)
    canonical_name.cache_clear()
    assert len(read_inventory(folder).loaded) == len(tensors)
    ds.load_checkpoint(folder, progress=False)
    assert canonical_name.cache_info().misses == len(tensors)
