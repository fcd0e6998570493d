import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.collectives import COMPILED_EXCHANGES, COMPILED_SUMS, SECOND_WIDTH
from helpers import slow
from pallas_kernels import gpu_interpreter
from pallas_kernels.common.pending import SplitSums
from pallas_kernels.peer_collectives import (
    PeerLayout,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    triton_gpu,
)

AXIS = "devices"
TESTS = pathlib.Path(__file__).parents[2]


def on_devices(op, x, **options):
    """`op` of x[d] on device d, for the devices of an axis that `vmap` stands in for."""

    def call(one):
        if op is all_gather:
            return op(one, axis_name=AXIS, **options)[0]
        return op(one, AXIS, **options)

    return np.asarray(jax.jit(jax.vmap(call, axis_name=AXIS))(x))


def values(*shape):
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(jnp.bfloat16)


def in_order(parts):
    """[n, ...] added in f32, in order, rounded once."""
    total = np.asarray(parts[0], np.float32)
    for part in parts[1:]:
        total = total + np.asarray(part, np.float32)
    return total.astype(jnp.bfloat16)


@pytest.mark.parametrize("rows", slow.all_but([4], [1, 4, 2048]))
def test_the_references_add_in_order(rows):
    x = values(4, rows, 512)
    found = on_devices(all_reduce, x)
    np.testing.assert_array_equal(found, np.stack([in_order(x)] * 4))
    parts = values(4, 4, rows, 64)
    np.testing.assert_array_equal(
        on_devices(reduce_scatter, parts), np.stack([in_order(parts[:, d]) for d in range(4)])
    )


def test_the_references_that_move():
    x = values(4, 4, 8)
    np.testing.assert_array_equal(on_devices(all_to_all, x), np.swapaxes(x, 0, 1))
    np.testing.assert_array_equal(on_devices(all_gather, x[0]), np.stack([x[0]] * 4))


def test_arrays_of_several_dtypes_are_gathered_in_one():
    rng = np.random.default_rng(0)
    rows, codes = values(3, 5, 8), rng.integers(0, 256, (3, 5, 4)).astype(np.uint8)
    ids = rng.integers(-1, 1 << 30, (3, 5, 2)).astype(np.int32)
    for arrays in ((rows,), (rows, ids), (codes, rows, ids)):
        each_device = jax.vmap(lambda *each: all_gather(*each, axis_name=AXIS), axis_name=AXIS)
        gathered = jax.jit(each_device)
        for found, given in zip(gathered(*arrays), arrays, strict=True):
            np.testing.assert_array_equal(found, np.stack([given] * 3))


def test_a_kernel_that_gathers_is_given_whole_lines(monkeypatch):
    """One row's experts and their weights are 24 bytes each."""
    lines = []

    def exchange(arrays, buffer, layout):
        lines.extend(x.nbytes / 16 for x in arrays)
        return [jax.lax.all_gather(x[0], AXIS) for x in arrays]

    monkeypatch.setattr(triton_gpu, "exchange", exchange)
    rng = np.random.default_rng(0)
    arrays = [values(2, 1, 64), rng.integers(0, 9, (2, 1, 6), np.int32), values(2, 1, 6)]

    def gather(*each):
        buffer = jnp.zeros(PeerLayout(2, 1024).num_words, jnp.int32)
        return all_gather(*each, axis_name=AXIS, buffer=buffer, backend="triton_gpu")

    with gpu_interpreter():
        gathered = jax.jit(jax.vmap(gather, axis_name=AXIS))(*arrays)
    for found, given in zip(gathered, arrays, strict=True):
        np.testing.assert_array_equal(found, np.stack([given] * 2))
    assert lines == [8, 2, 1]


def test_plus_is_added_and_rounded_first():
    x, plus = values(3, 5, 16), values(3, 5, 16) * 3
    add = jax.vmap(lambda a, b: all_reduce(a, AXIS, plus=b), axis_name=AXIS)
    found = jax.jit(add)(x, plus)
    np.testing.assert_array_equal(found, np.stack([in_order(x + plus)] * 3))
    with pytest.raises(ValueError, match=r"plus must be bfloat16\[5, 16\]"):
        jax.vmap(lambda a: all_reduce(a, AXIS, plus=a[1:]), axis_name=AXIS)(x)


def test_parts_are_added_and_rounded_first():
    rng = np.random.default_rng(0)
    parts, plus = rng.normal(size=(3, 4, 5, 16)).astype(np.float32), values(3, 5, 16)

    def add(parts, plus):
        return all_reduce(SplitSums(parts, plus.dtype), AXIS, plus=plus)

    found = jax.jit(jax.vmap(add, axis_name=AXIS))(parts, plus)
    rounded = jnp.sum(parts, axis=1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, np.stack([in_order(np.asarray(rounded) + plus)] * 3))


