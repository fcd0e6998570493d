"""Quantised weights keep their bytes: in both scale formats, fused or not, and saved again."""

import dataclasses
import gc
import itertools
import json
import re
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint import load as checkpoint_load
from dsv4_jax.checkpoint.spread import RoundedWeightsWarning, count_rounded
from dsv4_jax.model import param_shapes, quantize_params
from helpers import slow
from helpers.checkpoints import problems_of, read_tensors, released_tensors, write_released
from pallas_kernels.common.weights import (
    MXFP4,
    BlockFP8,
    decode_weight,
    is_quantized,
    weight_bytes,
)

pytestmark = pytest.mark.unoptimised

SWA, CSA = ds.AttentionType.SWA, ds.AttentionType.CSA
CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(SWA, CSA, CSA),
    router_types=(ds.RouterType.HASH, ds.RouterType.LEARNED, ds.RouterType.LEARNED),
    hidden_size=176,  # neither 128 nor 32 divides it
    moe_intermediate_size=160,
    q_lora_rank=136,
    num_routed_experts=3,
)


def load(folder, **options):
    return ds.load_checkpoint(folder, progress=False, **options)


def assert_same(actual, expected):
    """Bit for bit, with structure and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.fixture(scope="module")
def released():
    return released_tensors(CONFIG)


@pytest.mark.parametrize(
    ("scales", "experts", "limit"),
    slow.all_but(
        [("UE8M0", "fp4", 300_000)],
        [("UE8M0", "fp4", 300_000), ("F32", "fp8", 2**30), ("F32", "fp4", 2**30)],
    ),
)
def test_load_and_save_give_back_every_byte(tmp_path, monkeypatch, scales, experts, limit):
    tensors = released_tensors(CONFIG, scales=scales, experts=experts)
    folder = write_released(tmp_path / "a", CONFIG, tensors)
    if limit < 2**30:  # large leaves are filled on the device
        monkeypatch.setattr(checkpoint_load, "_LARGE_BYTES", 50_000)
    config, params = load(folder)
    assert config == CONFIG
    ds.save_checkpoint(config, params, tmp_path / "b", max_shard_bytes=limit)
    files = list((tmp_path / "b").glob("*.safetensors"))
    assert (len(files) > 1) == (limit < 2**30)
    assert read_tensors(*files) == read_tensors(folder / "model.safetensors")
    again_config, again = load(tmp_path / "b")
    assert again_config == config
    assert_same(again, params)
    fields = json.loads((tmp_path / "b" / "config.json").read_text())
    assert fields["expert_dtype"] == experts
    assert fields["quantization_config"].get("scale_fmt") == {"UE8M0": "ue8m0"}.get(scales)


def test_stored_weights_are_those_of_the_release(tmp_path, released):
    """Formats, dtypes and shapes; decoded they are what decoding while loading gives."""
    folder = write_released(tmp_path / "x", CONFIG, released)
    _, params = load(folder)
    shapes = param_shapes(CONFIG, jnp.bfloat16, weights="stored")
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    for leaf, shape in zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
    _, decoded = load(folder, weights="float32")
    assert decoded.dtype == jnp.float32
    assert not any(map(is_quantized, jax.tree.leaves(decoded, is_leaf=is_quantized)))
    assert_same(jit_decode(params), decoded)
    _, rounded = load(folder, weights="bfloat16")
    assert rounded.dtype == jnp.bfloat16
    ffn = rounded.layers["csa_learned"].ffn
    np.testing.assert_array_equal(ffn.w2, decoded.layers["csa_learned"].ffn.w2.astype(jnp.bfloat16))


def test_fp4_weights_that_kernels_round_are_named(tmp_path, released):
    """Scales of 128 outputs and 128 inputs may lie within 2^14, and others anywhere."""
    name = "layers.1.ffn.experts.2.w1.scale"
    scale = np.full(released[name].shape, 120, np.uint8)
    assert count_rounded(scale) == 0
    scale[:, 4:] = 90  # of inputs of their own
    scale[40, 0] = 134  # 2^14 times all others of its block
    assert count_rounded(scale) == 0
    scale[5, 1] = 105
    assert count_rounded(scale) == 1
    scale[8, :4] = 119
    assert count_rounded(scale) == count_rounded(np.exp2(scale - np.float32(127))) == 5
    stored = scale.view(released[name].dtype)
    folder = write_released(tmp_path / "x", CONFIG, released | {name: stored})
    with pytest.warns(RoundedWeightsWarning, match=r"^5 groups .*experts.2.w1.* \(5\)\. weights="):
        load(folder)


@jax.jit
def jit_decode(params):
    """All in f32, but for tables of experts."""

    def decode(leaf):
        values = decode_weight(leaf)
        return values if values.dtype == jnp.int32 else values.astype(jnp.float32)

    return jax.tree.map(decode, params, is_leaf=is_quantized)


@pytest.fixture(scope="module")
def quantised():
    config = dataclasses.replace(
        CONFIG, layer_types=(SWA,), router_types=(ds.RouterType.HASH,), num_mtp_layers=0
    )
    return config, quantize_params(config, ds.init_params(config, jax.random.key(0), jnp.bfloat16))


@pytest.mark.slow
def test_what_we_quantise_loads_as_it_was(tmp_path, quantised):
    config, params = quantised
    ds.save_checkpoint(config, params, tmp_path)
    assert_same(load(tmp_path)[1], params)


def fuse(tensors, scale_names):
    """Experts as transformers has them in memory; its names for the rest are tested elsewhere."""
    fused = {name: array for name, array in tensors.items() if ".experts." not in name}
    layers = sorted({name.split(".ffn.")[0] for name in tensors if ".experts." in name})
    for layer in layers:
        stem = f"{layer}.ffn.experts"

        def stack(w, part, stem=stem):
            count = sum(name.startswith(stem) and name.endswith("w1.weight") for name in tensors)
            return np.stack([tensors[f"{stem}.{e}.{w}.{part}"] for e in range(count)])

        for part, names in [("weight", ("gate_up_proj", "down_proj")), ("scale", scale_names)]:
            gate_up = np.concatenate([stack("w1", part), stack("w3", part)], axis=1)
            fused |= {f"{stem}.{names[0]}": gate_up, f"{stem}.{names[1]}": stack("w2", part)}
    return fused


@pytest.mark.parametrize(
    ("experts", "suffix"),
    slow.all_but(
        [("fp4", "_scale_inv"), ("fp8", ".scale")],
        list(itertools.product(["fp4", "fp8"], ["_scale_inv", ".scale", ".weight_scale_inv"])),
    ),
)
def test_fused_experts(tmp_path, released, experts, suffix):
    config = dataclasses.replace(CONFIG, num_mtp_layers=0)
    tensors = released if experts == "fp4" else released_tensors(config, experts=experts)
    tensors = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    _, expected = load(write_released(tmp_path / "a", config, tensors))
    fused = fuse(tensors, (f"gate_up_proj{suffix}", f"down_proj{suffix}"))
    assert len(fused) < len(tensors)
    folder = write_released(tmp_path / "b", config, fused)
    assert_same(load(folder)[1], expected)
    assert_same(load(folder, weights="float32")[1], load(tmp_path / "a", weights="float32")[1])


def test_damage_is_listed_in_full(tmp_path, released):
    """Of values alone, and beside what is wrong with shapes and names."""
    bad = {name: array.copy() for name, array in released.items()}
    bad["layers.0.attn.wq_a.scale"].view(np.uint8)[0, 1] = 255
    bad["layers.1.attn.wkv.scale"].view(np.uint8)[:] = 0
    bad["layers.1.ffn.experts.2.w2.scale"].view(np.uint8)[3, :2] = 255
    bad["layers.2.attn.wo_a.weight"].view(np.uint8)[5, 6:9] = [0x7F, 0xFF, 0x7E]
    infinite = np.full(bad["mtp.0.e_proj.scale"].shape, np.inf, np.float32)
    infinite[0, 0], infinite[0, 1], infinite[1, 0] = np.nan, 0, 1
    bad["mtp.0.e_proj.scale"] = infinite
    damage = [
        "damaged: layers.2.attn.wo_a.weight has 2 codes of NaN",
        "damaged: scale of layers.0.attn.wq_a.weight has 1 UE8M0 codes of 0 or 255",
        "damaged: scale of layers.1.attn.wkv.weight has 2 UE8M0 codes of 0 or 255",
        "damaged: scale of layers.1.ffn.experts.2.w2.weight has 2 UE8M0 codes of 0 or 255",
        "damaged: scale of mtp.0.e_proj.weight has 3 values that are not positive numbers",
    ]
    folder = write_released(tmp_path / "x", CONFIG, bad)
    for weights in ("stored", "float32"):
        assert problems_of(folder, weights=weights) == damage
    del bad["layers.2.attn.wq_b.scale"], bad["norm.weight"]
    bad["layers.0.attn.wo_b.scale"] = bad["layers.0.attn.wo_b.scale"][:1]
    assert problems_of(write_released(tmp_path / "x", CONFIG, bad)) == [
        *damage,
        "missing: norm.weight [176]",
        "missing: scale of layers.2.attn.wq_b.weight, which is float8_e4m3fn",
        "wrong shape: scale of layers.0.attn.wo_b.weight must be [2, 1], is [1, 1]",
    ]


def test_damage_in_fused_experts_is_located(tmp_path, released):
    config = dataclasses.replace(CONFIG, num_mtp_layers=0)
    tensors = {name: a for name, a in released.items() if not name.startswith("mtp.")}
    fused = fuse(tensors, ("gate_up_proj_scale_inv", "down_proj_scale_inv"))
    fused["layers.1.ffn.experts.gate_up_proj_scale_inv"].view(np.uint8)[2, 161, 0] = 255
    line = (
        "damaged: scale of layers.1.ffn.experts.gate_up_proj[2, 160:320] has 1 UE8M0 codes of 0 "
        "or 255"
    )
    assert problems_of(write_released(tmp_path / "x", config, fused)) == [line]
    short = fused["layers.2.ffn.experts.down_proj_scale_inv"][:, 1:]
    fused["layers.2.ffn.experts.down_proj_scale_inv"] = short
    del fused["layers.0.ffn.experts.gate_up_proj_scale_inv"]
    assert problems_of(write_released(tmp_path / "x", config, fused)) == [
        line,
        "missing: scale of layers.0.ffn.experts.gate_up_proj, which is int8",
        "wrong shape: scale of layers.2.ffn.experts.down_proj must be [3, 176, 5], is [3, 175, 5]",
    ]


def test_formats_that_the_model_cannot_keep(tmp_path, released):
    """Each is an error that names the way out, which works."""
    config = dataclasses.replace(CONFIG, num_mtp_layers=0)
    tensors = {name: array for name, array in released.items() if not name.startswith("mtp.")}
    dense = tensors["layers.2.attn.wq_b.weight"].astype(ml_dtypes.bfloat16)
    del tensors["layers.2.attn.wq_b.scale"]
    gate = tensors["layers.0.ffn.gate.weight"]
    scale = tensors["layers.0.ffn.experts.1.w3.scale"].astype(np.float32)
    other = tensors["layers.1.attn.wo_b.scale"].astype(np.float32)
    tensors |= {
        "layers.2.attn.wq_b.weight": dense,
        "layers.0.ffn.gate.weight": gate.astype(ml_dtypes.float8_e4m3fn),
        "layers.0.ffn.gate.scale": np.ones((1, 2), np.float32),
        "layers.0.ffn.experts.1.w3.scale": scale,
        "layers.1.attn.wo_b.scale": other,
    }
    folder = write_released(tmp_path / "x", config, tensors)
    way_out = 'load it with weights="bfloat16"'
    assert problems_of(folder) == [
        "mixed formats: layers of a kind must store layers.csa_learned.attn.wo_b alike, but "
        "layers.1.attn.wo_b.weight is FP8 with f32 scales, layers.2.attn.wo_b.weight is FP8 with "
        f"UE8M0 scales; {way_out}",
        "mixed formats: layers of a kind must store layers.csa_learned.attn.wq_b alike, but "
        "layers.1.attn.wq_b.weight is FP8 with UE8M0 scales, layers.2.attn.wq_b.weight is dense; "
        f"{way_out}",
        "wrong dtype: layers.0.ffn.gate.weight, which is float8_e4m3fn, but the model takes it "
        f"dense; {way_out}",
        "wrong dtype: scale of layers.0.ffn.experts.1.w3.weight, which is float32",
    ]
    assert load(folder, weights="bfloat16")[1].dtype == jnp.bfloat16


def test_fp4_of_odd_width(tmp_path):
    config = dataclasses.replace(CONFIG, moe_intermediate_size=159, num_mtp_layers=0)
    tensors = released_tensors(config, experts="fp8")
    name = "layers.1.ffn.experts.0.w2"
    tensors[f"{name}.weight"] = np.zeros((176, 80), np.int8)
    tensors[f"{name}.scale"] = np.full((176, 5), 127, np.uint8)
    (line,) = problems_of(write_released(tmp_path / "x", config, tensors))
    assert line == f"odd width: {name}.weight must have 159 inputs, and packed FP4 stores pairs"


def test_a_scale_under_two_names(tmp_path, released):
    tensors = dict(released)
    tensors["layers.0.attn.wkv.weight_scale_inv"] = tensors["layers.0.attn.wkv.scale"]
    (line,) = problems_of(write_released(tmp_path / "x", CONFIG, tensors))
    assert re.fullmatch(r"twice: layers\.0\.attn\.wkv\.scale, as .*\.scale and .*_inv", line)


def test_weights_and_dtype(tmp_path, released):
    folder = write_released(tmp_path / "x", CONFIG, released)
    with pytest.raises(ValueError, match=r"weights must be one of .*, got 'dense'"):
        load(folder, weights="dense")
    with pytest.raises(ValueError, match="that of the decoded weights, bfloat16, got float32"):
        load(folder, weights="bfloat16", dtype=jnp.float32)
    _, params = load(folder, dtype=jnp.float32)
    wq_a = params.layers["swa_hash"].attn.wq_a
    assert isinstance(wq_a, BlockFP8)
    assert (params.dtype, wq_a.dtype, wq_a.activations) == (jnp.float32, "float32", "fp8")


def test_u8_scales_are_ue8m0(tmp_path, released):
    tensors = {
        name: array.view(np.uint8) if array.dtype.name == "float8_e8m0fnu" else array
        for name, array in released.items()
    }
    expected = load(write_released(tmp_path / "a", CONFIG, released))[1]
    folder = write_released(tmp_path / "b", CONFIG, tensors)
    assert_same(load(folder)[1], expected)
    assert_same(load(folder, weights="float32")[1], load(tmp_path / "a", weights="float32")[1])


def test_params_that_may_not_be_quantised(tmp_path, quantised):
    config, params = quantised
    layers = dict(params.layers)
    hash_layer = layers["swa_hash"]
    broken = dataclasses.replace(hash_layer.ffn, gate=hash_layer.attn.wq_a, w1=hash_layer.ffn.w2)
    layers["swa_hash"] = dataclasses.replace(hash_layer, ffn=broken)
    with pytest.raises(ValueError, match="params are not those of config") as caught:
        ds.save_checkpoint(config, dataclasses.replace(params, layers=layers), tmp_path / "x")
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().split(" must be ")[0] for line in lines] == [
        "layers.swa_hash.ffn.gate",
        "layers.swa_hash.ffn.w1",
    ]
    assert "is BlockFP8[1, 136, 176] of float8_e4m3fn[1, 136, 176], uint8[1, 2, 2]" in lines[0]
    assert not (tmp_path / "x").exists()


# Memory.


def memory_config(*, experts, hidden, layers):
    return dataclasses.replace(
        ds.DSV4Config.tiny(),
        layer_types=(SWA,) * layers,
        router_types=(ds.RouterType.LEARNED,) * layers,
        hidden_size=hidden,
        moe_intermediate_size=hidden // 2,
        num_routed_experts=experts,
        num_mtp_layers=0,
    )


def largest_leaf(shapes):
    return max(weight_bytes(leaf) for leaf in jax.tree.leaves(shapes, is_leaf=is_quantized))


@pytest.mark.parametrize("experts", slow.all_but(["fp4"], ["fp4", "fp8"]))
def test_no_more_than_a_leaf_is_held_while_loading(tmp_path, experts):
    """Of arrays that NumPy holds: all that is held beside the model, where that is on a device.

    Of three loads the one that held least: what else the process does is counted too.
    """
    config = memory_config(experts=8, hidden=512, layers=2)
    tensors = released_tensors(config, experts=experts)
    folder = write_released(tmp_path, config, tensors)
    load(folder)  # compiles
    peaks = []
    for _ in range(3):
        gc.collect()
        tracemalloc.start()
        _, params = load(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    model, leaf = weight_bytes(params), largest_leaf(params)
    assert model > 3 * leaf
    assert min(peaks) < 1.1 * leaf + 2**20
    kind = BlockFP8 if experts == "fp8" else MXFP4
    assert isinstance(params.layers["swa_learned"].ffn.w1, kind)


PEAK = """
import pathlib, resource, sys
import jax
import dsv4_jax as ds
from pallas_kernels.common.weights import is_quantized, weight_bytes

