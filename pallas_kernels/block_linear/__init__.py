"""Products of rows with dense or quantised weights."""

from pallas_kernels.block_linear.op import (
    block_linear,
    block_linear_by_token,
    block_linear_in_parts,
    block_linears,
    swiglu_linear,
)

__all__ = [
    "block_linear",
    "block_linear_by_token",
    "block_linear_in_parts",
    "block_linears",
    "swiglu_linear",
]
