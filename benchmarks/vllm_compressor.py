"""vLLM's kernels for the work of `append_and_flush` and of the flushes, called through torch.

The folder holds, unmodified, `save_partial_states.py`, `fused_compress_quant_cache.py`,
`cache_utils.py` and `fused_indexer_q.py` of vLLM 0.33's `vllm/models/deepseek_v4/common/ops`; they
import a few names of vLLM, which `vllm_stand_in` provides. vLLM launches two kernels for each
compressor, "save" and "compress", and one for the window, which in its C++ library also norms and
rotates queries.
"""

import functools
import importlib
import types

import numpy as np

from benchmarks import baselines
from benchmarks.cases.cache import COMPRESSION_RATIO, DECODE_LENGTH, EPS, IC, LAYERS, ROPE, C
from benchmarks.layer_calls import decode_positions
from benchmarks.vllm_stand_in import PACKAGE, round_up, stand_in


@functools.cache
def load(folder, library=None):
    """The `Launches` of a folder; `library` holds vLLM's C++ operators."""
    return Launches(folder, library)


class Launches:
    """Times vLLM's launches on this GPU."""

    def __init__(self, folder, library):
        import torch

        stand_in(folder)
        self.save, self.compress, self.cache = (
            importlib.import_module(f"{PACKAGE}.{name}")
            for name in ("save_partial_states", "fused_compress_quant_cache", "cache_utils")
        )
        angle = torch.arange(65536, dtype=torch.float32)[:, None] * (
            160000.0 ** -(torch.arange(0, ROPE, 2, dtype=torch.float32) / ROPE)
        )
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1).cuda()
        self.has_library = library is not None
        if library:
            torch.ops.load_library(library)

    def prefill_us(self, kind, families, num_tokens):
        """Microseconds of these compressors for the first tokens of one request."""
        positions = [np.arange(num_tokens)]
        return round(
            sum(self._compress_us(kind, f, positions, LAYERS["prefill"]) for f in families), 2
        )

    def decode_us(self, kind, batch, closing, num_heads):
        """Microseconds of the window insert and of each compressor, summed."""
        positions = [p[None] for p in decode_positions(COMPRESSION_RATIO[kind], batch, closing)]
        families = ("main", "index") if kind == "csa" else ("main",)
        total = sum(
            self._compress_us(kind, family, positions, LAYERS["decode"]) for family in families
        )
        return round(total + self.insert_us(batch, num_heads), 2)

    def _compress_us(self, kind, family, positions, layers):
        buffers = [_Compressor(kind, family, positions, self.cos_sin) for _ in range(layers)]

        def run(compressor):
            compressor.save(self.save)
            compressor.compress(self.compress)

        return baselines.median_us([lambda c=c: run(c) for c in buffers])

    def insert_us(self, batch, num_heads):
        """Microseconds of the window insert."""
        import torch

        calls = []
        for _ in range(LAYERS["decode"]):
            pages = -(-batch // 64)
            cache = torch.zeros(pages, round_up(64 * 584, 576), dtype=torch.uint8, device="cuda")
            cache = cache[:, : 64 * 584]
            kv = torch.randn(batch, C, device="cuda").bfloat16()
            slots = torch.randperm(pages * 64, device="cuda")[:batch]
            if self.has_library:
                queries = torch.randn(batch, num_heads, C, device="cuda", dtype=torch.bfloat16)
                place = torch.arange(batch, device="cuda") + DECODE_LENGTH
                insert = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
                arguments = (queries, kv, cache, slots, place, self.cos_sin, num_heads, EPS, 64)
            else:
                insert, arguments = self.cache.quantize_and_insert_k_cache, (kv, cache, slots, 64)
            calls.append(lambda f=insert, a=arguments: f(*a))
        return baselines.median_us(calls)


class _Compressor:
    """One compressor's buffers in vLLM's layout, for tokens at positions[r] of request r."""

    def __init__(self, kind, family, positions, cos_sin):
        import torch

        self.dim, self.compression_ratio, self.cos_sin = (
            C if family == "main" else IC,
            COMPRESSION_RATIO[kind],
            cos_sin,
        )
        self.overlap = kind == "csa"
        self.width = self.dim * (2 if self.overlap else 1)
        self.page_tokens = 4 if self.overlap else 8
        self.page_entries = 256 // self.compression_ratio
        self.group, self.token_bytes, self.scale_bytes = (
            (64, 576, 8) if family == "main" else (128, 128, 4)
        )
        requests = np.repeat(np.arange(len(positions)), [len(p) for p in positions])
        flat = np.concatenate(positions)
        tables, num_pages = [], 0
        span = (2 if self.overlap else 1) * self.compression_ratio
        for place in positions:
            first = max(int(place[0]) - span + 1, 0) // self.page_tokens
            last = int(place[-1]) // self.page_tokens
            table = np.zeros(last + 1, np.int32)
            table[first:] = np.arange(num_pages, num_pages + last + 1 - first)
            num_pages += last + 1 - first
            tables.append(table)
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = pages
        state_slots = (
            table[requests, flat // self.page_tokens].astype(np.int64) * self.page_tokens
            + flat % self.page_tokens
        )
        entry = flat // self.compression_ratio
        keys = requests * 2**40 + entry // self.page_entries
        pages, number = np.unique(keys, return_inverse=True)
        entry_slots = number * self.page_entries + entry % self.page_entries
        entry_slots = np.where((flat + 1) % self.compression_ratio == 0, entry_slots, -1)
        stride = round_up(self.page_tokens * 2 * self.width * 4, 576) // 4
        state = torch.randn(num_pages, stride, device="cuda")
        self.state = state.as_strided(
            (num_pages, self.page_tokens, 2 * self.width), (stride, 2 * self.width, 1)
        )
        size = self.token_bytes + self.scale_bytes
        page_bytes = round_up(self.page_entries * size, 576)
        cache = torch.zeros(len(pages), page_bytes, dtype=torch.uint8, device="cuda")
        self.cache = cache.as_strided((len(pages), self.page_entries, size), (page_bytes, size, 1))
        both = torch.randn(len(flat), 2 * self.width, device="cuda")
        self.values, self.scores = both.split([self.width, self.width], dim=-1)
        self.ape = torch.randn(self.compression_ratio, self.width, device="cuda")
        self.norm = torch.ones(self.dim, device="cuda").bfloat16()
        self.positions = torch.from_numpy(flat.astype(np.int64)).cuda()
        self.requests = torch.from_numpy(requests.astype(np.int32)).cuda()
        self.slots = torch.from_numpy(state_slots).cuda()
        self.table = torch.from_numpy(table).cuda()
        self.entry_slots = torch.from_numpy(entry_slots).cuda()

    def save(self, module):
        module._SAVE_PARTIAL_STATES_KERNEL(
            kv=self.values, score=self.scores, ape=self.ape, **self._call_and_state()
        )

    def compress(self, module):
        norm = {"rms_norm_weight": self.norm, "rms_norm_eps": EPS}
        sizes = {"head_dim": self.dim, "rope_head_dim": ROPE, "quant_block": self.group}
        sizes |= {"token_stride": self.token_bytes, "scale_dim": self.scale_bytes}
        module.compress_norm_rope_store_triton(
            **self._call_and_state(),
            num_actual=len(self.positions),
            token_to_req_indices=self.requests,
            block_table=self.table,
            cos_sin_cache=self.cos_sin,
            kv_cache=self.cache,
            k_cache_metadata=types.SimpleNamespace(slot_mapping=self.entry_slots),
            overlap=self.overlap,
            use_fp4_cache=False,
            **norm,
            **sizes,
        )

    def _call_and_state(self):
        """Arguments of both launches."""
        state = {
            "state_cache": self.state,
            "state_width": self.width,
            "compress_ratio": self.compression_ratio,
        }
        places = {"positions": self.positions, "slot_mapping": self.slots}
        places |= {"block_size": self.page_tokens}
        return state | places | {"pdl_kwargs": {"launch_pdl": False}}
