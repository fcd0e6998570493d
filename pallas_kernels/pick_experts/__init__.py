"""Which experts a token picks, from the logits of its router."""

from pallas_kernels.pick_experts.op import pick_experts, router_logits

__all__ = ["pick_experts", "router_logits"]
