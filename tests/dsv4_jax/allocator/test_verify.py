"""The verifier finds each kind of damage, in every family, and nothing in a cache that is well."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.poison import poison_of
from helpers import slow

pytestmark = pytest.mark.unoptimised

CONFIG = dataclasses.replace(ds.DSV4Config.tiny(), num_mtp_layers=0)
FAMILIES = {
    "csa.entries": ("paged", "csa", "entries"),
    "csa.index_keys": ("paged", "csa", "index_keys"),
    "hca.entries": ("paged", "hca", "entries"),
    "swa.window": ("state", "swa", "window"),
    "csa.window": ("state", "csa", "window"),
    "hca.window": ("state", "hca", "window"),
    "csa.tail.previous": ("state", "csa", "tail"),
    "csa.tail.own": ("state", "csa", "tail"),
    "csa.index_tail.previous": ("state", "csa", "index_tail"),
    "csa.index_tail.own": ("state", "csa", "index_tail"),
    "hca.running": ("state", "hca", "running"),
}
LENGTH = 302  # every kind of window is open


@dataclasses.dataclass
class Case:
    """Two requests that share two blocks, a snapshot after them, and arrays of random bytes."""

    manager: ds.KVCacheManager
    cache: ds.ModelCache
    store: ds.cache.SnapshotStore
    slots: list[int]
    place: int


def random_bytes(leaf, rng):
    width = leaf.dtype.itemsize
    noise = rng.integers(0, 2 ** (8 * width) - 1, leaf.shape, dtype=np.uint64)
    return noise.astype(f"u{width}").view(leaf.dtype)


@pytest.fixture(params=slow.all_but(["fp8_ue8m0"], ["fp8_ue8m0", "f32", "fp8_per_entry"]))
def case(request):
    sizes = {"max_requests": 3, "max_context_tokens": 512, "num_blocks": 9}
    manager = ds.KVCacheManager(CONFIG, num_snapshots=2, poison=True, **sizes)
    cache = ds.init_cache(CONFIG, cache_format=request.param, **sizes)
    rng = np.random.default_rng(0)
    store = ds.cache.init_snapshot_store(cache, 2)
    state, paged, store = jax.tree.map(
        lambda leaf: random_bytes(leaf, rng), (cache.state, cache.paged, store)
    )
    cache = dataclasses.replace(cache, state=state, paged=paged)
    first = manager.admit(400)
    tokens = np.arange(LENGTH, dtype=np.int32)
    place = manager.prefixes.begin_snapshot()
    manager.advance(first, LENGTH)
    manager.share(first, tokens)
    assert manager.prefixes.keep_snapshot(first, 256, place)
    second = manager.fork(first, 400)
    cache = jax.tree.map(np.asarray, manager.apply(cache, store))
    return Case(manager, cache, store, [first, second], place)


def check(case, seals=None, store=None, **changes):
    cache = dataclasses.replace(case.cache, **changes)
    return ds.allocator.verify_cache(cache, case.manager.ledger(), seals, store or case.store)


def kinds(report):
    return {(problem.kind, problem.where.split(" ")[0]) for problem in report.problems}


def at(family, case):
    """Where a live row of the second slot is: indices after the layer."""
    room, attn, _ = FAMILIES[family]
    slot = case.slots[1]
    if room == "paged":
        schema = case.cache.paged[attn].schema
        entry = LENGTH // schema.compression_ratio - 1
        block = int(case.cache.block_table[slot, entry // schema.entries_per_block])
        return block, entry % schema.entries_per_block
    if family == "hca.running":
        return (slot,)
    schema = case.cache.state[attn].schema
    size = schema.tail_buffer_size if "tail" in family else schema.swa_window_size
    return slot, (LENGTH - 1) % size


def half_of(family, row):
    """The part of a row that the family is: of a CSA compressor's, the one or the other half."""
    if not family.endswith(("previous", "own")):
        return row
    half = row.shape[-1] // 2
    return row[..., :half] if family.endswith("previous") else row[..., half:]


