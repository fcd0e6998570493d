"""The roofline of a decode step: the bytes that must move and the operations that must be done.

Source: deepseek_v4.md section 7. Bytes per entry are those of the arrays that `init_cache` makes.
"""

from __future__ import annotations

import dataclasses

from dsv4_jax.bench.gpus import H200, Rates
from dsv4_jax.bench.shared_work import layer_reads
from dsv4_jax.cache.schema import LayerCacheSchema, build_schema
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.weight_sizes import FORMATS, walk_weights, weight_family, weight_format
from pallas_kernels.common.weights import weight_bytes

BANDWIDTH = H200.bandwidth
"""Bytes per second, read and written together, that a copy reaches on an H200."""
BF16_FLOPS = H200.bf16_flops
"""Operations per second that bf16 matrix products reach on an H200."""
FP8_FLOPS = H200.fp8_flops
"""Operations per second that FP8 matrix products reach on an H200."""
LAUNCH_S = 8e-6
"""Seconds that the target of the cache part allows for each launch of our kernels."""

_ACTIVATION = 2  # bytes of bf16
_F32 = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """The least work of one op.

    Attributes:
      name: name of the op.
      num_bytes: bytes read and written.
      flops: operations of its matrix products.
      in_fp8: whether those are of FP8; else they are of bf16.
    """

    name: str
    num_bytes: float
    flops: float = 0.0
    in_fp8: bool = False

    @property
    def roofline_s(self) -> float:
        """Seconds that the bytes or the products take on an H200, whichever is longer."""
        return self.seconds(H200)

    def seconds(self, rates: Rates) -> float:
        """The same on a GPU of those rates."""
        flops = rates.fp8_flops if self.in_fp8 else rates.bf16_flops
        return max(self.num_bytes / rates.bandwidth, self.flops / flops)


def cache_work(
    config: DSV4Config,
    spec: LayerSpec,
    *,
    batch: int,
    context: int,
    cache_format: str,
    block_parts: int = 1,
) -> list[Work]:
    """The work of one layer's cache-dependent ops in one decode step, from append to attention.

    Args:
      config: the model.
      spec: the layer.
      batch: B, number of requests.
      context: tokens of each request, including the one of the step.
      cache_format: name of the storage format.
      block_parts: devices that a request's blocks are dealt over; the work is that of one which has
        an equal part of the entries, and all of the window.
    """
    schema = build_schema(config, spec, cache_format)
    if spec.shares:
        return _shared_work(config, spec, schema, batch=batch, context=context)
    entry, key = _entry_bytes(schema)
    compression_ratio, dim = schema.compression_ratio, schema.entry_head_dim
    streams = 2 if spec.attn == AttentionType.CSA else 1
    entries = context // compression_ratio if spec.attn != AttentionType.SWA else 0
    is_scored = entries > schema.indexer_top_k
    selected = min(entries, schema.indexer_top_k) if spec.attn == AttentionType.CSA else entries
    entries, selected = -(-entries // block_parts), -(-selected // block_parts)
    appended = entry + dim * _ACTIVATION
    flushed = 0.0
    if spec.attn == AttentionType.CSA:
        index_dim = schema.indexer_head_dim
        appended += 2 * 2 * streams * (dim + index_dim) * _F32  # values and scores, in and out
        flushed = (
            2 * 2 * compression_ratio * (dim + index_dim) * _F32 + entry + key
        ) / compression_ratio
    elif spec.attn == AttentionType.HCA:
        appended += (2 + 2 * 3) * dim * _F32  # values and scores in, the pool in and out
        flushed = (3 * dim * _F32 + entry) / compression_ratio
    queries = 2 * config.num_attention_heads * dim * _ACTIVATION  # in and out, or as much output
    works = [Work("append", batch * (appended + flushed + queries))]
    if spec.attn == AttentionType.CSA and is_scored:
        heads, index_dim = config.indexer_num_heads, schema.indexer_head_dim
        works.append(
            Work(
                "index",
                batch * (entries * key + heads * index_dim + selected * _F32),
                batch * entries * (2 * heads * index_dim + 3 * heads),
                in_fp8=True,
            )
        )
    keys = min(context, schema.swa_window_size) + selected
    works.append(
        Work(
            "attention",
            batch * (keys * entry + queries),
            batch * 4 * config.num_attention_heads * dim * keys,
        )
    )
    return works


def _shared_work(
    config: DSV4Config, spec: LayerSpec, schema: LayerCacheSchema, *, batch: int, context: int
) -> list[Work]:
    """`cache_work` of a layer that shares entries."""
    reads, heads = layer_reads(config, spec, schema, context=context), config.num_attention_heads
    queries = 2 * heads * schema.entry_head_dim * _ACTIVATION
    works = [Work("append", batch * (reads.appended + queries))]
    if reads.scored:
        products = config.indexer_num_heads * (2 * config.indexer_head_dim + 3)
        flops = batch * reads.scored * products
        works.append(Work("index", batch * reads.index, flops, in_fp8=True))
    flops = batch * 4 * heads * schema.entry_head_dim * reads.keys
    works.append(Work("attention", batch * (reads.attended + queries), flops))
    return works


def step_cache_work(
    config: DSV4Config, *, batch: int, context: int, cache_format: str
) -> dict[str, Work]:
    """`cache_work` summed over all layers; keys are attention type and op, like `csa index`."""
    total: dict[str, Work] = {}
    for spec in layer_schedule(config):
        layer = cache_work(config, spec, batch=batch, context=context, cache_format=cache_format)
        for work in layer:
            name = f"{spec.attn} {work.name}"
            before = total.get(name, Work(name, 0.0, 0.0, work.in_fp8))
            total[name] = Work(
                name, before.num_bytes + work.num_bytes, before.flops + work.flops, work.in_fp8
            )
    return total


def step_cache_roofline_s(
    config: DSV4Config, *, batch: int, context: int, cache_format: str
) -> float:
    """Seconds of the cache-dependent part of a step, op by op and layer by layer."""
    return sum(
        work.roofline_s
        for spec in layer_schedule(config)
        for work in cache_work(
            config, spec, batch=batch, context=context, cache_format=cache_format
        )
    )


def step_weight_bytes(
    config: DSV4Config, params: DSV4Params, *, batch: int, experts: float
) -> dict[str, float]:
    """Bytes of weights that one step of `batch` tokens reads, by number format.

    Counts one row of the embedding per token, no rows of hash tables and no draft block.

    Args:
      config: the model.
      params: model parameters, or their shapes.
      batch: tokens of the step.
      experts: different experts of a layer that they pick.
    """
    read_share = {
        "embedding": batch / config.vocab_size,
        "routed experts": experts / config.num_routed_experts,
        "hash tables": 0.0,
    }
    total: dict[str, float] = {name: 0.0 for name in FORMATS}
    for path, weight in walk_weights(dataclasses.replace(params, mtp=None)):
        share = read_share.get(weight_family(path), 1.0)
        total[weight_format(weight)] += share * weight_bytes(weight)
    return {name: count for name, count in total.items() if count}


def _entry_bytes(schema: LayerCacheSchema) -> tuple[int, int]:
    """Bytes of an entry and of an index key in memory; the latter is 0 without an indexer."""
    fmt = schema.format
    entry = fmt.entry_bytes(schema.entry_head_dim, schema.rope_dim)
    if not schema.indexer_head_dim:
        return entry, 0
    return entry, fmt.index_key_bytes(schema.indexer_head_dim)
