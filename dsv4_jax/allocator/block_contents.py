"""What full blocks of sequences hold, by hashes that stand for all tokens up to their ends.

A key is a salted hash, chained over the prefix that ends with the block. Tokens are kept beside it
and compared too, so that a collision is a miss and never a wrong hit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_DIGEST_BYTES = 16


class BlockContent(NamedTuple):
    """One more block of a prefix.

    Attributes:
      key: hash of the prefix up to the end of this block.
      tokens: i32 ids of this block, as bytes.
    """

    key: bytes
    tokens: bytes

    @classmethod
    def after(cls, key: bytes | None, token_ids: np.ndarray, salt: bytes) -> BlockContent:
        """Tokens i32[n] of the block after a prefix of that key; None is no prefix."""
        tokens = _token_bytes(token_ids)
        return cls(_chain(_root_key(salt) if key is None else key, tokens), tokens)


class HashedTokens:
    """Tokens of a sequence that is looked up more than once; each full block is hashed once.

    Attributes:
      token_ids: i32[n]; nobody changes them.
      salt: sequences of different salts have nothing in common.
      contents: of its first full blocks, as far as somebody has asked for them.
      parents: key of the prefix before each of them, and one more; b"" is no prefix.
    """

    def __init__(self, token_ids: np.ndarray, salt: bytes, block_tokens: int) -> None:
        """Hashes nothing yet."""
        self.token_ids, self.salt = token_ids, salt
        self.contents: list[BlockContent] = []
        self.parents = [b""]
        self._block_tokens = block_tokens

    def __len__(self) -> int:
        """Tokens."""
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Full blocks."""
        return len(self.token_ids) // self._block_tokens

    def hash_more(self, num_blocks: int) -> bool:
        """Hashes so many further blocks at most; whether all have been."""
        first = len(self.contents)
        end, size = min(first + num_blocks, self.num_blocks), self._block_tokens
        raw = _token_bytes(self.token_ids[first * size : end * size])
        key, width = self.parents[first] or _root_key(self.salt), size * 4
        every = [raw[start : start + width] for start in range(0, len(raw), width)]
        keys = list(itertools.accumulate(every, _chain, initial=key))[1:]
        self.contents += map(BlockContent, keys, every)
        self.parents += keys
        return end == self.num_blocks

    def upto(self, num_blocks: int) -> list[BlockContent]:
        """Contents of at least the first blocks, of which there must be so many."""
        if len(self.contents) < num_blocks:
            # Who asks for one after the other does not get each by a call of its own.
            self.hash_more(max(num_blocks - len(self.contents), _HASHED_TOGETHER))
        return self.contents

    def key_before(self, number: int) -> bytes:
        """Key of the prefix before a block, once its contents are there; b"" is no prefix."""
        return self.parents[number]


_HASHED_TOGETHER = 16


def contents_of(
    token_ids: np.ndarray, salt: bytes, block_tokens: int
) -> Iterator[tuple[BlockContent, bytes]]:
    """Each full block of a sequence, and the key of the prefix before it; b"" is no prefix."""
    hashed = HashedTokens(token_ids, salt, block_tokens)
    hashed.hash_more(hashed.num_blocks)
    for number, content in enumerate(hashed.contents):
        yield content, hashed.key_before(number)


def _token_bytes(token_ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(token_ids, np.int32).tobytes()


def _root_key(salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"root").digest()


def _chain(key: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=_DIGEST_BYTES, key=key).digest()
