"""Shapes of products and ways to cut them, for `tune_block_linear`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import bench_block_linear, bench_expert_mlp
from dsv4_jax.bench import loops
from pallas_kernels.expert_mlp import mosaic_gpu as experts
from pallas_kernels.expert_mlp.reference import Arguments
from pallas_kernels.product import HOPPER, Tiling, multiply_rows, shapes_of
from pallas_kernels.product.choose_tiling import stages_that_fit

PEAK_FLOPS_OF_A_US = 1.6e9
MOST_STAGES = 12


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls of a shape: its name, () -> inputs of several of them, and operations of each."""

    name: str
    make: Callable
    flops: float

    @functools.cached_property
    def rounds(self):
        """Times that a loop goes through the inputs."""
        count = len(jax.eval_shape(self.make))
        return loops.enough_rounds(self.flops / PEAK_FLOPS_OF_A_US, count, least=4)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to cut the calls of a shape: its name, and function(*inputs) -> result."""

    calls: Calls
    name: str
    function: Callable


def candidates(names=()):
    """All of them, those of a shape together; of shapes whose name contains one of the names."""
    found = [
        *(c for name in MATRICES for c in products(name, 8192, MANY_ROWS)),
        *(c for name in MATRICES for c in products(name, 256, ways_of_256(name))),
        *(c for name in MATRICES for c in products(name, 64, ways_of_64(name))),
        *mixtures(18688, MORE_TOKENS),
        *mixtures(10922, MORE_TOKENS[:2]),
        *mixtures(8192, MANY_TOKENS),
        *mixtures(256, FEW_TOKENS),
    ]
    return [c for c in found if not names or any(name in c.calls.name for name in names)]


MATRICES = ("Flash queries", "Flash wo_b", "Pro wo_b")
"""Of `bench_block_linear`."""
TODAY = None


def cut(tile_m, tile_k=128, stages=0, **options):
    """A tiling; without stages it has as many as fit beside each other."""
    return Tiling(tile_m, tile_k, stages, **options)


GOES = {"persistent": 1, "packed_stores": True}
LEFT = {"swap_ab": False}
MANY_ROWS = [
    TODAY,
    cut(128, 128, 6),
    cut(128, 128, 4, band=16, **GOES),
    cut(128, 128, 6, **LEFT),
    cut(128, 128, 6, band=8, **GOES, **LEFT),
    cut(128, 128, 4, band=16, **GOES, **LEFT),
]


def ways_of_256(name):
    """With as many splits as make some 128 tiles."""
    splits = {"Flash queries": (1, 1), "Flash wo_b": (2, 4), "Pro wo_b": (1, 2)}[name]
    return [
        TODAY,
        cut(128, 128, 4, split_k=splits[0], band=2, **GOES),
        cut(128, 128, 6, split_k=splits[0], **LEFT),
        cut(128, 128, 4, split_k=splits[0], band=2, **GOES, **LEFT),
    ]


def ways_of_64(name):
    """A tile of 64 rows has no room for a second one on its SM: registers, not shared memory."""
    splits = {"Flash queries": 1, "Flash wo_b": 4, "Pro wo_b": 2}[name]
    return [
        TODAY,
        cut(64, 256, split_k=splits, packed_stores=True),
        cut(128, 128, 4, split_k=splits, **LEFT),
        cut(128, 128, 4, split_k=splits, **GOES, **LEFT),
    ]


MANY_TOKENS = [
    TODAY,
    cut(128, 128, 4, mma_rows=64, **GOES),
    cut(192, 128, 4, mma_rows=48, **GOES),
    cut(224, 128, 4, mma_rows=32, **GOES),
    cut(224, 128, 4, mma_rows=112, **GOES),
    cut(256, 128, 4, mma_rows=32, **GOES),
    cut(240, 128, 4, mma_rows=48, **GOES),
    cut(112, 128, 4, mma_rows=56, **GOES),
]
MORE_TOKENS = [TODAY, cut(160, 128, 4, mma_rows=40, **GOES), cut(256, 128, 4, mma_rows=64, **GOES)]
FEW_TOKENS = [
    TODAY,
    cut(16, 256, 4, packed_stores=True),
    cut(16, 512, 3, packed_stores=True),
    cut(16, 128, 8),
]


def products(matrix, rows, tilings):
    """Candidates of one matrix."""
    groups, out, into, _ = bench_block_linear.MATRICES[matrix]
    flops = 2 * groups * rows * out * into

    def make():
        count = None if rows < 1024 else 1
        return bench_block_linear.inputs(matrix, rows)[:count]

    [(_, weight), *_] = jax.eval_shape(make)
    shapes = shapes_of(weight, core=HOPPER)
    calls = Calls(f"{matrix}, {rows} rows", make, flops)
    return [
        Candidate(calls, name_of(way), functools.partial(multiply, tiling=filled(way, shapes)))
        for way in tilings
    ]


def multiply(x, weight, tiling):
    [product] = multiply_rows(x, [weight], dtype=jnp.bfloat16, tiling=tiling)
    return product


def mixtures(tokens, tilings):
    """Candidates of Flash's experts, picked uniformly."""
    count = 1 if tokens > 1024 else bench_expert_mlp.NUM_INPUTS

    def drawn():
        return [bench_expert_mlp.routing("Flash", tokens, "uniform", s) for s in range(count)]

    def make():
        return bench_expert_mlp.inputs("Flash", tokens, drawn())

    _, dim, width = bench_expert_mlp.MODELS["Flash"]
    flops = 2 * tokens * bench_expert_mlp.PICKS * 3 * dim * width
    w1, w3, w2 = jax.eval_shape(make)[0][3:]
    gate = shapes_of(w1, w3, is_gated=True, core=HOPPER)
    down = shapes_of(w2, core=HOPPER)
    calls = Calls(f"Flash experts, {tokens} tokens", make, flops)

    def function(way):
        tilings = None if way is TODAY else (filled(way, gate), filled(way, down))
        return functools.partial(mix, tilings=tilings)

    return [Candidate(calls, name_of(way), function(way)) for way in tilings]


def mix(x, ids, share, w1, w3, w2, tilings):
    arguments = Arguments(x, ids, share, w1, w3, w2, bench_expert_mlp.LIMIT)
    return experts.expert_mlp(arguments, tilings=tilings)[0]


def filled(tiling, shapes):
    """With as many stages as shared memory holds, where none are given."""
    if tiling is TODAY or tiling.stages:
        return tiling
    most = MOST_STAGES if tiling.persistent else min(shapes.k_iters(tiling), MOST_STAGES)
    return dataclasses.replace(tiling, stages=min(stages_that_fit(shapes, tiling), most))


def name_of(tiling):
    """The fields that are not as usual."""
    if tiling is TODAY:
        return "today"
    usual = Tiling(0, 128, 0)
    return ", ".join(
        f"{field.name} {getattr(tiling, field.name)}"
        for field in dataclasses.fields(tiling)
        if getattr(tiling, field.name) != getattr(usual, field.name)
    )
