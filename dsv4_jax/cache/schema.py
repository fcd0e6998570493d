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
        return self.ratio or 1

    @property
    def shares(self) -> bool:
        """Its entries are read by other layers too, or made by another one."""
        return False

    @property
    def entry_family(self) -> str:
        """What blocks its entries lie in, as of `LayerSpec`; the empty text for SWA."""
        return self.attn_type.value if self.entries_per_block else ""

    @property
    def entry_idx(self) -> int:
        """The index into the blocks of that family."""
        return self.family_idx

    @property
    def ratio(self) -> int:
        """Tokens of an entry that the layer reads; 0 for SWA."""
        return self.tail_buffer_size_a

    @property
    def pending_tokens(self) -> int:
        """The most tokens that wait for others of an entry that is made for other layers too."""
        return 0

    @property
    def makes_candidates(self) -> bool:
        """As of `LayerSpec`."""
        return False

    @property
    def takes_candidates(self) -> bool:
        """As of `LayerSpec`."""
        return False

    @property
    def format(self) -> CacheFormat:
        """The storage format itself."""
        return get_cache_format(self.cache_format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a layer makes and reads of entries that layers share; properties of its schema.

    Attributes:
      entry_family: as there.
      entry_idx: as there; -1 for SWA, and of no layer in particular.
      ratio: as there.
      pending_tokens: as there.
      makes_candidates: as there.
      takes_candidates: as there.
    """

    entry_family: str = ""
    entry_idx: int = -1
    ratio: int = 0
    pending_tokens: int = 0
    makes_candidates: bool = False
    takes_candidates: bool = False

    @classmethod
    def of(cls, spec: LayerSpec) -> Sharing:
        """Of one layer."""
        return cls(
            entry_family=spec.entry_family,
            entry_idx=spec.entry_idx if spec.ratio else -1,
            ratio=spec.ratio,
            pending_tokens=spec.ratio - 1 if spec.makes_entries else 0,
            makes_candidates=spec.makes_candidates,
            takes_candidates=spec.takes_candidates,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedLayerSchema(LayerCacheSchema):
    """What one layer keeps where layers share entries.

    Attributes:
      shared: what it makes and reads of those.
    """

    shared: Sharing

    @property
    def shares(self) -> bool:
        """See `LayerCacheSchema`."""
        return True

    @property
    def entry_family(self) -> str:
        """See `LayerCacheSchema`."""
        return self.shared.entry_family

    @property
    def entry_idx(self) -> int:
        """See `LayerCacheSchema`."""
        return self.shared.entry_idx

    @property
    def ratio(self) -> int:
        """See `LayerCacheSchema`."""
        return self.shared.ratio

    @property
    def pending_tokens(self) -> int:
        """See `LayerCacheSchema`."""
        return self.shared.pending_tokens

    @property
    def makes_candidates(self) -> bool:
        """See `LayerCacheSchema`."""
        return self.shared.makes_candidates

    @property
    def takes_candidates(self) -> bool:
        """See `LayerCacheSchema`."""
        return self.shared.takes_candidates


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
      NotImplementedError: as of `choose_cache_format`.
    """
    checks.instance("config", config, DSV4Config)
    checks.instance("spec", spec, LayerSpec)
    cache_format = choose_cache_format(config, cache_format)
    fmt = get_cache_format(cache_format)
    is_csa = spec.attn == AttentionType.CSA
    index_dim = config.indexer_head_dim
    if is_csa and fmt.index_key.rotated and index_dim & (index_dim - 1):
        raise ValueError(
            f"cache_format {fmt.name!r} rotates index keys by a Hadamard matrix, which needs "
            f"a power of two, got indexer_head_dim={index_dim}; use 'f32' or 'bf16'"
        )
    entries_per_block = config.block_tokens // spec.ratio if spec.ratio else 0
    kept = 0 if spec.shares else spec.ratio  # of the open window
    schema = LayerCacheSchema(
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
        tail_buffer_size_a=kept,
        tail_buffer_size_b=kept if is_csa else 0,
        needs_inv_scale="inv_scale" in fmt.entry.plane_shapes(config.head_dim, config.rope_dim),
    )
    if not spec.shares:
        return schema
    return SharedLayerSchema(**vars(schema), shared=Sharing.of(spec))


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
      NotImplementedError: it has one, and layers share what they select.
    """
    if config.idea.selector is not None and config.sources is not None:
        raise NotImplementedError(
            "the config's idea has a selector, which steps on the cache of a DeepSeek-V4.1 model "
            "do not ask, whose layers share what they select; forward does"
        )
    if split_cache and config.idea.selector is not None:
        raise ValueError(
            "split_cache deals a request's entries over devices, and the config's idea has a "
            "selector, which looks at all of them; leave one of the two out"
        )


def same_sizes(schema: LayerCacheSchema) -> LayerCacheSchema:
    """The schema that stands for a whole family: no layer in particular."""
    schema = dataclasses.replace(schema, layer_idx=-1, family_idx=-1)
    if not isinstance(schema, SharedLayerSchema):
        return schema
    return dataclasses.replace(schema, shared=dataclasses.replace(schema.shared, entry_idx=-1))


def ring_sizes(schema: LayerCacheSchema) -> LayerCacheSchema:
    """Of the slots of a layer's family: `same_sizes`, without entries that other layers share."""
    schema = same_sizes(schema)
    if not isinstance(schema, SharedLayerSchema):
        return schema
    return dataclasses.replace(
        schema,
        entries_per_block=0,
        indexer_entries_per_block=0,
        indexer_head_dim=0,
        indexer_top_k=0,
        shared=Sharing(),
    )


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
      family without layers. Where entries are shared, of the pools of each ratio, such as "csa2".

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
    families = {spec.entry_family for spec in schedule} - {""}
    if config.sources is not None:
        return dict.fromkeys(sorted(families), blocks)
    return {
        attn.value: blocks if attn in families else 0
        for attn in (AttentionType.CSA, AttentionType.HCA)
    }
