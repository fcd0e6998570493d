"""Multiplies rows with dense or quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.block_linear import reference
from pallas_kernels.common.backend import Backend, jax_arrays, resolve
from pallas_kernels.common.check_weights import check_rows, check_weight
from pallas_kernels.common.checks import (
    check_float_dtype,
    check_floats,
    check_list,
    check_number,
    check_rank,
    check_shape,
)
from pallas_kernels.common.pending import (
    ByGroup,
    ByToken,
    MaybeSplit,
    Pending,
    SplitSums,
    Unnormed,
    finish,
)
from pallas_kernels.common.weights import Weight, is_quantized
from pallas_kernels.product import (
    MANY_ROWS,
    can_join,
    find_obstacle,
    multiply_rows,
    swiglu_rows,
    triton_blocks,
)

_LINEAR: dict[Backend, Any] = {
    Backend.REFERENCE: reference.block_linears,
    Backend.MOSAIC_GPU: multiply_rows,
    Backend.TRITON_GPU: triton_blocks.multiply_rows,
}
_SWIGLU: dict[Backend, Any] = {
    Backend.REFERENCE: reference.swiglu_linear,
    Backend.MOSAIC_GPU: swiglu_rows,
    Backend.TRITON_GPU: triton_blocks.swiglu_rows,
}


def block_linear(
    x: jax.Array | Pending,
    weight: Weight,
    *,
    dtype: DTypeLike | None = None,
    backend: Backend | None = None,
) -> jax.Array:
    """Multiplies rows with a weight, accumulated in f32.

    In plain JAX, `weight.decode()` standing for a quantised weight's values and `round_rows` for
    what E4M3 keeps of rows, where the weight asks for that:

        rows = round_rows(x) if takes_rounded_rows(weight) else x
        values = weight.decode().swapaxes(-1, -2)
        product = jnp.matmul(rows, values, preferred_element_type=jnp.float32)
        return product.astype(dtype or x.dtype)

    Args:
      x: [T, in], or [G, T, in] for G weights; or such rows as another product left them, in parts
        or before their norm.
      weight: [out, in], or [G, out, in]; dense, block FP8 or MXFP4. A quantised weight says whether
        it takes rows rounded to E4M3 or as they are.
      dtype: of the result; None is that of x.
      backend: implementation to use; None picks the fastest one that runs here. For a dense weight
        that is XLA's own product.

    Returns:
      [T, out], or [G, T, out].

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: the named backend can't run here, or not at these sizes.

    Source: deepseek_v4.md section 4.5.
    """
    _check(x, weight)
    multiply = _choose(x, [weight], backend)
    [product] = multiply(*jax_arrays(x, [weight]), dtype=_dtype_of(dtype, x))
    return product


def block_linear_in_parts(
    x: jax.Array | Pending, weight: Weight, *, backend: Backend | None = None
) -> MaybeSplit:
    """`block_linear` whose result is left in parts where several CTAs shared the inputs.

    It saves a launch where what reads the result adds up the parts: `finish` of it is what
    `block_linear` returns.
    """
    [product] = block_linears(x, [weight], backend=backend, may_stay_in_parts=True)
    return product


def block_linear_by_token(
    x: jax.Array,
    weight: Weight,
    *,
    dtype: DTypeLike | None = None,
    backend: Backend | None = None,
) -> jax.Array | ByGroup:
    """`block_linear` of groups whose rows lie token by token, with a result for each token.

    In plain JAX: `block_linear(x.swapaxes(0, 1), weight).swapaxes(0, 1).reshape(T, -1)`.

    Args:
      x: [T, G, in].
      weight: [G, out, in].
      dtype: see `block_linear`.
      backend: see `block_linear`.

    Returns:
      [T, G * out]; a kernel leaves it by groups, and in parts, for the product that reads it.
    """
    check_rank(3, x=x)
    if x.shape[0] >= MANY_ROWS:
        product = block_linear(x.swapaxes(0, 1), weight, dtype=dtype, backend=backend)
        return product.swapaxes(0, 1).reshape(x.shape[0], -1)
    [product] = block_linears(
        ByToken(x), [weight], dtype=dtype, backend=backend, may_stay_in_parts=True
    )
    if isinstance(product, ByGroup):
        return product
    return finish(product).swapaxes(0, 1).reshape(x.shape[0], -1)


def block_linears(
    x: jax.Array | Pending,
    weights: Sequence[Weight],
    *,
    norms: Sequence[jax.Array | None] | None = None,
    eps: float = 0.0,
    dtype: DTypeLike | None = None,
    backend: Backend | None = None,
    may_stay_in_parts: bool = False,
) -> list[Any]:
    """`block_linear` of the same rows with several weights; of one format, in one launch.

    In plain JAX:

        products = [block_linear(x, weight, dtype=dtype) for weight in weights]
        return [p if n is None else rms_norm(p, n, eps=eps) for p, n in zip(products, norms)]

    Args:
      x: see `block_linear`.
      weights: see `block_linear`.
      norms: [out] for each weight, weight of the RMS norm that follows it, or None for none.
      eps: floor of the norms.
      dtype: see `block_linear`.
      backend: see `block_linear`.
      may_stay_in_parts: whether results without a norm may be `SplitSums`.

    Returns:
      A result for each weight.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: as `block_linear`.
    """
    check_list("weights", weights, of="weights")
    norms = [None] * len(weights) if norms is None else norms
    check_list("norms", norms, of="norms")
    eps = check_number("eps", eps, 0)
    if len(norms) != len(weights):
        raise ValueError(f"norms must be one for each weight, got {len(norms)=}, {len(weights)=}")
    for number, (weight, norm) in enumerate(zip(weights, norms, strict=True)):
        _check(x, weight, f"weights[{number}]")
        if norm is not None:
            check_shape(f"norms[{number}]", norm, (weight.shape[-2],), "out")
            check_floats(**{f"norms[{number}]": norm})
    if not can_join(weights):
        return [
            block_linears(x, [weight], norms=[norm], eps=eps, dtype=dtype, backend=backend)[0]
            for weight, norm in zip(weights, norms, strict=True)
        ]
    multiply = _choose(x, weights, backend)
    return multiply(
        *jax_arrays(x, weights),
        norms=jax_arrays(norms),
        eps=eps,
        dtype=_dtype_of(dtype, x),
        in_parts=may_stay_in_parts,
    )


def swiglu_linear(
    x: jax.Array, gate: Weight, up: Weight, *, limit: float, backend: Backend | None = None
) -> jax.Array:
    """SwiGLU of a gate and an up projection of the same rows.

    In plain JAX:

        gated, raised = block_linear(x, gate), block_linear(x, up)
        return jax.nn.silu(jnp.minimum(gated, limit)) * jnp.clip(raised, -limit, limit)

    Args:
      x: [T, in].
      gate: [out, in]; see `block_linear`.
      up: [out, in].
      limit: clamp of both, from above and from both sides, once rounded to the dtype of x.
      backend: see `block_linear`.

    Returns:
      [T, out], in the dtype of x.

    Raises:
      ValueError: shapes do not fit.
      NotImplementedError: as `block_linear`.

    Source: deepseek_v4.md section 1.5.
    """
    check_rank(2, x=x)
    for name, weight in (("gate", gate), ("up", up)):
        _check(x, weight, name)
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must agree on out, got {gate.shape=} and {up.shape=}")
    limit = check_number("limit", limit, 0)
    implementation = resolve(
        "swiglu_linear",
        backend,
        _SWIGLU,
        preferred=_preferred(x, [gate, up]),
        obstacle=_find_obstacle(x, [gate, up], backend),
        arguments={"x": x},
    )
    return implementation(*jax_arrays(x, gate, up), limit=limit)


def _choose(x: jax.Array | Pending, weights: Sequence[Weight], backend: Backend | None) -> Any:
    """The implementation that multiplies x with these weights."""
    return resolve(
        "block_linear",
        backend,
        _LINEAR,
        preferred=_preferred(x, weights),
        obstacle=_find_obstacle(x, weights, backend),
        arguments={"x": _array_of(x)},
    )


def _preferred(x: jax.Array | Pending, weights: Sequence[Weight]) -> Backend:
    """The faster implementation on a GPU: XLA's own for dense weights."""
    if triton_blocks.serves(weights) and find_obstacle(x, *weights, small_blocks=True) is not None:
        return Backend.TRITON_GPU
    return Backend.MOSAIC_GPU if any(map(is_quantized, weights)) else Backend.REFERENCE


