"""Products of rows with a dense or quantised weight."""

from pallas_kernels.block_linear.op import block_linear

__all__ = ["block_linear"]
