"""Operations of a kernel that Pallas's core has none of: PTX of elements, a barrier of a program.

Pallas's Triton backend has primitives of its own for these. Kernels that are translated to Triton's
language (`triton_language`) take those here, which outlive that backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import Primitive

from pallas_kernels.gpu.compat import effects, jax_core, pallas_core


class _BarrierEffect(jax_core.Effect):
    """Keeps a barrier, which has no result, in a traced kernel."""


_barrier_effect = _BarrierEffect()
pallas_core.kernel_local_effects.add_type(_BarrierEffect)
effects.control_flow_allowed_effects.add_type(_BarrierEffect)

inline_ptx_p = Primitive("inline_ptx")
barrier_p = Primitive("program_barrier")
barrier_p.multiple_results = True


def inline_ptx(
    text: str,
    arrays: Sequence[jax.Array],
    constraints: str,
    *,
    pack: int,
    result: jax.ShapeDtypeStruct,
) -> jax.Array:
    """PTX of a thread that sees `pack` elements of each array; see `triton.inline_lines`."""
    return inline_ptx_p.bind(*arrays, text=text, constraints=constraints, pack=pack, result=result)


def barrier() -> None:
    """Until all threads of the program have come here, and see what the others stored."""
    barrier_p.bind()


@inline_ptx_p.def_abstract_eval
def _inline_ptx_result(*arrays, text, constraints, pack, result):
    del text, constraints, pack
    if any(array.shape != result.shape for array in arrays):
        raise ValueError(f"PTX of elements takes arrays of {result.shape}, got {arrays}")
    return jax_core.ShapedArray(result.shape, result.dtype)


@barrier_p.def_effectful_abstract_eval
def _barrier_result():
    return (), {_barrier_effect}
