"""The GPUs that `plan` knows by name, alone or several of a kind: `h200`, `b200x8`."""

from __future__ import annotations

import argparse
import dataclasses
import re

from dsv4_jax.bench.gpus import GPUS, Rates
from dsv4_jax.cli.arguments import MAX_DEVICES
from dsv4_jax.config.kinds import show


@dataclasses.dataclass(frozen=True)
class Gpus:
    """GPUs of one kind.

    Attributes:
      kind: a key of `bench.gpus.GPUS`, or None where only the memory is known.
      count: how many.
      memory_bytes: memory of each.
    """

    kind: str | None
    count: int
    memory_bytes: int

    @property
    def rates(self) -> Rates:
        """What each reaches; of one whose kind is not known, an H200's."""
        return GPUS[self.kind or "h200"].rates

    def __str__(self) -> str:
        """As `--gpu` takes it, or the memory."""
        if self.kind is None:
            return f"a GPU of {self.memory_bytes / 2**30:,.1f} GiB"
        return self.kind if self.count == 1 else f"{self.kind}x{self.count}"


def read_gpus(text: str) -> Gpus:
    """Reads `h200` or `h200x8`; an argument type."""
    match = re.fullmatch(r"([a-z]+\d+)(?:x([1-9]\d{0,3}))?", text.lower())
    kind, count = match.groups() if match else (None, None)
    if kind not in GPUS or int(count or 1) > MAX_DEVICES:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(GPUS)}, or several such as h200x8 (up to "
            f"{MAX_DEVICES}), got {show(text)}; or give the memory with --gpu-gib"
        )
    return Gpus(kind, int(count or 1), GPUS[kind].memory_bytes)
