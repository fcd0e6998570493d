"""Matrices of the models, and calls of `block_linear`, `swiglu_linear` and what they share."""

from typing import NamedTuple

from dsv4_jax.config import DSV4Config

FLASH, PRO, V41 = DSV4Config.flash(), DSV4Config.pro(), DSV4Config.v41_flash()
BOTH, HOPPER = ("sm_90a", "sm_100a"), ("sm_90a",)
"""What a call is compiled for."""


class Matrix(NamedTuple):
    """A weight of so many groups, and the form in which its rows are multiplied."""

    groups: int
    out: int
    into: int
    activations: str = "fp8"


def matrices_of(model, config):
    """{name: matrix} of what the release stores in FP8."""
    dim, rank = config.hidden_size, config.q_lora_rank
    heads = config.num_attention_heads * config.head_dim
    index_heads = config.indexer_num_heads * config.indexer_head_dim
    groups, group_rank = config.o_groups, config.o_lora_rank
    width = config.moe_intermediate_size
    found = {
        "queries": Matrix(1, heads + index_heads, rank),
        "latent and window": Matrix(1, rank + config.head_dim, dim),
        "wo_a": Matrix(groups, group_rank, heads // groups, "bfloat16"),
        "wo_b": Matrix(1, dim, groups * group_rank),
        "shared w1 and w3": Matrix(1, 2 * width, dim),
        "shared w2": Matrix(1, dim, width),
    }
    return {f"{model} {name}": matrix for name, matrix in found.items()}


MATRICES = matrices_of("Flash", FLASH) | matrices_of("Pro", PRO)
ROWS = (1, 8, 64, 256, 8192)
IN_PARTS, ROWS_IN_PARTS = ("wo_b", "shared w2"), (8, 64)
"""Matrices whose sums of splits a model leaves to what reads them, and rows that are split."""
GATED, LIMIT = "shared w1 and w3", FLASH.swiglu_limit

QUERIES_OF_HCA = "Flash queries of HCA"
"""Without those of an indexer."""
_COMPILED_MATRICES = MATRICES | {
    QUERIES_OF_HCA: Matrix(1, FLASH.num_attention_heads * FLASH.head_dim, FLASH.q_lora_rank)
}


class Product(NamedTuple):
    """A call that is compiled: rows with a weight of a form."""

    form: str
    rows: int
    out: int
    into: int
    activations: str


def product(matrix, rows, form="fp8", activations="fp8"):
    """The call of rows with a matrix of those above."""
    _, out, into, _ = _COMPILED_MATRICES[matrix]
    return Product(form, rows, out, into, activations)


COMPILED = (
    product(QUERIES_OF_HCA, 1),
    product("Pro wo_b", 8),
    product("Flash wo_b", 64, activations="bfloat16"),
    product("Flash queries", 64),
    product("Flash shared w2", 256),
    product("Flash wo_b", 8192),
    product("Flash shared w2", 8192, form="mxfp4"),
)
COMPILED_UNNORMED = product(QUERIES_OF_HCA, 1)
COMPILED_GATED = Product("fp8", 96, PRO.moe_intermediate_size, PRO.hidden_size, "fp8")
"""Gate and up apart."""

V41_PARTS = {
    "latent and window": [(V41.q_lora_rank, V41.hidden_size), (V41.head_dim, V41.hidden_size)],
    "queries": [(V41.num_attention_heads * V41.head_dim, V41.q_lora_rank)],
    "output": [(V41.hidden_size, V41.o_groups * V41.o_lora_rank)],
    "gate and up": [(V41.moe_intermediate_size, V41.hidden_size)] * 2,
    "down": [(V41.hidden_size, V41.moe_intermediate_size)],
    "down of four": [(V41.hidden_size, V41.moe_intermediate_size // 4)],
}
"""Weights in blocks of 32 that are multiplied together; the last is that of one of four devices."""
V41_GROUPS = Matrix(
    V41.o_groups,
    V41.o_lora_rank,
    V41.num_attention_heads * V41.head_dim // V41.o_groups,
    "bfloat16",
)
COMPILED_OF_V41 = [
    (name, rows)
    for name in ("latent and window", "queries", "output", "down")
    for rows in (1, 8, 16, 32, 64)
]
COMPILED_ROWS_OF_V41 = (1, 8, 32, 64)
"""Of groups, and of a gate and an up projection."""
COMPILED_BLOCKS_OF_32 = [
    (name, rows)
    for name in ("latent and window", "queries", "output", "gate and up", "down of four")
    for rows in (1, 64)
]
"""Those that Triton's kernel takes."""

COMPILED_PICKS = (32_768, FLASH.hidden_size, 32_768 * FLASH.num_experts_per_token)
"""Rows of a prompt, their width, and those of them that experts pick."""
