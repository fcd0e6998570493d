"""The experts that tokens picked."""

from pallas_kernels.expert_mlp.op import expert_mlp
from pallas_kernels.expert_mlp.reference import swiglu

__all__ = ["expert_mlp", "swiglu"]
