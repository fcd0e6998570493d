"""What an engine holds at one moment, as plain values: for a page, or whoever wants to look.

It is read between two steps. It holds counts, ids of blocks and positions, and neither tokens, text
nor salts. Its size is bounded, whatever the engine's is.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.holdings import holdings_of
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.page_files import NO_PARENT
from dsv4_jax.allocator.prefix_tree import PrefixNode
from dsv4_jax.serving.device.host_copies import HostCopies
from dsv4_jax.serving.engine_core import EngineCore
from dsv4_jax.serving.metrics.histogram import Histogram
from dsv4_jax.serving.metrics.metrics import METRICS
from dsv4_jax.serving.requests.calls import exclusive_as
from dsv4_jax.serving.requests.request import Request

MAX_REQUESTS = 48
"""Requests that are shown, those that run before those that wait."""

MAX_BLOCKS = 256
"""Blocks of a request that are shown, the first ones."""

DEVICE = "device"

MAX_NODES = 1024
"""Blocks of known prefixes that are shown: those in use, then those last used that resume."""

_NUMBERS = [
    name for name, about in METRICS.items() if about.kind != "histogram" and about.label is None
]
"""Counters and gauges that are one number."""


@exclusive_as("its state was read")
def read_state(engine: EngineCore) -> dict[str, Any]:
    """The state of an engine between two calls.

    Returns:
      What `docs/serving.md` describes; `json.dumps` takes it.

    Raises:
      RuntimeError: a call is in progress.
    """
    metrics, queue = engine.metrics, engine.loop.queue
    now = engine.loop.clock()
    running, waiting = queue.by_age(), queue.waiting
    shown = [*running, *waiting[:MAX_REQUESTS]][:MAX_REQUESTS]
    managers = queue.shards.managers
    host = engine.loop.host
    tree = _read_trees(managers, host)
    return {
        "seconds": now,
        "sizes": _sizes(engine),
        "counters": {name: getattr(metrics, name) for name in _NUMBERS},
        "finished": dict(metrics.finished),
        "drafted_at": dict(metrics.drafted_at),
        "accepted_at": dict(metrics.accepted_at),
        "used_bytes": dict(metrics.used_bytes),
        "held_snapshots": sum(manager.prefixes.tree.num_held_snapshots for manager in managers),
        "first_token_s": _quantiles(metrics.first_token_s),
        "token_s": _quantiles(metrics.token_s),
        "requests": [_read_request(engine, request, now) for request in shown],
        "requests_left_out": len(running) + len(waiting) - len(shown),
        "tiers": _read_tiers(host),
        "prefixes": tree,
        "prefixes_left_out": sum(one.prefixes.tree.num_nodes for one in managers)
        - sum(DEVICE in one["where"] for one in tree),
    }


def _sizes(engine: EngineCore) -> dict[str, Any]:
    """What does not change."""
    pools, families = engine.loop.runner.plan, {}
    for schema in engine.cache.schemas:
        one = families.setdefault(
            schema.entry_family or schema.attn_type.value,
            {
                "layers": 0,
                "tokens_of_an_entry": schema.compression_ratio,
                "entries_of_a_block": schema.entries_per_block,
                "ring_tokens": schema.swa_window_size,
            },
        )
        one["layers"] += 1
    shards = len(engine.loop.shards.managers)
    return {
        "data_shards": shards,
        "slots": pools.max_requests * shards,
        "blocks": pools.num_blocks * shards,
        "block_tokens": pools.block_tokens,
        "snapshots": pools.num_snapshots * shards,
        "context_tokens": pools.max_context_tokens,
        "draft_tokens": engine.loop.runner.draft_tokens,
        "families": families,
        "unit_bytes": {
            family: unit.num_bytes for family, unit in engine.loop.runner.unit_bytes.items()
        },
        "snapshot_bytes": pools.bytes_per_snapshot,
    }


def _read_request(engine: EngineCore, request: Request, now: float) -> dict[str, Any]:
    read: dict[str, Any] = {
        "id": request.request_id,
        "is_running": request.slot >= 0,
        "seconds": now - request.submitted_s,
        "prompt_tokens": request.prompt_tokens,
        "hit_tokens": request.hit_tokens,
        "drawn_tokens": request.num_drawn,
        "most_tokens": len(request.token_ids),
    }
    if request.slot < 0:
        return read
    shards = engine.loop.shards
    manager, own = shards.of(request.slot)
    held = holdings_of(manager, own, MAX_BLOCKS)
    return read | {
        "slot": request.slot,
        "shard": shards.shard_of(request.slot),
        "held_tokens": int(manager.length_tokens[own]),
        "blocks": held.blocks.tolist(),
        "block_users": held.users.tolist(),
        "blocks_left_out": held.num_blocks - len(held.blocks),
    }


def _read_trees(
    managers: Sequence[KVCacheManager], host: HostCopies | None
) -> list[dict[str, Any]]:
    """Nodes of all shards' trees, each after its parent, and then what lies on the host alone."""
    read: list[dict[str, Any]] = []
    by_key: dict[bytes, int] = {}
    for shard, manager in enumerate(managers):
        places: dict[PrefixNode, int] = {}
        limit = len(read) + MAX_NODES // len(managers)
        for node in _wanted_nodes(manager, host):
            chain = []
            while node is not None and node not in places:
                chain.append(node)
                node = node.parent
            for new in reversed(chain[max(len(chain) - (limit - len(read)), 0) :]):
                places[new] = by_key[new.key] = len(read)
                read.append(
                    {
                        "shard": shard,
                        "block": new.block,
                        "parent": -1 if new.parent is None else places[new.parent],
                        "tokens": new.end,
                        "users": new.users,
                        "resumes": new.snapshot >= 0 or _resumes(host, new.key),
                        "where": [DEVICE, *_where(host, new.key)],
                    }
                )
            if len(read) >= limit:
                break
    if host is not None:
        _add_far(read, by_key, host)
        if host.disk is not None:
            block_tokens = managers[0].plan.block_tokens
            _add_files(read, by_key, host, host.disk, block_tokens)
    return read


