"""Weights in the formats of the release, made in one program each."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import weights

KINDS = {
    "fp8": weights.quantize_block_fp8,
    "mxfp4": weights.quantize_mxfp4,
    "dense": lambda values, dtype, activations: values.astype(dtype),
}


@functools.partial(jax.jit, static_argnames=("kind", "dtype", "activations"))
def quantize(kind, values, *, dtype="bfloat16", activations="fp8"):
    """[..., out, in] of any numbers, in that format; dense ones are of that dtype."""
    return KINDS[kind](jnp.asarray(values, jnp.float32), dtype=dtype, activations=activations)
