"""Which layer is SWA, CSA or HCA, how it routes, and where its arrays lie."""

from __future__ import annotations

import dataclasses
import itertools

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
    """

    layer_idx: int
    attn: AttentionType
    router: RouterType
    family_idx: int
    kind_idx: int
    index_source: int | None = None

    @property
    def kind(self) -> str:
        """Attention type and router, the key of the layer's stacked parameters: `csa_learned`."""
        return f"{self.attn}_{self.router}"


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

    def kind_stride(self, spec: LayerSpec) -> int:
        """How many layers of the kind of `spec` one copy of the pattern holds."""
        return sum(other.kind == spec.kind for other in self.pattern)


def layer_schedule(config: DSV4Config) -> tuple[LayerSpec, ...]:
    """The trunk's layers in order; those of the draft are `draft_layers`."""
    families = {attn: itertools.count() for attn in AttentionType}
    kinds: dict[tuple[AttentionType, RouterType], itertools.count[int]] = {}
    specs = []
    selecting = None
    for layer_idx, (attn, router) in enumerate(
        zip(config.layer_types, config.router_types, strict=True)
    ):
        kind = kinds.setdefault((attn, router), itertools.count())
        reuses = layer_idx in config.index_reuse
        if attn == AttentionType.CSA and not reuses:
            selecting = layer_idx
        specs.append(
            LayerSpec(
                layer_idx=layer_idx,
                attn=attn,
                router=router,
                family_idx=next(families[attn]),
                kind_idx=next(kind),
                index_source=selecting if reuses else None,
            )
        )
    return tuple(specs)


def draft_layers(config: DSV4Config) -> tuple[LayerSpec, ...]:
    """The layers of the draft: window attention and learned routing, whatever the trunk has.

    Raises:
      ValueError: the config has DSpark stages, and does not say how many.
    """
    count = config.num_mtp_layers
    if config.dspark is not None:
        count = config.dspark.known_stages
    return tuple(
        LayerSpec(
            layer_idx=config.num_layers + stage,
            attn=AttentionType.SWA,
            router=RouterType.LEARNED,
            family_idx=config.layer_types.count(AttentionType.SWA) + stage,
            kind_idx=stage,
        )
        for stage in range(count)
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
