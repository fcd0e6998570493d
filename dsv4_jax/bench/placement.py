"""What every device of a mesh holds of a model, and the requests that it leaves room for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh

from dsv4_jax.allocator.pool_plan import PoolPlan, plan_pools
from dsv4_jax.bench.workspace import workspace_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import AXES
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.model.shardings import param_shardings
from dsv4_jax.model.weight_forms import STORED
from dsv4_jax.model.weight_sizes import bytes_by_family, walk_weights
from pallas_kernels.common.weights import weight_bytes

STEP_TOKENS = 256
"""Tokens of a data shard's largest step, as an engine has it by default."""

_MAX_DEVICES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """What one device of a mesh holds.

    Attributes:
      data: data shards.
      model: devices of a data shard.
      params: shapes of its part of the weights, layers stacked.
      pools: sizes of the cache of one request, of which every device has a part.
      workspace_bytes: an estimate of what a step takes beside weights and cache.
      max_context_tokens: longest context that the model is meant for.
      gpu_bytes: memory of the device.
    """

    data: int
    model: int
    params: DSV4Params
    pools: PoolPlan
    workspace_bytes: int
    max_context_tokens: int
    gpu_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Its part of the weights, draft block included."""
        return sum(weight_bytes(weight) for _, weight in walk_weights(self.params))

    @property
    def families(self) -> dict[str, dict[str, int]]:
        """{family: {format: bytes}} of its part of the weights."""
        return bytes_by_family(self.params)

    @property
    def missing_bytes(self) -> int:
        """What weights and a step take beyond the device's memory; 0 if they fit."""
        return max(self.weight_bytes + self.workspace_bytes - self.gpu_bytes, 0)

    @property
    def free_bytes(self) -> int:
        """What is left for a cache."""
        return max(self.gpu_bytes - self.weight_bytes - self.workspace_bytes, 0)

    def request_bytes(self, context: int) -> int:
        """Cache of one request of so many tokens, on each device of its data shard."""
        pools = self.pools
        blocks = -(-context // pools.block_tokens)
        return pools.bytes_per_slot + -(-blocks // pools.block_parts) * pools.bytes_per_block

    def requests(self, context: int) -> int:
        """Requests of so many tokens that fit each data shard."""
        return self.free_bytes // self.request_bytes(context)

    def longest_context(self) -> int:
        """Tokens of a request that is alone on its data shard; 0 if none fits."""
        pools = self.pools
        room = self.free_bytes - pools.bytes_per_slot
        if room < 0 or not pools.bytes_per_block:
            return self.max_context_tokens if room >= 0 else 0
        blocks = room // pools.bytes_per_block * pools.block_parts
        return min(blocks * pools.block_tokens, self.max_context_tokens)


def place(
    config: DSV4Config,
    *,
    data: int,
    model: int,
    gpu_bytes: int,
    context: int,
    cache_format: str | None = None,
    weights: str = STORED,
    step_tokens: int = STEP_TOKENS,
    split_cache: bool = False,
) -> Placement:
    """Places a model on a mesh; nothing is allocated.

    Args:
      config: the model.
      data: data shards.
      model: devices of a data shard.
      gpu_bytes: memory of a device.
      context: most tokens of a request.
      cache_format: name of the storage format; None is the model's own.
      weights: as of `param_shapes`.
      step_tokens: tokens of a data shard's largest step.
      split_cache: blocks are dealt over `model`; else the cache is replicated over it.

    Raises:
      ValueError: a size of the model does not divide over the mesh, or there is no such format.
    """
    if split_cache and config.sources is not None:
        raise ValueError("split_cache deals no blocks of a model whose layers share entries")
    mesh = AbstractMesh((data, model), AXES)
    shapes = param_shapes(config, weights=weights)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype),
        shapes,
        param_shardings(config, mesh, shapes),
    )
    return Placement(
        data=data,
        model=model,
        params=params,
        workspace_bytes=workspace_bytes(
            config,
            data=data,
            model=model,
            context=context,
            step_tokens=step_tokens,
            logit_rows=step_tokens,
            split_cache=split_cache,
        ),
        pools=plan_pools(
            config,
            max_requests=1,
            max_context_tokens=context,
            cache_format=cache_format,
            block_parts=model if split_cache else 1,
        ),
        max_context_tokens=config.max_position_embeddings,
        gpu_bytes=gpu_bytes,
    )


def placements_on(num_devices: int, place_model: Callable[..., Placement]) -> list[Placement]:
    """Every mesh of so many devices that a model's sizes divide over, few data shards first.

    Args:
      num_devices: devices of a mesh.
      place_model: `place` of the model, with all arguments but `data` and `model`.
    """
    placements = []
    for data in range(1, num_devices + 1):
        if num_devices % data == 0:
            with contextlib.suppress(ValueError):  # a size does not divide
                placements.append(place_model(data=data, model=num_devices // data))
    return placements


def fitting_meshes(
    place_model: Callable[..., Placement], *, max_devices: int = _MAX_DEVICES
) -> list[Placement]:
    """Meshes of the fewest devices, in powers of two, that hold a model and a block of cache.

    Args:
      place_model: as of `placements_on`.
      max_devices: the most devices to try.

    Returns:
      All of that number of devices, few data shards first; none if `max_devices` are too few.
    """
    devices = 1
    while devices <= max_devices:
        fitting = [
            placed
            for placed in placements_on(devices, place_model)
            if placed.free_bytes > placed.pools.bytes_per_slot + placed.pools.bytes_per_block
        ]
        if fitting:
            return fitting
        devices *= 2
    return []
