"""Experts in MXFP4: `python -m benchmarks.bench_expert_mlp [results]`.

All experts of one layer of Flash and of Pro, six of them for a token, picked uniformly or with a
Zipf law. Calls have the same weights and other routings.

With `--marlin SO`, vLLM's library of experts, and `--library SO`, its C++ ops, its Marlin experts
are timed on the same GPU; with `--humming DIR`, the folder of that package, and `--sum FILE`,
vLLM's `moe_fused_mul_sum.py`, its Humming experts too, with rows in BF16 and rounded to FP8 as ours
are. `--rivals FP8` leaves the others out. Theirs include the sort of the picks, SwiGLU and the sum
over picks, as ours do.
"""

import functools
import re

import jax.numpy as jnp
import numpy as np

from benchmarks import baselines, draws, rival_experts, rival_humming
from benchmarks.cases.expert_mlp import LAWS, LIMIT, MODELS, NUM_INPUTS, PICKS, TOKENS
from dsv4_jax.bench import compare, timing
from dsv4_jax.bench.roofline import FP8_FLOPS
from pallas_kernels import expert_mlp
from pallas_kernels.common.weights import MXFP4


def main():
    parser = baselines.make_parser(
        __doc__,
        marlin="vLLM's library of experts; without it only ours is timed",
        library="vLLM's C++ ops, which its experts need",
        humming="folder of humming, beside which vLLM's experts are timed too",
        sum="vLLM's file of the sum over picks, which Humming needs",
    )
    parser.add_argument(
        "--rivals", default="", metavar="PATTERN", help="those whose names match it alone"
    )
    baselines.add_only(parser)
    args = parser.parse_args()
    rivals = Rivals(args.marlin, args.library, args.humming, args.sum, args.rivals)
    bandwidth = timing.copy_bandwidth()
    cases = [
        case_of(model, tokens, law, bandwidth, rivals)
        for model in MODELS
        for tokens in TOKENS
        for law in LAWS
        if law == "uniform" or 1 < tokens < max(TOKENS)
    ]
    return compare.measure(baselines.chosen(cases, args.only), args.results)


class Rivals:
    """The other kernels that were asked for, loaded when the first is timed."""

    def __init__(self, marlin=None, library=None, humming=None, sum_file=None, pattern=""):
        if (marlin and not library) or (humming and not (marlin and sum_file)):
            raise SystemExit("--marlin needs --library, and --humming needs both and --sum")
        self._pattern = pattern
        self._with_marlin, self._with_humming = bool(marlin), bool(humming)
        libraries = marlin, library
        self._marlin = baselines.Held(functools.partial(rival_experts.Marlin, libraries))
        self._humming = baselines.Held(
            functools.partial(rival_humming.Humming, libraries, humming, sum_file, TOKENS)
        )

    def of(self, model, drawn):
        """{name: () -> microseconds}."""
        sizes = MODELS[model]
        found = {}
        if self._with_marlin:
            found["vLLM Marlin"] = lambda: self._marlin.get(sizes, LIMIT).time_us(drawn)
        if self._with_humming:
            found["vLLM Humming, FP8 rows"] = lambda: self._humming.get(sizes, LIMIT).time_us(
                drawn, "fp8"
            )
            found["vLLM Humming, BF16 rows"] = lambda: self._humming.get(sizes, LIMIT).time_us(
                drawn, "bfloat16"
            )
        return {name: time for name, time in found.items() if re.search(self._pattern, name)}


def case_of(model, tokens, law, bandwidth, rivals):
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
        rivals=rivals.of(model, drawn),
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
