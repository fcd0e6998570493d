"""Published page bytes: sections one after another, each with P vectors of a few planes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Sections = list[list[str]]


def pack(sections: Sections, planes: dict[str, jax.Array], *, multiple: int) -> jax.Array:
    """Lays planes out as a page.

    Args:
      sections: names of the planes that lie side by side in each section.
      planes: arrays [..., P, n], or [..., P] for a plane of one value.
      multiple: the page's size is rounded up to a multiple of this many bytes, with zeros.

    Returns:
      u8[..., page bytes]: in each section, vector 0's bytes of all its planes, then vector 1's.
    """
    parts = []
    for names in sections:
        rows = jnp.concatenate([_to_bytes(planes[name], name) for name in names], axis=-1)
        *lead, num_entries, width = rows.shape
        parts.append(rows.reshape(*lead, num_entries * width))
    page = jnp.concatenate(parts, axis=-1)
    padding = [(0, 0)] * (page.ndim - 1) + [(0, -page.shape[-1] % multiple)]
    return jnp.pad(page, padding)


def unpack(
    sections: Sections,
    shapes: dict[str, jax.ShapeDtypeStruct],
    page_bytes: jax.Array,
    entries_per_page: int,
) -> dict[str, jax.Array]:
    """The inverse of `pack`; padding is ignored.

    Args:
      sections: as in `pack`.
      shapes: shape and dtype of each plane of one vector.
      page_bytes: u8[..., page bytes].
      entries_per_page: P.

    Returns:
      Planes [..., P, n].

    Raises:
      ValueError: the pages are too short for P vectors.
    """
    sizes = {name: s.size * s.dtype.itemsize for name, s in shapes.items()}
    needed = entries_per_page * sum(sizes.values())
    if page_bytes.shape[-1] < needed:
        raise ValueError(
            f"page_bytes must hold {needed} bytes for {entries_per_page} entries, "
            f"got {page_bytes.shape=}"
        )
    lead, start, planes = page_bytes.shape[:-1], 0, {}
    for names in sections:
        width = sum(sizes[name] for name in names)
        stop = start + entries_per_page * width
        rows = page_bytes[..., start:stop].reshape(*lead, entries_per_page, width)
        start, column = stop, 0
        for name in names:
            piece = rows[..., column : column + sizes[name]]
            planes[name] = _from_bytes(piece, shapes[name])
            column += sizes[name]
    return planes


def _to_bytes(plane: jax.Array, name: str) -> jax.Array:
    """[..., P, n] -> u8[..., P, n * itemsize]."""
    if name in ("scale", "inv_scale") and plane.dtype == jnp.float32:
        plane = plane[..., None]
    if plane.dtype == jnp.uint8:
        return plane
    as_bytes = jax.lax.bitcast_convert_type(plane, jnp.uint8)
    return as_bytes.reshape(*plane.shape[:-1], plane.shape[-1] * plane.dtype.itemsize)


def _from_bytes(piece: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if shape.dtype == jnp.uint8:
        return piece
    itemsize = shape.dtype.itemsize
    words = piece.reshape(*piece.shape[:-1], piece.shape[-1] // itemsize, itemsize)
    plane = jax.lax.bitcast_convert_type(words, shape.dtype)
    return plane.reshape(*piece.shape[:-1], *shape.shape)
