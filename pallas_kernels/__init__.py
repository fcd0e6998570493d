"""The ops under DeepSeek-V4's hybrid cache: arrays in, arrays out; usable without `dsv4_jax`."""

from pallas_kernels.append_flush import Appended, Compressor, append_and_flush
from pallas_kernels.append_window import append_tokens, encode_tokens
from pallas_kernels.backend import Backend, gpu_interpreter
from pallas_kernels.codecs import Planes
from pallas_kernels.flush_write import flush_csa, flush_hca, flush_write
from pallas_kernels.formats import CACHE_FORMATS, CacheFormat, get_cache_format
from pallas_kernels.gather_entries import gather_entries, gather_window
from pallas_kernels.index_queries import round_index_queries
from pallas_kernels.index_topk import index_topk
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.stream_mix import mix_streams

__all__ = [
    "CACHE_FORMATS",
    "Appended",
    "Backend",
    "CacheFormat",
    "Compressor",
    "Planes",
    "append_and_flush",
    "append_tokens",
    "encode_tokens",
    "flush_csa",
    "flush_hca",
    "flush_write",
    "gather_entries",
    "gather_window",
    "get_cache_format",
    "gpu_interpreter",
    "index_topk",
    "mix_streams",
    "round_index_queries",
    "sparse_attention",
]