def _find_obstacle(
    x: jax.Array | Pending, weights: Sequence[Weight], backend: Backend | None
) -> str | None:
    """Why the backend's kernel, or the preferred one, can't serve the call; None where it can."""
    chosen = _preferred(x, weights) if backend is None else backend
    if isinstance(chosen, str) and chosen == Backend.TRITON_GPU:
        return triton_blocks.find_obstacle(x, *weights)
    return find_obstacle(x, *weights, small_blocks=True)


def _array_of(x: jax.Array | Pending) -> jax.Array:
    if isinstance(x, SplitSums | ByGroup):
        return x.parts
    return x.rows if isinstance(x, Unnormed | ByToken) else x


def _dtype_of(dtype: DTypeLike | None, x: jax.Array | Pending) -> Any:
    """The dtype of a result; None is that of x."""
    return x.dtype if dtype is None else check_float_dtype("dtype", dtype)


def _check(x: jax.Array | Pending, weight: Weight, name: str = "weight") -> None:
    check_rows("x", x)
    check_weight(name, weight)
    if x.ndim not in (2, 3) or x.ndim != weight.ndim:
        raise ValueError(
            f"x must be [T, in] for a {name} [out, in], or [G, T, in] for [G, out, in]; "
            f"got {x.shape=} and {name}.shape={weight.shape}"
        )
    if x.shape[-1] != weight.shape[-1] or x.shape[:-2] != weight.shape[:-2]:
        raise ValueError(
            f"x and {name} must agree on their inputs and groups; got {x.shape=} and "
            f"{name}.shape={weight.shape}"
        )
