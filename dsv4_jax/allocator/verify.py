"""verify_cache: finds what is wrong with a cache, in every family.

It reads the whole cache and is no part of a step: for tests, for a debug mode, and for looking
into a cache that gave a strange answer.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from dsv4_jax.allocator.checksums import RowScan, scan_rows, scan_snapshots
from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.snapshots import SnapshotStore


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      kind: "length", "owner", "leak", "unwritten" or "checksum".
      where: the family, slot or block.
      message: what was found and what should be.
    """

    kind: str
    where: str
    message: str


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


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify_cache` found.

    Attributes:
      problems: empty if all is well.
      seals: for the next call, which then also finds what has changed.
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
      ledger: of `KVCacheManager.ledger`; without it, only what the cache itself says is checked.
      seals: of an earlier call, to find full blocks and live rows that have changed since.
      store: the snapshots, which then are checked too.

    Returns:
      The problems and, with a ledger, new seals. Rows of a previous tenant are found where freed
      storage is poisoned (`KVCacheManager(poison=True)`): a live row that still is poison was
      never written by who reads it.
    """
    lengths, table = np.asarray(cache.length_tokens), np.asarray(cache.block_table)
    scans = jax.device_get(scan_rows(cache))
    size = cache.block_tokens
    problems = _check_lengths(lengths, table, size, ledger)
    problems += _check_owners(lengths, table, size, ledger)
    if problems:
        return Report(tuple(problems), None)  # rows of a wrong table would only repeat it
    live = _live_rows(cache, lengths, table)
    for name, (first, second) in live.items():
        bad = np.flatnonzero(np.asarray(scans[name].is_poison)[first, second])
        if bad.size:
            where, row = int(first[bad[0]]), int(second[bad[0]])
            message = f"{bad.size} live rows were never written, the first in {where}, row {row}"
            problems.append(Problem("unwritten", name, message))
    if ledger is None:
        return Report(tuple(problems), None)
    kept = {} if store is None else jax.device_get(scan_snapshots(store))
    problems += _check_snapshots(kept, ledger, seals)
    if seals is not None:
        problems += _compare(seals, cache, scans, lengths, ledger, live)
    return Report(tuple(problems), _seal(cache, scans, kept, lengths, ledger))


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


Rows = tuple[np.ndarray, np.ndarray]


def _live_rows(cache: ModelCache, lengths: np.ndarray, table: np.ndarray) -> dict[str, Rows]:
    """By family, the rows that lengths make readable: block and offset, or slot and row."""
    live: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for slot in np.flatnonzero(lengths > 0):
        length = int(lengths[slot])
        for attn, pool in cache.paged.items():
            entries = np.arange(length // pool.schema.compression_ratio)
            per_block = pool.schema.entries_per_block
            rows = (table[slot][entries // per_block], entries % per_block)
            live.setdefault(f"{attn}.entries", []).append(rows)
            if pool.index_keys is not None:
                live.setdefault(f"{attn}.index_keys", []).append(rows)
        for name, (count, ring) in _ring_rows(cache, length).items():
            rows = np.arange(max(length - count, 0), length) % ring
            live.setdefault(name, []).append((np.full(len(rows), slot), rows))
    return {
        name: (np.concatenate([a for a, _ in rows]), np.concatenate([b for _, b in rows]))
        for name, rows in live.items()
    }


def _ring_rows(cache: ModelCache, length: int) -> dict[str, tuple[int, int]]:
    """By ring family, how many of the last tokens are live, and the ring's rows."""
    rows = {}
    for attn, pool in cache.state.items():
        schema = pool.schema
        rows[f"{attn}.window"] = (schema.swa_window_size, schema.swa_window_size)
        rate = schema.compression_ratio
        for name in ("tail", "index_tail"):
            if getattr(pool, name) is not None:
                # The b-stream lives for the next window, the a-stream for its own.
                rows[f"{attn}.{name}.previous"] = (rate + length % rate, 2 * rate)
                rows[f"{attn}.{name}.own"] = (length % rate, 2 * rate)
        if pool.running is not None:
            rows[f"{attn}.running"] = (min(length % rate, 1), 1)
    return rows


def _check_snapshots(
    scans: dict[str, RowScan], ledger: Ledger, seals: Seals | None
) -> list[Problem]:
    """Held places whose rows were never written, or have changed since they were."""
    problems = []
    for name, scan in scans.items():
        sums, num_rows = np.asarray(scan.checksums), scan.checksums.shape[1]
        sealed = {} if seals is None else seals.snapshots.get(name, {})
        for place in np.flatnonzero(ledger.snapshot_ends >= 0):
            # A window longer than the history has rows that nothing is written to.
            last = ledger.snapshot_ends[place] - 1
            written = (last - np.arange(num_rows)) % num_rows <= last
            where = f"{name} snapshot {place}"
            if np.any(np.asarray(scan.is_poison)[place, written]):
                problems.append(Problem("unwritten", where, "rows were never written"))
            generation, expected = sealed.get(int(place), (None, None))
            is_same = generation == ledger.snapshot_generations[place]
            if is_same and np.any(sums[place] != expected):
                problems.append(Problem("checksum", where, "a snapshot has changed"))
    return problems


def _seal(
    cache: ModelCache,
    scans: dict[str, RowScan],
    kept: dict[str, RowScan],
    lengths: np.ndarray,
    ledger: Ledger,
) -> Seals:
    full = set(ledger.cached_blocks.tolist())
    for slot in np.flatnonzero(lengths > 0):
        full |= set(ledger.block_table[slot, : lengths[slot] // cache.block_tokens].tolist())
    generations = ledger.block_generations
    blocks, rings = {}, {}
    for name, scan in scans.items():
        sums = np.asarray(scan.checksums)
        if name.endswith(("entries", "index_keys")):
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
                int(place): (
                    int(ledger.snapshot_generations[place]),
                    np.asarray(scan.checksums[place]),
                )
                for place in np.flatnonzero(ledger.snapshot_ends >= 0)
            }
            for name, scan in kept.items()
        },
    )


def _compare(
    seals: Seals,
    cache: ModelCache,
    scans: dict[str, RowScan],
    lengths: np.ndarray,
    ledger: Ledger,
    live: dict[str, Rows],
) -> list[Problem]:
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
            count_old, ring = _ring_rows(cache, old)[name]
            count_new, _ = _ring_rows(cache, new)[name]
            if name.endswith("running"):
                rows = np.arange(int(count_new and new == old))
            else:
                rows = np.arange(max(old - count_old, new - count_new, 0), old) % ring
            bad = rows[sums[slot, rows] != expected[slot, rows]]
            if bad.size:
                message = f"rows {bad.tolist()} have changed without a token"
                problems.append(Problem("checksum", f"{name} slot {slot}", message))
    return problems
