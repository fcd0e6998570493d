"""Idea: what a researcher puts in the place of parts of the model; by default nothing."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsv4_jax import checks

if TYPE_CHECKING:
    from dsv4_jax.config.model_config import DSV4Config
    from pallas_kernels.common.formats import CacheFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idea:
    """Changes to the model that need no change of its code; hashable, and so static in `jit`.

    `applied_to` gives a config that carries the idea. `forward`, `init_cache`, every step on a
    cache and `Engine` take the config, so that all of them obey one idea. A field of None is the
    model as it is, at no cost: the programs are the same.

    A function is traced: it has `jnp` operations, the same result for the same arguments, and no
    arrays of its own that change. Functions compare by identity. One that is defined anew, like a
    lambda in a loop, compiles anew.

    Attributes:
      selector: the entries that CSA layers attend to, `attention.Selector`.
      max_selected: the most entries that `selector` selects of a token, at least 1; of more, the
        first ones count. A step on a cache reads as many rows as this, so that a tight bound is
        fast. None is every entry there can be.
      pooling: what each token brings into its compression window, `attention.Pooling`.
      sampler: logits to tokens, in the place of `sample`: from f32[n, V], `Sampling` of n rows and
        i32[n], the position that each drawn token will have, to i32[n]. Drafts are kept where they
        are what it draws, so that it may look at these arguments alone.
      index_reuse: CSA layers that attend to what an earlier one selected; see `DSV4Config`.
      cache_format: the storage format, by name or a `pallas_kernels.CacheFormat` of one's own,
        where none is asked for by name.

    Raises:
      ValueError: a field is of another type, or cannot be hashed; or a function does not take its
        arguments.
    """

    selector: Callable[..., Any] | None = None
    max_selected: int | None = None
    pooling: Callable[..., Any] | None = None
    sampler: Callable[..., Any] | None = None
    index_reuse: tuple[int, ...] | None = None
    cache_format: str | CacheFormat | None = None

    def __post_init__(self) -> None:
        """Refuses what could not be a static argument."""
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self, name)
            if function is not None:
                _check_function(name, function, arguments)
        if self.max_selected is not None:
            width = checks.integer("max_selected", self.max_selected, 1)
            object.__setattr__(self, "max_selected", width)
            if self.selector is None:
                raise ValueError(
                    f"max_selected={width} needs a selector; the model's own selects indexer_top_k "
                    "entries, which dataclasses.replace(config, indexer_top_k=...) changes"
                )
        if self.index_reuse is not None:
            layers = checks.sequence("index_reuse", self.index_reuse, of="layers", limit=1024)
            object.__setattr__(self, "index_reuse", layers)
        for name, value in vars(self).items():
            if not _can_be_hashed(value):
                checks.refuse(name, "hashable, since it is static", value, "use a frozen dataclass")

    def applied_to(self, config: DSV4Config) -> DSV4Config:
        """The config that carries this idea, in the place of any other.

        Raises:
          ValueError: `index_reuse` names layers that cannot reuse.
        """
        changes: dict[str, Any] = {"idea": self}
        if self.index_reuse is not None:
            changes["index_reuse"] = self.index_reuse
        return dataclasses.replace(config, **changes)


_ARGUMENTS = {
    "selector": ("selection",),
    "pooling": ("tokens",),
    "sampler": ("logits", "sampling", "positions"),
}
"""What functions are called with, by position."""


def _check_function(name: str, function: Any, arguments: tuple[str, ...]) -> None:
    if not callable(function):
        checks.refuse(name, "a function or None", function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C, which does not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = getattr(function, "__qualname__", type(function).__qualname__)
        raise ValueError(
            f"{name} must take ({', '.join(arguments)}), got {called}{signature} ({error})"
        ) from None


def _can_be_hashed(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


NO_IDEA = Idea()
"""The model as it is."""
