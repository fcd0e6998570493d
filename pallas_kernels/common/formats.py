"""Cache formats: a codec for entries, one for index keys and, where it is another, one for windows.

    f32, bf16              plain entries and keys
    fp8_ue8m0              grouped FP8 entries, MXFP4 keys; the released model's, 584 and 68 bytes
    fp8_ue8m0_fp8_index    the same entries, FP8 keys
    fp8_per_entry          scaled FP8 entries, NVFP4 keys
    fp4_e4m3               FP4 entries, MXFP4 keys that are not rotated, windows in FP8 whole;
                           DeepSeek-V4.1's: 288, 68 and 528 bytes

Source: deepseek_v4.md section 4.4, deepseek_v41.md section 10.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.common.checks import shown
from pallas_kernels.common.codecs import (
    Codec,
    FP4KeyCodec,
    FP8KeyCodec,
    GroupedFP8Codec,
    PlainCodec,
    PlaneShapes,
    ScaledFP8Codec,
    WholeFP8Codec,
    round_through,
)


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """How a cache stores its entries and its index keys.

    Attributes:
      name: what `cache_format` arguments call it.
      entry: codec of CSA and HCA entries, and of window entries too unless `window` says otherwise.
      index_key: codec of index keys.
      window: codec of window entries; None is that of `entry`.
    """

    name: str
    entry: Codec
    index_key: Codec
    window: Codec | None = None

    @property
    def ring(self) -> Codec:
        """The codec of window entries."""
        return self.entry if self.window is None else self.window

    def round_window(self, x: jax.Array, rope_dim: int) -> jax.Array:
        """[..., C] -> f32[..., C], a window entry as the cache would give it back."""
        return self.ring.decode(self.ring.encode(x, rope_dim), x.shape[-1])

    def round_entry(self, x: jax.Array, rope_dim: int) -> jax.Array:
        """[..., C] -> f32[..., C] as the cache would give it back."""
        return self.entry.decode(self.entry.encode(x, rope_dim), x.shape[-1])

    def round_index(self, x: jax.Array) -> jax.Array:
        """[..., IC] -> f32[..., IC], an index key or query as scores see it, rotated where due."""
        return round_through(self.index_key, x)

    def entry_bytes(self, head_dim: int, rope_dim: int) -> int:
        """Bytes of one entry in memory."""
        return _plane_bytes(self.entry.plane_shapes(head_dim, rope_dim))

    def window_bytes(self, head_dim: int, rope_dim: int) -> int:
        """Bytes of one window entry in memory."""
        return _plane_bytes(self.ring.plane_shapes(head_dim, rope_dim))

    def index_key_bytes(self, index_dim: int) -> int:
        """Bytes of one index key in memory."""
        return _plane_bytes(self.index_key.plane_shapes(index_dim, 0))


CODECS: dict[str, Codec] = {
    "f32": PlainCodec("float32"),
    "bf16": PlainCodec("bfloat16"),
    "grouped_fp8": GroupedFP8Codec(),
    "scaled_fp8": ScaledFP8Codec(),
    "mxfp4_key": FP4KeyCodec(group=32, power_of_two=True),
    "fp8_key": FP8KeyCodec(),
    "nvfp4_key": FP4KeyCodec(group=16, power_of_two=False),
    "whole_fp8": WholeFP8Codec(),
    "fp4_entry": FP4KeyCodec(group=16, power_of_two=False, rotated=False),
    "unrotated_mxfp4_key": FP4KeyCodec(group=32, power_of_two=True, rotated=False),
}
"""Codecs by name; `*_key` are of index keys alone, the FP8 ones without it of entries alone."""

CACHE_FORMATS: dict[str, CacheFormat] = {
    name: CacheFormat(name, CODECS[entry], CODECS[index_key], CODECS[window] if window else None)
    for name, entry, index_key, window in (
        ("f32", "f32", "f32", None),
        ("bf16", "bf16", "bf16", None),
        ("fp8_ue8m0", "grouped_fp8", "mxfp4_key", None),
        ("fp8_ue8m0_fp8_index", "grouped_fp8", "fp8_key", None),
        ("fp8_per_entry", "scaled_fp8", "nvfp4_key", None),
        ("fp4_e4m3", "fp4_entry", "unrotated_mxfp4_key", "whole_fp8"),
    )
}


def get_cache_format(name: str | CacheFormat) -> CacheFormat:
    """The format of that name; a format is itself.

    Raises:
      ValueError: there is none.
    """
    if isinstance(name, CacheFormat):
        return name
    if not isinstance(name, str) or name not in CACHE_FORMATS:
        raise ValueError(f"cache_format must be one of {list(CACHE_FORMATS)}, got {shown(name)}")
    return CACHE_FORMATS[name]


def get_codec(name: str) -> Codec:
    """The codec of that name, for one kind of vectors alone.

    Raises:
      ValueError: there is none.
    """
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"codec must be one of {list(CODECS)}, got {shown(name)}")
    return CODECS[name]


def _plane_bytes(shapes: PlaneShapes) -> int:
    return sum(s.size * s.dtype.itemsize for s in shapes.values())
