"""What must be equal for an engine to go on with what another process has written to a disk."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax
from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.serving.device.request_rows import engine_shape
from dsv4_jax.serving.sizing import EnginePlan
from pallas_kernels.common.checksums import mix_bits

_VERSION = "1"
"""Of what pages hold, within a version of the package; another one makes all files misses."""


def open_disk(plan: EnginePlan, params: DSV4Params) -> DiskTier | None:
    """The tier of an engine's options, if they name a directory.

    Raises:
      ValueError: others can write to the directory, or it is none.
      OSError: it cannot be made or read.
    """
    options = plan.options
    if options.disk_cache_dir is None or not plan.pools.num_snapshots:
        return None
    max_bytes = options.disk_cache_bytes
    assert isinstance(max_bytes, int)
    return DiskTier(options.disk_cache_dir, max_bytes, disk_shape(plan, params))


def disk_shape(plan: EnginePlan, params: DSV4Params) -> Mapping[str, str]:
    """By name: the model, its weights, the cache's format, the mesh, and what computes."""
    device = next(iter(jax.tree.leaves(params)[0].devices()))
    return engine_shape(plan) | {
        "version": f"{dsv4_jax.__version__} {_VERSION}",
        "jax": jax.__version__,
        "device": device.device_kind,
        "weights": weights_digest(params),
    }


def weights_digest(params: DSV4Params) -> str:
    """A hash of every weight, of which the devices compute a checksum each, where they lie.

    Of the Engram tables it has a part, since their files may be larger than the host's memory.
    """
    told = hashlib.blake2b(digest_size=16)
    if params.engram is not None:
        told.update(params.engram.digest())
    plain = dataclasses.replace(params, peers=None, engram=None)
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain):
        told.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} ".encode())
        told.update(np.asarray(_sums(leaf)).tobytes())
    return told.hexdigest()


@jax.jit
def _sums(leaf: Any) -> jax.Array:
    """u32[2], of an array's bits and their places; nothing is moved, however it is split."""
    bits = jax.lax.bitcast_convert_type(leaf, np.dtype(f"u{leaf.dtype.itemsize}"))
    position = jnp.ones(leaf.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(leaf.ndim)):
        steps = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        position += steps * np.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    mixed = [
        mix_bits(bits.astype(jnp.uint32) ^ (position * np.uint32(one)))
        for one in (0x9E3779B1, 0x85EBCA77)
    ]
    return jnp.stack([jnp.sum(one, dtype=jnp.uint32) for one in mixed])
