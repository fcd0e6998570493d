"""Products of other projects, for the matrices of `bench_block_linear`: DeepGEMM and cuBLAS.

A shape is (rows, groups, out, into). `python -m benchmarks.rival_products DIR SHAPE ...` calls
DeepGEMM's kernel of each shape once, written 8x1x4096x8192, so that its cache holds the kernel.
"""

import functools
import os
import subprocess
import sys

from benchmarks import baselines

_SCALED = 128
_LARGEST = 448.0
_TOLERANCE = 0.06
_PROCESSES = 12


def main():
    deep_gemm, *shapes = sys.argv[1:]
    products = DeepGemm(deep_gemm)
    for shape in shapes:
        operands = Operands(*map(int, shape.split("x")))
        products.multiply(operands)
        operands.check()


class DeepGemm:
    """DeepGEMM's FP8 products, and vLLM's kernel that rounds rows for them."""

    def __init__(self, folder, library=None):
        """Imports `deep_gemm` from its folder, and loads vLLM's C++ ops."""
        import torch

        sys.path.insert(0, folder)
        import deep_gemm

        self._deep_gemm = deep_gemm
        self._deep_gemm.set_pdl(True)  # as vLLM does
        if library:
            torch.ops.load_library(library)

    def time_us(self, shape, count, *, rounds, limit=None):
        """Median microseconds, with the launch that rounds the rows or without it.

        With a limit, SwiGLU follows, of a gate and an up projection that are halves of the outputs.
        """
        made = [Operands(*shape) for _ in range(count)]

        def call(operands):
            if rounds:
                self.round_rows(operands)
            self.multiply(operands)
            if limit is not None:
                self.activate(operands, limit)

        call(made[0])
        made[0].check()
        calls = [functools.partial(call, operands) for operands in made]
        return baselines.median_us(calls, replays_of(shape))

    def multiply(self, operands):
        """As vLLM calls it on Hopper: f32 scales that are powers of two."""
        rows, weight = (operands.codes, operands.scale), (operands.weight, operands.weight_scale)
        if len(operands.weight) == 1:
            rows, weight = (tuple(each[0] for each in pair) for pair in (rows, weight))
            self._deep_gemm.fp8_gemm_nt(rows, weight, operands.product[:, 0])
        else:
            rows = tuple(each.transpose(0, 1) for each in rows)
            recipe = (1, _SCALED, _SCALED)
            self._deep_gemm.fp8_einsum(
                "bhr,hdr->bhd", rows, weight, operands.product, recipe=recipe
            )

    def round_rows(self, operands):
        import torch

        torch.ops._C.per_token_group_fp8_quant(
            operands.x[0],
            operands.codes[0],
            operands.scale[0],
            _SCALED,
            1e-10,
            -_LARGEST,
            _LARGEST,
            True,  # scales are powers of two
            True,  # a column of scales is contiguous
            True,  # and begins at a multiple of 16 bytes
        )

    def activate(self, operands, limit):
        """SwiGLU as vLLM has it, on a product that is stored."""
        import torch

        product = operands.product[:, 0]
        torch.ops._C.silu_and_mul_with_clamp(operands.activated, product, limit)


class Operands:
    """Arrays of one call; codes and scales are of x[groups, rows, into]."""

    def __init__(self, rows, groups, out, into):
        import torch

        device = {"device": "cuda"}
        scales = into // _SCALED
        self.x = torch.randn(groups, rows, into, dtype=torch.bfloat16, **device)
        grouped = self.x.float().unflatten(-1, (scales, _SCALED))
        largest = grouped.abs().amax(-1) / _LARGEST
        scale = torch.exp2(torch.ceil(torch.log2(largest)))
        self.codes = (grouped / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn)
        padded = -(-rows // 4) * 4
        self.scale = torch.zeros(groups * scales * padded, **device).as_strided(
            (groups, rows, scales), (scales * padded, 1, padded)
        )
        self.scale.copy_(scale)
        weight = torch.randn(groups, out, into, dtype=torch.bfloat16, **device)
        self.weight = weight.to(torch.float8_e4m3fn)
        exponents = torch.randint(-8, -3, (groups, out // _SCALED, scales), **device)
        self.weight_scale = torch.exp2(exponents.float())
        self.product = torch.empty(rows, groups, out, dtype=torch.bfloat16, **device)
        self.activated = torch.empty(rows, out // 2, dtype=torch.bfloat16, **device)

    def check(self):
        """Raises ValueError unless the product of the first rows is near that in f32."""
        scale = self.weight_scale[:, :2].repeat_interleave(_SCALED, 1)
        scale = scale.repeat_interleave(_SCALED, 2)
        weight = self.weight[:, : 2 * _SCALED].float() * scale
        expected = (self.x[:, :4].float() @ weight.mT).transpose(0, 1)
        found = self.product[:4, :, : 2 * _SCALED].float()
        error = ((found - expected).norm() / expected.norm()).item()
        if not error < _TOLERANCE:
            raise ValueError(f"the product is wrong by {error:.3g} of its norm")


def compile_ahead(folder, shapes):
    """Compiles DeepGEMM's kernels of these shapes in processes; what fails is compiled later."""
    words = ["x".join(map(str, shape)) for shape in shapes]
    count = max(1, min(_PROCESSES, len(words), (os.cpu_count() or 1) - 2))
    command = [sys.executable, "-m", "benchmarks.rival_products", folder]
    running = [subprocess.Popen([*command, *words[first::count]]) for first in range(count)]
    for process in running:
        process.wait()


def cublas_us(shape, count):
    """Median microseconds of torch's product in BF16."""
    import torch

    rows, groups, out, into = shape
    made = {"device": "cuda", "dtype": torch.bfloat16}
    calls = []
    for _ in range(count):
        x = torch.randn(groups, rows, into, **made)
        weight = torch.randn(groups, out, into, **made)
        product = torch.empty(groups, rows, out, **made)
        if groups == 1:
            calls.append(functools.partial(torch.mm, x[0], weight[0].T, out=product[0]))
        else:
            calls.append(functools.partial(torch.bmm, x, weight.mT, out=product))
    return baselines.median_us(calls, replays_of(shape))


def replays_of(shape):
    """Fewer for calls that take long."""
    return 4 if shape[0] > 1000 else 20


if __name__ == "__main__":
    main()
