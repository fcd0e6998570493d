"""A checkpoint on a mesh: every device has its part of the stored bytes, and no host more."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import dsv4_jax as ds
from dsv4_jax.checkpoint import shards
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.model.released import quantized_shape
from helpers import slow
from helpers.checkpoints import random_fp8, released_tensors, write_released
from pallas_kernels.common.weights import MXFP4, BlockFP8, decode_weight
from tools.meshes import harness

pytestmark = pytest.mark.unoptimised

CSA, HASH, LEARNED = ds.AttentionType.CSA, ds.RouterType.HASH, ds.RouterType.LEARNED
CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(ds.AttentionType.SWA, CSA, CSA),
    router_types=(HASH, LEARNED, LEARNED),
    hidden_size=256,
    num_attention_heads=8,
    head_dim=128,
    q_lora_rank=128,
    o_groups=8,
    o_lora_rank=128,
    moe_intermediate_size=1024,
    num_routed_experts=16,
    num_mtp_layers=1,
)
"""Eight devices split it without cutting a block of scales."""
ONE_LAYER = dataclasses.replace(
    CONFIG, layer_types=(CSA,), router_types=(LEARNED,), num_mtp_layers=0
)
"""With fewer leaves, each of which compiles for each device."""
STAGES = dataclasses.replace(
    ONE_LAYER,
    dspark=DSparkConfig(
        block_size=3, markov_rank=8, noise_token_id=9, target_layers=(0,), num_stages=2
    ),
)


def start(folder, *arguments, processes=1):
    command = [sys.executable, "-m", "tools.meshes.on_cpus", "load", str(folder)]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=os.environ | harness.environment_of(harness.DEVICES // processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "experts", "meshes"),
    slow.all_but(
        [(ONE_LAYER, "fp4", "2x2")],
        [
            (ONE_LAYER, "fp4", "2x2"),
            (CONFIG, "fp4", "1x1 1x2 1x8 2x4 4x2 8x1"),
            (CONFIG, "fp8", "1x8 4x2"),
            (STAGES, "fp4", "1x1 2x2 1x8 8x1"),
        ],
    ),
)
def test_parts_together_are_the_parameters_of_one_device(tmp_path, config, experts, meshes):
    folder = write_released(tmp_path, config, released_tensors(config, experts=experts))
    wrong = result(start(folder, *meshes.split()))
    assert wrong == {mesh: [] for mesh in meshes.split()}


@pytest.mark.parametrize("weight_format", [BlockFP8, MXFP4])
def test_a_part_of_a_quantised_weight_is_a_part_of_its_bytes(weight_format):
    """Outputs 128..384 and inputs 256..512: what is cut is decoded to what is decoded and cut."""
    rng, shape = np.random.default_rng(0), (512, 512)
    part = slice(128, 384), slice(256, 512)
    if weight_format is BlockFP8:
        arrays = random_fp8(rng, shape).view(jnp.float8_e4m3fn), scales(rng, (4, 4))
    else:
        arrays = rng.integers(0, 256, (512, 256), dtype=np.uint8), scales(rng, (512, 16))
    wanted = quantized_shape(weight_format, shape, jnp.bfloat16)
    cut = shards.cut_stored(wanted, arrays, part)
    assert all(np.shares_memory(some, whole) for some, whole in zip(cut, arrays, strict=True))
    np.testing.assert_array_equal(decode(wanted, cut), decode(wanted, arrays)[part])
    expected = quantized_shape(weight_format, (256, 256), jnp.bfloat16)
    assert shards.part_shape(wanted, part) == expected


def scales(rng, shape):
    return rng.integers(120, 130, shape, dtype=np.uint8)


def decode(wanted, arrays):
    def decoded(codes, scale):
        if isinstance(wanted, MXFP4):
            return decode_weight(MXFP4.from_stored(codes, scale, dtype="bfloat16"))
        return decode_weight(dataclasses.replace(wanted, codes=codes, scale=scale))

    return np.asarray(jax.jit(decoded)(*arrays))


@pytest.mark.parametrize("weight_format", [BlockFP8, MXFP4])
def test_a_block_of_scales_is_not_cut(weight_format):
    wanted = quantized_shape(weight_format, (512, 512), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"must begin at a multiple of .*32\.\.512; take another"):
        shards.part_shape(wanted, (slice(32, 512), slice(0, 512)))


@pytest.mark.parametrize(
    ("change", "mesh", "message"),
    [
        ({"num_routed_experts": 12}, (8, 1), "num_routed_experts=12 .*data=8 and model=1"),
        ({"num_attention_heads": 4, "o_groups": 4}, (1, 8), "num_attention_heads=4 .*model=8"),
        ({"moe_intermediate_size": 512}, (1, 8), "shared_w1=512 .*in blocks of 128, got model=8"),
        ({"o_lora_rank": 64}, (1, 8), "wo_a=512 .*in blocks of 128, got model=8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, change, mesh, message
):
    config = dataclasses.replace(ONE_LAYER, **change)
    folder = write_released(tmp_path, config, released_tensors(config))
    monkeypatch.setattr(shards.ShardedStack, "__init__", None)
    with pytest.raises(ValueError, match=message):
        ds.load_checkpoint(folder, mesh=AbstractMesh(mesh, ("data", "model")), progress=False)


@pytest.mark.parametrize("mesh", [3, "4x2", AbstractMesh((1, 1), ("data", "model"))])
def test_what_is_no_mesh_of_devices_is_refused(tmp_path, mesh):
    folder = write_released(tmp_path, ONE_LAYER, released_tensors(ONE_LAYER))
    with pytest.raises(ValueError, match=r"^mesh must "):
        ds.load_checkpoint(folder, mesh=mesh, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_holds_its_devices_parts_and_one_tensor(tmp_path, processes):
    """Experts of 400 MB: of two processes, each takes the memory of half of them."""
    config = dataclasses.replace(
        CONFIG, hidden_size=512, num_routed_experts=128, layer_types=(CSA,) * 4,
        router_types=(LEARNED,) * 4, num_mtp_layers=0,
    )  # fmt: skip
    folder = write_released(tmp_path, config, released_tensors(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        start(folder, "4x2", "--memory", "--process", number, processes, port, processes=processes)
        for number in range(processes)
    ]
    for found in [result(process) for process in started]:
        assert found["zeros"] == 0
        assert found["own"] < found["all"] * (2 if processes == 1 else 0.7)
        assert found["grown"] < found["own"] + found["largest_part"] + 2**25
        assert found["grown"] > found["own"] / 2  # it is measured at all
