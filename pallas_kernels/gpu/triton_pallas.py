"""What kernels take of Pallas's Triton backend; the only module that names it.

The backend is deprecated upstream. `triton` imports this where its lowering is the one chosen, so
that nothing breaks on the day on which the backend is gone but this choice.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import jax
from jax.experimental.pallas import triton as pltri
from jaxlib.triton import dialect

warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)

# MLIR imports the module of an operation's dialect by this name. It is not there, and would be
# looked for in four packages for each operation of a kernel: a fifth of the time to trace a step.
sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)

CompilerParams = pltri.CompilerParams


def inline_ptx(
    text: str,
    arrays: Sequence[jax.Array],
    constraints: str,
    *,
    pack: int,
    result: jax.ShapeDtypeStruct,
) -> jax.Array:
    """PTX of a thread that sees `pack` elements of each array; see `triton.inline_lines`."""
    return pltri.elementwise_inline_asm(
        text, args=arrays, constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )[0]


def barrier() -> None:
    """Until all threads of the program have come here, and see what the others stored."""
    pltri.debug_barrier()
