"""Products of the same few rows with several weights, dense or block FP8."""

from pallas_kernels.joined_linears.op import joined_linears, joins

__all__ = ["joined_linears", "joins"]
