"""What `dsv4-jax bench serve` tells of a load: figures of all its requests, and lines of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4_jax.bench.load import SERVED, Outcome

PERCENTILES = (50, 90, 99)

_LATE_S = 0.02
"""A client that sends later than this, at the 99th percentile, is the bottleneck itself."""


def summarise(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Figures of a run; of times, percentiles over requests that were served."""
    served = [outcome for outcome in outcomes if outcome.status == SERVED]
    prompts = sum(outcome.prompt_tokens for outcome in served)
    drawn = sum(outcome.drawn_tokens for outcome in served)
    return {
        "seconds": seconds,
        "requests": len(outcomes),
        "served": len(served),
        "by_status": dict(sorted(Counter(outcome.status for outcome in outcomes).items())),
        "problems": {one.status: one.problem for one in reversed(outcomes) if one.problem},
        "requests_per_s": len(served) / seconds,
        "drawn_tokens": drawn,
        "drawn_tokens_per_s": drawn / seconds,
        "prompt_tokens": prompts,
        "hit_rate": _hit_rate(served, prompts),
        "first_token_s": _spread([outcome.first_s for outcome in served]),
        "between_events_s": _spread([gap for outcome in served for gap in outcome.gaps_s]),
        "per_token_s": _spread([outcome.per_token_s for outcome in served]),
        "whole_s": _spread([outcome.whole_s for outcome in served]),
        "late_s": _spread([outcome.late_s for outcome in outcomes]),
    }


def _hit_rate(served: Sequence[Outcome], prompt_tokens: int) -> float | None:
    """Share of the prompts' tokens that were in the server's cache; None if it does not say."""
    hits = [outcome.hit_tokens for outcome in served if outcome.hit_tokens is not None]
    return sum(hits) / prompt_tokens if prompt_tokens and len(hits) == len(served) else None


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and the largest of a list; None of an empty one."""
    numbers = np.array([value for value in values if value is not None])
    if not len(numbers):
        return None
    percentiles = zip(PERCENTILES, np.percentile(numbers, PERCENTILES).tolist(), strict=True)
    named = {f"p{share}": value for share, value in percentiles}
    return {"mean": float(numbers.mean())} | named | {"most": float(numbers.max())}


def report_lines(figures: dict[str, Any], loop: str) -> list[str]:
    """What a person reads; `loop` says how requests came."""
    statuses = ", ".join(f"{status}: {count}" for status, count in figures["by_status"].items())
    share, hits = figures["hit_rate"], ""
    if share is not None:
        hits = f", {share:.0%} of them from the cache"
    elif figures["prompt_tokens"]:
        hits = ", of which the server does not say how many were in its cache"
    lines = [
        f"requests  {figures['requests']} in {figures['seconds']:.1f} s; {loop}; "
        f"{figures['requests_per_s']:.2f} per s served",
        f"status    {statuses}",
        *(f"  {status}: {problem}" for status, problem in figures["problems"].items()),
        f"tokens    {figures['drawn_tokens']:,} drawn, {figures['drawn_tokens_per_s']:,.0f} per s; "
        f"{figures['prompt_tokens']:,} of prompts{hits}",
        f"{'ms':<16}" + "".join(f"{name:>11}" for name in ("mean", "p50", "p90", "p99", "most")),
    ]
    for name, shown in (
        ("first_token_s", "first token"),
        ("between_events_s", "between events"),
        ("per_token_s", "for each token"),
        ("whole_s", "whole answer"),
    ):
        if spread := figures[name]:
            cells = "".join(f"{value * 1e3:>11,.1f}" for value in spread.values())
            lines.append(f"{shown:<16}{cells}")
    late = figures["late_s"]
    if late is not None and late["p99"] > _LATE_S:
        lines.append(
            f"this client was late itself: by {late['p99'] * 1e3:.0f} ms at p99; give it a core of "
            "its own, or ask for a lower --rate or --concurrency"
        )
    return lines
