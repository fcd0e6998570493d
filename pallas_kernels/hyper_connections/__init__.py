"""Hyper-connections: how a sublayer reads the residual streams."""

from pallas_kernels.hyper_connections.op import mix_streams

__all__ = ["mix_streams"]
