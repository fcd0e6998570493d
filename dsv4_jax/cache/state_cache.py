"""StateCachePool: what a request keeps besides blocks, one slot for its lifetime.

Most pools are of an attention type. Where layers share entries, tokens that wait for others of
their entry are a pool of the entries' family, since fewer layers have them than have a window; and
where a model has Engram tables, so are the last token ids, which n-grams look back to.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.cache.filled import filled
from dsv4_jax.cache.paged_cache import zeros
from dsv4_jax.cache.schema import Families, FamilyKind, LayerCacheSchema
from pallas_kernels.common.addressing import drop_absent
from pallas_kernels.common.codecs import Planes

TOKEN_IDS = "token ids"
"""Family of the last token ids, where a model has Engram tables."""
_NO_TOKENS = np.asarray([[-np.inf], [0.0], [0.0]], np.float32)
"""What a running softmax starts with: `pallas_kernels.compressor.pooling.empty_pool`."""


@flax.struct.dataclass(kw_only=True)
class StateCachePool:
    """The window ring and the compressor states of the layers of one attention type.

    What a slot's rows mean follows from its length: the token at position p is in ring row p % W
    and tail row p % (2 * M). Nothing else says which rows are live.

    Attributes:
      window: planes [L, NS, W, ...] of the cache format, the last W raw tokens.
      tail: CSA: `values` and `scores`, f32[L, NS, 2 * M, 2 * C], the previous and the open window
        of the compressor, position bias in the scores; else None.
      index_tail: CSA: the same for the indexer's compressor, 2 * IC wide; else None.
      running: HCA: f32[L, NS, 3, C], the running softmax of the open window (largest score, sum of
        exponentials, sum weighted by value); else None.
      pending: layers that make entries for others too: `values` and `scores`,
        f32[L, NS, M - 1, C], the last tokens, of which those of the open window wait; else None.
      schema: sizes that all L layers share.
    """

    window: Planes
    tail: Planes | None
    index_tail: Planes | None
    running: jax.Array | None
    pending: Planes | None = None
    schema: LayerCacheSchema = flax.struct.field(pytree_node=False)

    @property
    def num_slots(self) -> int:
        """NS."""
        return jax.tree.leaves(self)[0].shape[1]

    @property
    def num_layers(self) -> int:
        """L."""
        return jax.tree.leaves(self)[0].shape[0]

    def families(self) -> Families:
        """Arrays by what they are for."""
        return {
            "window": (FamilyKind.WINDOW, self.window),
            "compressor state": (FamilyKind.STATE, (self.tail, self.running, self.pending)),
            "indexer state": (FamilyKind.STATE, self.index_tail),
        }

    def memory_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def reset_slot(self, slot: jax.Array | int) -> StateCachePool:
        """Empties one slot; -1 is none."""
        if not isinstance(slot, jax.Array | np.ndarray):
            slot = checks.integer("slot", slot, -1, self.num_slots - 1)
        else:
            checks.array("slot", slot, ())
        checks.in_range("slot", slot, -1, self.num_slots)
        return self.reset_slots(jnp.asarray(slot, jnp.int32)[None])

    def reset_slots(self, slots: jax.Array) -> StateCachePool:
        """Empties slots i32[U]; -1 empties nothing."""
        checks.array("slots", slots, (None,))
        checks.in_range("slots", slots, -1, self.num_slots)
        dropped = drop_absent(slots, self.num_slots)
        fresh = self._empty_slot()

        def reset(pool: jax.Array, empty: jax.Array) -> jax.Array:
            return pool.at[:, dropped].set(empty[:, :1], mode="drop")

        return jax.tree.map(reset, self, fresh)

    def _empty_slot(self) -> StateCachePool:
        if self.pending is not None:
            return init_pending_pool(self.schema, 1)
        return (
            init_id_pool(self.schema, 1)
            if "ids" in self.window
            else init_state_pool(self.schema, 1)
        )


def init_state_pool(
    schema: LayerCacheSchema, max_requests: int, *, num_layers: int = 1
) -> StateCachePool:
    """An empty pool.

    Args:
      schema: schema of any layer of the family.
      max_requests: NS.
      num_layers: L.

    Raises:
      ValueError: a size is below 1.
    """
    checks.instance("schema", schema, LayerCacheSchema)
    max_requests = checks.integer("max_requests", max_requests, 1)
    num_layers = checks.integer("num_layers", num_layers, 1)
    lead = (num_layers, max_requests)
    tail = index_tail = running = None
    if schema.tail_buffer_size_b:
        tail = _tail(lead, schema, schema.entry_head_dim)
        index_tail = _tail(lead, schema, schema.indexer_head_dim)
    elif schema.tail_buffer_size_a:
        running = filled((*lead, 3, schema.entry_head_dim), _NO_TOKENS, jnp.float32)
    shapes = schema.format.ring.plane_shapes(schema.entry_head_dim, schema.rope_dim)
    return StateCachePool(
        window=zeros(shapes, (*lead, schema.swa_window_size)),
        tail=tail,
        index_tail=index_tail,
        running=running,
        schema=schema,
    )


def init_pending_pool(
    schema: LayerCacheSchema, max_requests: int, *, num_layers: int = 1
) -> StateCachePool:
    """An empty pool of tokens that wait for others of their entry; arguments as above."""
    lead = (num_layers, max_requests, schema.pending_tokens)
    row = jax.ShapeDtypeStruct((schema.entry_head_dim,), jnp.float32)
    return StateCachePool(
        window={},
        tail=None,
        index_tail=None,
        running=None,
        pending=zeros({"values": row, "scores": row}, lead),
        schema=schema,
    )


def init_id_pool(schema: LayerCacheSchema, max_requests: int) -> StateCachePool:
    """A pool of the last `schema.swa_window_size` token ids, one layer; -1 is none."""
    ids = filled((1, max_requests, schema.swa_window_size), -1, jnp.int32)
    return StateCachePool(
        window={"ids": ids}, tail=None, index_tail=None, running=None, schema=schema
    )


def _tail(lead: tuple[int, int], schema: LayerCacheSchema, dim: int) -> Planes:
    shape = (*lead, schema.tail_buffer_size, 2 * dim)
    return {
        "values": filled(shape, 0, jnp.float32),
        "scores": filled(shape, -jnp.inf, jnp.float32),
    }
