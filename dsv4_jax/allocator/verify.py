"""verify_cache: finds what is wrong with a cache, in every family.

It reads the whole cache and is no part of a step: for tests, for a debug mode, and for looking
into a cache that gave a strange answer.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from dsv4_jax import checks
from dsv4_jax.allocator.checksums import scan_rows, scan_snapshots
from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.allocator.live_rows import live_rows
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.allocator.seals import Seals, check_snapshots, compare_seals, seal
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.snapshots import SnapshotStore


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify_cache` found.

    Attributes:
      problems: empty if all is well.
      seals: what the next call needs to find what has changed.
    """

    problems: tuple[Problem, ...]
    seals: Seals | None

    def __str__(self) -> str:
        """One line per problem."""
        return (
            "\n".join(f"{p.kind}: {p.where}: {p.message}" for p in self.problems) or "no problems"
        )


def verify_cache(
    cache: ModelCache,
    ledger: Ledger | None = None,
    seals: Seals | None = None,
    store: SnapshotStore | None = None,
) -> Report:
    """Checks lengths, owners, rows and checksums, of the cache and of its snapshots.

    Args:
      cache: between steps, with all changes applied.
      ledger: what `KVCacheManager.ledger` gives; without it, only what the cache itself says is
        checked.
      seals: seals of an earlier call, to find full blocks and live rows that have changed since.
      store: the snapshots, if they are to be checked too.

    Returns:
      The problems and, with a ledger, new seals. Rows of a previous tenant are found where freed
      storage is poisoned (`KVCacheManager(poison=True)`): a live row that still is poison was
      never written by who reads it.

    Raises:
      ValueError: an argument is of another type.
    """
    checks.instance("cache", cache, ModelCache)
    for name, value, kind in (
        ("ledger", ledger, Ledger),
        ("seals", seals, Seals),
        ("store", store, SnapshotStore),
    ):
        if value is not None:
            checks.instance(name, value, kind)
    lengths, table = np.asarray(cache.length_tokens), np.asarray(cache.block_table)
    scans = jax.device_get(scan_rows(cache))
    size = cache.block_tokens
    problems = _check_lengths(lengths, table, size, ledger)
    problems += _check_owners(lengths, table, size, ledger)
    if problems:
        return Report(tuple(problems), None)  # rows of a wrong table would only repeat it
    live = live_rows(cache, lengths, table)
    for name, (first, second) in live.items():
        bad = np.flatnonzero(np.asarray(scans[name].is_poison)[first, second])
        if bad.size:
            where, row = int(first[bad[0]]), int(second[bad[0]])
            message = f"{bad.size} live rows were never written, the first in {where}, row {row}"
            problems.append(Problem("unwritten", name, message))
    if ledger is None:
        return Report(tuple(problems), None)
    kept = {} if store is None else jax.device_get(scan_snapshots(store))
    problems += check_snapshots(kept, ledger, seals)
    if seals is not None:
        problems += compare_seals(seals, cache, scans, lengths, ledger, live)
    return Report(tuple(problems), seal(cache, scans, kept, lengths, ledger))


def _check_lengths(
    lengths: np.ndarray, table: np.ndarray, size: int, ledger: Ledger | None
) -> list[Problem]:
    problems = []
    held = np.sum(table >= 0, axis=1)
    for slot in range(len(lengths)):
        where = f"slot {slot}"
        if np.any(table[slot, : held[slot]] < 0):
            problems.append(Problem("owner", where, f"a hole in its table {table[slot]}"))
        if table.shape[1] and not 0 <= lengths[slot] <= held[slot] * size:
            message = f"length {lengths[slot]} in blocks for {held[slot] * size} tokens"
            problems.append(Problem("length", where, message))
        if ledger is None:
            continue
        if lengths[slot] != ledger.length_tokens[slot]:
            message = f"length {lengths[slot]}, the manager says {ledger.length_tokens[slot]}"
            problems.append(Problem("length", where, message))
        if not ledger.held_slots[slot] and (lengths[slot] or held[slot]):
            message = f"free, with length {lengths[slot]} and {held[slot]} blocks"
            problems.append(Problem("length", where, message))
        if not np.array_equal(table[slot], ledger.block_table[slot]):
            message = f"table {table[slot]}, the manager says {ledger.block_table[slot]}"
            problems.append(Problem("owner", where, message))
    return problems


def _check_owners(
    lengths: np.ndarray, table: np.ndarray, size: int, ledger: Ledger | None
) -> list[Problem]:
    problems = []
    slots, logical = np.nonzero(table >= 0)
    blocks = table[slots, logical]
    is_full = (logical + 1) * size <= lengths[slots]
    for block in np.unique(blocks):
        mine = np.flatnonzero(blocks == block)
        if len(mine) > 1 and (len(set(logical[mine])) > 1 or not np.all(is_full[mine])):
            message = (
                f"open in one of slots {slots[mine].tolist()}, places {logical[mine].tolist()}"
            )
            problems.append(Problem("owner", f"block {block}", message))
    if ledger is None:
        return problems
    num_blocks = len(ledger.owners)
    counted = np.bincount(blocks, minlength=num_blocks)
    counted += np.bincount(ledger.cached_blocks, minlength=num_blocks)
    free = np.bincount(ledger.free_blocks, minlength=num_blocks)
    for block in np.flatnonzero(counted != ledger.owners):
        message = f"{ledger.owners[block]} owners, {counted[block]} found in tables and prefixes"
        problems.append(Problem("owner", f"block {block}", message))
    for block in np.flatnonzero((counted > 0) & (free > 0)):
        problems.append(Problem("owner", f"block {block}", "free and in use"))
    for block in np.flatnonzero((counted == 0) & (free == 0)):
        problems.append(Problem("leak", f"block {block}", "neither free nor in use"))
    for block in np.flatnonzero(free > 1):
        problems.append(Problem("leak", f"block {block}", f"free {free[block]} times"))
    return problems
