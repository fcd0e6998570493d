"""The type and the range of each size of a model.

A range holds every model of this family that a machine could run and keeps products of sizes within
64 bits. It says what a file may ask for, not what works well.
"""

from __future__ import annotations

from dsv4_jax.config.kinds import MAX_I32, POSITIVE, Flag, Kind, Whole

MAX_LAYERS = 1024
MAX_END_TOKENS = 1024
MAX_MTP_DRAFT_TOKENS = 8
"""Tokens that an MTP block, which was trained to guess one, may guess in a row."""
MAX_BLOCK_TOKENS = 2**24
MAX_EXPERTS_OF_ALL_LAYERS = 2**18
"""Three tensors each; Pro has 23,424."""

COMPRESSION_RATIO = Whole(1, 2**20)
"""Tokens per entry."""

_WIDTH, _COUNT = Whole(1, 2**20), Whole(1, 2**16)

KINDS: dict[str, Kind] = {
    "vocab_size": Whole(1, 2**24),
    "hidden_size": _WIDTH,
    "num_attention_heads": _COUNT,
    "head_dim": _COUNT,
    "rope_dim": _COUNT,
    "q_lora_rank": _WIDTH,
    "o_groups": _COUNT,
    "o_lora_rank": _WIDTH,
    "sliding_window": _WIDTH,
    "csa_compression_ratio": COMPRESSION_RATIO,
    "hca_compression_ratio": COMPRESSION_RATIO,
    "indexer_num_heads": _COUNT,
    "indexer_head_dim": _COUNT,
    "indexer_top_k": _WIDTH,
    "num_routed_experts": _COUNT,
    "num_experts_per_token": _COUNT,
    "moe_intermediate_size": _WIDTH,
    "routed_scaling_factor": POSITIVE,
    "swiglu_limit": POSITIVE,
    "query_norm": Flag(),
    "shifted_streams": Flag(),
    "weight_block": Whole(32, 128),
    "num_mtp_layers": Whole(0, 1),
    "hc_mult": Whole(1, 1024),
    "hc_sinkhorn_iters": Whole(1, 1024),
    "hc_eps": POSITIVE,
    "rms_norm_eps": POSITIVE,
    "rope_theta": POSITIVE,
    "compress_rope_theta": POSITIVE,
    "max_position_embeddings": Whole(1, MAX_I32),
}
"""By fields of `DSV4Config`."""

YARN_KINDS: dict[str, Kind] = {
    "factor": POSITIVE,
    "original_max_positions": Whole(1, MAX_I32),
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
}
"""By fields of `YarnScaling`."""
