"""The roofline of a layer whose entries other layers read too, or that reads those of another.

Such a layer keeps a window of its own. It writes entries and index keys if it makes some, scores
and selects if it is a selector, of all entries or of the blocks that an earlier layer left, and
attends to as many as others. Bytes of entries, keys and windows are those of the arrays.

Source: deepseek_v41.md sections 4, 6, 7 and 10.
"""

from __future__ import annotations

import dataclasses

from dsv4_jax.cache.schema import LayerCacheSchema
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec

_BF16, _F32 = 2, 4


@dataclasses.dataclass(frozen=True)
class LayerReads:
    """What a token of a decode step moves in one layer.

    Attributes:
      appended: bytes in and out of what the layer keeps of it, its share of an entry included.
      scored: entries whose keys are read; 0 where nothing is scored.
      index: bytes of these keys, of the queries and of what is selected.
      keys: vectors that are attended to.
      attended: bytes of these.
    """

    appended: float
    scored: int
    index: float
    keys: int
    attended: float


def layer_reads(
    config: DSV4Config, spec: LayerSpec, schema: LayerCacheSchema, *, context: int
) -> LayerReads:
    """The reads of a layer.

    Args:
      config: the model.
      spec: the layer.
      schema: what it keeps, in its format.
      context: tokens of the request, including the one of the step.
    """
    fmt, dim = schema.format, schema.entry_head_dim
    window = fmt.window_bytes(dim, schema.rope_dim)
    entry = fmt.entry_bytes(dim, schema.rope_dim)
    key = fmt.index_key_bytes(config.indexer_head_dim)
    entries = context // spec.ratio if spec.ratio else 0
    selected = min(entries, config.indexer_top_k)
    appended = window + dim * _BF16
    if spec.makes_entries and spec.ratio:
        parts = spec.ratio if spec.ratio > 1 else 1  # values, and of pairs scores
        # The first token of a pair is written, and read when the second comes.
        waits = 2 * parts * dim * _F32 * (spec.ratio - 1) / spec.ratio
        appended += parts * dim * _F32 + waits + (entry + key) / spec.ratio
    scored, index = 0, 0.0
    if spec.makes_selection and entries > config.indexer_top_k:
        scored = entries
        limit = None if config.sources is None else config.sources.candidates
        if limit is not None and entries > limit.blocks * limit.block_size:
            if spec.takes_candidates:
                scored = limit.blocks * limit.block_size
            if spec.takes_candidates or spec.makes_candidates:
                index += limit.blocks * _F32
        index += scored * key + config.indexer_num_heads * config.indexer_head_dim
        index += selected * _F32
    near = min(context, schema.swa_window_size)
    attended = near * window + selected * entry
    return LayerReads(appended, scored, index, near + selected, attended)
