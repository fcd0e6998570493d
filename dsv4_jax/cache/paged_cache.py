"""PagedKVPool: compressed entries and index keys of one family, by physical block."""

from __future__ import annotations

import flax.struct
import jax

from dsv4_jax import checks
from dsv4_jax.cache.filled import filled
from dsv4_jax.cache.schema import Families, FamilyKind, LayerCacheSchema
from pallas_kernels.common.codecs import Planes, PlaneShapes


@flax.struct.dataclass(kw_only=True)
class PagedKVPool:
    """Blocks of the layers of one attention type, CSA or HCA.

    Attributes:
      entries: planes [L, NB, EB, ...] of the cache format.
      index_keys: planes [L, NB, EB, ...] for CSA, else None; a key shares its entry's address.
      schema: sizes that all L layers share.
    """

    entries: Planes
    index_keys: Planes | None
    schema: LayerCacheSchema = flax.struct.field(pytree_node=False)

    @property
    def num_blocks(self) -> int:
        """NB."""
        return jax.tree.leaves(self.entries)[0].shape[1]

    def families(self) -> Families:
        """Arrays by what they are for."""
        kind = FamilyKind.ENTRIES
        return {"entries": (kind, self.entries), "index keys": (kind, self.index_keys)}

    def memory_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def init_paged_pool(
    schema: LayerCacheSchema, num_blocks: int, *, num_layers: int = 1
) -> PagedKVPool:
    """An empty pool of entries, for all layers of a family.

    Args:
      schema: of any of the layers, which must have entries: CSA or HCA.
      num_blocks: NB.
      num_layers: L.

    Raises:
      ValueError: the schema is of a window layer, or a size is below 1.
    """
    checks.instance("schema", schema, LayerCacheSchema)
    if not schema.entries_per_block:
        raise ValueError(f"layer {schema.layer_idx} is {schema.attn_type}: it has no entries")
    num_blocks = checks.integer("num_blocks", num_blocks, 1)
    num_layers = checks.integer("num_layers", num_layers, 1)
    lead = (num_layers, num_blocks, schema.entries_per_block)
    fmt = schema.format
    index_keys = None
    if schema.indexer_head_dim:
        index_keys = zeros(fmt.index_key.plane_shapes(schema.indexer_head_dim, 0), lead)
    return PagedKVPool(
        entries=zeros(fmt.entry.plane_shapes(schema.entry_head_dim, schema.rope_dim), lead),
        index_keys=index_keys,
        schema=schema,
    )


def zeros(shapes: PlaneShapes, lead: tuple[int, ...]) -> Planes:
    """Zeroed planes with those leading axes."""
    return {name: filled(lead + s.shape, 0, s.dtype) for name, s in shapes.items()}
