"""The experts that tokens picked."""

from pallas_kernels.expert_mlp.op import expert_mlp, mixture_mlp

__all__ = ["expert_mlp", "mixture_mlp"]
