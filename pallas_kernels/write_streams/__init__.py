"""What a sublayer writes to the residual streams, and the next one's first product with them."""

from pallas_kernels.write_streams.op import write_streams

__all__ = ["write_streams"]
