"""Blocks that are taken together are those that would be taken one after the other."""

import numpy as np
import pytest

from dsv4_jax.allocator.block_contents import HashedTokens
from dsv4_jax.allocator.block_pool import BlockPool
from dsv4_jax.allocator.leaving import Room
from dsv4_jax.allocator.prefix_tree import PrefixTree

SIZE = 2


def filled(parts, num_blocks, lengths):
    """A pool of which known prefixes of so many blocks hold some that nobody uses."""
    tree = PrefixTree(SIZE, 2, parts)
    pool, chains = BlockPool(num_blocks, tree), []
    tree.leaving = []
    for number, length in enumerate(lengths):
        tokens, chain = HashedTokens(np.full(length * SIZE, number, np.int32), b"", SIZE), []
        contents = tokens.upto(length)[:length]
        tree.insert_used(chain, contents, [pool.take(logical) for logical in range(length)])
        chains.append(chain)
    for chain in chains:
        tree.leave(*chain)
    return tree, pool, chains


def taken_one_by_one(pool, first, count, beside):
    blocks = []
    while len(blocks) < count and pool.has_beside(first + len(blocks), beside):
        blocks.append(pool.take(first + len(blocks)))
    return blocks


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 4), (1, 5), (2, 99)])
@pytest.mark.parametrize("beside", [0, 2])
def test_many_blocks_are_those_of_one_after_the_other(parts, first, count, beside):
    one, many = filled(parts, 18, [5, 3, 4])[1], filled(parts, 18, [5, 3, 4])[1]
    wanted = taken_one_by_one(one, first, count, beside)
    assert many.take_many(first, count, beside) == wanted
    for name in ("owners", "generations"):
        assert getattr(one, name).tolist() == getattr(many, name).tolist()
    assert (one.num_evicted, one.num_free) == (many.num_evicted, many.num_free)
    assert sorted(one.free) == sorted(many.free)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 3), (1, 7), (5, 12), (0, 18)])
def test_what_is_missing_is_what_gives_way_where_parts_are_even(parts, first, count):
    """At least so many give way; none where enough are free or no part has any to give."""
    pool = filled(parts, 18, [6, 6])[1]
    missing, before = pool.missing(first, count), pool.num_evicted
    taken = taken_one_by_one(pool, first, count, 0)
    assert len(taken) == count
    assert missing <= pool.num_evicted - before
    assert (missing > 0) == (pool.num_evicted > before)


def test_no_more_leaves_than_there_is_room_for():
    """A block, and a snapshot where there is one; what does not fit is the next to leave."""
    tree, pool, (_, chain, _) = filled(1, 12, [3, 4, 5])
    tree.put_snapshot(chain[1], tree.take_snapshot_place())
    assert pool.evict(12, Room(10 * 7 + 9, 10, 100)) == 7
    assert [(one.of, one.end) for one in tree.leaving[:4]] == [
        ("blocks", 6), ("blocks", 4), ("blocks", 2), ("blocks", 8)
    ]  # fmt: skip
    assert pool.evict(12, Room(10 * 3 + 109, 10, 100)) == 3  # the end of the third, after all
    assert pool.evict(12, Room(109, 10, 100)) == 0
    assert chain[1].snapshot >= 0
    assert pool.evict(12, Room(120, 10, 100)) == 2
    assert [one.of for one in tree.leaving[-3:]] == ["snapshots", "blocks", "blocks"]
    assert (pool.num_evicted, pool.num_free, tree.num_nodes) == (12, 12, 0)
