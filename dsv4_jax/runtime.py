"""How XLA runs for this package: its flags, its memory, and the cache of compiled programs."""

from __future__ import annotations

import functools
import os
import pathlib
import re
from typing import Any

import jax
from jax._src import xla_bridge  # nothing public says whether backends have started
from jax.experimental.mosaic.gpu import core as mosaic_core
from jaxlib.mlir import ir

from dsv4_jax import checks

XLA_GPU_FLAGS = {
    "xla_gpu_dot_merger_threshold_mb": "0",
}
"""Flags that make a decode step faster on a GPU, and why.

`xla_gpu_dot_merger_threshold_mb=0`: XLA joins products of one input, such as the projections of a
hidden state, by writing their weights next to each other, in every step; for a step whose time is
that of reading weights once, this trebles it.

Command buffers (CUDA graphs) are XLA's default and stay as they are: five launches in a row or
more become a graph, kernels of Pallas among them.
"""


def set_xla_flags(**flags: str) -> str:
    """Adds `XLA_GPU_FLAGS` to the environment variable `XLA_FLAGS`; call it before JAX is used.

    Flags that the variable has already are left alone: what the user sets wins. A CPU ignores them.

    Args:
      **flags: more flags, or other values of these; names as XLA has them, without dashes.

    Returns:
      The variable's new value.

    Raises:
      ValueError: a flag's value is no text, or has spaces.
      RuntimeError: JAX has started its backends, and flags are read no more.
    """
    for name, value in flags.items():
        if any(char.isspace() for char in checks.text(name, value)):
            checks.refuse(name, "a text without spaces, which divide flags", value)
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "XLA has read its flags already; call set_xla_flags before the first array is made"
        )
    words = os.environ.get("XLA_FLAGS", "").split()
    present = {word.lstrip("-").split("=")[0] for word in words}
    wanted = XLA_GPU_FLAGS | flags
    words += [f"--{name}={value}" for name, value in wanted.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join(words)
    return os.environ["XLA_FLAGS"]


def claim_memory(fraction: float = 0.95, *, at_once: bool = True) -> None:
    """Lets JAX take this share of a GPU's memory, three quarters by default; call it before JAX.

    What the user has set wins, and so does a JAX that runs already.

    Args:
      fraction: share of the GPU's memory.
      at_once: whether it is taken when JAX starts, or as it is needed, which leaves room for
        other processes.
    """
    if xla_bridge.backends_are_initialized():
        return
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = str(fraction)
    if not at_once:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def use_compilation_cache(folder: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Keeps compiled programs on disk, so that the next process reads them instead of compiling.

    Args:
      folder: where to keep them; None is the folder that JAX was told
        (`JAX_COMPILATION_CACHE_DIR`), else `dsv4-jax/xla` in `$XDG_CACHE_HOME` or `~/.cache`.

    Returns:
      The folder.

    Raises:
      ValueError: it is no path.
    """
    if folder is not None and not isinstance(folder, str | os.PathLike):
        checks.refuse("folder", "a path", folder)
    chosen = folder or jax.config.jax_compilation_cache_dir  # pyright: ignore
    if chosen is None:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        chosen = pathlib.Path(home) / "dsv4-jax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.__version_info__ < (0, 12):
        _number_no_kernels()
    return pathlib.Path(chosen)


@functools.cache
def _number_no_kernels() -> None:
    """Takes a process's numbering out of its Mosaic kernels, as jax 0.12 does.

    jax 0.11 counts the kernels of a name that a process has lowered, and keeps the number in the
    kernel: a program lowered a second time, or after others, is then not found in the cache.
    """
    run = mosaic_core._run_serde_pass

    def run_without_number(module: ir.Module, **options: Any) -> ir.Module:
        name, attributes = "mosaic_gpu.dump_basename", module.operation.attributes
        if name in attributes:
            with module.context:
                bare = re.sub(r"_\d+$", "", ir.StringAttr(attributes[name]).value)
                attributes[name] = ir.StringAttr.get(bare)
        return run(module, **options)

    mosaic_core._run_serde_pass = run_without_number
