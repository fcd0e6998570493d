"""Codecs: how the values of an entry or of an index key become bytes.

A codec stores a vector as *planes*: a dict of arrays that share their leading axes.

    plain            values [C]
    grouped FP8      nope u8[N] E4M3 | rope bf16[R] | scale u8[8 * ceil(Q / 8)] UE8M0, one per 64
    scaled FP8       nope u8[N] E4M3 | rope bf16[R] | inv_scale f32[]
    MXFP4 keys       codes u8[IC / 2] E2M1 pairs | scale u8[IC / 32] UE8M0
    FP8 keys         codes u8[IC] E4M3 | scale f32[]
    NVFP4 keys       codes u8[IC / 2] E2M1 pairs | scale u8[IC / 16] E4M3, global scale 1

and of DeepSeek-V4.1

    whole FP8        codes u8[C] E4M3 | scale u8[C / 32] UE8M0
    FP4 entries      codes u8[C / 2] E2M1 pairs | scale u8[C / 16] E4M3, global scale 1
    MXFP4 keys       as above

In memory the signs of MXFP4 codes are interleaved, for kernels that unpack them; in published pages
they are not. V4's entries are rounded to bf16 before they are quantised; its FP8 and FP4 keys, and
the queries that meet them, are Hadamard-rotated and rounded to bf16 first. V4.1's vectors are
quantised as they are.

Source: deepseek_v4.md sections 4.2 to 4.4, deepseek_v41.md section 10.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.common import numbers, pages
from pallas_kernels.common.rounding import exact_divide, round_to

Planes = dict[str, jax.Array]
PlaneShapes = dict[str, jax.ShapeDtypeStruct]

_AMAX_FLOOR = np.float32(1e-4)
_PAGE_ROPE_DIM = 64  # of the released models, whose page layout is the published one


@runtime_checkable
class Codec(Protocol):
    """Turns vectors into planes and back."""

    @property
    def rotated(self) -> bool:
        """Whether vectors are Hadamard-rotated before they are stored."""
        ...

    def plane_shapes(self, dim: int, rope_dim: int) -> PlaneShapes:
        """The planes of one vector of `dim` dims, of which the last `rope_dim` rotate."""
        ...

    def encode(self, x: jax.Array, rope_dim: int) -> Planes:
        """[..., dim] -> planes."""
        ...

    def decode(self, planes: Planes, dim: int) -> jax.Array:
        """Planes -> f32[..., dim]."""
        ...

    def to_pages(self, planes: Planes) -> jax.Array:
        """Planes [..., P, n] -> u8[..., page bytes], the published page of P vectors."""
        ...

    def from_pages(self, page_bytes: jax.Array, entries_per_page: int, dim: int) -> Planes:
        """The inverse of `to_pages`."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainCodec:
    """Values as they are, in one floating-point dtype."""

    dtype: str
    rotated: bool = False

    def plane_shapes(self, dim: int, rope_dim: int) -> PlaneShapes:
        """See `Codec`."""
        return {"values": jax.ShapeDtypeStruct((dim,), jnp.dtype(self.dtype))}

    def encode(self, x: jax.Array, rope_dim: int) -> Planes:
        """See `Codec`."""
        return {"values": round_to(x, self.dtype)}

    def decode(self, planes: Planes, dim: int) -> jax.Array:
        """See `Codec`."""
        return planes["values"].astype(jnp.float32)

    def to_pages(self, planes: Planes) -> jax.Array:
        """Raises ValueError: nobody publishes pages of plain values."""
        raise ValueError(_no_pages(f"{self.dtype} values"))

    def from_pages(self, page_bytes: jax.Array, entries_per_page: int, dim: int) -> Planes:
        """Raises ValueError: nobody publishes pages of plain values."""
        raise ValueError(_no_pages(f"{self.dtype} values"))


