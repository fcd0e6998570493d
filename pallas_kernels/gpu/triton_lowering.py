"""What kernels for Triton become on a GPU: the choice, and what each choice needs."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import jax


class Lowering(enum.StrEnum):
    """What a traced kernel becomes on a GPU; the kernels are the same, and so are their bits."""

    PALLAS = "pallas"
    """Pallas's Triton backend, which is deprecated upstream; the default while jax has it."""
    PTX = "ptx"
    """Triton's language (`triton_language`), which the package `triton` compiles to PTX when a
    program is lowered; XLA launches that as a kernel of its own."""
    IR = "ir"
    """The same source, whose Triton IR XLA compiles as it does that of Pallas's backend.

    The default where that is gone: results have the same bits, and kernels take the same time."""
    JAX_TRITON = "jax_triton"
    """The same source, which `jax_triton.triton_call` compiles and launches."""


LOWERING_VARIABLE = "PALLAS_KERNELS_TRITON"
"""Environment variable: the lowering of the whole process, by its name."""
_LOWERING = contextvars.ContextVar[Lowering | None]("lowering", default=None)


def lowering() -> Lowering:
    """What a kernel traced now becomes."""
    return _LOWERING.get() or _of_process()


@functools.cache
def _of_process() -> Lowering:
    """The one that the environment names, or the default.

    Raises:
      ValueError: there is no lowering of that name.
    """
    if named := os.environ.get(LOWERING_VARIABLE):
        if named not in list(Lowering):
            raise ValueError(
                f"{LOWERING_VARIABLE} must be one of {list(map(str, Lowering))}, got {named!r}"
            )
        return Lowering(named)
    try:
        _backend()
    except ModuleNotFoundError:
        return Lowering.IR
    return Lowering.PALLAS


def _backend() -> Any:
    """The module that takes what it needs of Pallas's Triton backend.

    Raises:
      ModuleNotFoundError: jax has none; what it leaves in its place may say so with any error.
    """
    try:
        return importlib.import_module("pallas_kernels.gpu.triton_pallas")
    except Exception as error:
        raise ModuleNotFoundError(
            f"the lowering pallas ({LOWERING_VARIABLE}, or use_lowering) needs Pallas's Triton "
            f"backend, which jax {jax.__version__} lacks; choose ir or ptx, or leave it unset"
        ) from error


@contextlib.contextmanager
def use_lowering(name: Lowering | str) -> Iterator[None]:
    """Kernels traced inside become this; what was traced before stays what it is.

    Programs that `jax.jit` has kept don't ask again: trace a function of your own inside, or call
    `jax.clear_caches()` first.

    Raises:
      ValueError: there is no lowering of that name.
    """
    if name not in list(Lowering):
        raise ValueError(f"name must be one of {list(map(str, Lowering))}, got {name!r}")
    token = _LOWERING.set(Lowering(name))
    try:
        yield
    finally:
        _LOWERING.reset(token)


def compiler_params(num_warps: int, num_stages: int | None = None) -> Any:
    """Those of `pl.pallas_call` by which a kernel is lowered as `lowering` says."""
    if lowering() == Lowering.PALLAS:
        return _backend().CompilerParams(num_warps=num_warps, num_stages=num_stages)
    from pallas_kernels.gpu.triton_language import lowering as translated

    return translated.CompilerParams(num_warps, num_stages, str(lowering()))


def operations() -> Any:
    """The module whose primitives the present lowering knows."""
    if lowering() == Lowering.PALLAS:
        return _backend()
    from pallas_kernels.gpu.triton_language import primitives

    return primitives
