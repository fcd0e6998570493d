"""Experts in MXFP4: `python -m benchmarks.bench_expert_mlp [results]`.

All experts of one layer of Flash and of Pro, six of them for a token, picked uniformly or with a
Zipf law. Calls have the same weights and other routings.
"""

import functools

import jax.numpy as jnp
import numpy as np

from benchmarks import baselines, draws
from dsv4_jax.bench import compare, timing
from dsv4_jax.bench.roofline import FP8_FLOPS
from pallas_kernels import expert_mlp
from pallas_kernels.common.weights import MXFP4

MODELS = {"Flash": (256, 4096, 2048), "Pro": (384, 7168, 3072)}
"""Experts, D and I."""
TOKENS = (1, 8, 64, 256, 8192)
PICKS, LIMIT, NUM_INPUTS = 6, 10.0, 3
LAWS = ("uniform", "Zipf")


def main():
    args = baselines.make_parser(__doc__).parse_args()
    bandwidth = timing.copy_bandwidth()
    cases = [
        case_of(model, tokens, law, bandwidth)
        for model in MODELS
        for tokens in TOKENS
        for law in LAWS
        if law == "uniform" or 1 < tokens < max(TOKENS)
    ]
    return compare.measure(cases, args.results)


def case_of(model, tokens, law, bandwidth):
    num_experts, dim, width = MODELS[model]
    drawn = [routing(model, tokens, law, seed) for seed in range(NUM_INPUTS)]
    picked = np.mean([len(np.unique(ids)) for ids in drawn])
    num_bytes = picked * 3 * dim * width * 17 / 32
    flops = 2 * tokens * PICKS * 3 * dim * width
    return compare.Case(
        f"expert_mlp {model}, {law}",
        f"{tokens} x {PICKS} of {num_experts}",
        functools.partial(expert_mlp, limit=LIMIT, backend="mosaic_gpu"),
        lambda: (None, inputs(model, tokens, drawn)),
        roofline_us=max(num_bytes / bandwidth, flops / FP8_FLOPS) * 1e6,
    )


def routing(model, tokens, law, seed):
    """i32[tokens, 6], distinct in a row; with a Zipf law expert e is picked as 1 / (e + 1) is."""
    rng, num_experts = np.random.default_rng(seed), MODELS[model][0]
    weight = 1 / np.arange(1, num_experts + 1) if law == "Zipf" else np.ones(num_experts)
    keys = np.log(weight) + rng.gumbel(size=(tokens, num_experts))
    return np.argsort(-keys, axis=1)[:, :PICKS].astype(np.int32)


def inputs(model, tokens, drawn):
    """Calls with different routings of the same experts."""
    _, dim, width = MODELS[model]
    shapes = (width, dim), (width, dim), (dim, width)
    made = draws.make(
        {
            "x": draws.Draw((tokens, dim), jnp.bfloat16),
            "share": draws.Draw((tokens, PICKS), among=(0.1, 0.2, 0.3)),
            "weights": [weight_draw(model, *shape) for shape in shapes],
        }
    )
    experts = [
        MXFP4(codes=codes, scale=scale, size=shape, dtype="bfloat16", activations="fp8")
        for (codes, scale), shape in zip(made["weights"], shapes, strict=True)
    ]
    return [(made["x"], jnp.asarray(ids), made["share"], *experts) for ids in drawn]


def weight_draw(model, out, into):
    """Draws of codes and of words of four scales."""
    tiles = MODELS[model][0], out // 64, into // 128
    words = tuple(int.from_bytes(bytes([a, b, b, a]), "little") for a in (119, 120) for b in (118,))
    codes = draws.Draw((*tiles, 64, 64), jnp.uint8, among=range(256))
    return codes, draws.Draw((*tiles, 64), jnp.int32, among=words)


if __name__ == "__main__":
    raise SystemExit(main())
