"""Calls of `hyper_connections` and `write_streams`: tokens and the width of their streams."""

from typing import NamedTuple

from benchmarks.cases.product import FLASH, PRO, V41

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
MOST_OF_FEW = 64
"""Tokens up to which the kernel for few of them is timed."""


class Streams(NamedTuple):
    """A call that is compiled; `shifted` ones have weights of the streams besides."""

    tokens: int
    dim: int
    shifted: bool = False


COMPILED_READS = [
    Streams(64, FLASH.hidden_size),
    Streams(1, PRO.hidden_size),
    Streams(2048, FLASH.hidden_size),
    Streams(64, V41.hidden_size, shifted=True),
    Streams(2048, V41.hidden_size, shifted=True),
]
COMPILED_WRITES = [
    Streams(16, FLASH.hidden_size),
    Streams(1, PRO.hidden_size),
    Streams(64, PRO.hidden_size),
    Streams(2048, FLASH.hidden_size),
]
