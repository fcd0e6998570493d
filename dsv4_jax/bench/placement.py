"""What every device of a mesh holds of a model, and the requests that it leaves room for."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh

from dsv4_jax.bench.engine_bytes import EngineBytes, engine_bytes
from dsv4_jax.cache.schema import FormatName, blocks_of
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.kinds import MAX_I32
from dsv4_jax.mesh import AXES
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.model.shardings import param_shardings
from dsv4_jax.model.weight_forms import STORED
from dsv4_jax.model.weight_sizes import bytes_by_family, walk_weights
from dsv4_jax.serving.options import MAX_REQUESTS, EngineOptions
from pallas_kernels.common.weights import weight_bytes

_MAX_DEVICES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """What one device of a mesh holds.

    Attributes:
      config: the model.
      data: data shards.
      model: devices of a data shard.
      params: shapes of its part of the weights, layers stacked.
      options: those of an engine, whose requests are spread over the data shards.
      gpu_bytes: memory of the device.
      given_weight_bytes: what its weights take, if that is not counted.
    """

    config: DSV4Config
    data: int
    model: int
    params: DSV4Params
    options: EngineOptions
    gpu_bytes: int
    given_weight_bytes: int | None = None

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Its part of the weights, draft included."""
        if self.given_weight_bytes is not None:
            return self.given_weight_bytes
        return sum(weight_bytes(weight) for _, weight in walk_weights(self.params))

    @property
    def families(self) -> dict[str, dict[str, int]]:
        """{family: {format: bytes}} of its part of the weights."""
        return bytes_by_family(self.params)

    def beside(self, requests: int, context: int | None = None) -> EngineBytes:
        """What an engine for so many requests of each data shard takes beside the weights.

        Args:
          requests: of a data shard, at least 1.
          context: most tokens of a request; None is that of the options.
        """
        context = self.options.max_context_tokens if context is None else context
        options = self.options.changed(
            max_requests=requests * self.data, max_context_tokens=context
        )
        return engine_bytes(self.config, options, data=self.data, model=self.model)

    def holds(self, requests: int, context: int | None = None) -> bool:
        """Whether the device has room for that, and for the weights."""
        return self.weight_bytes + self.beside(requests, context).total_bytes <= self.gpu_bytes

    @property
    def missing_bytes(self) -> int:
        """What weights and a step take beyond the device's memory; 0 if they fit."""
        one = self.beside(1)
        needed = self.weight_bytes + one.total_bytes - one.cache_bytes
        return max(needed - self.gpu_bytes, 0)

    @functools.cached_property
    def requests(self) -> int:
        """The most requests that fit each data shard, of all that an engine may have."""
        blocks = blocks_of(self.config, self.options.max_context_tokens) + self.model
        most = min(MAX_REQUESTS // self.data, MAX_I32 // blocks)
        if self.options.prefill_tokens is not None:  # a step holds a token of every request
            most = min(most, max(self.options.prefill_tokens))
        return largest(self.holds, most)

    def longest_context(self) -> int:
        """Tokens of a request that is alone on its data shard; 0 if none fits."""
        longest, block = self.config.max_position_embeddings, self.config.block_tokens
        blocks = largest(
            lambda count: self.holds(1, min(count * block, longest)), -(-longest // block)
        )
        return min(blocks * block, longest)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, where all smaller ones do; 0 if none."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def place(
    config: DSV4Config,
    *,
    data: int,
    model: int,
    gpu_bytes: int,
    context: int,
    cache_format: FormatName | None = None,
    weights: str = STORED,
    draft_tokens: int = 0,
    prefill_tokens: Sequence[int] | None = None,
    split_cache: bool = False,
    given_weight_bytes: int | None = None,
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
      draft_tokens: drafts that an engine checks in a step.
      prefill_tokens: sizes of its steps with prompts; None is the engine's own.
      split_cache: blocks are dealt over `model`; else the cache is replicated over it.
      given_weight_bytes: what the weights of a device take; None counts them.

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
        config=config,
        data=data,
        model=model,
        params=params,
        options=EngineOptions(
            max_context_tokens=context,
            cache_format=cache_format,
            draft_tokens=draft_tokens,
            prefill_tokens=prefill_tokens,
            split_cache=split_cache,
        ),
        gpu_bytes=gpu_bytes,
        given_weight_bytes=given_weight_bytes,
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
            if placed.holds(1, placed.config.block_tokens)
        ]
        if fitting:
            return fitting
        devices *= 2
    return []
