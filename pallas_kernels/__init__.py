"""The ops under DeepSeek-V4's hybrid cache: arrays in, arrays out; usable without `dsv4_jax`.

    append      append_and_flush, in one launch: encode_tokens, compressor, append_tokens and
                round_index_queries
    select      index_topk, in two: index_scores and select_top_k
    attend      sparse_attention; gather_entries
    multiply    block_linear, joined_linears, pick_experts, expert_mlp
    streams     hyper_connections, write_streams
    draw        limit_tokens
    mesh        peer_collectives
    copy        pack_rows, gather_host_rows

Each is a folder: `op.py` checks arguments and chooses a backend, `reference.py` is the definition,
and further files are kernels. Under them lie `product` (rows times weights), `gpu` (what kernels
share) and `common` (formats, weights, rounding, the indices of a call).
"""

from pallas_kernels.append_and_flush import Appended, append_and_flush
from pallas_kernels.append_tokens import append_tokens
from pallas_kernels.block_linear import block_linear, block_linears, swiglu_linear
from pallas_kernels.common.backend import (
    Backend,
    FallbackWarning,
    forbid_fallbacks,
    gpu_interpreter,
)
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.codecs import Codec, Planes
from pallas_kernels.common.formats import (
    CACHE_FORMATS,
    CODECS,
    CacheFormat,
    get_cache_format,
    get_codec,
)
from pallas_kernels.common.layer_planes import LayerPlanes
from pallas_kernels.common.norm_rope import NormRope
from pallas_kernels.common.weights import MXFP4, BlockFP8
from pallas_kernels.compressor import Compressor, flush_csa, flush_hca, flush_write
from pallas_kernels.encode_tokens import encode_tokens
from pallas_kernels.expert_mlp import expert_mlp, mixture_mlp
from pallas_kernels.gather_entries import gather_entries, gather_window
from pallas_kernels.gather_host_rows import gather_host_rows
from pallas_kernels.hyper_connections import hyper_connections
from pallas_kernels.index_scores import index_scores
from pallas_kernels.index_topk import index_topk
from pallas_kernels.joined_linears import joined_linears
from pallas_kernels.limit_tokens import limit_tokens
from pallas_kernels.pack_rows import pack_rows, sum_rows, unpack_rows
from pallas_kernels.peer_collectives import (
    PeerLayout,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from pallas_kernels.pick_experts import pick_experts
from pallas_kernels.round_index_queries import round_index_queries
from pallas_kernels.select_top_k import select_top_k
from pallas_kernels.sparse_attention import (
    AttentionPart,
    attend_in_part,
    join_parts,
    sparse_attention,
)
from pallas_kernels.write_streams import write_streams

__all__ = [
    "CACHE_FORMATS",
    "CODECS",
    "MXFP4",
    "Appended",
    "AttentionPart",
    "Backend",
    "BlockFP8",
    "CacheFormat",
    "CallIndices",
    "Codec",
    "Compressor",
    "FallbackWarning",
    "LayerPlanes",
    "NormRope",
    "PeerLayout",
    "Planes",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "append_and_flush",
    "append_tokens",
    "attend_in_part",
    "block_linear",
    "block_linears",
    "encode_tokens",
    "expert_mlp",
    "flush_csa",
    "flush_hca",
    "flush_write",
    "forbid_fallbacks",
    "gather_entries",
    "gather_host_rows",
    "gather_window",
    "get_cache_format",
    "get_codec",
    "gpu_interpreter",
    "hyper_connections",
    "index_scores",
    "index_topk",
    "join_parts",
    "joined_linears",
    "limit_tokens",
    "mixture_mlp",
    "pack_rows",
    "pick_experts",
    "reduce_scatter",
    "round_index_queries",
    "select_top_k",
    "sparse_attention",
    "sum_rows",
    "swiglu_linear",
    "unpack_rows",
    "write_streams",
]