def resident():
    fields = pathlib.Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()

ds.load_checkpoint(sys.argv[1], progress=False)  # compiles, for the same shapes but few layers
before = resident()
config, params = ds.load_checkpoint(sys.argv[2], progress=False)
leaves = jax.tree.leaves(params, is_leaf=is_quantized)
print(weight_bytes(params), max(map(weight_bytes, leaves)), before)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_peak_memory_of_two_gigabytes(tmp_path, experts):
    """Resident memory of a process, mapped files included: the model and less than a leaf more."""
    layers = 12 if experts == "fp4" else 6
    small = memory_config(experts=3, hidden=2048, layers=1)
    large = memory_config(experts=54, hidden=2048, layers=layers)
    folders = []
    for name, config in (("small", small), ("large", large)):
        tensors = released_tensors(config, experts=experts)
        folders.append(str(write_released(tmp_path / name, config, tensors)))
    del tensors
    run = subprocess.run(
        [sys.executable, "-c", PEAK, *folders], check=True, capture_output=True, text=True
    )
    model, leaf, before, peak = map(int, run.stdout.split())
    print(f"{experts}: model {model:,}, largest leaf {leaf:,}, peak above start {peak - before:,}")
    assert model > 2e9
    assert peak - before < model + leaf + 100 * 2**20
