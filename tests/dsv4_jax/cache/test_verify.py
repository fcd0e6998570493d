"""The verifier finds each kind of damage, in every family, and nothing in a cache that is well."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.slot_changes import poison_of

CONFIG = dataclasses.replace(ds.DSV4Config.tiny(), num_mtp_layers=0)
FAMILIES = {
    "csa.entries": ("paged", "csa", "entries"),
    "csa.index_keys": ("paged", "csa", "index_keys"),
    "hca.entries": ("paged", "hca", "entries"),
    "swa.window": ("state", "swa", "window"),
    "csa.window": ("state", "csa", "window"),
    "hca.window": ("state", "hca", "window"),
    "csa.tail": ("state", "csa", "tail"),
    "csa.index_tail": ("state", "csa", "index_tail"),
    "hca.running": ("state", "hca", "running"),
}
LENGTH = 300


@dataclasses.dataclass
class Case:
    """A manager with two requests that share two blocks, and a cache full of random bytes."""

    manager: ds.KVCacheManager
    cache: ds.ModelCache
    slots: list[int]


def random_bytes(leaf, rng):
    width = leaf.dtype.itemsize
    noise = rng.integers(0, 2 ** (8 * width) - 1, leaf.shape, dtype=np.uint64)
    return jnp.asarray(noise.astype(f"u{width}").view(leaf.dtype))


@pytest.fixture(params=["fp8_ue8m0", "f32", "fp8_per_entry"])
def case(request):
    sizes = {"max_requests": 3, "max_context_tokens": 512, "num_blocks": 9}
    manager = ds.KVCacheManager(CONFIG, num_snapshots=2, poison=True, **sizes)
    cache = ds.init_cache(CONFIG, cache_format=request.param, **sizes)
    rng = np.random.default_rng(0)
    state, paged = jax.tree.map(lambda leaf: random_bytes(leaf, rng), (cache.state, cache.paged))
    cache = dataclasses.replace(cache, state=state, paged=paged)
    store = ds.init_snapshot_store(cache, 2)
    first = manager.admit(400)
    tokens = np.arange(LENGTH, dtype=np.int32)
    manager.advance(first, LENGTH)
    manager.share(first, tokens)
    second = manager.fork(first, 400)
    return Case(manager, manager.apply(cache, store), [first, second])


def check(case, seals=None, **changes):
    cache = dataclasses.replace(case.cache, **changes)
    return ds.verify_cache(cache, case.manager.ledger(), seals)


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


def changed(family, case, place, change):
    """The cache's room with a change to every plane of one row, last layer."""
    room, attn, name = FAMILIES[family]
    pools = getattr(case.cache, room)
    planes = getattr(pools[attn], name)

    def one(plane):
        row = plane[(-1, *place)]
        return plane.at[(-1, *place)].set(change(row))

    pool = dataclasses.replace(pools[attn], **{name: jax.tree.map(one, planes)})
    return {room: {**pools, attn: pool}}


def flip(row):
    """One bit of the first value."""
    bits = np.array(row).reshape(-1).view(np.uint8)
    bits[0] ^= 1
    return jnp.asarray(bits.view(row.dtype).reshape(row.shape))


def test_a_cache_that_is_well_has_no_problems(case):
    report = check(case)
    assert not report.problems, str(report)
    assert not check(case, report.seals).problems
    assert not ds.verify_cache(case.cache).problems
    assert str(report) == "no problems"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_was_never_written_is_found(case, family):
    """As a row of a previous tenant is, where freed storage is poisoned."""
    place = at(family, case)
    change = changed(family, case, place, lambda row: jnp.full_like(row, poison_of(row.dtype)))
    found = kinds(check(case, **change))
    assert {kind for kind, _ in found} == {"unwritten"}
    assert all(where.startswith(family) for _, where in found)
    assert ("unwritten", family) in {(k, w.rsplit(".p", 1)[0].rsplit(".o", 1)[0]) for k, w in found}


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
    assert {kind for kind, _ in found} == {"checksum"}
    assert all(where.startswith(family) for _, where in found)


def test_what_is_not_live_may_change(case):
    seals = check(case).seals
    free_block = int(case.manager.ledger().free_blocks[0])
    free_slot = ({0, 1, 2} - set(case.slots)).pop()
    for family, place in (("csa.entries", (free_block, 3)), ("swa.window", (free_slot, 2))):
        assert not check(case, seals, **changed(family, case, place, flip)).problems


def test_a_released_request_is_no_longer_sealed(case):
    seals = check(case).seals
    case.manager.release(case.slots[1])
    case.cache = case.manager.apply(case.cache, ds.init_snapshot_store(case.cache, 2))
    report = check(case, seals)
    assert not report.problems, str(report)


def test_wrong_lengths_are_found(case):
    lengths = case.cache.length_tokens
    slot, free = case.slots[0], ({0, 1, 2} - set(case.slots)).pop()
    for new in (LENGTH + 1, LENGTH - 1, 10_000, -1):
        found = kinds(check(case, length_tokens=lengths.at[slot].set(new)))
        assert ("length", "slot") in found
    assert ("length", "slot") in kinds(check(case, length_tokens=lengths.at[free].set(1)))


def test_a_block_owned_twice_is_found(case):
    table = case.cache.block_table
    first, second = case.slots
    twice = table.at[second, 2].set(table[first, 2])  # both still write to it
    assert ("owner", "block") in kinds(check(case, block_table=twice))
    assert {k for k, _ in kinds(ds.verify_cache(dataclasses.replace(case.cache, block_table=twice)))
            } == {"owner"}  # fmt: skip
    moved = table.at[second, 0].set(table[first, 1])
    assert ("owner", "block") in kinds(check(case, block_table=moved))
    assert ("owner", "slot") in kinds(check(case, block_table=table.at[first, 1].set(-1)))


def test_leaks_are_found(case):
    ledger = case.manager.ledger()
    lost = dataclasses.replace(ledger, free_blocks=ledger.free_blocks[1:])
    (problem,) = ds.verify_cache(case.cache, lost).problems
    assert problem.kind == "leak"
    assert problem.where == f"block {ledger.free_blocks[0]}"
    double = np.concatenate([ledger.free_blocks, ledger.free_blocks[:1]])
    (problem,) = ds.verify_cache(
        case.cache, dataclasses.replace(ledger, free_blocks=double)
    ).problems
    assert problem.message == "free 2 times"
    used = np.concatenate([ledger.free_blocks, ledger.block_table[case.slots[0], :1]])
    (problem,) = ds.verify_cache(case.cache, dataclasses.replace(ledger, free_blocks=used)).problems
    assert problem.message == "free and in use"
    owners = ledger.owners.copy()
    owners[ledger.block_table[case.slots[0], 0]] += 1
    (problem,) = ds.verify_cache(case.cache, dataclasses.replace(ledger, owners=owners)).problems
    assert problem.message.startswith("4 owners, 3 found")
