"""Rows of stacked planes as bytes without padding, and back; with checksums."""

from pallas_kernels.pack_rows.op import pack_rows, sum_rows, unpack_rows

__all__ = ["pack_rows", "sum_rows", "unpack_rows"]
