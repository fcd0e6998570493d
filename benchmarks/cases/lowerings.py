"""Calls that are timed by each lowering of a Triton kernel."""

TIMED = (
    ("hyper_connections", 1),
    ("hyper_connections", 64),
    ("pick_experts", 64),
    ("router_logits", 64),
    ("append_and_flush hca", 64),
    ("round_index_queries", 64),
    ("write_streams", 16),
    ("flush hca", 256),
    ("joined_linears", 64),
    ("joined_linears", 1),
    ("limit_tokens", 8),
    ("append_and_flush csa", 64),
)
"""(op, tokens or rows of a call)."""
NAMED_BY_OP = {"append_and_flush hca", "append_and_flush csa"}
"""Rows whose names leave the number out."""
