"""Products with quantised weights: `python -m benchmarks.bench_block_linear [results]`.

Every matrix of Flash and Pro that the release stores in FP8, with three weights in turn, or as many
as exceed the L2 cache. The launch that rounds the rows is part of the call.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks import baselines, draws
from dsv4_jax.bench import compare, timing
from dsv4_jax.bench.roofline import FP8_FLOPS
from pallas_kernels.block_linear import mosaic_gpu
from pallas_kernels.common.weights import BlockFP8
from pallas_kernels.gpu.devices import H200

ROWS = (1, 8, 64, 256, 8192)
MATRICES = {
    "Flash queries": (1, 40_960, 1024, "fp8"),
    "Flash latent and window": (1, 1536, 4096, "fp8"),
    "Flash wo_a": (8, 1024, 4096, "bfloat16"),
    "Flash wo_b": (1, 4096, 8192, "fp8"),
    "Flash shared w1 and w3": (1, 4096, 4096, "fp8"),
    "Flash shared w2": (1, 4096, 2048, "fp8"),
    "Pro queries": (1, 73_728, 1536, "fp8"),
    "Pro wo_b": (1, 7168, 16_384, "fp8"),
    "Pro shared w2": (1, 7168, 3072, "fp8"),
}


def main():
    args = baselines.make_parser(__doc__).parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [case_of(name, rows, bandwidth) for name in MATRICES for rows in ROWS]
    return compare.measure(cases, args.results)


def case_of(name, rows, bandwidth):
    groups, out, into, _ = MATRICES[name]
    num_bytes = groups * (out * into + out * into // 128**2 + rows * (into + 2 * out))
    limit = max(num_bytes / bandwidth, 2 * groups * rows * out * into / FP8_FLOPS)
    return compare.Case(
        f"block_linear {name}",
        f"{rows} x {groups} x {out} x {into}",
        multiply,
        lambda: (None, inputs(name, rows)),
        roofline_us=limit * 1e6,
    )


def multiply(x, weight):
    [product] = mosaic_gpu.block_linear(x, [weight], dtype=jnp.bfloat16)
    return product


def inputs(name, rows):
    groups, out, into, activations = MATRICES[name]
    count = max(3, -(-2 * H200.l2_bytes // (groups * out * into)))
    made = draws.make(
        [(draws.Draw((groups, rows, into), jnp.bfloat16), weight_draw(name)) for _ in range(count)]
    )
    return [(x, as_weight(weight, activations)) for x, weight in made]


def weight_draw(name):
    """Draws of codes and scales."""
    groups, out, into, _ = MATRICES[name]
    codes = draws.Draw((groups, out, into), jnp.float8_e4m3fn, as_bytes=True)
    return codes, draws.Draw((groups, out // 128, into // 128), jnp.uint8, among=range(112, 120))


@functools.partial(jax.jit, static_argnums=1)
def as_weight(drawn, activations):
    codes, scale = drawn
    codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return BlockFP8(codes=codes, scale=scale, dtype="bfloat16", activations=activations)


if __name__ == "__main__":
    raise SystemExit(main())
