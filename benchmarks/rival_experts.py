"""vLLM's Marlin experts in MXFP4, for the calls of `bench_expert_mlp`, called as on Hopper.

Picks are sorted by expert, then gate and up, SwiGLU with its clamp, down, and the sum over picks.
Weights are random. The launches are in vLLM's libraries of experts and of C++ ops.
"""

import functools
import math

from benchmarks import baselines
from pallas_kernels.gpu.devices import H200

_FLOAT4 = 0x2000000010102  # vLLM's number of the type E2M1
SCALES = {"low": 118, "high": 121, "dtype": "uint8"}
CODES = {"low": -(2**31), "high": 2**31, "dtype": "int32"}
GROUP = 32
LOCKS = 16 * H200.num_sms
_TOLERANCE = 0.06


class Call:
    """Arrays of one call, and the launches before and after its products."""

    def __init__(self, ids, model, limit):
        """Draws rows and makes room.

        Args:
          ids: i32[tokens, picks], the picked experts.
          model: experts, D and I.
          limit: of SwiGLU.
        """
        import torch

        self.num_experts, dim, width = model
        self.ids = torch.as_tensor(ids, dtype=torch.int32, device="cuda")
        self.num_tokens, self.num_picks = self.ids.shape
        self.num_rows = self.ids.numel()
        self.limit = limit
        made = {"dtype": torch.bfloat16, "device": "cuda"}
        self.x = torch.randn(self.num_tokens, dim, **made)
        self.share = torch.full(self.ids.shape, 1 / self.num_picks, device="cuda")
        self.gate_up = torch.empty(self.num_rows, 2 * width, **made)
        self.hidden = torch.empty(self.num_rows, width, **made)
        self.down = torch.empty(self.num_rows, dim, **made)
        self.out = torch.empty(self.num_tokens, dim, **made)

    @property
    def parts(self):
        return self.down.view(self.num_tokens, self.num_picks, -1)

    def sort(self, tile):
        """The picks in tiles of one expert each: rows, experts of tiles, and how many rows."""
        import torch

        most = self.num_rows + self.num_experts * (tile - 1)
        if self.num_rows < self.num_experts:
            most = min(most, self.num_rows * tile)
        sizes = most, math.ceil(most / tile), 1
        order = [torch.empty(size, dtype=torch.int32, device="cuda") for size in sizes]
        torch.ops._moe_C.moe_align_block_size(self.ids, self.num_experts, tile, *order, None)
        return order

    def check(self, expected):
        """Raises ValueError unless the result is near f32[tokens, dim]."""
        error = ((self.out.float() - expected).norm() / expected.norm()).item()
        if not error < _TOLERANCE:
            raise ValueError(f"the experts' result is wrong by {error:.3g} of its norm")


class Marlin:
    """Products of rows in BF16 with weights that are unpacked to BF16."""

    def __init__(self, libraries, model, limit):
        """Draws weights of a model, (experts, D, I), after a small check."""
        load(libraries)
        self._check()
        self._model, self._limit = model, limit
        self._weights = _marlin_weights(*model)

    def time_us(self, routings):
        """Median microseconds of calls with these routings."""
        calls = [Call(ids, self._model, self._limit) for ids in routings]
        return median_us([functools.partial(self._run, each, self._weights) for each in calls])

    def _run(self, call, weights):
        import torch

        tiles = (8, 16, 32, 48)
        tile = next((n for n in tiles if call.num_rows / call.num_experts / n < 0.9), 64)
        order = call.sort(tile)
        self._multiply(call, call.x, call.gate_up, weights[0], order, tile, down=False)
        torch.ops._C.silu_and_mul_with_clamp(call.hidden, call.gate_up, call.limit, 1.0, 0.0)
        self._multiply(call, call.hidden, call.down, weights[1], order, tile, down=True)
        torch.ops._moe_C.moe_sum(call.parts, call.out)

    def _multiply(self, call, x, product, weight, order, tile, *, down):
        import torch

        codes, scales = weight
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x,
            product,
            codes,
            None,  # bias
            scales,
            None,  # scales of rows
            None,  # scale of all weights
            None,  # zero points
            self._locks,
            *order,
            call.share,
            tile,
            1 if down else call.num_picks,
            down,  # times the shares
            _FLOAT4,
            len(x),
            product.shape[1],
            x.shape[1],
            False,  # no atomic additions
            True,  # sums in f32
            False,  # zero points are not floats
            -1,  # it chooses its tiles
            -1,
            -1,
        )

    @functools.cached_property
    def _locks(self):
        import torch

        return torch.zeros(LOCKS, dtype=torch.int32, device="cuda")

    def _check(self):
        """With weights that are equal throughout an expert, which look alike in any layout."""
        import torch

        num_experts, _, width = model = 8, 1024, 512
        weights = _marlin_weights(*model)
        exponents = torch.arange(num_experts, device="cuda") % 3 - 6
        for codes, scales in weights:
            codes.fill_(0x22222222)  # 1.0
            scales.view(torch.uint8).copy_((exponents + 127)[:, None, None])
        call = Call([[0, 1, 2, 3, 4, 5], [7, 6, 5, 4, 3, 2]], model, limit=0.5)
        self._run(call, weights)
        scale = torch.exp2(exponents.float())[call.ids.long()]
        gate = call.x.float().sum(1, keepdim=True) * scale
        hidden = swiglu(gate, gate, call.limit)
        total = (hidden * scale * width * call.share).sum(1, keepdim=True)
        call.check(total.expand_as(call.out))


@functools.cache
def load(libraries):
    """Loads vLLM's libraries: of experts, and of C++ ops."""
    import torch

    for library in libraries:
        torch.ops.load_library(library)


def median_us(calls):
    return baselines.median_us(calls, replays=4 if calls[0].args[0].num_tokens > 1000 else 20)


def random(*shape, low, high, dtype):
    import torch

    return torch.randint(low, high, shape, dtype=getattr(torch, dtype), device="cuda")


def _marlin_weights(num_experts, dim, width):
    """Codes and scales of both products, in the shapes of Marlin's layout."""
    import torch

    weights = []
    for into, out in ((dim, 2 * width), (width, dim)):
        codes = random(num_experts, into // 16, 2 * out, **CODES)
        scales = random(num_experts, into // GROUP, out, **SCALES)
        weights.append((codes, scales.view(torch.float8_e8m0fnu)))
    return weights


def swiglu(gate, up, limit):
    import torch

    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