def _add_far(read: list[dict[str, Any]], by_key: dict[bytes, int], host: HostCopies) -> None:
    """Blocks that were used last of those that have left all devices, parents first."""
    pages = host.tier.latest(MAX_NODES)
    far = [page for page in pages if page.of == "blocks" and page.content.key not in by_key]
    for page in sorted(far, key=lambda page: page.end)[: max(MAX_NODES - len(read), 0)]:
        parent = by_key.get(page.parent, -1)
        by_key[page.content.key] = len(read)
        read.append(
            {
                "shard": 0 if parent < 0 else read[parent]["shard"],
                "block": -1,
                "parent": parent,
                "tokens": page.end,
                "users": 0,
                "resumes": _resumes(host, page.content.key),
                "where": _where(host, page.content.key),
            }
        )


def _add_files(
    read: list[dict[str, Any]],
    by_key: dict[bytes, int],
    host: HostCopies,
    disk: DiskTier,
    block_tokens: int,
) -> None:
    """The same of those that lie on the disk alone; files say which block comes before theirs."""
    following: dict[bytes, list[bytes]] = {}
    for page in reversed(disk.latest()):
        if page.key not in by_key and page.parent is not None:
            following.setdefault(page.parent, []).append(page.key)
    reached = collections.deque([NO_PARENT, *by_key])
    while reached and len(read) < MAX_NODES:
        parent_key = reached.popleft()
        parent = by_key.get(parent_key, -1)
        for key in following.pop(parent_key, ())[: MAX_NODES - len(read)]:
            by_key[key] = len(read)
            reached.append(key)
            before = 0 if parent < 0 else read[parent]["tokens"]
            read.append(
                {
                    "shard": 0 if parent < 0 else read[parent]["shard"],
                    "block": -1,
                    "parent": parent,
                    "tokens": before + block_tokens,
                    "users": 0,
                    "resumes": _resumes(host, key),
                    "where": ["disk"],
                }
            )


def _resumes(host: HostCopies | None, key: bytes) -> bool:
    """Whether a snapshot at the end of that prefix lies beside the devices."""
    tiers = {} if host is None else host.tiers
    return any(tier.has("snapshots", key) for tier in tiers.values())


def _where(host: HostCopies | None, key: bytes) -> list[str]:
    """The tiers beside the devices that a block lies in."""
    tiers = {} if host is None else host.tiers
    return [name for name, tier in tiers.items() if tier.has("blocks", key)]


def _read_tiers(host: HostCopies | None) -> dict[str, dict[str, int]]:
    """What each holds, and what it may."""
    names = ("num_pages", "num_bytes", "max_bytes")
    tiers = {} if host is None else host.tiers
    return {tier: {name: getattr(of, name) for name in names} for tier, of in tiers.items()}


def _wanted_nodes(manager: KVCacheManager, host: HostCopies | None) -> Iterator[PrefixNode]:
    """Nodes to show with their parents; no more of them than are shown are looked at.

    Those that are used, that resume, and whose snapshots lie on the host.
    """
    tree = manager.prefixes.tree
    far = [] if host is None else host.tier.latest(MAX_NODES)
    keys = (page.content.key for page in far if page.of == "snapshots")
    nodes = (node for key in keys if (node := tree.get(key)) is not None)
    chains = (manager.prefixes.of(slot).chain for slot in manager.prefixes.slots)
    used = (chain[:MAX_NODES][-1] for chain in chains if chain)
    return itertools.chain(used, itertools.islice(tree.resumable(), MAX_NODES), nodes)


def _quantiles(histogram: Histogram) -> dict[str, float] | None:
    """Estimates; None before any value."""
    if not histogram.count:
        return None
    return {f"p{share}": float(histogram.quantile(share / 100)) for share in (50, 90, 99)}
