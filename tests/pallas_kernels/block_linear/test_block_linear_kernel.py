"""The kernel of products with quantised weights against the reference."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import product as cases
from helpers import slow
from helpers.quantised import KINDS, quantize
from pallas_kernels import block_linear, gpu_interpreter, swiglu_linear
from pallas_kernels.block_linear import reference
from pallas_kernels.common import numbers, weights
from pallas_kernels.common.norm_rope import rms_norm
from pallas_kernels.common.pending import Unnormed
from pallas_kernels.common.rows import quantize_rows
from pallas_kernels.product import (
    BLACKWELL,
    HOPPER,
    Shapes,
    Tiling,
    decoded,
    find_obstacle,
    multiply_rows,
    shapes_of,
    swiglu_rows,
    triton_rows,
)
from pallas_kernels.product.choose_tiling import plan_call
from pallas_kernels.product.scratch import shared_bytes

pytestmark = pytest.mark.unoptimised

FORMATS = ["fp8", "mxfp4"]
TOLERANCE = 2e-5
"""Relative to the largest result: f32 sums in another order, and of the FP8 tensor core of a card
14 bits of 128 products."""
CARD_TOLERANCE = 1e-3


def make(kind, shape, activations="fp8"):
    values = np.random.default_rng(0).normal(size=shape) * shape[-1] ** -0.5
    values = values * 2.0 ** (np.arange(shape[-1]) // 32 % 5)
    return quantize(kind, values.astype(np.float32), activations=activations)


def close(lane, found, expected):
    bound = TOLERANCE if lane == "interpreter" else CARD_TOLERANCE
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max())


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(jnp.bfloat16)


reference_product = jax.jit(reference.block_linear)
reference_swiglu = functools.partial(reference.swiglu_linear, limit=1.5)
jit_swiglu = jax.jit(reference_swiglu)
jit_block_linear = jax.jit(block_linear, static_argnames=("dtype", "backend"))


@functools.partial(jax.jit, static_argnames=("tiling", "core"))
def run(x, weight, tiling=None, core=None):
    return multiply_rows(x, [weight], tiling=tiling, core=core)[0]


@pytest.mark.parametrize(
    ("kind", "activations"),
    slow.all_but(
        [("fp8", "bfloat16")],
        list(itertools.product(FORMATS, weights.ACTIVATIONS)),
    ),
)
def test_products_are_the_reference_s(lane, kind, activations):
    weight = make(kind, (192, 512), activations)
    x = normal(5, 512)
    expected = jit_block_linear(x, weight, dtype=jnp.float32, backend="reference")
    found = jit_block_linear(x, weight, dtype=jnp.float32, backend="mosaic_gpu")
    close(lane, found, expected)


def test_many_rows_as_they_are_are_multiplied_by_xla(lane):
    """With what the codes stand for; rounded rows, and scales of any value, with the codes."""
    weight = make("fp8", (2, 128, 256), "bfloat16")
    x = jnp.asarray(normal(2, decoded.MANY_ROWS, 256))
    products = jax.jit(functools.partial(block_linear, dtype=jnp.float32, backend="mosaic_gpu"))
    text = products.lower(x, weight).as_text()
    assert "dot_general" in text
    assert "mosaic" not in text
    found, expected = products(x, weight), reference_product(x, weight)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
    assert decoded.suits([weight], x)
    assert not decoded.suits([weight], x[:, 1:])
    assert not decoded.suits([dataclasses.replace(weight, activations="fp8")], x)
    of_any_scale = dataclasses.replace(weight, scale=numbers.decode_ue8m0(weight.scale))
    assert not decoded.suits([of_any_scale], x)


@pytest.mark.slow
@pytest.mark.parametrize("picked", slow.all_but([True], [False, True]))
def test_many_rows_are_rounded_as_the_definition_has_it(lane, picked):
    """Whose programs take twice the groups; 10 are no multiple of those."""
    weight, x = make("fp8", (128, 1280)), normal(triton_rows._MANY_ROWS, 1280)
    token = jnp.arange(len(x), dtype=jnp.int32)[::-1] if picked else None
    found = jax.jit(functools.partial(triton_rows.make_rows, num_spare=0))(x, weight, token=token)
    expected = jax.jit(quantize_rows)(x[::-1] if picked else x)
    np.testing.assert_array_equal(
        np.asarray(found.codes[0]).view(np.uint8),
        np.asarray(expected.codes).reshape(len(x), -1).view(np.uint8),
    )
    np.testing.assert_array_equal(found.scale[0].T, numbers.decode_ue8m0(expected.scale))


@pytest.mark.slow
@pytest.mark.parametrize("num_used", slow.all_but([6], [0, 6]))
def test_rows_that_nobody_reads_are_not_rounded(lane, num_used):
    """But for those that share a program with one that is read; the others are as they were."""
    weight, x = make("fp8", (128, 256)), normal(triton_rows._MANY_ROWS, 256)
    rounded = jax.jit(functools.partial(triton_rows.make_rows, num_spare=0))
    every, found = (rounded(x, weight, num_used=n) for n in (None, jnp.int32(num_used)))
    codes, wanted = (np.asarray(rows.codes[0]).view(np.uint8) for rows in (found, every))
    np.testing.assert_array_equal(codes[:num_used], wanted[:num_used])
    np.testing.assert_array_equal(found.scale[0, :, :num_used], every.scale[0, :, :num_used])
    first = -(-num_used // triton_rows._ROWS_OF_MANY) * triton_rows._ROWS_OF_MANY
    if lane == "interpreter":  # which makes results of one byte over and over
        assert len(np.unique(codes[first:])) == 1
    assert len(np.unique(wanted[first:])) > 100


def normed_product(x, norm, weight):
    return reference.block_linear(rms_norm(x, norm, eps=0.5), weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "splits"), slow.all_but([(1024, 2)], [(1024, 1), (1024, 2), (2304, 1)])
)
def test_a_norm_may_be_left_to_the_product_that_reads_its_rows(lane, inputs, splits):
    """In two passes over the rows; a last bit of bf16 may differ, and with it a code of E4M3."""
    weight = weight_stack(make("fp8", (128, inputs)))
    rng = np.random.default_rng(1)
    x = 5 * rng.normal(size=(1, 5, inputs)) * np.arange(1, 6)[None, :, None]
    x, norm = x.astype(jnp.bfloat16), rng.uniform(0.5, 2, inputs).astype(jnp.bfloat16)
    expected = np.asarray(jax.jit(normed_product)(x, norm, weight))
    found = np.asarray(run(Unnormed(x, norm, 0.5), weight, Tiling(8, 256, 2, split_k=splits)))
    bound = 2.0**-9 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=bound)
    assert np.abs(found - expected).mean() < bound / 20


TILINGS = [
    Tiling(8, 128, 2),
    Tiling(16, 256, 2),
    Tiling(8, 256, 3, split_k=2),
    Tiling(32, 128, 4, split_k=4),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tiling"),
    slow.all_but(
        [("fp8", TILINGS[2])],
        list(itertools.product(FORMATS, TILINGS)),
    ),
    ids=str,
)
def test_any_tiling_gives_the_products_of_every_group(lane, kind, tiling):
    weight = make(kind, (2, 128, 512))
    x = normal(2, 11, 512)
    close(lane, run(x, weight, tiling), reference_product(x, weight))


PERSISTENT_TILINGS = [
    Tiling(16, 256, 2, persistent=1, band=2),
    Tiling(16, 128, 3, split_k=2, persistent=1, band=3, packed_stores=True),
]
PERSISTENT_CASES = [
    (kind, (2, 320, 512), 37, tiling, few)
    for kind, tiling in itertools.product(KINDS, PERSISTENT_TILINGS)
    for few in (1, 132)
] + [
    (kind, (1, 128, 256), 270, tiling, 2)
    for kind, tiling in itertools.product(
        KINDS, [Tiling(256, 128, 2), Tiling(224, 128, 2, persistent=1)]
    )
]
IN_PIECES = ("mxfp4", (1, 128, 256), 170, Tiling(144, 128, 2, persistent=1, mma_rows=48), 2)
"""A tile of more rows than one product has; the fewest that are."""


@pytest.mark.parametrize(
    ("kind", "shape", "rows", "tiling", "num_sms"),
    slow.all_but([], [*PERSISTENT_CASES, IN_PIECES]),
    ids=str,
)
def test_ctas_may_go_through_tiles_of_many_rows(kind, shape, rows, tiling, num_sms):
    """Alone, or some beside each other and with some that have none; the last tile is not full."""
    weight = make(kind, shape)
    x = normal(shape[0], rows, shape[2])
    core = with_sms(num_sms)
    with gpu_interpreter():
        found = run(x, weight, tiling, core)
    close("interpreter", found, reference_product(x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [0, 1])
def test_the_next_tile_of_mxfp4_is_loaded_while_products_run(lane, persistent):
    """Five stages in the memory of two: the same bits as where each is unpacked in its turn."""
    weight = make("mxfp4", (1, 192, 640))
    x = normal(1, 9, 640)
    ahead, alone = Tiling(128, 128, 2, mma_rows=32, persistent=persistent), Tiling(16, 128, 2)
    shapes = shapes_of(weight, core=HOPPER)
    assert shapes.loads_ahead(ahead.tile_m)
    assert not shapes.loads_ahead(alone.tile_m)
    found, expected = (run(x, weight, tiling, with_sms(1)) for tiling in (ahead, alone))
    np.testing.assert_array_equal(found, expected)


ON_LEFT = Tiling(128, 128, 2, swap_ab=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "inputs", "options"),
    slow.all_but(
        [("fp8", 640, {"persistent": 1, "band": 2})],
        [
            ("fp8", 640, {"persistent": 1, "band": 2}),
            ("fp8", 1024, {"split_k": 2}),
            ("bfloat16", 256, {}),
            ("bfloat16", 512, {"persistent": 1, "band": 2, "split_k": 2}),
        ],
    ),
    ids=str,
)
def test_rows_may_be_the_left_operand(lane, activations, inputs, options):
    """Rounds of one, two and four stages; outputs end within a CTA's, rows within a consumer's."""
    weight = make("fp8", (2, 192, inputs), activations)
    x = normal(2, 150, inputs)
    found = run(x, weight, dataclasses.replace(ON_LEFT, **options), with_sms(2))
    close(lane, found, reference_product(x, weight))


@pytest.mark.slow
def test_rows_on_the_left_of_weights_that_begin_within_a_cta(lane):
    stacks = [weight_stack(with_scales(make("fp8", (out, 256)))) for out in (192, 64, 128)]
    x = normal(1, 70, 256)
    multiply = functools.partial(multiply_rows, tiling=ON_LEFT, core=with_sms(1))
    for weight, product in zip(stacks, jax.jit(multiply)(x, stacks), strict=True):
        close(lane, product, reference_product(x, weight))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", slow.all_but([{"persistent": 1}], [{"persistent": 1}, {}]), ids=str
)
def test_rows_on_the_left_of_gate_and_up(lane, options):
    """As weights on the left on a card, whose sums lack bits of numbers far beyond the limit."""
    gate, up = (make("fp8", (128, 256)) for _ in range(2))
    up = jax.tree.map(lambda leaf: leaf[..., ::-1], up)  # whose scales differ
    x = (8 * normal(140, 256)).astype(jnp.bfloat16)

    def multiply(tiling):
        kernel = functools.partial(swiglu_rows, limit=1.5, tiling=tiling)
        return jax.jit(functools.partial(kernel, core=with_sms(1)))(x, gate, up)

    found = multiply(dataclasses.replace(ON_LEFT, **options))
    expected = multiply(Tiling(16, 128, 2)) if lane == "gpu" else jit_swiglu(x, gate, up)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_allclose(found, expected, atol=2.0**-7 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("rows", "num_sms"), slow.all_but([], [(40, 4), (20, 4), (72, 132)]), ids=str
)
def test_gate_and_up_in_narrow_tiles(lane, rows, num_sms):
    """Of 24, 16 and 8 rows: as few as give more SMs a tile."""
    gate, up = (make("fp8", (128, 256)) for _ in range(2))
    up = jax.tree.map(lambda leaf: leaf[::-1], up)
    x = (8 * normal(rows, 256)).astype(jnp.bfloat16)

    def multiply(tiling):
        kernel = functools.partial(swiglu_rows, limit=1.5, tiling=tiling)
        return jax.jit(functools.partial(kernel, core=with_sms(num_sms)))(x, gate, up)

    expected = multiply(Tiling(16, 128, 2)) if lane == "gpu" else jit_swiglu(x, gate, up)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_allclose(multiply(None), expected, atol=2.0**-7 * np.abs(expected).max())


def with_sms(num_sms):
    device = dataclasses.replace(HOPPER.device, num_sms=num_sms)
    return dataclasses.replace(HOPPER, device=device)


BLACKWELL_CASES = [
    ("mxfp4", "bfloat16", (2, 200, 384), Tiling(16, 128, 2)),
    ("mxfp4", "fp8", (2, 40, 512), Tiling(16, 256, 2, split_k=2)),
    ("fp8", "fp8", (2, 192, 512), Tiling(16, 256, 3)),
    ("fp8", "bfloat16", (2, 192, 512), Tiling(32, 128, 2, split_k=2)),
    ("dense", "fp8", (2, 192, 256), Tiling(16, 128, 2, split_k=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "activations", "shape", "tiling"),
    slow.all_but(BLACKWELL_CASES[:1], BLACKWELL_CASES),
    ids=str,
)
def test_blackwell_s_tensor_cores_give_the_same(kind, activations, shape, tiling):
    """With a row of NaN, which stays alone."""
    weight = make(kind, shape, activations)
    x = normal(2, 19, shape[-1])
    expected = np.asarray(reference_product(x, weight)).copy()
    with gpu_interpreter():
        x[1, 3, 5] = np.nan
        found = np.array(run(x, weight, tiling, BLACKWELL))
    assert np.all(np.isnan(found[1, 3]))
    found[1, 3] = expected[1, 3]
    close("interpreter", found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("core", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_weights_of_one_launch_may_begin_within_a_cta(core):
    """And may have scales that are no powers of two."""
    stacks = [weight_stack(with_scales(make("fp8", (out, 256)))) for out in (192, 64, 128)]
    x = normal(1, 3, 256)
    with gpu_interpreter():
        found = jax.jit(functools.partial(multiply_rows, core=core))(x, stacks)
    for weight, product in zip(stacks, found, strict=True):
        close("interpreter", product, reference_product(x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("core", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_in_one_product(core, kind):
    gate, up = (make(kind, (128, 256)) for _ in range(2))
    up = jax.tree.map(lambda leaf: leaf[::-1], up)
    x = (8 * normal(19, 256)).astype(jnp.bfloat16)
    expected = reference.swiglu_linear(x, gate, up, limit=1.5)
    multiply = functools.partial(swiglu_rows, limit=1.5, core=core)
    with gpu_interpreter():
        found = jax.jit(functools.partial(multiply, tiling=Tiling(16, 128, 2)))(x, gate, up)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_allclose(found, expected, atol=2.0**-7 * np.abs(expected).max())


PIECES = [(13, Tiling(16, 128, 2, mma_rows=8)), (130, Tiling(144, 128, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "tiling"), slow.all_but(PIECES[:1], PIECES), ids=str)
def test_gate_and_up_of_several_pieces(rows, tiling):
    """What they exchange takes the same memory for each piece of a tile."""
    gate = make("mxfp4", (64, 128))
    up = jax.tree.map(lambda leaf: np.asarray(leaf)[..., ::-1, :], gate)
    x = normal(rows, 128)
    expected = np.asarray(jit_swiglu(x, gate, up), np.float32)
    multiply = functools.partial(swiglu_rows, limit=1.5, core=HOPPER)
    with gpu_interpreter():
        found = jax.jit(functools.partial(multiply, tiling=tiling))(x, gate, up)
    np.testing.assert_allclose(found, expected, atol=2.0**-7 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(200, 130), pytest.param((40, 96), marks=pytest.mark.slow)], ids=str
)
def test_mxfp4_of_any_width(lane, shape):
    weight = make("mxfp4", shape)
    x = normal(3, shape[1])
    found = jit_block_linear(x, weight, dtype=jnp.float32, backend="mosaic_gpu")
    close(lane, found, jit_block_linear(x, weight, dtype=jnp.float32, backend="reference"))


@pytest.mark.slow
def test_rows_of_mxfp4_that_share_a_scale_may_differ(lane):
    """Rows i and i + 32; E4M3 holds both exactly where one is 2^10 times as large."""
    values = np.random.default_rng(0).normal(size=(64, 128))
    values *= np.where(np.arange(64)[:, None] < 32, 2.0**-10, 1)
    weight = quantize("mxfp4", values.astype(np.float32))
    x = normal(3, 128)
    found = run(x[None], weight_stack(weight))[0]
    expected = reference_product(x[None], weight_stack(weight))[0]
    for rows in (slice(32), slice(32, 64)):
        close(lane, found[:, rows], expected[:, rows])


@pytest.mark.slow
def test_fp8_scales_may_be_any_f32(lane):
    weight = with_scales(make("fp8", (128, 256)))
    x = normal(3, 256)
    close(
        lane,
        run(x[None], weight_stack(weight)),
        reference_product(x[None], weight_stack(weight)),
    )


def with_scales(weight):
    scale = jax.random.uniform(jax.random.key(5), weight.scale.shape, minval=0.5, maxval=2)
    return dataclasses.replace(weight, scale=scale)


def weight_stack(weight):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], weight)


@pytest.mark.slow
def test_a_nan_stays_in_its_row(lane):
    weight = weight_stack(make("mxfp4", (128, 256)))
    x = normal(1, 4, 256)
    clean = run(x, weight)
    x[0, 2, 7] = np.nan
    found = np.asarray(run(x, weight))
    assert np.all(np.isnan(found[0, 2]))
    rest = np.array([0, 1, 3])
    np.testing.assert_array_equal(found[0, rest], np.asarray(clean)[0, rest])


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_place(lane):
    weight = weight_stack(make("fp8", (128, 512), "bfloat16"))
    x = normal(1, 12, 512)
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_array_equal(run(x[:, order], weight), np.asarray(run(x, weight))[:, order])


def test_what_the_kernel_cannot_serve_is_refused_by_name():
    x = jnp.zeros((1, 2, 96))
    for weight, message in (
        (jnp.zeros((64, 96)), "dense weights and rows in bfloat16, got float32"),
        (make("fp8", (64, 96)), "multiples of 64 x 128"),
        (make("mxfp4", (64, 96), "bfloat16"), "bfloat16 alone, got float32"),
    ):
        assert message in find_obstacle(x, weight)


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 8192])
@pytest.mark.parametrize("format", ["fp8", "mxfp4", "dense"])
@pytest.mark.parametrize("num_weights", [1, 2])
@pytest.mark.parametrize("core", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_every_tiling_fits_the_memories(rows, format, num_weights, core):
    for k_groups, num_tiles in ((32, 8), (8, 512), (64, 64), (32, 16), (12, 1024)):
        for terms in (1,) if format == "dense" else (1, 2):
            tiles, is_gated = (num_tiles,) * num_weights, num_weights == 2
            shapes = Shapes(k_groups, tiles, terms, is_gated, format, core=core)
            weight = jax.ShapeDtypeStruct((64, k_groups * shapes.group_k), jnp.bfloat16)
            shapes, tiling = plan_call(
                shapes, jnp.bfloat16, weight, rows, 1, may_split=num_weights == 1
            )
            assert shapes.rounds_rows <= (rows <= core.min_tile_m and format != "dense")
            assert shared_bytes(shapes, tiling) < 230_000
            assert k_groups % (shapes.groups_of_stage(tiling) * tiling.split_k) == 0
            assert tiling.stages >= 2
            if core.has_tmem:
                assert tiling.tile_m * terms <= 128  # two of them: half of tensor memory
                assert not tiling.persistent
            assert tiling.tile_m <= (256 if format == "mxfp4" else 128)
            assert tiling.tile_m % core.min_tile_m == 0


def _specs(kind, rows, out, into, activations="fp8"):
    def shape(*size, dtype):
        return jax.ShapeDtypeStruct(size, dtype)

    if kind == "fp8":
        weight = weights.BlockFP8(
            codes=shape(1, out, into, dtype=jnp.float8_e4m3fn),
            scale=shape(1, out // 128, into // 128, dtype=jnp.uint8),
            dtype="bfloat16",
            activations=activations,
        )
    else:
        weight = weights.MXFP4(
            codes=shape(1, out // 64, into // 128, 64, 64, dtype=jnp.uint8),
            scale=shape(1, out // 64, into // 128, 64, dtype=jnp.int32),
            size=(out, into),
            dtype="bfloat16",
            activations=activations,
        )
    return [shape(1, rows, into, dtype=jnp.bfloat16), weight]


def _product(x, weight):
    return block_linear(x, weight, backend="mosaic_gpu")


def _product_of_unnormed(x, norm, weight):
    return block_linear(Unnormed(x, norm, 1e-6), weight, backend="mosaic_gpu")


def _gated(x, gate, up):
    return swiglu_linear(x, gate, up, limit=10.0, backend="mosaic_gpu")


def _gated_specs(case):
    x, weight = _specs(*case)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weight)
    return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype), one, one]


def _unnormed_specs():
    x, weight = _specs(*cases.COMPILED_UNNORMED)
    return [x, jax.ShapeDtypeStruct((x.shape[-1],), jnp.bfloat16), weight]


AOT_CASES = (
    [
        (
            f"{case.form} {case.rows}x{case.out}x{case.into} {case.activations}@{target}",
            _product,
            _specs(*case),
        )
        for target in cases.BOTH
        for case in cases.COMPILED
    ]
    + [
        (f"{one.form} {one.rows}x{one.out}x{one.into} unnormed@{target}", call, _unnormed_specs())
        for target in cases.BOTH
        for one, call in [(cases.COMPILED_UNNORMED, _product_of_unnormed)]
    ]
    + [
        (
            f"{one.form} {one.rows} gate and up {one.out}x{one.into}@{target}",
            _gated,
            _gated_specs(one),
        )
        for target in cases.HOPPER
        for one in [cases.COMPILED_GATED]
    ]
)
