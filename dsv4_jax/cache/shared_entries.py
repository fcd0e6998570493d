"""What a cache would keep of a model whose layers share entries; there is no such cache yet.

Source: deepseek_v41.md section 10.
"""

from __future__ import annotations

from dsv4_jax.cache.schema import FormatName, choose_cache_format
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, draft_layers, layer_schedule
from pallas_kernels.common.formats import get_cache_format

_F32 = 4


def bytes_per_request(config: DSV4Config, cache_format: FormatName | None = None) -> int:
    """What does not grow: a ring for each layer and stage, and a pending token of each source.

    A source whose entries are pairs keeps the value and the score of a token that waits for its
    second, f32[C] each.
    """
    fmt, schedule = get_cache_format(choose_cache_format(config, cache_format)), _layers(config)
    ring = config.sliding_window * fmt.window_bytes(config.head_dim, config.rope_dim)
    pairs = sum(spec.makes_entries and spec.ratio > 1 for spec in schedule)
    return len(schedule) * ring + pairs * 2 * config.head_dim * _F32


def bytes_per_block(config: DSV4Config, cache_format: FormatName | None = None) -> int:
    """Entries and index keys of all sources that a block of tokens takes."""
    fmt = get_cache_format(choose_cache_format(config, cache_format))
    each = fmt.entry_bytes(config.head_dim, config.rope_dim)
    each += fmt.index_key_bytes(config.indexer_head_dim)
    makers = (spec for spec in layer_schedule(config) if spec.makes_entries)
    return sum(config.block_tokens // spec.ratio * each for spec in makers)


def _layers(config: DSV4Config) -> tuple[LayerSpec, ...]:
    return (*layer_schedule(config), *draft_layers(config))
