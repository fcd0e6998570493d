"""The experts that tokens picked."""

from pallas_kernels.expert_mlp.mosaic_gpu import UNPACKED_ROWS
from pallas_kernels.expert_mlp.op import expert_mlp, mixture_mlp

__all__ = ["UNPACKED_ROWS", "expert_mlp", "mixture_mlp"]
