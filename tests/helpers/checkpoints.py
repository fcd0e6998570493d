"""Checkpoints written and read byte by byte, and random ones with quantised weights."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint.names import all_targets
from dsv4_jax.config.write_json import write_config
from dsv4_jax.model import param_shapes
from dsv4_jax.model.released import released_format
from pallas_kernels.common.weights import MXFP4

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}


def write_tensors(file, tensors):
    """The format by its description: length and JSON of the header, then all bytes."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def read_tensors(*files):
    """Dtype, shape and bytes of every tensor, by the format's description."""
    tensors = {}
    for file in files:
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                assert name not in tensors
                body = data[start + begin : start + end]
                tensors[name] = entry["dtype"], tuple(entry["shape"]), body
    return tensors


def random_fp8(rng, shape):
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)  # no NaN


def random_scale(rng, shape, kind):
    if kind == "F32":
        return rng.uniform(1e-3, 3, shape).astype(np.float32)
    codes = rng.integers(121, 136, shape, dtype=np.uint8)  # within 2^14, which kernels hold exactly
    return codes.view(ml_dtypes.float8_e8m0fnu)


def released_tensors(config, *, scales="UE8M0", experts="fp4", dtype=jnp.bfloat16, seed=0):
    """A random checkpoint as DeepSeek releases one, in its names.

    Args:
      config: the model.
      scales: "UE8M0" or "F32", of FP8 weights; those of FP4 are UE8M0.
      experts: "fp4" or "fp8".
      dtype: of weights that are released as BF16.
      seed: of all draws.
    """
    rng, tensors = np.random.default_rng(seed), {}
    shapes = param_shapes(config, dtype)
    for name, target in all_targets(config, shapes).items():
        weight_format, shape = released_format(target.leaf), target.shape
        scale_name = name.replace(".weight", ".scale")
        if target.is_hash_table:
            tensors[name] = rng.integers(0, config.num_routed_experts, shape)
        elif weight_format is None:
            f32 = name.endswith((".ape", "attn_sink", "gate.bias")) or "hc_" in name
            values = rng.standard_normal(shape, np.float32)
            tensors[name] = values if f32 else values.astype(dtype)
        elif weight_format is MXFP4 and experts == "fp4":
            out, into = shape
            pairs = rng.integers(0, 256, (out, into // 2), dtype=np.uint8)
            tensors[name] = pairs.view(np.int8)
            tensors[scale_name] = random_scale(rng, (out, -(-into // 32)), "UE8M0")
        else:
            out, into = shape
            tensors[name] = random_fp8(rng, shape).view(ml_dtypes.float8_e4m3fn)
            blocks = -(-out // config.weight_block), -(-into // config.weight_block)
            tensors[scale_name] = random_scale(rng, blocks, scales)
    return tensors


def write_released(folder, config, tensors):
    """A directory with these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(write_config(config)))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def save_first_layer(folder):
    """Random weights of the shipped checkpoint's first layer, with its tokenizer."""
    shipped = pathlib.Path(ds.SHIPPED_CHECKPOINT)
    whole, _ = ds.load_checkpoint(shipped)
    config = dataclasses.replace(
        whole,
        layer_types=whole.layer_types[:1],
        router_types=whole.router_types[:1],
        num_mtp_layers=0,
        dspark=None,
    )
    params = ds.init_params(config, jax.random.key(3), dtype=jnp.bfloat16)  # draws no stop
    ds.save_checkpoint(config, params, folder)
    shutil.copy(shipped / "tokenizer.json", folder)


def problems_of(folder, **options):
    """What `load_checkpoint` lists of a checkpoint that does not fit its config, sorted."""
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as caught:
        ds.load_checkpoint(folder, progress=False, **options)
    return sorted(line.strip() for line in str(caught.value).splitlines()[1:])