def changed(family, case, place, change):
    """The cache's room with a change to every plane of one row, last layer."""
    room, attn, name = FAMILIES[family]
    pools = getattr(case.cache, room)

    def one(plane):
        plane = plane.copy()
        part = half_of(family, plane[(-1, *place, ...)])
        part[...] = change(part)
        return plane

    planes = jax.tree.map(one, getattr(pools[attn], name))
    return {room: {**pools, attn: dataclasses.replace(pools[attn], **{name: planes})}}


def flip(row):
    """One bit of the last value."""
    bits = np.ascontiguousarray(row).reshape(-1).view(np.uint8).copy()
    bits[-1] ^= 1
    return bits.view(row.dtype).reshape(row.shape)


def poisoned(row):
    return np.full_like(row, poison_of(row.dtype))


def test_a_cache_that_is_well_has_no_problems(case):
    report = check(case)
    assert not report.problems, str(report)
    assert not check(case, report.seals).problems
    assert not ds.allocator.verify_cache(case.cache).problems
    assert str(report) == "no problems"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_was_never_written_is_found(case, family):
    """As a row of a previous tenant is, where freed storage is poisoned."""
    place = at(family, case)
    found = kinds(check(case, **changed(family, case, place, poisoned)))
    assert found == {("unwritten", family)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_byte_that_changed_is_found(case, family):
    """Entries of full blocks, which nobody may write, and live rows of rings."""
    seals = check(case).seals
    place = at(family, case)
    if FAMILIES[family][0] == "paged":
        block = int(case.cache.block_table[case.slots[0], 1])
        open_block = changed(family, case, place, flip)
        assert not check(case, seals, **open_block).problems  # still open: may be written
        place = (block, place[1] % 4)
    found = kinds(check(case, seals, **changed(family, case, place, flip)))
    assert found == {("checksum", family)}


def test_two_changes_do_not_cancel(case):
    """Two signs, or one value swapped for another."""
    seals, place = check(case).seals, at("hca.running", case)

    def negated(row):
        row = row.copy()
        row[..., :2] *= -1
        return row

    for change in (negated, lambda row: row[..., ::-1]):
        bad = changed("hca.running", case, place, change)
        assert kinds(check(case, seals, **bad)) == {("checksum", "hca.running")}


def test_what_is_not_live_may_change(case):
    seals = check(case).seals
    free_block = int(case.manager.ledger().free_blocks[0])
    free_slot = ({0, 1, 2} - set(case.slots)).pop()
    slot, closed = case.slots[0], (LENGTH // 4 * 4 - 1) % 8  # a row of the window before
    for family, place in (
        ("csa.entries", (free_block, 3)), ("hca.entries", (free_block, 0)),
        ("swa.window", (free_slot, 2)), ("csa.tail.own", (slot, closed)),
    ):  # fmt: skip
        assert not check(case, seals, **changed(family, case, place, flip)).problems


SNAPSHOTS = {
    "swa.window": ("window", "swa"), "csa.window": ("window", "csa"),
    "hca.window": ("window", "hca"), "csa.tail": ("tail", None),
    "csa.index_tail": ("index_tail", None),
}  # fmt: skip


def changed_store(case, family, place, change):
    """The store with a change to every plane of one row of a place, last layer."""
    field, attn = SNAPSHOTS[family]
    planes = getattr(case.store, field)

    def one(plane):
        plane = plane.copy()
        row = plane[-1, place, 1, ...]
        row[...] = change(row)
        return plane

    new = jax.tree.map(one, planes[attn] if attn else planes)
    return dataclasses.replace(case.store, **{field: {**planes, attn: new} if attn else new})


@pytest.mark.parametrize("family", SNAPSHOTS)
def test_damage_to_a_snapshot_is_found(case, family):
    seals = check(case).seals
    bad = changed_store(case, family, case.place, poisoned)
    assert kinds(check(case, store=bad)) == {("unwritten", family)}
    bad = changed_store(case, family, case.place, flip)
    assert kinds(check(case, seals, store=bad)) == {("checksum", family)}
    for change in (poisoned, flip):
        free = changed_store(case, family, 1 - case.place, change)
        assert not check(case, seals, store=free).problems


def test_a_store_without_places_is_well(case):
    empty = ds.cache.init_snapshot_store(case.cache, 0)
    manager = ds.KVCacheManager(CONFIG, max_requests=3, max_context_tokens=512, num_blocks=9)
    cache = dataclasses.replace(
        case.cache,
        length_tokens=np.zeros_like(case.cache.length_tokens),
        block_table=np.full_like(case.cache.block_table, -1),
    )
    report = ds.allocator.verify_cache(cache, manager.ledger(), store=empty)
    assert not report.problems
    assert not ds.allocator.verify_cache(cache, manager.ledger(), report.seals, empty).problems


def test_a_place_that_is_written_again_is_no_longer_sealed(case):
    seals = check(case).seals
    assert case.manager.prefixes.begin_snapshot() == 1 - case.place  # the free one
    assert case.manager.prefixes.begin_snapshot() == case.place  # the held one gives way
    assert case.manager.prefixes.keep_snapshot(case.slots[0], 128, case.place)
    new = changed_store(case, "csa.tail", case.place, flip)
    assert not check(case, seals, store=new).problems


def test_a_released_request_is_no_longer_sealed(case):
    seals = check(case).seals
    case.manager.release(case.slots[1])
    case.cache = case.manager.apply(case.cache, case.store)
    report = check(case, seals)
    assert not report.problems, str(report)


def with_value(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def test_wrong_lengths_are_found(case):
    lengths = case.cache.length_tokens
    slot, free = case.slots[0], ({0, 1, 2} - set(case.slots)).pop()
    for new in (LENGTH + 1, LENGTH - 1, 10_000, -1):
        found = kinds(check(case, length_tokens=with_value(lengths, slot, new)))
        assert ("length", "slot") in found
    assert ("length", "slot") in kinds(check(case, length_tokens=with_value(lengths, free, 1)))


def test_a_block_owned_twice_is_found(case):
    table = case.cache.block_table
    first, second = case.slots
    twice = with_value(table, (second, 2), table[first, 2])  # both still write to it
    assert ("owner", "block") in kinds(check(case, block_table=twice))
    report = ds.allocator.verify_cache(dataclasses.replace(case.cache, block_table=twice))
    assert {kind for kind, _ in kinds(report)} == {"owner"}
    moved = with_value(table, (second, 0), table[first, 1])
    assert ("owner", "block") in kinds(check(case, block_table=moved))
    assert ("owner", "slot") in kinds(check(case, block_table=with_value(table, (first, 1), -1)))


def test_leaks_are_found(case):
    ledger = case.manager.ledger()
    lost = dataclasses.replace(ledger, free_blocks=ledger.free_blocks[1:])
    (problem,) = ds.allocator.verify_cache(case.cache, lost).problems
    assert problem.kind == "leak"
    assert problem.where == f"block {ledger.free_blocks[0]}"
    double = np.concatenate([ledger.free_blocks, ledger.free_blocks[:1]])
    (problem,) = ds.allocator.verify_cache(
        case.cache, dataclasses.replace(ledger, free_blocks=double)
    ).problems
    assert problem.message == "free 2 times"
    used = np.concatenate([ledger.free_blocks, ledger.block_table[case.slots[0], :1]])
    (problem,) = ds.allocator.verify_cache(
        case.cache, dataclasses.replace(ledger, free_blocks=used)
    ).problems
    assert problem.message == "free and in use"
    owners = ledger.owners.copy()
    owners[ledger.block_table[case.slots[0], 0]] += 1
    (problem,) = ds.allocator.verify_cache(
        case.cache, dataclasses.replace(ledger, owners=owners)
    ).problems
    assert problem.message.startswith("4 owners, 3 found")