@dataclasses.dataclass(frozen=True)
class GroupedFP8Codec:
    """The released entry: nope dims in E4M3 with one UE8M0 scale per 64, rope dims in bf16.

    The scale plane is padded with zero bytes to whole 8-byte words, as in the published page.
    """

    rotated: bool = False
    group: int = 64

    def plane_shapes(self, dim: int, rope_dim: int) -> PlaneShapes:
        """See `Codec`."""
        num_groups = pl.cdiv(dim - rope_dim, self.group)  # 7 of 448 dims
        return {
            "nope": jax.ShapeDtypeStruct((dim - rope_dim,), jnp.uint8),
            "rope": jax.ShapeDtypeStruct((rope_dim,), jnp.bfloat16),
            "scale": jax.ShapeDtypeStruct((pl.cdiv(num_groups, 8) * 8,), jnp.uint8),
        }

    def encode(self, x: jax.Array, rope_dim: int) -> Planes:
        """See `Codec`."""
        nope, rope = _split_rope(x, rope_dim)
        groups = numbers.split_groups(nope, self.group)  # f32[..., G, 64]
        amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), _AMAX_FLOOR)
        scale = numbers.encode_ue8m0(amax * numbers.INV_448)  # u8[..., G]
        code = numbers.encode_e4m3(groups * numbers.invert_ue8m0(scale)[..., None])
        padding = [(0, 0)] * (scale.ndim - 1) + [(0, -scale.shape[-1] % 8)]
        return {
            "nope": numbers.join_groups(code, nope.shape[-1]),
            "rope": rope,
            "scale": jnp.pad(scale, padding),
        }

    def decode(self, planes: Planes, dim: int) -> jax.Array:
        """See `Codec`."""
        groups = numbers.split_groups(numbers.decode_e4m3(planes["nope"]), self.group)
        scale = numbers.decode_ue8m0(planes["scale"][..., : groups.shape[-2]])
        nope = numbers.join_groups(groups * scale[..., None], planes["nope"].shape[-1])
        return jnp.concatenate([nope, planes["rope"].astype(jnp.float32)], axis=-1)

    def to_pages(self, planes: Planes) -> jax.Array:
        """See `Codec`; a page is rounded up to a multiple of 576 bytes.

        Raises:
          ValueError: the entries do not have the 64 rope dims that the published page has.
        """
        if planes["rope"].shape[-1] != _PAGE_ROPE_DIM:
            raise ValueError(
                f"a page's entries have {_PAGE_ROPE_DIM} rope dims, "
                f"got {planes['rope'].shape=}; keep the planes of a smaller head as they are"
            )
        return pages.pack([["nope", "rope"], ["scale"]], planes, multiple=576)

    def from_pages(self, page_bytes: jax.Array, entries_per_page: int, dim: int) -> Planes:
        """See `Codec`; the rope dims are the released 64.

        Raises:
          ValueError: `dim` leaves no room for them, or the pages are too short.
        """
        if dim <= _PAGE_ROPE_DIM:
            raise ValueError(f"dim must exceed a page's {_PAGE_ROPE_DIM} rope dims, got {dim=}")
        shapes = self.plane_shapes(dim, _PAGE_ROPE_DIM)
        return pages.unpack([["nope", "rope"], ["scale"]], shapes, page_bytes, entries_per_page)


@dataclasses.dataclass(frozen=True)
class WholeFP8Codec:
    """The window entry of DeepSeek-V4.1: all dims in E4M3, with one UE8M0 scale per 32."""

    rotated: bool = False
    group: int = 32

    def plane_shapes(self, dim: int, rope_dim: int) -> PlaneShapes:
        """See `Codec`."""
        return {
            "codes": jax.ShapeDtypeStruct((dim,), jnp.uint8),
            "scale": jax.ShapeDtypeStruct((pl.cdiv(dim, self.group),), jnp.uint8),
        }

    def encode(self, x: jax.Array, rope_dim: int) -> Planes:
        """See `Codec`."""
        groups = numbers.split_groups(x.astype(jnp.float32), self.group)  # f32[..., G, 32]
        amax = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), _AMAX_FLOOR)
        scale = numbers.encode_ue8m0(amax * numbers.INV_448)  # u8[..., G]
        code = numbers.encode_e4m3(groups * numbers.invert_ue8m0(scale)[..., None])
        return {"codes": numbers.join_groups(code, x.shape[-1]), "scale": scale}

    def decode(self, planes: Planes, dim: int) -> jax.Array:
        """See `Codec`."""
        groups = numbers.split_groups(numbers.decode_e4m3(planes["codes"]), self.group)
        values = groups * numbers.decode_ue8m0(planes["scale"])[..., None]  # f32[..., G, 32]
        return numbers.join_groups(values, planes["codes"].shape[-1])

    def to_pages(self, planes: Planes) -> jax.Array:
        """See `Codec`: all codes, then all scales."""
        return pages.pack([["codes"], ["scale"]], planes, multiple=1)

    def from_pages(self, page_bytes: jax.Array, entries_per_page: int, dim: int) -> Planes:
        """See `Codec`."""
        shapes = self.plane_shapes(dim, 0)
        return pages.unpack([["codes"], ["scale"]], shapes, page_bytes, entries_per_page)


