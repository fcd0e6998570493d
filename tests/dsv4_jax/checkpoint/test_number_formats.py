"""Checkpoints in several dtypes, and weights in FP8 and FP4."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import dsv4_jax as ds
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.write_json import write_config
from helpers import page_reader, slow
from helpers.checkpoints import problems_of, random_fp8, random_scale
from helpers.saved_checkpoint import (
    SAVED,
    assert_same,
    load,
    random_params,
    released_names,
    saved_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.unoptimised


@pytest.mark.parametrize(
    ("stored", "dtype"),
    slow.all_but(
        [(ml_dtypes.bfloat16, jnp.float32), (np.float32, jnp.float16), (np.float16, jnp.bfloat16)],
        list(
            itertools.product(
                [ml_dtypes.bfloat16, np.float16, np.float32],
                [jnp.bfloat16, jnp.float16, jnp.float32],
            )
        ),
    ),
)
def test_dtypes(tmp_path, fixture_params, stored, dtype):
    """Matrices come in the dtype asked for; what is f32 in the release stays f32."""
    float32 = re.compile(r"hc_|\.ape$|attn_sink$|gate\.bias$")
    tensors = {
        name: array.astype(stored)
        if array.dtype == np.float32 and not float32.search(name)
        else array
        for name, array in saved_tensors().items()
    }
    _, params = load(write_checkpoint(tmp_path / "x", tensors), dtype)
    shapes = ds.model.param_shapes(fixture_params[0], jnp.bfloat16)

    def expected(leaf, shape):
        leaf = np.asarray(leaf)
        return leaf.astype(stored).astype(dtype) if shape.dtype == jnp.bfloat16 else leaf

    assert_same(params, jax.tree.map(expected, fixture_params[1], shapes))
    assert params.dtype == dtype
    assert params.hc_head.fn.dtype == jnp.float32
    assert params.layers["swa_hash"].ffn.tid2eid.dtype == jnp.int32


QUANTISED = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(AttentionType.SWA,),
    router_types=(RouterType.LEARNED,),
    hidden_size=176,  # neither 128 nor 32 divides it
    moe_intermediate_size=160,
    q_lora_rank=136,
    num_routed_experts=2,
    num_experts_per_token=1,
    num_mtp_layers=0,
)
FP8_NAMES = {"attn.wq_a": "wq_a", "attn.wq_b": "wq_b", "attn.wkv": "wkv", "attn.wo_b": "wo_b"}


@pytest.fixture(scope="module")
def unquantised(tmp_path_factory):
    """f32 tensors of QUANTISED in DeepSeek's names."""
    folder = tmp_path_factory.mktemp("unquantised")
    ds.save_checkpoint(QUANTISED, random_params(QUANTISED), folder)
    saved = safetensors.numpy.load_file(folder / "model.safetensors")
    return released_names(saved, num_layers=1, num_experts=2)


def scale_value(scale):
    """f64; UE8M0 by its bits."""
    if scale.dtype == np.float32:
        return scale.astype(np.float64)
    return page_reader.ue8m0_values(scale.view(np.uint8))


