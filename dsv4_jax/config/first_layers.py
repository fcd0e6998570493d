"""A model cut to its first layers, for benchmarks and compiled steps of a few layers."""

from __future__ import annotations

import dataclasses

from dsv4_jax.config.engram import EngramConfig
from dsv4_jax.config.model_config import DSV4Config
from dsv4_jax.config.sources import EntrySources


def first_layers(config: DSV4Config, layers: int) -> DSV4Config:
    """The first layers of a model, with the entries and Engram tables that are theirs.

    A DSpark draft stays as it is, and must not read layers that are gone.

    Raises:
      ValueError: the model has not so many layers, or a draft reads others.
    """
    if not 1 <= layers <= config.num_layers:
        raise ValueError(f"layers must be in 1..{config.num_layers}, got {layers}")
    return dataclasses.replace(
        config,
        layer_types=config.layer_types[:layers],
        router_types=config.router_types[:layers],
        sources=_first_sources(config.sources, layers),
        engram=_first_tables(config.engram, layers),
    )


def _first_sources(sources: EntrySources | None, layers: int) -> EntrySources | None:
    """Who makes and selects among the first layers, if layers of the model share entries."""
    if sources is None:
        return None
    limit = sources.candidates
    return dataclasses.replace(
        sources,
        ratios=sources.ratios[:layers],
        makers=tuple(maker for maker in sources.makers if maker < layers),
        selectors=tuple(selector for selector in sources.selectors if selector < layers),
        candidates=limit if limit is not None and limit.layer < layers else None,
    )


def _first_tables(engram: EngramConfig | None, layers: int) -> EngramConfig | None:
    """The Engram tables of the first layers; None if they have none."""
    kept = () if engram is None else tuple(layer for layer in engram.layers if layer < layers)
    return dataclasses.replace(engram, layers=kept) if engram is not None and kept else None
