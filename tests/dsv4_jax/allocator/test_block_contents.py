"""Hashes of blocks: what is asked for more than once is hashed once, in portions."""

import numpy as np
import pytest

from dsv4_jax.allocator import block_contents
from dsv4_jax.allocator.block_contents import BlockContent, HashedTokens, contents_of
from dsv4_jax.allocator.prefix_tree import PrefixTree


@pytest.fixture
def hashed_blocks(monkeypatch):
    """The tokens of each block that was hashed, one after the other."""
    chain, seen = block_contents._chain, []
    monkeypatch.setattr(
        block_contents, "_chain", lambda key, tokens: (seen.append(tokens), chain(key, tokens))[1]
    )
    return seen


def by_hand(token_ids, salt, size):
    found, key = [], None
    for start in range(0, len(token_ids) // size * size, size):
        found.append(BlockContent.after(key, token_ids[start : start + size], salt))
        key = found[-1].key
    return found


def test_portions_give_what_one_block_after_the_other_gives():
    ids = np.arange(4 * 50 + 3, dtype=np.int64)  # of the last three there is no block
    for portion in (1, 7, 50, 99):
        hashed = HashedTokens(ids, b"a", 4)
        while not hashed.hash_more(portion):
            pass
        assert hashed.contents == by_hand(ids, b"a", 4)
        assert hashed.hash_more(portion)
    assert [one for one, _ in contents_of(ids, b"a", 4)] == hashed.contents
    parents = [parent for _, parent in contents_of(ids, b"a", 4)]
    assert parents == [b"", *(one.key for one in hashed.contents[:-1])]
    assert hashed.upto(20)[19] == hashed.contents[19]
    others = HashedTokens(ids, b"b", 4).upto(50)
    assert not {one.key for one in others} & {one.key for one in hashed.contents}


def test_a_sequence_that_is_looked_up_again_is_hashed_and_walked_once(hashed_blocks, monkeypatch):
    tree, ids = PrefixTree(4, 0), np.arange(4 * 200)
    parent = None
    for block, (content, _) in enumerate(contents_of(ids[:400], b"", 4)):
        parent = tree.insert(parent, content, block)
    hashed_blocks.clear()
    find, steps = PrefixTree.find_child, []
    monkeypatch.setattr(
        PrefixTree, "find_child", lambda *arguments: (steps.append(1), find(*arguments))[1]
    )
    hashed = HashedTokens(ids, b"", 4)
    for _ in range(9):
        assert [node.block for node in tree.match(hashed, 200)] == list(range(100))
    assert len(tree.match(hashed, 30)) == 30
    assert len(hashed_blocks) < 120
    assert len(steps) < 120


def test_what_left_the_tree_since_the_last_look_is_not_found_again():
    tree, ids = PrefixTree(4, 0), np.arange(4 * 6)
    contents = [content for content, _ in contents_of(ids, b"", 4)]
    nodes = [None]
    for block, content in enumerate(contents):
        nodes.append(tree.insert(nodes[-1], content, block))
    hashed = HashedTokens(ids, b"", 4)
    assert tree.match(hashed, 6) == nodes[1:]
    for _ in range(3):
        tree.evict()
    assert tree.match(hashed, 6) == nodes[1:4]
    new = tree.insert(nodes[3], contents[3], 9)
    assert tree.match(hashed, 6) == [*nodes[1:4], new]