@dataclasses.dataclass(frozen=True)
class ScaledFP8Codec:
    """E4M3 with one f32 scale per entry, rope dims in bf16: the original PyTorch cache's entry."""

    rotated: bool = False

    def plane_shapes(self, dim: int, rope_dim: int) -> PlaneShapes:
        """See `Codec`."""
        return {
            "nope": jax.ShapeDtypeStruct((dim - rope_dim,), jnp.uint8),
            "rope": jax.ShapeDtypeStruct((rope_dim,), jnp.bfloat16),
            "inv_scale": jax.ShapeDtypeStruct((), jnp.float32),
        }

    def encode(self, x: jax.Array, rope_dim: int) -> Planes:
        """See `Codec`; `inv_scale` keeps the original's name: a value is code * inv_scale."""
        nope, rope = _split_rope(x, rope_dim)
        amax = jnp.maximum(jnp.max(jnp.abs(nope), axis=-1), _AMAX_FLOOR)  # f32[...]
        inv_scale = exact_divide(amax, jnp.float32(448.0))  # f32[...]; 448 is E4M3's largest
        code = numbers.encode_e4m3(exact_divide(nope, inv_scale[..., None]))
        return {"nope": code, "rope": rope, "inv_scale": inv_scale}

    def decode(self, planes: Planes, dim: int) -> jax.Array:
        """See `Codec`; values are rounded to bf16, as the original's kernels do."""
        nope = numbers.decode_e4m3(planes["nope"]) * planes["inv_scale"][..., None]
        nope = round_to(nope, jnp.bfloat16).astype(jnp.float32)
        return jnp.concatenate([nope, planes["rope"].astype(jnp.float32)], axis=-1)

    def to_pages(self, planes: Planes) -> jax.Array:
        """Raises ValueError: the original keeps planes, not pages."""
        raise ValueError(_no_pages("entries of 'fp8_per_entry'"))

    def from_pages(self, page_bytes: jax.Array, entries_per_page: int, dim: int) -> Planes:
        """Raises ValueError: the original keeps planes, not pages."""
        raise ValueError(_no_pages("entries of 'fp8_per_entry'"))


@dataclasses.dataclass(frozen=True)
class FP8KeyCodec:
    """Index keys in E4M3 with one power-of-two f32 scale: 132 bytes, as vLLM and SGLang have it."""

    rotated: bool = True

    def plane_shapes(self, dim: int, rope_dim: int) -> PlaneShapes:
        """See `Codec`."""
        return {
            "codes": jax.ShapeDtypeStruct((dim,), jnp.uint8),
            "scale": jax.ShapeDtypeStruct((), jnp.float32),
        }

    def encode(self, x: jax.Array, rope_dim: int) -> Planes:
        """See `Codec`."""
        x = _rotate_and_round(x)
        amax = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), _AMAX_FLOOR)
        scale = numbers.encode_ue8m0(amax * numbers.INV_448)  # u8[...], one for a key
        code = numbers.encode_e4m3(x * numbers.invert_ue8m0(scale)[..., None])
        return {"codes": code, "scale": numbers.decode_ue8m0(scale)}

    def decode(self, planes: Planes, dim: int) -> jax.Array:
        """See `Codec`."""
        return numbers.decode_e4m3(planes["codes"]) * planes["scale"][..., None]

    def to_pages(self, planes: Planes) -> jax.Array:
        """See `Codec`: all codes, then all scales."""
        return pages.pack([["codes"], ["scale"]], planes, multiple=1)

    def from_pages(self, page_bytes: jax.Array, entries_per_page: int, dim: int) -> Planes:
        """See `Codec`."""
        shapes = self.plane_shapes(dim, 0)
        return pages.unpack([["codes"], ["scale"]], shapes, page_bytes, entries_per_page)


