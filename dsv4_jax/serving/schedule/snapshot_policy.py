"""Which block boundaries are worth a snapshot: where a later request may resume."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.serving.requests.reading import Reading
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.sizing import UpperSteps

SPACED_SNAPSHOTS, SPACED_BLOCKS = 8, 16
"""Evenly spaced snapshots of a prompt, at most: so many, or one in so many blocks if those are
more. A snapshot takes the room of four blocks of V4-Flash, and most prompts go on from an end or
from where another left (`benchmarks/snapshot_policies.py`)."""


class Boundary(NamedTuple):
    """A block boundary that a step keeps.

    Attributes:
      slot: of the request.
      end: tokens before it.
      place: in its shard's store.
      must_follow: as of `PrefixNode`.
    """

    slot: int
    end: int
    place: int
    must_follow: int = 0


def plan_request(
    request: Request, shards: DataShards, known_tokens: int, upper: UpperSteps | None = None
) -> None:
    """Spreads the snapshots of a request that has just been admitted, and plans how it is read.

    Args:
      request: the request, in its slot.
      shards: the cache's managers.
      known_tokens: how much of it the prefix tree knew before, resumable or not.
      upper: None has all layers read all tokens.
    """
    manager, slot = shards.of(request.slot)
    plan, hit = manager.plan, manager.prefixes.hit_tokens(slot)
    request.next_boundary = known_tokens if known_tokens > hit else 0
    blocks = request.num_known // plan.block_tokens
    most = max(SPACED_SNAPSHOTS, blocks // SPACED_BLOCKS)
    places = max(min(plan.num_snapshots // 2, most), 1)
    request.snapshot_spacing = max(-(-blocks // places), 1)
    if upper is not None:
        needed = [_last_boundary(request, plan.block_tokens), request.next_boundary]
        request.reading = _plan_reading(request, hit, needed, upper)
        request.upper_from = -1 if manager.prefixes.is_exact_hit(slot) else hit


def plan_restored(
    request: Request, shards: DataShards, length: int, upper: UpperSteps | None = None
) -> None:
    """`plan_request` of one that came with its cache, which nobody knows how it was read.

    Whoever read it has let all layers run from `look_back` tokens before its last boundary on.
    """
    plan_request(request, shards, 0)
    if upper is not None:
        last = _last_boundary(request, shards.managers[0].plan.block_tokens)
        begin = last - upper.look_back
        request.reading = _plan_reading(request, length, [last], upper)
        request.upper_from = min(length, begin) if begin > 0 else -1


def _plan_reading(request: Request, start: int, needed: list[int], upper: UpperSteps) -> Reading:
    return Reading.of(
        start,
        request.num_known,
        needed if upper.sizes else (),
        look_back=upper.look_back,
        sizes=upper.step_sizes,
        rest_cost=upper.rest_cost,
    )


def _last_boundary(request: Request, block_tokens: int) -> int:
    """The last block boundary before the last known token."""
    return (request.num_known - 1) // block_tokens * block_tokens


def take_boundaries(
    request: Request, shards: DataShards, length: int, end: int, *, is_pending: bool = False
) -> list[Boundary]:
    """Boundaries after `length`, up to `end`, that are worth keeping, with a place for each.

    Who continues an answer comes in at its end, so that snapshots of prompts are worth more: an
    answer's next one takes the place of its last one. While one is still to be written, those after
    it take free places alone.

    Args:
      request: the request.
      shards: the cache's managers.
      length: tokens before the step.
      end: the most after it.
      is_pending: the request has a place that a step in flight may write.
    """
    manager, slot = shards.of(request.slot)
    prefixes, size = manager.prefixes, manager.plan.block_tokens
    boundaries: list[Boundary] = []
    for boundary in range((length // size + 1) * size, end + 1, size):
        must_follow, reading = 0, request.reading
        if reading is not None and not reading.is_exact(boundary, request.upper_from):
            must_follow = reading.look_back
        if not _is_worth_keeping(request, manager, slot, boundary, must_follow):
            continue
        if boundary - size > request.prompt_tokens:
            if (is_pending or boundaries) and not prefixes.tree.num_free_snapshots:
                continue
            befores = range(boundary - size, request.prompt_tokens, -size)
            any(prefixes.demote_snapshot(slot, before) for before in befores)  # the last one
        place = prefixes.begin_snapshot()
        if place >= 0:
            boundaries.append(Boundary(request.slot, boundary, place, must_follow))
    return boundaries


def _is_worth_keeping(
    request: Request, manager: KVCacheManager, slot: int, boundary: int, must_follow: int
) -> bool:
    """Whether a snapshot of this boundary would serve somebody.

    Evenly spaced boundaries of a prompt are, its last ones, the one where it leaves what is known,
    and all that an answer reaches, for the prompt that continues it.
    """
    if not manager.plan.num_snapshots:
        return False
    size, prompt = manager.plan.block_tokens, request.prompt_tokens
    is_last = boundary > prompt - size - 1
    is_spaced = (boundary // size) % request.snapshot_spacing == 0
    if not (is_last or is_spaced or boundary == request.next_boundary):
        return False
    prefix = request.known[:boundary]
    return len(prefix) < boundary or not manager.prefixes.is_resumable(slot, prefix, must_follow)
