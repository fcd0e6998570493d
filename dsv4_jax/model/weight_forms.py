"""The forms that weights are held in, by the words that mean the same wherever they are asked for.

    "stored"               as the release stores them: block FP8 and MXFP4, and the rest dense
    "bfloat16", "float32"  dense in that dtype, what the release has quantised too

`load_checkpoint`, `convert_checkpoint`, `param_shapes`, the benchmarks and `--weights` of every
command read `weights` by the rules below.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.rules import Word

STORED = "stored"
_ALSO = (("released", STORED),)

WEIGHT_FORMS = Word((STORED, "bfloat16", "float32"), also=_ALSO)
"""All of them: what a checkpoint may be loaded as."""
RELEASE_FORMS = Word((STORED, "bfloat16"), also=_ALSO)
"""Those that models are released in: what `convert` writes."""
FLOATS = ("float32", "bfloat16", "float16")
"""Dtypes of activations, and of weights and tables that are not quantised."""


def dtype_beside(weights: str, dtype: Any = None) -> np.dtype:
    """The dtype of activations and of dense weights.

    Args:
      weights: one of `WEIGHT_FORMS`.
      dtype: what was asked for; None is that of dense weights, or with stored ones bf16.

    Raises:
      ValueError: it is none of `FLOATS`, or another than that of the dense weights.
    """
    is_stored = weights == STORED
    beside = float_dtype((jnp.bfloat16 if is_stored else weights) if dtype is None else dtype)
    if not is_stored and beside.name != weights:
        raise ValueError(
            f"dtype must be that of the decoded weights, {weights}, got {beside.name}; leave it out"
        )
    return beside


def float_dtype(dtype: Any) -> np.dtype:
    """One of `FLOATS`, whichever way it is spelt.

    Raises:
      ValueError: it is none of them, or nothing that NumPy takes for a dtype.
    """
    try:
        found = None if dtype is None or isinstance(dtype, np.generic) else jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # as NumPy refuses texts
        found = None
    if found is None or found.name not in FLOATS:
        checks.refuse("dtype", "float32, bfloat16 or float16", dtype)
    return found
