"""What transformers writes of a model that it quantised: experts' weights apart, scales fused.

`tests/data/make_transformers_fp8.py` recorded names, dtypes and shapes; values are drawn here.
"""

import json
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest

import dsv4_jax as ds
from helpers.checkpoints import (
    SAFETENSORS_DTYPES,
    random_fp8,
    random_scale,
    released_tensors,
    write_released,
)
from helpers.dspark import TRUNK, write_checkpoint
from pallas_kernels.common.weights import BlockFP8

FILE = pathlib.Path(__file__).parents[2] / "data" / "transformers_fp8.json"
RECORDED = json.loads(FILE.read_text())
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, known, known)) for known, name in SAFETENSORS_DTYPES.items()
}


def recorded_checkpoint(kind):
    """The config, and tensors as the recorded header has them."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (dtype, shape) in RECORDED[kind]["tensors"].items():
        if "scale_inv" in name:
            tensors[name] = random_scale(rng, shape, "UE8M0" if kind == "ue8m0" else "F32")
        elif dtype == "F8_E4M3":
            tensors[name] = random_fp8(rng, shape).view(ml_dtypes.float8_e4m3fn)
        elif dtype == "I64":
            tensors[name] = rng.integers(0, 2, shape)
        else:
            tensors[name] = rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
    return RECORDED[kind]["config"], tensors


def load(folder, **options):
    return ds.load_checkpoint(folder, progress=False, **options)[1]


@pytest.mark.parametrize("kind", RECORDED)
def test_what_is_recorded_loads_with_its_values(tmp_path, kind):
    contents, tensors = recorded_checkpoint(kind)
    folder = write_checkpoint(tmp_path / "x", contents, tensors)
    assert isinstance(load(folder).layers["csa_learned"].ffn.w1, BlockFP8)
    decoded = load(folder, weights="float32")
    stem = "model.layers.1.ffn.experts"
    gate_up, down = (
        tensors[f"{stem}.{name}_scale_inv"].astype(np.float32)
        for name in ("gate_up_proj", "down_proj")
    )
    assert gate_up.shape == (2, 2, 1)
    ffn = decoded.layers["csa_learned"].ffn
    for expert in range(2):
        scales = {"w1": gate_up[expert, 0], "w3": gate_up[expert, 1], "w2": down[expert, 0]}
        for w, scale in scales.items():
            codes = tensors[f"{stem}.{expert}.{w}.weight"].astype(np.float32)
            np.testing.assert_array_equal(getattr(ffn, w)[0, expert], codes * scale)
    codes = tensors["model.layers.1.attn.wq_b.weight"].astype(np.float32)
    scale = tensors["model.layers.1.attn.wq_b.weight_scale_inv"].astype(np.float32)
    wanted = codes * np.repeat(scale, 128, axis=0)
    np.testing.assert_array_equal(decoded.layers["csa_learned"].attn.wq_b[0], wanted)


def fuse_scales(tensors, num_experts, *, shared_rows=False):
    """The scales of experts as transformers leaves them, their weights apart."""
    fused = {
        n: array for n, array in tensors.items() if not re.search(r"experts\.\d+\.w\d\.scale", n)
    }
    for stem in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:

        def stack(w, stem=stem):
            return np.stack([tensors[f"{stem}.experts.{e}.{w}.scale"] for e in range(num_experts)])

        parts = [stack("w1")] if shared_rows else [stack("w1"), stack("w3")]
        fused[f"{stem}.experts.gate_up_proj_scale_inv"] = np.concatenate(parts, axis=1)
        fused[f"{stem}.experts.down_proj_scale_inv"] = stack("w2")
    return fused


@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_each_expert_finds_its_part_of_fused_scales(tmp_path, experts):
    tensors = released_tensors(TRUNK, experts=experts)
    fused = fuse_scales(tensors, TRUNK.num_routed_experts)
    assert len(fused) < len(tensors)
    expected = load(write_released(tmp_path / "a", TRUNK, tensors), weights="float32")
    found = load(write_released(tmp_path / "b", TRUNK, fused), weights="float32")
    for layer, one in expected.layers.items():
        for w in ("w1", "w2", "w3"):
            np.testing.assert_array_equal(getattr(found.layers[layer].ffn, w), getattr(one.ffn, w))


def test_one_block_of_rows_may_hold_gate_and_up(tmp_path):
    """Of experts of up to 64 rows, where a block of 128 rows spans both."""
    tensors = released_tensors(TRUNK, experts="fp8", scales="F32")
    for name in tensors:
        if name.endswith(".w3.scale"):
            tensors[name] = tensors[name.replace(".w3.", ".w1.")]
    shared = fuse_scales(tensors, TRUNK.num_routed_experts, shared_rows=True)
    expected = load(write_released(tmp_path / "a", TRUNK, tensors), weights="float32")
    found = load(write_released(tmp_path / "b", TRUNK, shared), weights="float32")
    for w in ("w1", "w3"):
        np.testing.assert_array_equal(
            getattr(found.layers["hca_learned"].ffn, w),
            getattr(expected.layers["hca_learned"].ffn, w),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: scale[:-1], r"wrong shape: scale of layers\.2.*must be \[8, 2, 1\], is \[7"),
        (lambda scale: scale[:, :1].repeat(3, 1), r"must be \[8, 2, 1\], is \[8, 3, 1\]"),
        (None, r"missing: scale of layers\.2\.ffn\.experts\.0\.w1"),
    ],
)
def test_fused_scales_of_another_shape_are_refused(tmp_path, change, message):
    name = "layers.2.ffn.experts.gate_up_proj_scale_inv"
    tensors = released_tensors(TRUNK, experts="fp8", scales="F32")
    fused = fuse_scales(tensors, TRUNK.num_routed_experts)
    scale = fused.pop(name)
    if change is not None:
        fused[name] = change(scale)
    with pytest.raises(ValueError, match=message):
        load(write_released(tmp_path / "x", TRUNK, fused))


def test_fused_scales_that_no_weight_needs_are_unexpected(tmp_path):
    tensors = released_tensors(TRUNK, experts="fp8", scales="F32")
    name = "layers.2.ffn.experts.down_proj_scale_inv"
    extra = {name: fuse_scales(tensors, TRUNK.num_routed_experts)[name]}
    with pytest.raises(ValueError, match=f"unexpected: {re.escape(name)}"):
        load(write_released(tmp_path / "x", TRUNK, tensors | extra))
