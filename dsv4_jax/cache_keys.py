"""Keys of jax's compilation cache that do not say where source code lies.

jax leaves out of a key where a program's operations were written, but not where a kernel's were: a
kernel is text inside of an operation, which holds file names, lines and columns of the kernel and
of whoever called it. So another folder, or a comment above a kernel, would compile all again. Here
kernels enter a key without those. What is compiled keeps them, so that errors and profiles name
lines; a program that comes from the cache names those of the code that it was compiled from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
from typing import Any

from jaxlib.mlir import ir, passmanager

from dsv4_jax import compat

_log = logging.getLogger(__name__)

_KERNELS = {"__gpu$xla.gpu.triton": "ir", "mosaic_gpu_v2": "module"}
"""Custom calls that are kernels, and the field of each one's config that holds its text."""

_CONFIG = "mhlo.backend_config"
_DERIVED = ("kernel_hash",)
"""Fields that follow from the text with its locations."""

_BYTECODE = b"ML\xefR"
"""How MLIR begins that is not written as text."""

_NUM_KEPT = 1024
"""Hashes of kernels that are kept: the steps of an engine have kernels in common."""

_COUNTED = "mosaic_gpu.dump_basename"
"""Attribute in which jax 0.11 counts the kernels of a name that a process has lowered."""


@functools.cache
def leave_out_locations() -> None:
    """Makes jax's keys independent of where kernels were written, for the rest of the process."""

    def change(canonicalize: compat.Canonicalize) -> compat.Canonicalize:
        def canonicalize_kernels_too(module: ir.Module, *options: Any, **more: Any) -> bytes:
            with module.context:
                copy: Any = module.operation.clone(ip=False)
                strip_kernels(copy)
                return canonicalize(copy, *options, **more)

        return canonicalize_kernels_too

    compat.replace_canonicalize(change)


def strip_kernels(module: ir.Module) -> None:
    """Puts a hash in the place of each kernel's text, of the text without locations.

    Args:
      module: a lowered program, which is changed; nobody can compile it any more.
    """

    def strip(operation: Any) -> ir.WalkResult:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and _CONFIG in attributes:
            field = _KERNELS.get(ir.StringAttr(attributes["call_target_name"]).value)
            config = ir.DictAttr(attributes[_CONFIG])
            if field is not None and field in config:
                fields = {one.name: one.attr for one in config if one.name not in _DERIVED}
                text = ir.StringAttr(fields[field]).value_bytes
                fields[field] = ir.StringAttr.get(hash_of_kernel(text))
                attributes[_CONFIG] = ir.DictAttr.get(fields)
        return ir.WalkResult.ADVANCE

    module.operation.walk(strip)


@functools.lru_cache(_NUM_KEPT)
def hash_of_kernel(text: bytes) -> bytes:
    """A hash of a kernel's MLIR without locations and the number that a process gave it."""
    if not text.startswith(_BYTECODE) and b"loc(" not in text:
        return hashlib.sha256(text).hexdigest().encode()  # Triton's, whose dialect jax may not have
    try:
        with _context() as context:
            kernel: Any = ir.Module.parse(text, context)
            attributes = kernel.operation.attributes
            if _COUNTED in attributes:
                del attributes[_COUNTED]
            passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(kernel.operation)
            written = io.BytesIO()  # six times faster than text
            kernel.operation.write_bytecode(written)
            plain = written.getvalue()
    except ir.MLIRError as error:  # then the key holds the locations, and no more is lost
        _log.warning("a kernel enters the compilation cache with its locations: %s", error)
        plain = text
    return hashlib.sha256(plain).hexdigest().encode()


def _context() -> ir.Context:
    """What kernels of both kinds are read in."""
    context = ir.Context()
    context.append_dialect_registry(compat.dialects())
    with contextlib.suppress(ImportError):  # a jax that has no such backend has no such kernels
        from pallas_kernels.gpu import triton_pallas

        triton_pallas.dialect.register_dialect(context)
    context.load_all_available_dialects()
    context.allow_unregistered_dialects = True
    return context
