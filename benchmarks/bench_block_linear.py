"""Products with quantised weights: `python -m benchmarks.bench_block_linear [results]`.

Every matrix of Flash and Pro that the release stores in FP8, with three weights in turn, or as many
as exceed the L2 cache. The launches that round the rows and add up the sums of splits are part of
the call; `block_linear_in_parts` leaves out the second, as a model does where `write_streams` adds.
`swiglu_linear` is the shared expert's gate and up projection with what follows.

With `--baseline DIR`, the folder of vLLM's `deep_gemm` package, DeepGEMM's FP8 products are timed
on the same GPU: after vLLM's launch that rounds the rows, with its C++ ops (`--library SO`), and
alone. vLLM rounds the rows of wo_a in the kernel before, so that wo_a has the second alone; ours
doesn't round them. Beside `swiglu_linear`, vLLM's SwiGLU comes after DeepGEMM's product. `--cublas`
times torch's products in BF16, whose weights are twice the bytes.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks import baselines, draws, rival_products
from benchmarks.cases.product import GATED, IN_PARTS, LIMIT, MATRICES, ROWS, ROWS_IN_PARTS
from dsv4_jax.bench import compare, timing
from dsv4_jax.bench.roofline import FP8_FLOPS
from pallas_kernels.common.weights import BlockFP8
from pallas_kernels.gpu.devices import H200
from pallas_kernels.product import multiply_rows, swiglu_rows


def main():
    library = "vLLM's C++ ops, whose launch rounds the rows"
    parser = baselines.make_parser(__doc__, "folder of deep_gemm", library=library)
    parser.add_argument("--cublas", action="store_true", help="also time BF16 products of torch")
    baselines.add_only(parser)
    args = parser.parse_args()
    bandwidth = timing.copy_bandwidth()
    rivals = Rivals(args.baseline, args.library, args.cublas)
    cases = [case_of(name, rows, bandwidth, rivals) for name in MATRICES for rows in ROWS]
    cases += [
        case_of(name, rows, bandwidth, rivals, "block_linear_in_parts")
        for name in MATRICES
        for rows in ROWS_IN_PARTS
        if name.endswith(IN_PARTS)
    ]
    cases += [
        case_of(name, rows, bandwidth, rivals, "swiglu_linear")
        for name in MATRICES
        for rows in ROWS
        if name.endswith(GATED)
    ]
    cases = baselines.chosen(cases, args.only)
    rivals.shapes = [shape_of(case) for case in cases]
    return compare.measure(cases, args.results)


class Rivals:
    """The other kernels that were asked for, loaded when the first is timed.

    Attributes:
      shapes: of all rows, whose kernels are compiled before the first is timed.
    """

    def __init__(self, folder=None, library=None, cublas=False):
        self._folder, self._library, self._cublas = folder, library, cublas
        self._deep_gemm = baselines.Held(self._load)
        self.shapes = []

    def of(self, shape, count, *, gated=False):
        """{name: () -> microseconds}."""
        found = {}
        if self._folder and self._library and shape[1] == 1:
            name = "rounding + DeepGEMM FP8" + (" + SwiGLU" if gated else "")
            found[name] = lambda: self._us(shape, count, rounds=True, gated=gated)
        if gated:
            return found
        if self._folder:
            found["DeepGEMM FP8 alone"] = lambda: self._us(shape, count, rounds=False)
        if self._cublas:
            found["cuBLAS BF16"] = lambda: rival_products.cublas_us(shape, count)
        return found

    def _us(self, shape, count, *, rounds, gated=False):
        limit = LIMIT if gated else None
        return self._deep_gemm.get().time_us(shape, count, rounds=rounds, limit=limit)

    def _load(self):
        rival_products.compile_ahead(self._folder, self.shapes)
        return rival_products.DeepGemm(self._folder, self._library)


def shape_of(case):
    """(rows, groups, out, into)."""
    return tuple(int(size) for size in case.shape.split(" x "))


def case_of(name, rows, bandwidth, rivals, op="block_linear"):
    groups, out, into, _ = MATRICES[name]
    gated = op == "swiglu_linear"
    stored = out // 2 if gated else out
    num_bytes = groups * (out * into + out * into // 128**2 + rows * (into + 2 * stored))
    limit = max(num_bytes / bandwidth, 2 * groups * rows * out * into / FP8_FLOPS)
    return compare.Case(
        f"{op} {name}",
        f"{rows} x {groups} x {out} x {into}",
        OPS[op],
        lambda: (None, gated_inputs(name, rows) if gated else inputs(name, rows)),
        roofline_us=limit * 1e6,
        rivals=rivals.of((rows, groups, out, into), count_of(name), gated=gated),
    )


def multiply(x, weight):
    [product] = multiply_rows(x, [weight], dtype=jnp.bfloat16)
    return product


def multiply_in_parts(x, weight):
    [product] = multiply_rows(x, [weight], norms=[None], dtype=jnp.bfloat16, in_parts=True)
    return product


def multiply_gated(x, gate, up):
    return swiglu_rows(x, gate, up, limit=LIMIT)


OPS = {
    "block_linear": multiply,
    "block_linear_in_parts": multiply_in_parts,
    "swiglu_linear": multiply_gated,
}


def inputs(name, rows):
    groups, _, into, activations = MATRICES[name]
    x = draws.Draw((groups, rows, into), jnp.bfloat16)
    made = draws.make([(x, weight_draw(name)) for _ in range(count_of(name))])
    return [(x, as_weight(weight, activations)) for x, weight in made]


def gated_inputs(name, rows):
    """Rows, and halves of the outputs as a gate and an up projection."""
    return [(x[0], *halves(weight)) for x, weight in inputs(name, rows)]


@jax.jit
def halves(weight):
    return [jax.tree.map(lambda leaf, i=i: jnp.split(leaf[0], 2)[i], weight) for i in range(2)]


def count_of(name):
    """How many weights are taken in turn."""
    groups, out, into, _ = MATRICES[name]
    return max(3, -(-2 * H200.l2_bytes // (groups * out * into)))


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
