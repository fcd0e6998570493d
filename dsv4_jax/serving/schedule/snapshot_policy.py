"""Which block boundaries are worth a snapshot: where a later request may resume."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.serving.requests.request import Request


class Boundary(NamedTuple):
    """A block boundary that a step keeps: slot, tokens before it, place in its shard's store."""

    slot: int
    end: int
    place: int


def plan_request(request: Request, shards: DataShards, known_tokens: int) -> None:
    """Spreads the snapshots of a request that has just been admitted.

    Args:
      request: the request, in its slot.
      shards: the cache's managers.
      known_tokens: how much of it the prefix tree knew before, resumable or not.
    """
    manager, slot = shards.of(request.slot)
    plan, hit = manager.plan, manager.prefixes.hit_tokens(slot)
    request.next_boundary = known_tokens if known_tokens > hit else 0
    blocks = request.num_known // plan.block_tokens
    places = max(plan.num_snapshots // 2, 1)
    request.snapshot_spacing = max(-(-blocks // places), 1)


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
        if not _is_worth_keeping(request, manager, slot, boundary):
            continue
        if boundary - size > request.prompt_tokens:
            if (is_pending or boundaries) and not prefixes.tree.num_free_snapshots:
                continue
            befores = range(boundary - size, request.prompt_tokens, -size)
            any(prefixes.demote_snapshot(slot, before) for before in befores)  # the last one
        place = prefixes.begin_snapshot()
        if place >= 0:
            boundaries.append(Boundary(request.slot, boundary, place))
    return boundaries


def _is_worth_keeping(request: Request, manager: KVCacheManager, slot: int, boundary: int) -> bool:
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
    return len(prefix) < boundary or not manager.prefixes.is_resumable(slot, prefix)
