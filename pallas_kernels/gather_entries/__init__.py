"""Stored vectors into dense arrays."""

from pallas_kernels.gather_entries.op import gather_entries, gather_window

__all__ = ["gather_entries", "gather_window"]
