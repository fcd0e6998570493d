"""How a sublayer reads the residual streams."""

from pallas_kernels.stream_mix.op import mix_streams

__all__ = ["mix_streams"]
