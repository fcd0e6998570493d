"""Seals: what must stay as it is until it is freed or overwritten by its own request."""

from __future__ import annotations

import dataclasses

import numpy as np

from dsv4_jax.allocator.checksums import RowScan
from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.allocator.live_rows import Rows, rings_of
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.cache.model_cache import ModelCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seals:
    """What must not change until it is freed or overwritten by its own request.

    Attributes:
      length_tokens: i32[NS], when sealed.
      slot_generations: i32[NS], which tenant each slot had.
      blocks: by family, {block: (generation, u32[EB])}, of full blocks.
      rings: by family, u32[NS, rows].
      snapshots: by family, {place: (generation, u32[rows])}, of those that are held.
    """

    length_tokens: np.ndarray
    slot_generations: np.ndarray
    blocks: dict[str, dict[int, tuple[int, np.ndarray]]]
    rings: dict[str, np.ndarray]
    snapshots: dict[str, dict[int, tuple[int, np.ndarray]]]


def check_snapshots(
    scans: dict[str, RowScan], ledger: Ledger, seals: Seals | None
) -> list[Problem]:
    """Held places whose rows were never written, or have changed since they were."""
    problems = []
    for name, scan in scans.items():
        sums, num_rows = np.asarray(scan.checksums), scan.checksums.shape[1]
        sealed = {} if seals is None else seals.snapshots.get(name, {})
        for snapshot in np.flatnonzero(ledger.snapshot_ends >= 0):
            # A window longer than the prefix has rows that nothing is written to.
            last = ledger.snapshot_ends[snapshot] - 1
            written = (last - np.arange(num_rows)) % num_rows <= last
            where = f"{name} snapshot {snapshot}"
            if np.any(np.asarray(scan.is_poison)[snapshot, written]):
                problems.append(Problem("unwritten", where, "rows were never written"))
            generation, expected = sealed.get(int(snapshot), (None, None))
            is_same = generation == ledger.snapshot_generations[snapshot]
            if is_same and np.any(sums[snapshot] != expected):
                problems.append(Problem("checksum", where, "a snapshot has changed"))
    return problems


def seal(
    cache: ModelCache,
    scans: dict[str, RowScan],
    kept: dict[str, RowScan],
    lengths: np.ndarray,
    ledger: Ledger,
) -> Seals:
    """What `compare_seals` needs next time."""
    full = set(ledger.cached_blocks.tolist())
    for slot in np.flatnonzero(lengths > 0):
        full |= set(ledger.block_table[slot, : lengths[slot] // cache.block_tokens].tolist())
    generations = ledger.block_generations
    blocks, rings = {}, {}
    for name, scan in scans.items():
        sums = np.asarray(scan.checksums)
        if scan.kind.is_paged:
            blocks[name] = {block: (int(generations[block]), sums[block]) for block in full}
        else:
            rings[name] = sums
    return Seals(
        length_tokens=lengths.copy(),
        slot_generations=ledger.slot_generations.copy(),
        blocks=blocks,
        rings=rings,
        snapshots={
            name: {
                int(snapshot): (
                    int(ledger.snapshot_generations[snapshot]),
                    np.asarray(scan.checksums[snapshot]),
                )
                for snapshot in np.flatnonzero(ledger.snapshot_ends >= 0)
            }
            for name, scan in kept.items()
        },
    )


def compare_seals(
    seals: Seals,
    cache: ModelCache,
    scans: dict[str, RowScan],
    lengths: np.ndarray,
    ledger: Ledger,
    live: dict[str, Rows],
) -> list[Problem]:
    """Full blocks and live rows that have changed since they were sealed."""
    problems = []
    for name, sealed in seals.blocks.items():
        sums = np.asarray(scans[name].checksums)
        for block, (generation, expected) in sealed.items():
            is_same = generation == ledger.block_generations[block]
            if is_same and ledger.owners[block] and np.any(sums[block] != expected):
                message = "a full block has changed"
                problems.append(Problem("checksum", f"{name} block {block}", message))
    same = (seals.slot_generations == ledger.slot_generations) & (lengths >= seals.length_tokens)
    for name, expected in seals.rings.items():
        if name not in live:
            continue
        sums = np.asarray(scans[name].checksums)
        for slot in np.flatnonzero(same & (seals.length_tokens > 0)):
            old, new = int(seals.length_tokens[slot]), int(lengths[slot])
            # A row whose token is live in both has to hold it in both.
            was, ring = rings_of(cache, old)[name], rings_of(cache, new)[name]
            if ring.sums_up:
                rows = np.arange(ring.num_live if new == old else 0)
            else:
                first = max(old - was.num_live, new - ring.num_live, 0)
                rows = np.arange(first, old) % ring.num_rows
            bad = rows[sums[slot, rows] != expected[slot, rows]]
            if bad.size:
                message = f"rows {bad.tolist()} have changed without a token"
                problems.append(Problem("checksum", f"{name} slot {slot}", message))
    return problems
