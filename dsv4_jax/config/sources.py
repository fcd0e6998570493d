"""Entries and selections that layers share: which layers make them, and which read them.

Source: deepseek_v41.md sections 2, 4 and 7.
"""

from __future__ import annotations

import dataclasses

from dsv4_jax.config.kinds import ListOf, Whole, show
from dsv4_jax.config.limits import MAX_LAYERS

RATIOS = ListOf(Whole(0, 2), MAX_LAYERS)
"""Tokens per entry of each layer: of a pair, of one token, or none in a window layer."""
LAYERS = ListOf(Whole(0, MAX_LAYERS), MAX_LAYERS)
COUNT = Whole(1, 2**24)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """What a layer leaves of the entries for the selections of later layers.

    Attributes:
      layer: the layer whose scores decide.
      blocks: blocks of entries that are kept for a query.
      block_size: entries of a block, on a fixed grid from entry 0.

    Raises:
      ValueError: a value is no integer or out of range; the message names the field.
    """

    layer: int
    blocks: int
    block_size: int

    def __post_init__(self) -> None:
        """Refuses what is no such number."""
        for name, kind in (
            ("layer", LAYERS.item),
            ("blocks", COUNT),
            ("block_size", COUNT),
        ):
            value = kind.read(getattr(self, name), f"candidates.{name}")
            object.__setattr__(self, name, value)

    @property
    def least_entries(self) -> int:
        """The fewest entries that are kept where blocks are left out: the newest may hold one."""
        return self.blocks * self.block_size - (self.block_size - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntrySources:
    """Which layers make entries, index keys and selections, where others read them.

    A layer reads the entries of the last maker at or before it, and attends to what the last
    selector at or before it selected of them.

    Attributes:
      ratios: of each trunk layer, the tokens of an entry that it reads; 0 is a window layer.
      makers: layers that make entries and index keys.
      selectors: layers that score and select; all makers are among them.
      candidates: what limits the selections of later layers; None has no such limit.

    Raises:
      ValueError: a value of a wrong type, out of range or in contradiction to another; the message
        names the field.
    """

    ratios: tuple[int, ...]
    makers: tuple[int, ...]
    selectors: tuple[int, ...]
    candidates: Candidates | None = None

    def __post_init__(self) -> None:
        """Refuses layers that would read what nobody makes."""
        for name, kind in (("ratios", RATIOS), ("makers", LAYERS), ("selectors", LAYERS)):
            value = tuple(kind.read(getattr(self, name), f"sources.{name}"))
            object.__setattr__(self, name, value)
        if not isinstance(self.candidates, Candidates | None):
            raise ValueError(
                f"sources.candidates must be a Candidates or None, got {show(self.candidates)}"
            )
        for name in ("makers", "selectors"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers)):
                raise ValueError(f"sources.{name} must ascend, got {show(list(layers))}")
            for layer in layers:
                if layer >= len(self.ratios) or not self.ratios[layer]:
                    raise ValueError(
                        f"sources.{name} must be layers whose ratio is 1 or 2, got layer {layer}"
                    )
        for layer in self.makers:
            if layer not in self.selectors:
                raise ValueError(
                    f"sources.selectors must have every maker, and layer {layer} is missing; "
                    "indices that were selected of other entries say nothing of its own"
                )
        for layer, ratio in enumerate(self.ratios):
            if not ratio:
                continue
            if not self.makers or layer < self.makers[0]:
                raise ValueError(
                    f"sources.makers must have a layer at or before layer {layer}, which reads "
                    f"entries, got {show(list(self.makers))}"
                )
            maker = self.maker_of(layer)
            if self.ratios[maker] != ratio:
                raise ValueError(
                    f"sources.ratios must be equal for a maker and those who read it, got "
                    f"{self.ratios[maker]} of layer {maker} and {ratio} of layer {layer}"
                )
        if self.candidates is not None:
            self._check_candidates(self.candidates)

    def _check_candidates(self, candidates: Candidates) -> None:
        if candidates.layer not in self.selectors:
            raise ValueError(
                f"candidates.layer must be one of the selectors {show(list(self.selectors))}, got "
                f"{candidates.layer}"
            )
        if later := [maker for maker in self.makers if maker > candidates.layer]:
            raise ValueError(
                f"candidates.layer must not lie before a maker, whose entries are others, got "
                f"{candidates.layer} and maker {later[0]}"
            )

    def maker_of(self, layer: int) -> int:
        """The layer whose entries and index keys a layer reads."""
        return max(maker for maker in self.makers if maker <= layer)

    def selector_of(self, layer: int) -> int:
        """The layer whose selection a layer attends to."""
        return max(selector for selector in self.selectors if selector <= layer)

    def is_limited(self, layer: int) -> bool:
        """Whether a selector takes candidates alone."""
        return self.candidates is not None and layer > self.candidates.layer

    def check_fits(self, *, num_layers: int, indexer_top_k: int) -> None:
        """Refuses what a model of those sizes cannot have.

        Raises:
          ValueError: ratios are not one per layer, or candidates may be fewer than are selected.
        """
        if len(self.ratios) != num_layers:
            raise ValueError(
                f"sources.ratios must have one entry per layer, got {len(self.ratios)} for "
                f"{num_layers} layers"
            )
        if self.candidates is not None and self.candidates.least_entries < indexer_top_k:
            raise ValueError(
                "candidates.blocks * block_size - (block_size - 1) must be at least "
                f"indexer_top_k={indexer_top_k}, got {self.candidates.least_entries}; fewer would "
                "leave queries without the entries that they are to select"
            )
