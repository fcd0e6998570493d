"""The benchmark of drafts on a mesh: the model there, and one point."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from dsv4_jax.bench.mesh_step import on_every_shard, param_shapes_on, shapes_on_every_shard
from dsv4_jax.bench.round_case import RoundCase
from dsv4_jax.bench.round_programs import Model
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.snapshots import SnapshotStore
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import mesh_sizes, shardings_of
from dsv4_jax.model.params import DSV4Params, param_shapes, unstack_layers
from dsv4_jax.peers import make_peer_buffers


class RandomModel:
    """A model with DSpark stages on one device or a mesh, before and after its weights are made.

    Attributes:
      shapes: with shapes in the place of parameters.
    """

    def __init__(self, config: DSV4Config, mesh: Mesh | None, *, weights: str) -> None:
        """Allocates the peer buffers, if the mesh has some, and nothing else.

        Args:
          config: with `dspark`.
          mesh: the devices; None is one.
          weights: what the parameters are, as in `param_shapes`.
        """
        self._mesh, self._weights, self._peers = mesh, weights, None
        if mesh is None:
            self.shapes = Model(config, unstack_layers(param_shapes(config, weights=weights)))
            return
        self._peers = make_peer_buffers(mesh)
        shapes = param_shapes_on(mesh, config, weights=weights, peers=self._peers)
        self.shapes = Model(config, shapes)

    def make(self, routing: str) -> Model:
        """The model with random parameters, whose tokens pick experts by that law."""
        config = self.shapes.config
        made = random_params(config, weights=self._weights, mesh=self._mesh, routing=routing)
        made = dataclasses.replace(jax.block_until_ready(made), peers=self._peers)
        return Model(config, made)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRoundCase(RoundCase):
    """One point on a mesh: caches of all data shards have equal contents, requests say their own.

    Attributes:
      mesh: the devices; `batch`, of all of them together, divides over its data shards.
    """

    mesh: Mesh

    @property
    def mesh_sizes(self) -> tuple[int, int]:
        """Data shards, and devices of each."""
        return mesh_sizes(self.mesh)

    @property
    def local_devices(self) -> int:
        """Devices of this process that run it."""
        return len(self.mesh.local_devices)

    def placed[T](self, tree: T) -> T:
        """Arrays of all requests on the mesh."""
        return jax.device_put(tree, shardings_of(tree, self.mesh))

    def device_params(self, params: DSV4Params) -> DSV4Params:
        """The shapes of what a device holds of parameters on the mesh, or of their shapes."""

        def part(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)

        return jax.tree.map(part, dataclasses.replace(params, peers=None))

    def cache_shapes(self, config: DSV4Config) -> ModelCache:
        """What `fill` makes, as shapes on the mesh."""
        return shapes_on_every_shard(self._of_a_shard().cache_shapes(config), self.mesh)

    def fill(self, config: DSV4Config) -> ModelCache:
        """A cache on the mesh, full up to `lengths`."""
        cache = on_every_shard(self._of_a_shard().fill(config), self.mesh)
        return jax.block_until_ready(cache)

    def store_shapes(self, cache: ModelCache) -> SnapshotStore:
        """What `store` makes, as shapes on the mesh, of those of a cache."""
        shapes = super().store_shapes(cache)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            shardings_of(shapes, self.mesh),
        )

    def _of_a_shard(self) -> RoundCase:
        """The requests of one data shard, on one device."""
        fields: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(RoundCase)
        }
        fields["batch"] = self.batch // self.mesh_sizes[0]
        return RoundCase(**fields)
