"""Sizes of a layer's cache and of the pools; no arrays."""

from __future__ import annotations

import dataclasses
import enum
import fractions
import math

from dsv4_jax import checks
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec
from dsv4_jax.config.layer_types import AttentionType
from pallas_kernels.common.formats import CACHE_FORMATS, CacheFormat, get_cache_format

BLOCK_SIZE_ORIGINAL_TOKENS = 128
"""Tokens of a block at the released ratios, 4 and 128; `DSV4Config.block_tokens` for any others."""

DEFAULT_CACHE_FORMAT = "fp8_ue8m0"
"""Of DeepSeek-V4; `own_format` gives that of any model."""

type FormatName = str | CacheFormat
"""A name in `CACHE_FORMATS`, or a format of one's own."""

_MAX_LAYERS = 4096


class FamilyKind(enum.Enum):
    """What a family of a cache's arrays holds. `families` of a pool says which is of which kind.

    `ENTRIES`: entries or index keys, by block and offset. `WINDOW`: a ring of the last tokens, by
    slot and row. `STATE`: what a compressor keeps of open windows, by slot.
    """

    ENTRIES = "entries"
    WINDOW = "window"
    STATE = "state"

    @property
    def is_paged(self) -> bool:
        """It grows by block; others are there once for every slot."""
        return self is FamilyKind.ENTRIES


