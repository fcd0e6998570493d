"""The prefix tree by itself: what gives way first."""

import numpy as np

from dsv4_jax.allocator.block_contents import BlockContent
from dsv4_jax.allocator.prefix_tree import PrefixTree


def grown(num_nodes):
    """A tree of first blocks, of one token each, that all have a snapshot."""
    tree = PrefixTree(1, num_nodes)
    blocks = [BlockContent.after(None, np.int32([token]), b"") for token in range(num_nodes)]
    nodes = [tree.insert(None, content, block) for block, content in enumerate(blocks)]
    for node in nodes:
        tree.put_snapshot(node, tree.take_snapshot_place())
    return tree, nodes


def test_the_least_recently_used_snapshot_gives_way():
    tree, nodes = grown(3)
    tree.use(nodes[0])
    for expected in (1, 2, 0):
        place = nodes[expected].snapshot
        assert tree.take_snapshot_place() == place
        assert nodes[expected].snapshot == -1
    assert tree.take_snapshot_place() == -1
    assert tree.num_evicted_snapshots == 3


def test_a_snapshot_that_somebody_waits_for_gives_way_to_none():
    tree, nodes = grown(2)
    nodes[0].snapshot_holds = 1
    assert [tree.take_snapshot_place() for _ in range(2)] == [1, -1]
    nodes[0].snapshot_holds = 0
    assert tree.take_snapshot_place() == 0


def test_a_snapshot_that_was_demoted_gives_way_first():
    tree, nodes = grown(3)
    tree.demote_snapshot(nodes[2])
    assert tree.take_snapshot_place() == 2
    assert [node.snapshot >= 0 for node in nodes] == [True, True, False]


def test_a_snapshot_that_was_demoted_and_then_used_is_worth_keeping_again():
    tree, nodes = grown(3)
    tree.leaving = []
    for node in nodes[1:]:
        tree.demote_snapshot(node)
    tree.use(nodes[2])
    for expected in (1, 0, 2):
        tree.take_snapshot_place()
        assert nodes[expected].snapshot == -1
    assert [one.content.key for one in tree.leaving] == [nodes[0].key, nodes[2].key]


def test_the_least_recently_used_leaf_is_evicted_and_one_in_use_is_not():
    tree, nodes = grown(3)
    tree.use(nodes[1])
    tree.use(nodes[0])
    tree.leave(nodes[0])
    assert [tree.evict(), tree.evict()] == [nodes[2], nodes[0]]
    assert tree.num_unused == 0


def test_a_snapshot_that_more_must_follow_gives_way_to_one_that_asks_for_less():
    """It is not copied to the host either, whence anybody could resume at it."""
    tree, (node,) = grown(1)
    tree.drop_snapshot(node)
    tree.leaving = []
    tree.put_snapshot(node, tree.take_snapshot_place(), 20)
    assert node.must_follow == 20
    tree.num_snapshots, tree._free_snapshots = 2, [1]
    tree.snapshot_generations = np.zeros(2, np.int32)
    tree.put_snapshot(node, tree.take_snapshot_place())
    assert (node.snapshot, node.must_follow, tree.leaving) == (1, 0, [])
    assert tree.take_snapshot_place() == 0
    tree.drop_snapshot(node)
    assert [leaving.of for leaving in tree.leaving] == ["snapshots"]
