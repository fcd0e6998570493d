"""What each layer makes and reads, how it routes, and where its arrays lie."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TypedDict

from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.model_config import DSV4Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of the schedule.

    Attributes:
      layer_idx: place in the model; layers of a draft come after the trunk.
      attn: attention type.
      router: router type.
      family_idx: place among the layers of the same attention type: the layer's index into every
        stacked array of that family's pools.
      kind_idx: place among the trunk layers of the same kind: the layer's index into that kind's
        stacked parameters; of a draft, which has parameters of its own, among its layers.
      index_source: the earlier CSA layer whose selected entries this one attends to; None for a
        layer that selects for itself, or has no indexer.
      ratio: tokens of an entry that the layer attends to; 0 has none.
      entry_source: the layer whose entries those are; its own place where it makes them, None
        where there are none.
      entry_idx: where entries are shared, the place of that layer among those that make entries of
        this family: the index into every stacked array of that family's blocks. Elsewhere that is
        `family_idx`, and this is 0.
      shares: whether entries and selections are those of `DSV4Config.sources`, which other layers
        read too.
      makes_candidates: the layer leaves candidates for later selections.
      takes_candidates: the layer selects among candidates alone.
      writes_engram: rows of an Engram table are written into the streams before the layer.
    """

    layer_idx: int
    attn: AttentionType
    router: RouterType
    family_idx: int
    kind_idx: int
    index_source: int | None = None
    ratio: int = 0
    entry_source: int | None = None
    entry_idx: int = 0
    shares: bool = False
    makes_candidates: bool = False
    takes_candidates: bool = False
    writes_engram: bool = False

    @property
    def makes_entries(self) -> bool:
        """The layer makes entries and index keys."""
        return self.entry_source == self.layer_idx

    @property
    def entry_family(self) -> str:
        """What blocks the entries lie in: of an attention type or, where shared, of a ratio too.

        Of a window layer it is the empty text.
        """
        if self.entry_source is None:
            return ""
        return f"{self.attn}{self.ratio}" if self.shares else str(self.attn)

    @property
    def makes_selection(self) -> bool:
        """The layer scores entries and selects some."""
        return self.attn == AttentionType.CSA and self.index_source is None

    @property
    def kind(self) -> str:
        """Attention type and router, the key of the layer's stacked parameters: `csa_learned`.

        Where layers share entries, what the layer has of its own stands between the two, as in
        `csa1_selects_learned`.
        """
        parts = [f"{self.attn}{self.ratio}" if self.shares and self.ratio else str(self.attn)]
        if self.shares and self.ratio:
            made = [("makes", self.makes_entries), ("selects", self.makes_selection)]
            parts += [name for name, is_made in made if is_made]
            parts += ["limits"] * self.makes_candidates + ["limited"] * self.takes_candidates
        parts += ["engram"] * self.writes_engram
        return "_".join([*parts, str(self.router)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of layers made of `repeats` copies of one pattern of kinds.

    Attributes:
      pattern: the layers of the first copy.
      repeats: number of copies; copy `r` of `spec` has `family_idx + r * family_stride(spec)`.
    """

    pattern: tuple[LayerSpec, ...]
    repeats: int

    def family_stride(self, spec: LayerSpec) -> int:
        """How many layers of the attention type of `spec` one copy of the pattern holds."""
        return sum(other.attn == spec.attn for other in self.pattern)

    def entry_stride(self, spec: LayerSpec) -> int:
        """How many layers of one copy of the pattern make entries of the family that `spec` reads.

        Copy `r` of `spec` reads those of `entry_idx + r * entry_stride(spec)`.
        """
        family = spec.entry_family
        return sum(other.makes_entries and other.entry_family == family for other in self.pattern)

    @property
    def engram_stride(self) -> int:
        """How many layers of one copy of the pattern have an Engram table."""
        return sum(other.writes_engram for other in self.pattern)

    def kind_stride(self, spec: LayerSpec) -> int:
        """How many layers of the kind of `spec` one copy of the pattern holds."""
        return sum(other.kind == spec.kind for other in self.pattern)


def layer_schedule(config: DSV4Config) -> tuple[LayerSpec, ...]:
    """The trunk's layers in order; those of the draft are `draft_layers`."""
    families = {attn: itertools.count() for attn in AttentionType}
    kinds: dict[str, itertools.count[int]] = {}
    made: dict[str, int] = {}  # by family of entries, the last layer that made some
    specs = []
    for layer_idx, (attn, router) in enumerate(
        zip(config.layer_types, config.router_types, strict=True)
    ):
        spec = LayerSpec(
            layer_idx=layer_idx,
            attn=attn,
            router=router,
            family_idx=next(families[attn]),
            kind_idx=0,
            writes_engram=config.engram is not None and layer_idx in config.engram.layers,
            **_reading(config, layer_idx, attn),
        )
        if spec.shares and spec.makes_entries:
            made[spec.entry_family] = made.get(spec.entry_family, -1) + 1
        spec = dataclasses.replace(spec, entry_idx=made.get(spec.entry_family, 0))
        kind = kinds.setdefault(spec.kind, itertools.count())
        specs.append(dataclasses.replace(spec, kind_idx=next(kind)))
    return tuple(specs)


class _Reading(TypedDict, total=False):
    index_source: int | None
    ratio: int
    entry_source: int | None
    shares: bool
    makes_candidates: bool
    takes_candidates: bool


def _reading(config: DSV4Config, layer: int, attn: AttentionType) -> _Reading:
    """What a layer makes and reads of entries: fields of its `LayerSpec`."""
    if attn == AttentionType.SWA:
        return {"shares": config.sources is not None}
    if (sources := config.sources) is None:
        reused = None
        if layer in config.index_reuse:
            own = (n for n in range(layer) if config.layer_types[n] == attn)
            reused = max(n for n in own if n not in config.index_reuse)
        ratio = config.compression_ratio(attn)
        return {"index_source": reused, "ratio": ratio, "entry_source": layer}
    selector = sources.selector_of(layer)
    return {
        "index_source": None if selector == layer else selector,
        "ratio": sources.ratios[layer],
        "entry_source": sources.maker_of(layer),
        "shares": True,
        "makes_candidates": sources.candidates is not None and layer == sources.candidates.layer,
        "takes_candidates": selector == layer and sources.is_limited(layer),
    }


def draft_layers(config: DSV4Config) -> tuple[LayerSpec, ...]:
    """The layers of the draft: window attention and learned routing, whatever the trunk has.

    They make and read no entries.

    Raises:
      ValueError: the config has DSpark stages, and does not say how many.
    """
    count = config.num_mtp_layers
    if config.dspark is not None:
        count = config.dspark.known_stages
    return tuple(draft_layer(config, stage) for stage in range(count))


def draft_layer(config: DSV4Config, stage: int) -> LayerSpec:
    """A layer of the draft of a config, whether or not that has one."""
    return LayerSpec(
        layer_idx=config.num_layers + stage,
        attn=AttentionType.SWA,
        router=RouterType.LEARNED,
        family_idx=config.layer_types.count(AttentionType.SWA) + stage,
        kind_idx=stage,
        shares=config.sources is not None,
    )


def split_into_segments(schedule: tuple[LayerSpec, ...]) -> tuple[Segment, ...]:
    """Cuts a schedule into segments of a repeating pattern, so that layers can be scanned.

    Greedy: at each layer, the pattern that covers most layers with at least two copies wins, the
    shorter one among equals; a layer that starts none is a segment by itself. Flash gives
    twice SWA, once CSA, then 20 times (HCA, CSA).
    """
    kinds = [(spec.kind, spec.index_source is not None) for spec in schedule]
    segments = []
    start = 0
    while start < len(kinds):
        best_period, best_repeats = 1, 1
        for period in range(1, (len(kinds) - start) // 2 + 1):
            pattern = kinds[start : start + period]
            repeats = 1
            while kinds[start + repeats * period :][:period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > best_repeats * best_period:
                best_period, best_repeats = period, repeats
        segments.append(
            Segment(pattern=schedule[start : start + best_period], repeats=best_repeats)
        )
        start += best_period * best_repeats
    return tuple(segments)
