"""Which implementation of an op runs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping


class Backend(enum.StrEnum):
    """The routes an op can take; every op has REFERENCE."""

    REFERENCE = "reference"
    """jnp through XLA: the definition, on any device."""


def resolve[F: Callable](
    op: str, backend: Backend | str | None, implementations: Mapping[Backend, F]
) -> F:
    """Picks an op's implementation.

    Args:
      op: the op's name, for errors.
      backend: the one to use; None picks the fastest one that runs here.
      implementations: what the op has.

    Raises:
      ValueError: there is no backend of that name.
      NotImplementedError: the op has no implementation for it.
    """
    if backend is None:
        return implementations[Backend.REFERENCE]
    if backend not in list(Backend):
        raise ValueError(f"backend must be one of {[b.value for b in Backend]}, got {backend!r}")
    if backend not in implementations:
        raise NotImplementedError(
            f"{op} has no {str(backend)!r} implementation, it has {list(map(str, implementations))}"
        )
    return implementations[Backend(backend)]
