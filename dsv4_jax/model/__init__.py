"""Parameters, and the model from token ids to logits.

    trunk                embedding, every layer's block on a cache, head
    block                one layer: attention, then experts, each between hyper-connections
    hyper_connections    how a sublayer reads the residual streams and writes to them
    moe                  routing and the experts
    forward              token ids to logits over whole sequences, without a cache
    mtp                  the draft of an MTP block
    dspark               DSpark drafts: what settled tokens leave, a pass over a block, its chain
    dspark_sequence      the same over whole sequences, without a cache

`params`, `layer_params` and `draft_params` have the parameters as pytrees, and `shardings` says
where they lie on a mesh.
"""

from dsv4_jax.model.forward import forward_streams
from dsv4_jax.model.mtp import forward_draft
from dsv4_jax.model.params import (
    DSV4Params,
    init_params,
    param_shapes,
    quantize_params,
    unstack_layers,
)
from dsv4_jax.model.shardings import param_shardings

__all__ = [
    "DSV4Params",
    "forward_draft",
    "forward_streams",
    "init_params",
    "param_shapes",
    "param_shardings",
    "quantize_params",
    "unstack_layers",
]
