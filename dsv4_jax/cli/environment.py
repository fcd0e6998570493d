"""What a command makes of its environment before JAX starts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile

import jax

from dsv4_jax.runtime import look_for_no_gpu, set_xla_flags
from dsv4_jax.standard_streams import say

_READ_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"
"""XLA ends the process that reads flags which it does not know."""


def prepare_jax(**flags: str) -> None:
    """Chooses devices and flags, and looks at the cache of programs; call it before JAX starts.

    Args:
      **flags: as of `set_xla_flags`.

    Raises:
      ValueError: the environment asks for what cannot be.
    """
    if jax.config.jax_enable_x64:  # pyright: ignore
        raise ValueError(
            "JAX_ENABLE_X64 must be off: arrays here have 32 bits and fewer; take it out of the "
            "environment"
        )
    look_for_no_gpu()
    _check_cache()
    given = os.environ.get("XLA_FLAGS", "")
    with contextlib.suppress(RuntimeError):  # JAX runs already, in the process that calls this
        set_xla_flags(**flags)
        if given.strip():
            _check_flags()


def _check_flags() -> None:
    """Lets another process read the flags, with XLA's log on, since that tells the reason.

    Raises:
      ValueError: it was ended by one of them.
    """
    done = subprocess.run(
        [sys.executable, "-c", _READ_FLAGS],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
        errors="replace",
    )
    told = next((line for line in done.stderr.splitlines() if "] " in line), None)
    if done.returncode and told:
        raise ValueError(f"XLA_FLAGS must be flags that XLA knows: {told.partition('] ')[2]}")


def _check_cache() -> None:
    """Does without a cache that cannot be written, and says so once; JAX says so at every program.

    A folder on another machine, such as `gs://bucket/folder`, is not asked.
    """
    chosen: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore
    if chosen is None:
        say("[compiled programs are not kept: no home for them; set JAX_COMPILATION_CACHE_DIR]")
    elif "://" not in chosen:
        try:
            os.makedirs(chosen, exist_ok=True)
            with tempfile.TemporaryFile(dir=chosen):
                pass
        except OSError as error:
            jax.config.update("jax_compilation_cache_dir", None)
            say(f"[compiled programs are not kept: {error}]")
