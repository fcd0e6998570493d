"""Roundings that XLA would otherwise skip, fuse or approximate, and with them the bits of a cache.

On a GPU (jax 0.11, H200) XLA drops a conversion to bf16 or FP8 and back inside one program, through
a bitcast too; converts f32 to FP8 by way of f16; and divides with an error of up to 2 ulp. Anywhere
it fuses a product into a sum as the shape suits it, and turns a division by a broadcast into a
product. What is stored in a cache is defined to the bit, so none of that may happen here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Values in that dtype, rounded even where a later conversion takes them back to f32."""
    info = jnp.finfo(dtype)
    if info.bits >= jnp.finfo(x.dtype).bits:
        return x.astype(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def rounded(x: jax.Array) -> jax.Array:
    """f32 -> f32, the same; a product in it is rounded before anything is added to it.

    Otherwise the same row may have other bits in a call of another size.
    """
    return jnp.where(jnp.isnan(x), jnp.float32(jnp.nan), x)


def exact_divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """The IEEE quotient of f32 arrays, from XLA's approximate one.

    A Newton step brings the quotient within an ulp; of it and its neighbour the one with the
    smaller remainder is the nearest, since a quotient never lies halfway.
    """
    approximate = x / divisor
    quotient = approximate + _remainder(x, approximate, divisor) / divisor
    remainder = _remainder(x, quotient, divisor)
    towards = jnp.where((remainder < 0) == (divisor < 0), jnp.inf, -jnp.inf)
    neighbour = jnp.nextafter(quotient, towards.astype(jnp.float32))
    closer = jnp.abs(_remainder(x, neighbour, divisor)) < jnp.abs(remainder)
    nearest = jnp.where(closer, neighbour, quotient)
    return jnp.where(approximate == 0, approximate, nearest)  # of either sign


def _remainder(x: jax.Array, quotient: jax.Array, divisor: jax.Array) -> jax.Array:
    """X - quotient * divisor without error, for a quotient that is off by an ulp or so.

    The product's own error comes from halves of 12 bits, whose products are exact.
    """
    product = rounded(quotient * divisor)
    q_high, q_low = _halves(quotient)
    d_high, d_low = _halves(divisor)
    error = rounded(q_high * d_high) - product
    error = error + rounded(q_high * d_low)
    error = error + rounded(q_low * d_high)
    error = error + rounded(q_low * d_low)
    return (x - product) - error


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    high = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
    return high, x - high
