"""How a small model starts on a CPU: compiling takes longer there than all that it is asked.

Its programs are compiled without the passes of LLVM that take half of the time, and an engine has
steps of one shape, so that there is one program where there would be two to five.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from typing import Any

from dsv4_jax.checkpoint.find import find_checkpoint, is_on_hub
from dsv4_jax.runtime import has_gpu

_SMALL_BYTES = 2**26
_LEAST_TOKENS = 16
"""Of a step: prompts are short, and a step of more would take longer where all rows decode."""

FLAGS = {"xla_backend_optimization_level": "1"}
"""Flags of XLA for it; what the user sets wins."""


def starts_quickly(checkpoint: str | None) -> bool:
    """Whether that is a small model on a machine without a GPU; one on a hub is not asked."""
    if has_gpu() or is_on_hub(checkpoint):
        return False
    with contextlib.suppress(OSError, ValueError):  # which loading will say
        folder = find_checkpoint(checkpoint)
        return 0 < _weight_bytes(folder) <= _SMALL_BYTES
    return False


def one_shape(args: argparse.Namespace, max_requests: int) -> dict[str, Any]:
    """Fields of `EngineOptions` by which all steps have one shape; {} if a shape was asked for.

    Args:
      args: with the options of `add_engine_options`, drafts settled.
      max_requests: requests at once on a data shard.
    """
    asked = [getattr(args, name, None) for name in ("prefill_tokens", "decode_batch_sizes")]
    other_rows = args.prefill_activations not in (None, args.activations)
    if asked != [None, None] or args.steps_per_call > 1 or other_rows:
        return {}
    if not starts_quickly(args.checkpoint):
        return {}
    size = max(_LEAST_TOKENS, max_requests * (args.draft_tokens + 1))
    return {"prefill_tokens": (size,), "decode_tokens": size}


def _weight_bytes(folder: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
