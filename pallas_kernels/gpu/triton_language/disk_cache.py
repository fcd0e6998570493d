"""What Triton made of kernels, kept on disk in the folder of jax's compilation cache.

jax asks its cache for a program that is lowered, and Triton compiles a kernel while it is lowered.
So Triton's own part, which takes seconds, would be done in every process but for this.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax

_FORMAT = 1
"""Of what is kept; another number finds nothing of this one."""
_FOLDER = "triton"
_VARIABLES = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "DISABLE_LLVM_OPT")
"""How variables of the environment begin that Triton's compiler reads."""
_LINES = "TRITON_DISABLE_LINE_INFO"
"""One of them that says nothing here: lines are always left out."""


def key_of(*parts: Any) -> str:
    """A name for what Triton makes of these, which are values of JSON.

    The version of Triton is in it, and the environment as far as Triton reads it.

    Raises:
      ModuleNotFoundError: there is no Triton.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            "kernels for Triton need the package triton where jax has no Triton backend of Pallas, "
            "or PALLAS_KERNELS_TRITON asks for it, and it is not installed; "
            "pip install 'triton>=3.7,<3.9'"
        ) from None
    read = [name for name in list(os.environ) if name.startswith(_VARIABLES)]
    variables = sorted((name, os.environ.get(name)) for name in read if name != _LINES)
    told = [_FORMAT, version, variables, *parts]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def kept(key: str, names: Collection[str], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is kept by that name, else what `make` gives, which is kept from then on.

    Without a folder of jax's compilation cache nothing is kept. Of a file that is not whole nothing
    is taken. Two processes may write one at once: each writes its own, and the last one stays.

    Args:
      key: a name that `key_of` gave.
      names: of what `make` gives.
      make: gives a dict of JSON.
    """
    folder = _folder()
    if folder is None:
        return make()
    path = folder / f"{key}.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict) and found.keys() == set(names):
        return found
    made = make()
    part = folder / f"{key}.{os.getpid()}.{threading.get_ident()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(made))  # to be read by whom the folder lets read
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        warnings.warn(
            f"Triton will compile this kernel again in the next process: {folder}, beside jax's "
            f"compilation cache, does not take it ({error})",
            stacklevel=2,
        )
    return made


def _folder() -> pathlib.Path | None:
    """Where kernels are kept; None where jax keeps no programs, or not in a file system."""
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or not config.jax_enable_compilation_cache or "://" in str(folder):
        return None
    return pathlib.Path(folder) / _FOLDER