type Families = dict[str, tuple[FamilyKind, object]]
"""Arrays of a pool by what they are for, and their kind; no leaves where there are none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCacheSchema:
    """What one layer keeps.

    Attributes:
      layer_idx: place in the model.
      family_idx: place among the layers of its attention type, the index into stacked pools.
      attn_type: attention type.
      cache_format: the storage format.
      block_tokens: tokens that a block stands for.
      entries_per_block: EB; 0 for SWA.
      entry_head_dim: C.
      rope_dim: R.
      num_query_heads: H.
      indexer_entries_per_block: index keys per block, EB for CSA, else 0.
      indexer_head_dim: IC for CSA, else 0.
      indexer_top_k: K for CSA, else 0.
      swa_window_size: W.
      tail_buffer_size_a: M, tokens of the open window; 0 for SWA.
      tail_buffer_size_b: M, tokens of the previous window, for CSA; else 0.
      needs_inv_scale: the format keeps one f32 scale per entry.
    """

    layer_idx: int
    family_idx: int
    attn_type: AttentionType
    cache_format: FormatName
    block_tokens: int
    entries_per_block: int
    entry_head_dim: int
    rope_dim: int
    num_query_heads: int
    indexer_entries_per_block: int
    indexer_head_dim: int
    indexer_top_k: int
    swa_window_size: int
    tail_buffer_size_a: int
    tail_buffer_size_b: int
    needs_inv_scale: bool

    @property
    def tail_buffer_size(self) -> int:
        """Tokens of both windows that a compressor reads: 2 * M for CSA, M for HCA, 0 for SWA."""
        return self.tail_buffer_size_a + self.tail_buffer_size_b

    @property
    def compression_ratio(self) -> int:
        """M, tokens per entry; 1 for SWA, which has no entries."""
        return self.tail_buffer_size_a or 1

    @property
    def format(self) -> CacheFormat:
        """The storage format itself."""
        return get_cache_format(self.cache_format)


def build_schema(
    config: DSV4Config, spec: LayerSpec, cache_format: FormatName = DEFAULT_CACHE_FORMAT
) -> LayerCacheSchema:
    """Derives one layer's schema.

    Args:
      config: the model.
      spec: the layer, from `layer_schedule` or `draft_layers`.
      cache_format: the storage format.

    Raises:
      ValueError: there is no such format, or the format cannot hold this model's vectors.
      NotImplementedError: as of `check_has_cache`.
    """
    checks.instance("config", config, DSV4Config)
    checks.instance("spec", spec, LayerSpec)
    check_has_cache(config)
    cache_format = choose_cache_format(config, cache_format)
    fmt = get_cache_format(cache_format)
    is_csa = spec.attn == AttentionType.CSA
    index_dim = config.indexer_head_dim
    if is_csa and fmt.index_key.rotated and index_dim & (index_dim - 1):
        raise ValueError(
            f"cache_format {fmt.name!r} rotates index keys by a Hadamard matrix, which needs "
            f"a power of two, got indexer_head_dim={index_dim}; use 'f32' or 'bf16'"
        )
    compressed = spec.attn != AttentionType.SWA
    compression_ratio = config.compression_ratio(spec.attn) if compressed else 0
    entries_per_block = config.block_tokens // compression_ratio if compressed else 0
    return LayerCacheSchema(
        layer_idx=spec.layer_idx,
        family_idx=spec.family_idx,
        attn_type=spec.attn,
        cache_format=cache_format,
        block_tokens=config.block_tokens,
        entries_per_block=entries_per_block,
        entry_head_dim=config.head_dim,
        rope_dim=config.rope_dim,
        num_query_heads=config.num_attention_heads,
        indexer_entries_per_block=entries_per_block if is_csa else 0,
        indexer_head_dim=index_dim if is_csa else 0,
        indexer_top_k=config.indexer_top_k if is_csa else 0,
        swa_window_size=config.sliding_window,
        tail_buffer_size_a=compression_ratio,
        tail_buffer_size_b=compression_ratio if is_csa else 0,
        needs_inv_scale="inv_scale" in fmt.entry.plane_shapes(config.head_dim, config.rope_dim),
    )


def check_has_cache(config: DSV4Config) -> None:
    """Refuses a model of which there is no cache, and so no engine.

    Raises:
      NotImplementedError: its layers share entries, or are DeepSeek-V4.1's otherwise.
    """
    is_v4 = config.query_norm and not config.shifted_streams and config.engram is None
    if config.sources is not None or not is_v4:
        raise NotImplementedError(
            "this is a DeepSeek-V4.1 model, of which there are checkpoints, `dsv4-jax plan`, "
            "`dsv4-jax convert` and forward over whole sequences, and no cache, engine or draft "
            "yet; serve a DeepSeek-V4 model"
        )


def choose_cache_format(
    config: DSV4Config, asked: FormatName | None, default: FormatName | None = None
) -> FormatName:
    """The format that is asked for, else that of the config's idea, else the default.

    Without a default it is `own_format`.

    Raises:
      ValueError: there is no such format.
      NotImplementedError: it rotates index keys, and the model shares its entries.
    """
    default = own_format(config) if default is None else default
    chosen = default if config.idea.cache_format is None else config.idea.cache_format
    chosen = check_format(chosen if asked is None else asked)
    if config.sources is not None and get_cache_format(chosen).index_key.rotated:
        raise NotImplementedError(
            "cache_format must be 'f32' or 'bf16' for a DeepSeek-V4.1 model, or another that does "
            f"not rotate index keys, as its own does not, {own_format(config)!r}; got "
            f"{get_cache_format(chosen).name!r}"
        )
    return chosen


def own_format(config: DSV4Config) -> str:
    """The format in which the model was trained."""
    return DEFAULT_CACHE_FORMAT if config.sources is None else "fp4_e4m3"


def check_format(asked: FormatName) -> FormatName:
    """A name of a format, or a format.

    Raises:
      ValueError: there is no such format.
    """
    if isinstance(asked, CacheFormat):
        return asked
    return checks.choice("cache_format", asked, tuple(CACHE_FORMATS))


def check_selector(config: DSV4Config, *, split_cache: bool) -> None:
    """Refuses an idea that needs all of a request's entries on one device, where they are split.

    Raises:
      ValueError: the idea has a selector and `split_cache` is set.
    """
    if split_cache and config.idea.selector is not None:
        raise ValueError(
            "split_cache deals a request's entries over devices, and the config's idea has a "
            "selector, which looks at all of them; leave one of the two out"
        )


def same_sizes(schema: LayerCacheSchema) -> LayerCacheSchema:
    """The schema that stands for a whole family: no layer in particular."""
    return dataclasses.replace(schema, layer_idx=-1, family_idx=-1)


def blocks_of(config: DSV4Config, tokens: int) -> int:
    """Blocks that `tokens` tokens need; a started block counts whole."""
    return -(-tokens // config.block_tokens)


def compute_block_budget(
    config: DSV4Config,
    schedule: tuple[LayerSpec, ...],
    max_context_tokens: int,
    max_concurrent_requests: int,
    *,
    headroom: float = 0.1,
) -> dict[str, int]:
    """Physical blocks that the pools need.

    Args:
      config: the model.
      schedule: the model's layers.
      max_context_tokens: longest context of a request.
      max_concurrent_requests: requests at once.
      headroom: share of spare blocks, rounded up like everything here.

    Returns:
      Blocks of the "csa" and of the "hca" pools: equal, since one table serves both; 0 for a
      family without layers.

    Raises:
      ValueError: an argument is out of range.
    """
    checks.instance("config", config, DSV4Config)
    schedule = tuple(
        checks.instance("schedule", spec, LayerSpec)
        for spec in checks.sequence("schedule", schedule, of="LayerSpec", limit=_MAX_LAYERS)
    )
    name = "max_concurrent_requests"
    max_concurrent_requests = checks.integer(name, max_concurrent_requests, 1)
    max_context_tokens = checks.integer("max_context_tokens", max_context_tokens, 1)
    headroom = checks.number("headroom", headroom, 0)
    blocks = blocks_of(config, max_context_tokens) * max_concurrent_requests
    # The decimal the caller wrote, not its binary neighbour, which would ask for one more block.
    blocks = math.ceil(blocks * (1 + fractions.Fraction(str(headroom))))
    families = {spec.attn for spec in schedule}
    return {
        attn.value: blocks if attn in families else 0
        for attn in (AttentionType.CSA, AttentionType.HCA)
    }
