"""Hyper-connections: how a sublayer reads the residual streams."""

from pallas_kernels.hyper_connections.op import hyper_connections

__all__ = ["hyper_connections"]
