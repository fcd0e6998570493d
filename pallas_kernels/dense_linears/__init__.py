"""Products of the same few rows with several dense weights."""

from pallas_kernels.dense_linears.op import dense_linears

__all__ = ["dense_linears"]