@pytest.mark.slow
def test_of_scattered_sums_too():
    rng = np.random.default_rng(1)
    parts, plus = rng.normal(size=(3, 4, 3, 16)).astype(np.float32), values(3, 3, 16)

    def add(parts, plus):
        return reduce_scatter(SplitSums(parts, plus.dtype), AXIS, plus=plus)

    found = jax.vmap(add, axis_name=AXIS)(parts, plus)
    rounded = np.asarray(jnp.sum(parts, axis=1).astype(jnp.bfloat16)) + plus
    np.testing.assert_array_equal(found, np.stack([in_order(rounded[:, d]) for d in range(3)]))
    with pytest.raises(ValueError, match=r"plus must be bfloat16\[3, 16\] as x"):
        jax.vmap(lambda a: reduce_scatter(a, AXIS, plus=a[1:]), axis_name=AXIS)(plus)


@pytest.mark.parametrize("devices", [2, 5, 8])
def test_fields_of_a_buffer_follow_each_other(devices):
    layout = PeerLayout(devices, 256)
    sums, exchanges = layout.turns
    assert sums == 256
    assert exchanges - sums == 256 * 4
    assert layout.slots[0] - exchanges == devices * 256 * 4
    assert layout.slots[1] - layout.slots[0] == 2 * devices * 256 * 16
    assert layout.num_words * 4 - layout.slots[1] == 2 * devices * 256 * 16
    assert layout.slots[0] % 16 == 0
    assert PeerLayout.of(devices, layout.num_words) == layout
    assert PeerLayout(devices).num_words < 1 << 26


def test_a_header_has_addresses_of_64_bits():
    addresses = [0x7F00_0000_0100, 0x7F12_3456_7800]
    words = PeerLayout(2, 128).header(1, addresses).view(np.uint64)
    assert words[:4].tolist() == [addresses[1], 1, *addresses]


def test_bad_input_is_refused():
    x, buffer = values(2, 2, 8), jnp.zeros(PeerLayout(2, 128).num_words, jnp.int32)
    with pytest.raises(ValueError, match="a part for each device"):
        on_devices(reduce_scatter, values(2, 3, 8))
    with pytest.raises(ValueError, match="buffer must have"):
        on_devices(all_reduce, x, buffer=buffer[1:])
    for op in (all_reduce, all_gather, all_to_all, reduce_scatter):
        with pytest.raises(NotImplementedError, match="needs a peer buffer"):
            on_devices(op, x, backend="triton_gpu")
        with pytest.raises(ValueError, match="backend must be one of"):
            on_devices(op, x, backend="triton-gpu", buffer=buffer)
        found = on_devices(op, x, backend="reference", buffer=buffer)
        np.testing.assert_array_equal(found, on_devices(op, x))
    with pytest.raises(NotImplementedError, match="adds bfloat16"):
        on_devices(all_reduce, x.astype(jnp.float32), buffer=buffer, backend="triton_gpu")
    with pytest.raises(NotImplementedError, match="up to 2048 to each device, got 4096"):
        on_devices(all_gather, values(2, 2048), buffer=buffer, backend="triton_gpu")
    with pytest.raises(NotImplementedError, match="multiple of 16 bytes"):
        on_devices(all_to_all, values(2, 2, 4), buffer=buffer, backend="triton_gpu")
    for wrong in ({"devices": 1}, {"devices": 9}, {"devices": 2, "lines": 100}):
        with pytest.raises(ValueError, match="must be"):
            PeerLayout(**wrong)


def test_without_gpus_a_buffer_changes_nothing():
    x, buffer = values(2, 2, 8), jnp.zeros(PeerLayout(2, 128).num_words, jnp.int32)
    found = on_devices(all_reduce, x, buffer=buffer)
    np.testing.assert_array_equal(found, on_devices(all_reduce, x))


@pytest.mark.gpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_kernels_on_all_meshes_of_the_gpus():
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = {"PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "tools.meshes.on_gpus", "peers"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for rows in json.loads(done.stdout.splitlines()[-1]).values():
        assert all(differ == 0 and count > 0 for differ, count in rows.values())


def _sum_case(devices, parts, size, terms, split):
    layout, dtype = PeerLayout(devices), jnp.bfloat16

    def call(buffer, *terms):
        first, *others = terms
        first = SplitSums(first, jnp.dtype(dtype)) if split else first
        return triton_gpu.add_up([first, *others], buffer, layout)

    specs = [jax.ShapeDtypeStruct((layout.num_words,), jnp.int32)]
    specs += [jax.ShapeDtypeStruct((parts, size), dtype)] * terms
    if split:
        specs[1] = jax.ShapeDtypeStruct((split, parts, size), jnp.float32)
    of = f", the first in {split}" if split else ""
    return (f"sum of {devices}, {terms}x{parts}x{size}{of}", call, specs)


def _exchange_case(devices, parts, size, dtype):
    layout, dtype = PeerLayout(devices), jnp.dtype(dtype)

    def call(buffer, x):
        return triton_gpu.exchange([x, x[:, :SECOND_WIDTH]], buffer, layout)

    specs = [
        jax.ShapeDtypeStruct((layout.num_words,), jnp.int32),
        jax.ShapeDtypeStruct((parts, size), dtype),
    ]
    return (f"exchange of {devices}, {dtype.name}[{parts}, {size}]", call, specs)


AOT_CASES = [
    *(_sum_case(*case) for case in COMPILED_SUMS),
    *(_exchange_case(*case) for case in COMPILED_EXCHANGES),
]
