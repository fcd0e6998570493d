"""verify_cache: finds what is wrong with a cache, in every family.

It reads the whole cache and is no part of a step: for tests, for a debug mode, and for looking
into a cache that gave a strange answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dsv4_jax import checks
from dsv4_jax.allocator.checksums import RowScan, read_tables, scan_rows, scan_snapshots
from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.allocator.live_rows import live_rows
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.allocator.seals import Seals, check_snapshots, compare_seals, seal
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.snapshots import SnapshotStore
from dsv4_jax.mesh import fetch, find_mesh, mesh_sizes


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify_cache` found.

    Attributes:
      problems: empty if all is well.
      seals: what the next call needs to find what has changed: one, or where there were several
        ledgers, one for each.
    """

    problems: tuple[Problem, ...]
    seals: Seals | tuple[Seals, ...] | None

    def beside(self, problems: Sequence[Problem]) -> Report:
        """The same with others' problems too."""
        return dataclasses.replace(self, problems=(*self.problems, *problems))

    def __str__(self) -> str:
        """One line per problem."""
        return (
            "\n".join(f"{p.kind}: {p.where}: {p.message}" for p in self.problems) or "no problems"
        )


def verify_cache(
    cache: ModelCache,
    ledger: Ledger | Sequence[Ledger] | None = None,
    seals: Seals | Sequence[Seals] | None = None,
    store: SnapshotStore | None = None,
) -> Report:
    """Checks lengths, owners, rows and checksums, of the cache and of its snapshots.

    On a mesh every data shard is checked, and what its devices along `model` hold must be equal,
    but for the blocks of a split cache: each must lie on the device that its place in a table says.

    Args:
      cache: between steps, with all changes applied.
      ledger: what `KVCacheManager.ledger` gives, on a mesh one for each data shard; without it,
        only what the cache itself says is checked.
      seals: seals of an earlier call, to find full blocks and live rows that have changed since.
      store: the snapshots, if they are to be checked too.

    Returns:
      The problems and, with ledgers, new seals. Rows of a previous tenant are found where freed
      storage is poisoned (`KVCacheManager(poison=True)`): a live row that still is poison was
      never written by who reads it.

    Raises:
      ValueError: an argument is of another type, or ledgers or seals are not one for each data
        shard.
    """
    checks.instance("cache", cache, ModelCache)
    if store is not None:
        checks.instance("store", store, SnapshotStore)
    return verify_scan(cache, scan_cache(cache, store), ledger, seals)


def scan_cache(cache: ModelCache, store: SnapshotStore | None) -> dict[str, Any]:
    """What `verify_scan` needs, in NumPy; of every device, one after the other."""
    found = {
        "tables": read_tables(cache),
        "rows": scan_rows(cache),
        "snapshots": {} if store is None else scan_snapshots(store),
    }
    return fetch(found)


def verify_scan(
    cache: ModelCache,
    found: dict[str, Any],
    ledger: Ledger | Sequence[Ledger] | None,
    seals: Seals | Sequence[Seals] | None,
) -> Report:
    """`verify_cache` of what `scan_cache` found; of the cache itself only sizes are read."""
    mesh = find_mesh(cache)
    shards, replicas = (1, 1) if mesh is None else mesh_sizes(mesh)
    ledgers = _one_each("ledger", ledger, Ledger, shards)
    sealed = _one_each("seals", seals, Seals, shards)
    reports = []
    for shard in range(shards):
        mine = [_part(found, shard * replicas + i, shards * replicas) for i in range(replicas)]
        whole, dealt = mine[0], []
        if cache.split_cache and cache.paged:
            whole = _join_blocks(mine)
            dealt = _check_dealt(whole["tables"][1], cache.num_blocks // shards, replicas)
        report = _verify_shard(cache, whole, ledgers[shard], sealed[shard])
        problems = (*dealt, *report.problems, *_compare_replicas(mine))
        if shards > 1:
            problems = [
                dataclasses.replace(one, where=f"data {shard}, {one.where}") for one in problems
            ]
        reports.append(Report(tuple(problems), report.seals))
    every = tuple(report.seals for report in reports)
    return Report(
        tuple(problem for report in reports for problem in report.problems),
        every[0] if ledger is None or isinstance(ledger, Ledger) else every,
    )


def _one_each[T](name: str, value: Any, kind: type[T], shards: int) -> list[T | None]:
    """One value of a kind, or None, for each data shard."""
    if value is None:
        return [None] * shards
    if isinstance(value, kind):
        value = [value]
    is_list = isinstance(value, list | tuple) and len(value) == shards
    if is_list and all(one is None or isinstance(one, kind) for one in value):
        return list(value)
    rule = f"a {kind.__name__}" if shards == 1 else f"a list of {shards}, one for each data shard"
    checks.refuse(name, rule, value)


def _part(tree: Any, number: int, count: int) -> Any:
    """One of so many equal parts of every array's first axis."""

    def cut(array: np.ndarray) -> np.ndarray:
        size = array.shape[0] // count
        return array[number * size : (number + 1) * size]

    return jax.tree.map(cut, tree)


def _join_blocks(parts: Sequence[Any]) -> Any:
    """What a data shard holds, whose devices hold different blocks; these leave `parts`."""
    rows = dict(parts[0]["rows"])
    for name in [name for name, scan in rows.items() if scan.kind.is_paged]:
        scans = [part["rows"].pop(name) for part in parts]
        rows[name] = jax.tree.map(lambda *arrays: np.concatenate(arrays), *scans)
    return parts[0] | {"rows": rows}


def _check_dealt(table: np.ndarray, num_blocks: int, parts: int) -> list[Problem]:
    """Blocks of a split cache that do not lie where a step looks for them."""
    problems = []
    for slot, logical in np.argwhere(table >= 0).tolist():
        block = int(table[slot, logical])
        device, wanted = block * parts // num_blocks, logical % parts
        if device != wanted:
            message = (
                f"place {logical} of slot {slot} is of model {wanted}, and it lies on {device}"
            )
            problems.append(Problem("owner", f"block {block}", message))
    return problems


def _compare_replicas(parts: Sequence[Any]) -> list[Problem]:
    """What devices of one data shard hold of a cache that they should all have."""
    problems = []
    first = jax.tree_util.tree_leaves_with_path(parts[0])
    for number, part in enumerate(parts[1:], start=1):
        for (path, expected), leaf in zip(first, jax.tree.leaves(part), strict=True):
            bad = np.flatnonzero(np.any(leaf != expected, axis=tuple(range(1, leaf.ndim))))
            if bad.size:
                name = jax.tree_util.keystr(path, simple=True, separator=" ")
                message = f"{bad.size} slots, blocks or places differ from model 0: {bad[:8]}"
                problems.append(Problem("replica", f"model {number}, {name}", message))
    return problems


def _verify_shard(
    cache: ModelCache, found: dict[str, Any], ledger: Ledger | None, seals: Seals | None
) -> Report:
    """The problems of one data shard, from what one of its devices found, or of blocks all."""
    lengths, table = found["tables"]
    scans: dict[str, RowScan] = found["rows"]
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
    kept: dict[str, RowScan] = found["snapshots"]
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