def slow_fp8(codes, scale):
    values, scale = np.empty(codes.shape), scale_value(scale)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            values[i, j] = page_reader.E4M3[codes[i, j]] * scale[i // 128, j // 128]
    return values.astype(np.float32)  # a product of 4 and 24 bits is exact in f64


def slow_fp4(pairs, scale):
    values, scale = np.empty((pairs.shape[0], 2 * pairs.shape[1])), scale_value(scale)
    for i in range(pairs.shape[0]):
        for j in range(values.shape[1]):
            code = pairs[i, j // 2] >> 4 if j % 2 else pairs[i, j // 2] & 15
            values[i, j] = page_reader.E2M1[code] * scale[i, j // 32]
    return values.astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    slow.all_but(
        [("UE8M0", "scale"), ("F32", "weight_scale_inv")],
        list(itertools.product(["UE8M0", "F32"], ["scale", "weight_scale_inv"])),
    ),
)
def test_fp8_blocks(tmp_path, unquantised, kind, suffix):
    rng = np.random.default_rng(7)
    tensors, expected = dict(unquantised), {}
    for name, leaf in FP8_NAMES.items():
        out, into = tensors[f"layers.0.{name}.weight"].shape
        codes = random_fp8(rng, (out, into))
        scale = random_scale(rng, (-(-out // 128), -(-into // 128)), kind)
        tensors[f"layers.0.{name}.weight"] = codes.view(ml_dtypes.float8_e4m3fn)
        tensors[f"layers.0.{name}.{suffix}"] = scale
        expected[leaf] = slow_fp8(codes, scale)
    assert any(array.shape[0] > 128 and array.shape[1] > 128 for array in expected.values())
    folder = write_checkpoint(tmp_path / "x", tensors, write_config(QUANTISED))
    attn = load(folder, weights="float32")[1].layers["swa_learned"].attn
    for leaf, values in expected.items():
        np.testing.assert_array_equal(np.asarray(getattr(attn, leaf))[0], values)
    rounded = load(folder, jnp.bfloat16, "bfloat16")[1].layers["swa_learned"].attn
    for leaf, values in expected.items():
        np.testing.assert_array_equal(
            np.asarray(getattr(rounded, leaf))[0], values.astype(jnp.bfloat16)
        )


@pytest.mark.parametrize("packed", [np.int8, np.uint8])
def test_packed_fp4_experts(tmp_path, unquantised, packed):
    rng = np.random.default_rng(8)
    tensors = dict(unquantised)
    expected = {w: [] for w in ("w1", "w2", "w3")}
    for expert in range(2):
        for w in expected:
            name = f"layers.0.ffn.experts.{expert}.{w}"
            out, into = tensors[f"{name}.weight"].shape
            pairs = rng.integers(0, 256, (out, into // 2), dtype=np.uint8)
            scale = random_scale(rng, (out, -(-into // 32)), "UE8M0")
            tensors |= {f"{name}.weight": pairs.view(packed), f"{name}.scale": scale}
            expected[w].append(slow_fp4(pairs, scale))
    folder = write_checkpoint(tmp_path / "x", tensors, write_config(QUANTISED))
    ffn = load(folder, weights="float32")[1].layers["swa_learned"].ffn
    for w, values in expected.items():
        np.testing.assert_array_equal(np.asarray(getattr(ffn, w))[0], np.stack(values))


def test_quantised_weights_that_do_not_fit(tmp_path, unquantised):
    e4m3, f32 = ml_dtypes.float8_e4m3fn, np.float32
    wq_a, wkv = (unquantised[f"layers.0.attn.{name}.weight"] for name in ("wq_a", "wkv"))
    expert = unquantised["layers.0.ffn.experts.0.w1.weight"]
    tensors = unquantised | {
        "layers.0.attn.wq_a.weight": wq_a.astype(e4m3),  # without a scale
        "layers.0.attn.wkv.weight": wkv.astype(e4m3),
        "layers.0.attn.wkv.scale": np.ones((2, 1), f32),
        "layers.0.attn_norm.weight": np.ones(176, e4m3),
        "layers.0.attn_norm.scale": np.ones((1, 1), f32),
        "layers.0.attn.wo_b.scale": np.ones((2, 1), f32),  # of a weight that is not quantised
        "layers.0.ffn.experts.0.w1.weight": np.zeros((len(expert), 88), np.int8),
    }
    folder = write_checkpoint(tmp_path / "x", tensors, write_config(QUANTISED))
    assert problems_of(folder, dtype=jnp.float32) == [
        "missing: scale of layers.0.attn.wq_a.weight, which is float8_e4m3fn",
        "missing: scale of layers.0.ffn.experts.0.w1.weight, which is int8",
        "unexpected: layers.0.attn.wo_b.scale [2, 1]",
        "wrong dtype: layers.0.attn_norm.weight, which is float8_e4m3fn",
        "wrong shape: scale of layers.0.attn.wkv.weight must be [1, 2], is [2, 1]",
    ]


@pytest.mark.parametrize("dtype", [np.int32, np.float64, "float8_e4m3fn"])
def test_dtype_that_parameters_cannot_have(dtype):
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16, got"):
        load(SAVED, dtype)
