"""Rows of tables in the host's memory."""

from pallas_kernels.gather_host_rows.op import gather_host_rows

__all__ = ["gather_host_rows"]
