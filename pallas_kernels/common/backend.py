"""Which implementation of an op runs, and on what."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.checks import shown


class Backend(enum.StrEnum):
    """The routes an op can take; every op has REFERENCE."""

    REFERENCE = "reference"
    """jnp through XLA: the definition, on any device."""
    MOSAIC_GPU = "mosaic_gpu"
    """Pallas through Mosaic GPU: Hopper and Blackwell."""
    TRITON_GPU = "triton_gpu"
    """Pallas through Triton: Hopper and Blackwell."""


def has_fallen_back() -> bool:
    """Whether a `FallbackWarning` was due in this process, heard or not."""
    return bool(_SAID)


class FallbackWarning(UserWarning):
    """An op with `backend=None` takes its reference on a GPU: its kernel can't serve the call.

    Said once for each op, shapes and reason, when a call is traced. A filter of `warnings` silences
    it or makes it an error; so does `forbid_fallbacks`, for what is traced inside.
    """


FORBID_VARIABLE = "PALLAS_KERNELS_FORBID_FALLBACKS"
"""Environment variable; 1 is `forbid_fallbacks` for the whole process."""
_FORBIDDING = contextvars.ContextVar(
    "forbidding", default=os.environ.get(FORBID_VARIABLE, "0") not in ("", "0")
)
_SAID: set[str] = set()
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INTERPRETING = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def gpu_interpreter(*, detect_races: bool = True) -> Iterator[None]:
    """Runs GPU kernels traced inside on the CPU: slow, for tests.

    It sees missing waits before loads and copies, and not before the operands of `wgmma`.
    Warpgroups wait for each other on XLA's threads, one a core: where there are few, set the
    environment variable NPROC to 16 before JAX starts, or a kernel of five may wait for ever.

    Args:
      detect_races: whether unsynchronised accesses to one address raise (jax 0.12; 0.11 prints).

    Raises:
      RuntimeError: jax is 0.11.1, whose interpreter stops at PTX in kernels.
    """
    names = {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
    if "inline_mgpu" not in names:
        raise RuntimeError(f"gpu_interpreter needs jax 0.11.2 or newer, got {jax.__version__}")
    token = _INTERPRETING.set(True)
    params = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
    try:
        with (
            jax.default_device(jax.devices("cpu")[0]),
            plgpu.force_gpu_interpret_mode(params),
        ):
            yield
    finally:
        _INTERPRETING.reset(token)


@contextlib.contextmanager
def forbid_fallbacks() -> Iterator[None]:
    """Raises `NotImplementedError` where an op traced inside would fall back to its reference.

    What was traced before is not looked at again. Without a GPU nothing raises: there the reference
    is what `backend=None` means.
    """
    token = _FORBIDDING.set(True)
    try:
        yield
    finally:
        _FORBIDDING.reset(token)


def interpreting() -> bool:
    """Whether a kernel traced now runs in the interpreter."""
    return _INTERPRETING.get()


def compute_capability() -> tuple[int, int] | None:
    """That of the NVIDIA GPU that a function traced now runs on; None where there is none."""
    device = jax.config.jax_default_device or jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability is None or device.platform not in ("gpu", "cuda"):
        return None
    major, minor = str(capability).split(".")
    return int(major), int(minor)


def device_kind() -> str | None:
    """The name of the GPU that a function traced now runs on; None where it is no GPU."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return str(device.device_kind) if compute_capability() is not None else None


def resolve[F: Callable](
    op: str,
    backend: Backend | str | None,
    implementations: Mapping[Backend, F],
    *,
    preferred: Backend | None = None,
    obstacle: str | None = None,
    arguments: Mapping[str, jax.Array] | None = None,
) -> F:
    """Picks an op's implementation.

    On a GPU of this decade, None picks `preferred`. Where an obstacle, or an older GPU, leaves the
    reference, that is said once, as a `FallbackWarning`. Without a GPU None is the reference.
    Implementations update arrays, and index them by what is being traced: they take `jax_arrays`.

    Args:
      op: the op's name, for errors and the warning.
      backend: the one to use; None chooses.
      implementations: those that the op has.
      preferred: the fastest one for these shapes, by measurement; None is the op's kernel.
      obstacle: why the kernels can't serve this call, as the rest of a sentence of which they are
        the subject; None where they can.
      arguments: arrays by name, whose shapes the warning gives.

    Raises:
      ValueError: there is no backend of that name.
      NotImplementedError: the op has no implementation for it, or it can't run here or not at these
        sizes, or a fallback is forbidden.
    """
    arguments = arguments or {}
    if preferred is None:
        kernels = [each for each in implementations if each != Backend.REFERENCE]
        preferred = kernels[0] if kernels else Backend.REFERENCE
    capability = compute_capability()
    on_gpu = capability is not None and capability >= (9, 0)
    if backend is None:
        if capability is None or preferred == Backend.REFERENCE:
            return implementations[Backend.REFERENCE]
        if not on_gpu:
            obstacle = f"needs compute capability 9.0 or more, got {capability}"
        if obstacle is None:
            return implementations[preferred]
        _report_fallback(f"'{preferred}' {op} {obstacle}", op, arguments)
        return implementations[Backend.REFERENCE]
    if not isinstance(backend, str) or backend not in list(Backend):
        names = [b.value for b in Backend]
        raise ValueError(f"backend must be one of {names}, got {shown(backend)}")
    if backend not in implementations:
        raise NotImplementedError(
            f"{op} has no {str(backend)!r} implementation, it has {list(map(str, implementations))}"
        )
    if backend != Backend.REFERENCE and obstacle is not None:
        raise NotImplementedError(f"{str(backend)!r} {op} {obstacle}; pass backend='reference'")
    if backend != Backend.REFERENCE and not (on_gpu or interpreting()):
        raise NotImplementedError(
            f"{str(backend)!r} kernels of {op} need an NVIDIA GPU of compute capability 9.0 or "
            f"more, got {capability}; pass backend='reference', or trace inside gpu_interpreter()"
        )
    return implementations[Backend(backend)]


def jax_arrays(*operands: Any) -> Any:
    """An op's operands, or its only one, with JAX's arrays in place of NumPy's."""
    trees = jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, operands
    )
    return trees if len(trees) > 1 else trees[0]


def _report_fallback(reason: str, op: str, arguments: Mapping[str, jax.Array]) -> None:
    shapes = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arguments.items())
    call = f"{op} of {shapes}" if shapes else op
    text = f"{call} runs as its reference on a GPU, which is slow: {reason}"
    if _FORBIDDING.get():
        raise NotImplementedError(f"{text}; fallbacks are forbidden")
    if text not in _SAID:
        warnings.warn(text, FallbackWarning, skip_file_prefixes=(_PACKAGE,))
        _SAID.add(text)  # not where a filter makes it an error, which is one each time
