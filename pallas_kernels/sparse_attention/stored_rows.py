"""Keys' rows as planes store them: where 64 of their columns lie, and what they hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import codecs
from pallas_kernels.common.codecs import Codec
from pallas_kernels.gpu import mosaic, mosaic_codes, mosaic_memory

GROUP = 64
"""Columns that are fetched together."""
_SCALES_OF_WORD = 4
_WHOLE = codecs.WholeFP8Codec, codecs.FP4KeyCodec
"""DeepSeek-V4.1's window and entry, whose planes have no columns apart."""


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """How rows are stored, and the dtype that they become.

    Attributes:
      codec: how the planes store a vector.
      planes: their names and lengths, in order.
      dtype: of products.
    """

    codec: Codec
    planes: tuple[tuple[str, int], ...]
    dtype: Any

    def fetch_rows(self, sources, source, index, chunk):
        """64 stored columns of the named rows."""
        name, start = self.place(chunk)
        width, layout = GROUP, mosaic.ROWS
        if isinstance(self.codec, codecs.FP4KeyCodec):  # two codes a byte
            start, width, layout = start // 2, GROUP // 2, mosaic.HALF_ROWS
        return mosaic_memory.load_indexed_rows(
            sources[name], source, index, start=start, width=width, layout=layout
        )

    def fetch_scales(self, sources, source, index, chunks):
        """The words of scales that chunks of the named rows need, by plane and number."""
        words = {word for chunk in chunks if (word := self.scale_word(chunk)) is not None}
        return {
            f"{name} {number}": mosaic_memory.load_indexed_words(
                sources[name], source, index, word=number
            )
            for name, number in sorted(words)
        }

    def place(self, chunk):
        """Plane and first column in it of columns 64 chunk .. 64 chunk + 63 of a row."""
        if isinstance(self.codec, codecs.PlainCodec):
            return "values", chunk * GROUP
        if isinstance(self.codec, _WHOLE):
            return "codes", chunk * GROUP
        nope = dict(self.planes)["nope"]
        start = chunk * GROUP
        return ("nope", start) if start < nope else ("rope", start - nope)

    def scale_word(self, chunk):
        """Plane and 32-bit word of the chunk's scales; None where it has none."""
        if isinstance(self.codec, _WHOLE):
            return "scale", chunk * GROUP // (_SCALES_OF_WORD * self.codec.group)
        if self.place(chunk)[0] != "nope":
            return None
        if isinstance(self.codec, codecs.GroupedFP8Codec):
            return "scale", chunk // 4
        return "inv_scale", 0

    def decode(self, rows, scales, chunk):
        """[64, 64] in ROWS layout: a chunk's values."""
        word = self.scale_word(chunk)
        if word is None:
            return rows.astype(self.dtype)
        scale = scales[f"{word[0]} {word[1]}"]
        if isinstance(self.codec, codecs.FP4KeyCodec):
            return mosaic_codes.decode_e2m1(rows, scale)
        if isinstance(self.codec, codecs.WholeFP8Codec):
            first = chunk * GROUP // self.codec.group % _SCALES_OF_WORD
            return mosaic_codes.decode_e4m3(rows, scale, first=first)
        if word[0] == "scale":
            # UE8M0: the byte of this chunk's group becomes an f32's exponent.
            scale = ((scale >> (8 * (chunk % 4))) & 255) << 23  # i32[64], bits of f32
        wide = self.dtype if self.dtype == jnp.float16 else jnp.float32
        scale = lax.bitcast_convert_type(scale, jnp.float32).astype(wide)
        # A row's scale is in the lanes that have the row, since it was loaded in `ROW`: nothing
        # moves.
        scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, rows.shape, [0]), mosaic.ROWS)
        # [64, 64] codes; a factor for each row, in the layout of the values.
        codes = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn)
        return (codes.astype(wide) * scale).astype(self.dtype)