@dataclasses.dataclass(frozen=True)
class FP4KeyCodec:
    """Index keys in E2M1: MXFP4 (UE8M0 scale per 32) or NVFP4 (E4M3 per 16, global scale 1).

    Not `rotated`, the first is DeepSeek-V4.1's index key and the second its entry. Stored codes are
    the published pairs, but for the signs of MXFP4: see `interleaves_signs`.
    """

    group: int
    power_of_two: bool
    rotated: bool = True

    def plane_shapes(self, dim: int, rope_dim: int) -> PlaneShapes:
        """See `Codec`."""
        return {
            "codes": jax.ShapeDtypeStruct((pl.cdiv(dim, 2),), jnp.uint8),
            "scale": jax.ShapeDtypeStruct((pl.cdiv(dim, self.group),), jnp.uint8),
        }

    def encode(self, x: jax.Array, rope_dim: int) -> Planes:
        """See `Codec`."""
        code, scale = self._quantize(x)
        return {"codes": self.from_pairs(numbers.pack_nibbles(code)), "scale": scale}

    def decode(self, planes: Planes, dim: int) -> jax.Array:
        """See `Codec`."""
        code = numbers.unpack_nibbles(self.to_pairs(planes["codes"]))[..., :dim]
        return self._values(code, planes["scale"])

    def round(self, x: jax.Array) -> jax.Array:
        """[..., IC] -> f32[..., IC], as `decode` gives what `encode` makes, but never packed."""
        return self._values(*self._quantize(x))

    def _quantize(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """E2M1 codes u8[..., IC], one a byte, and the scales of groups."""
        x = _rotate_and_round(x) if self.rotated else x.astype(jnp.float32)
        groups = numbers.split_groups(x, self.group)  # f32[..., G, group]
        amax = jnp.max(jnp.abs(groups), axis=-1)  # f32[..., G]
        if self.power_of_two:
            scale = numbers.encode_ue8m0(
                jnp.maximum(amax, np.float32(6 * 2.0**-126)) * numbers.INV_6
            )
            scaled = groups * numbers.invert_ue8m0(scale)[..., None]  # exact: powers of two
        else:
            amax = exact_divide(amax, jnp.float32(6.0))  # 6 is E2M1's largest
            scale = numbers.encode_e4m3(jnp.maximum(amax, np.float32(2.0**-9)))
            scaled = exact_divide(groups, numbers.decode_e4m3(scale)[..., None])
        return numbers.join_groups(numbers.encode_e2m1(scaled), x.shape[-1]), scale

    def _values(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        groups = numbers.split_groups(numbers.decode_e2m1(code), self.group)
        decode = numbers.decode_ue8m0 if self.power_of_two else numbers.decode_e4m3
        return numbers.join_groups(groups * decode(scale)[..., None], code.shape[-1])

    def to_pages(self, planes: Planes) -> jax.Array:
        """See `Codec`: all codes, as plain pairs, then all scales."""
        published = planes | {"codes": self.to_pairs(planes["codes"])}
        return pages.pack([["codes"], ["scale"]], published, multiple=1)

    def from_pages(self, page_bytes: jax.Array, entries_per_page: int, dim: int) -> Planes:
        """See `Codec`."""
        shapes = self.plane_shapes(dim, 0)
        planes = pages.unpack([["codes"], ["scale"]], shapes, page_bytes, entries_per_page)
        return planes | {"codes": self.from_pairs(planes["codes"])}

    def interleaves_signs(self, dim: int) -> bool:
        """Whether a key's codes are stored as `numbers.interleave_signs` has it: MXFP4, in eights.

        Keys of 1, 2 or 4 dims, which no model has, fill no word of eight and stay plain pairs.
        """
        return self.power_of_two and dim % 8 == 0

    def to_pairs(self, codes: jax.Array) -> jax.Array:
        """Stored u8[..., IC / 2] -> u8[..., IC / 2], published: the even code in the low nibble."""
        return self._through_words(numbers.restore_signs, codes)

    def from_pairs(self, pairs: jax.Array) -> jax.Array:
        """The inverse of `to_pairs`."""
        return self._through_words(numbers.interleave_signs, pairs)

    def _through_words(self, move: Callable[[jax.Array], jax.Array], codes: jax.Array) -> jax.Array:
        if not self.interleaves_signs(2 * codes.shape[-1]):
            return codes
        words = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4)  # eight codes each
        moved = move(jax.lax.bitcast_convert_type(words, jnp.uint32))
        return jax.lax.bitcast_convert_type(moved, jnp.uint8).reshape(codes.shape)


def rope_dim_of(planes: Mapping[str, Any]) -> int:
    """R, by planes [..., n], shapes or refs of them; 0 where a codec keeps no dims apart."""
    return planes["rope"].shape[-1] if "rope" in planes else 0


def round_through(codec: Codec, x: jax.Array) -> jax.Array:
    """[..., IC] -> f32[..., IC], as an index codec would give it back."""
    if isinstance(codec, FP4KeyCodec):
        return codec.round(x)
    return codec.decode(codec.encode(x, 0), x.shape[-1])


def _split_rope(x: jax.Array, rope_dim: int) -> tuple[jax.Array, jax.Array]:
    """[..., C] -> nope f32[..., N], rounded to bf16, and rope bf16[..., R]."""
    x = round_to(x, jnp.bfloat16)
    nope_dim = x.shape[-1] - rope_dim
    return x[..., :nope_dim].astype(jnp.float32), x[..., nope_dim:]


def _rotate_and_round(x: jax.Array) -> jax.Array:
    return round_to(numbers.hadamard_rotate(x), jnp.bfloat16).astype(jnp.float32)


def _no_pages(what: str) -> str:
    return (
        f"{what} have no published page layout; entries of 'fp8_ue8m0' and "
        "'fp8_ue8m0_fp8_index' have one, and index keys of those two and of 'fp8_per_entry'"
    )
