"""One token per request into all that a layer keeps, entries of closing windows included."""

from pallas_kernels.append_and_flush.op import append_and_flush
from pallas_kernels.append_and_flush.reference import Appended

__all__ = ["Appended", "append_and_flush"]
