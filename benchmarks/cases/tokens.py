"""Small calls on a row of each token: joined projections, experts picked, tokens left to draw."""

from typing import NamedTuple

from benchmarks.cases.product import FLASH, PRO, V41

_ENTRY, _KEY = 2 * FLASH.head_dim, 2 * FLASH.indexer_head_dim
JOINED = (_ENTRY, _ENTRY, _KEY, _KEY, FLASH.indexer_num_heads)
"""Outputs of the projections that a CSA layer joins: values and scores of its two compressors,
which have biases by position, and the weights of index heads."""
POSITIONS = FLASH.csa_compression_ratio
"""Rows of a bias."""
JOINED_FP8 = (FLASH.q_lora_rank, FLASH.head_dim)
"""Those of the FP8 weights that few rows are multiplied with besides: query latent and window."""


class Joined(NamedTuple):
    """A call of `joined_linears` that is compiled; with FP8 weights if those have a block."""

    rows: int
    dim: int
    block: int | None = None


COMPILED_JOINED = [
    Joined(1, FLASH.hidden_size),
    Joined(8, PRO.hidden_size),
    Joined(64, FLASH.hidden_size),
    Joined(1, FLASH.hidden_size, FLASH.weight_block),
    Joined(1, V41.hidden_size, V41.weight_block),
]

EXPERTS, DIM = FLASH.num_routed_experts, FLASH.hidden_size
PICKS, SCALING = FLASH.num_experts_per_token, FLASH.routed_scaling_factor
COMPILED_PICKED = [(1, EXPERTS), (64, PRO.num_routed_experts)]
"""(tokens, experts)."""
COMPILED_ROUTED = [(8, EXPERTS, DIM), (64, PRO.num_routed_experts, PRO.hidden_size)]
"""The same with the router's product of rows of such a width."""

VOCAB = FLASH.vocab_size
DRAWN = (1, 8, 64, 256)
"""Rows from which a token is drawn."""
DRAWN_CONTEXT = 8192
"""Tokens that a request may have, whose counts penalties read."""
COMPILED_LIMITED = (1, 64)
