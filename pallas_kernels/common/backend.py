"""Which implementation of an op runs, and on what."""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


class Backend(enum.StrEnum):
    """The routes an op can take; every op has REFERENCE."""

    REFERENCE = "reference"
    """jnp through XLA: the definition, on any device."""
    MOSAIC_GPU = "mosaic_gpu"
    """Pallas through Mosaic GPU: Hopper and Blackwell."""
    TRITON_GPU = "triton_gpu"
    """Pallas through Triton: Hopper and Blackwell."""


_INTERPRETING = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def gpu_interpreter(*, detect_races: bool = True) -> Iterator[None]:
    """Runs GPU kernels traced inside on the CPU: slow, for tests.

    It sees missing waits before loads and copies, and not before the operands of `wgmma`.
    Warpgroups wait for each other on XLA's threads, one a core: where there are few, set the
    environment variable NPROC to 16 before JAX starts, or a kernel of five may wait for ever.

    Args:
      detect_races: whether unsynchronised accesses to one address raise (jax 0.12; 0.11 prints).
    """
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


def interpreting() -> bool:
    """Whether a kernel traced now runs in the interpreter."""
    return _INTERPRETING.get()


def compute_capability() -> tuple[int, int] | None:
    """Of the GPU that a function traced now will run on; None where it is no NVIDIA GPU."""
    device = jax.config.jax_default_device or jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability is None or device.platform not in ("gpu", "cuda"):
        return None
    major, minor = str(capability).split(".")
    return int(major), int(minor)


def device_kind() -> str | None:
    """The name of the GPU that a function traced now will run on; None where it is no GPU."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return str(device.device_kind) if compute_capability() is not None else None


def resolve[F: Callable](
    op: str,
    backend: Backend | str | None,
    implementations: Mapping[Backend, F],
    *,
    preferred: Backend = Backend.REFERENCE,
) -> F:
    """Picks an op's implementation.

    Args:
      op: the op's name, for errors.
      backend: the one to use; None picks `preferred` on a GPU of this decade, else the reference.
      implementations: what the op has.
      preferred: the fastest one for these shapes, by measurement.

    Raises:
      ValueError: there is no backend of that name.
      NotImplementedError: the op has no implementation for it, or it can't run here.
    """
    capability = compute_capability()
    on_gpu = capability is not None and capability >= (9, 0)
    if backend is None:
        return implementations[preferred if on_gpu else Backend.REFERENCE]
    if backend not in list(Backend):
        raise ValueError(f"backend must be one of {[b.value for b in Backend]}, got {backend!r}")
    if backend not in implementations:
        raise NotImplementedError(
            f"{op} has no {str(backend)!r} implementation, it has {list(map(str, implementations))}"
        )
    if backend != Backend.REFERENCE and not (on_gpu or interpreting()):
        raise NotImplementedError(
            f"{str(backend)!r} kernels of {op} need an NVIDIA GPU of compute capability 9.0 or "
            f"more, got {capability}; pass backend='reference', or trace inside gpu_interpreter()"
        )
    return implementations[Backend(backend)]
