"""Parameters, and the model from token ids to logits."""

from dsv4_jax.model.draft import forward_draft
from dsv4_jax.model.forward import forward_streams
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
