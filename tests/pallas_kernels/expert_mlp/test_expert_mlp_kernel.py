"""The kernels of picked experts against the reference, at hostile routings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import expert_mlp as cases
from benchmarks.cases.product import BOTH
from helpers import slow
from helpers.quantised import quantize
from pallas_kernels import expert_mlp, gpu_interpreter, mixture_mlp
from pallas_kernels.common import weights
from pallas_kernels.common.pending import PickedSums, SplitSums, finish
from pallas_kernels.expert_mlp import mosaic_gpu
from pallas_kernels.expert_mlp.reference import Arguments
from pallas_kernels.product import BLACKWELL, HOPPER, Tiling, choose_tiling

pytestmark = pytest.mark.unoptimised

E, WIDTH, D, K, LIMIT = 4, 96, 256, 2, 2.0
BOUND = {"interpreter": 1e-2, "gpu": 2e-2}
"""Relative to the largest result: hidden values are rounded to bf16 and E4M3 between the products,
where a last bit of f32 decides a tie."""

jit_expert_mlp = jax.jit(expert_mlp, static_argnames=("limit", "picked_among", "backend"))
jit_mixture = jax.jit(mixture_mlp, static_argnames=("limit", "backend"))


@functools.cache
def make(kind="mxfp4", activations="fp8", width=WIDTH, dim=D):
    rng, shapes = np.random.default_rng(0), ((E, width, dim), (E, width, dim), (E, dim, width))
    values = [rng.normal(size=shape) * 3 * shape[-1] ** -0.5 for shape in shapes]
    return [quantize(kind, v.astype(np.float32), activations=activations) for v in values]


@functools.cache
def shared_expert(width=128, dim=D):
    """The second of each stack, for all tokens."""
    take = jax.jit(lambda stacks: jax.tree.map(lambda leaf: leaf[1], tuple(stacks)))
    return take(make("fp8", width=width, dim=dim))


def routing(name, num_tokens):
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(num_tokens)]).astype(np.int32)
    if name == "one expert":
        ids[:] = [3, 0]
    if name == "none":
        ids[::2, 1] = -1
        ids[-1] = E
    return jnp.asarray(ids), jnp.asarray(rng.uniform(0.2, 1, ids.shape), jnp.float32)


@functools.partial(jax.jit, static_argnames=("tilings", "core"))
def run(x, ids, share, w1, w3, w2, tilings=None, core=None):
    arguments = Arguments(x, ids, share, w1, w3, w2, LIMIT)
    return mosaic_gpu.expert_mlp(arguments, tilings=tilings, core=core)[0]


def rows(num_tokens, dim=D):
    return jnp.asarray(np.random.default_rng(2).normal(size=(num_tokens, dim)), jnp.bfloat16)


def close(lane, found, expected):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(found, expected, atol=BOUND[lane] * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_tokens"), slow.all_but([("none", 5)], [("none", 5), ("random", 1), ("none", 12)])
)
def test_the_shared_expert_joins_the_picked_ones(lane, name, num_tokens):
    """In their launches where tokens are few, beside them where they are not."""
    stacks = make(width=128)
    given = (rows(num_tokens), *routing(name, num_tokens), *stacks, shared_expert())
    expected = jit_mixture(*given, limit=LIMIT, backend="reference")
    found = jit_mixture(*given, limit=LIMIT, backend="mosaic_gpu")
    for mine, wanted in zip(found, expected, strict=True):
        close(lane, mine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "dim"), slow.all_but([(2, 512)], [(2, 512), (1, 512), (2, 768), (3, 512)])
)
def test_few_tokens_that_picked_the_same_experts(lane, num_tokens, dim):
    """Each expert has as many rows as there are tokens, rounded some groups of inputs at a time."""
    given = rows(num_tokens, dim), *routing("one expert", num_tokens)
    given = *given, *make(width=128, dim=dim), shared_expert(dim=dim)
    expected = jit_mixture(*given, limit=LIMIT, backend="reference")
    found = jit_mixture(*given, limit=LIMIT, backend="mosaic_gpu")
    for mine, wanted in zip(found, expected, strict=True):
        close(lane, mine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", slow.all_but([5], [1, 5, 40]))
def test_experts_that_round_rows_by_32_inputs(lane, num_tokens):
    """V4.1's, and a shared expert whose scales are of 32 x 32, in their launches if rows are few.

    Rows whose groups of 32 differ in size by up to 2^12, which a scale for 128 holds as well.
    """
    stacks = [dataclasses.replace(weight, row_group=32) for weight in make(width=128)]
    shared = tuple(
        weights.quantize_block_fp8(jnp.float32(w.decode()), dtype="bfloat16", block=32)
        for w in shared_expert()
    )
    x = rows(num_tokens) * jnp.bfloat16(2.0 ** (3 * (np.arange(D) // 32 % 4 + 1) - 12))[None]
    given = (x, *routing("random", num_tokens), *stacks, shared)
    expected = jit_mixture(*given, limit=LIMIT, backend="reference")
    found = jit_mixture(*given, limit=LIMIT, backend="mosaic_gpu")
    for mine, wanted in zip(found, expected, strict=True):
        close(lane, mine, wanted)
    left = functools.partial(mixture_mlp, limit=LIMIT, may_stay_in_parts=True, backend="mosaic_gpu")
    _, of_shared = jax.eval_shape(left, *given)
    assert (of_shared is None) == (num_tokens <= 8)  # its result is among the parts


@pytest.mark.slow
@pytest.mark.parametrize("ids", slow.all_but([[2, -1]], [[2, -1], [0, 3], [E, E]]))
def test_one_token_s_experts_are_items_and_may_stay_in_parts(lane, ids):
    stacks = make(width=128)
    shared = shared_expert()
    poisoned = [jax.tree.map(_poison_all_but(ids), weight) for weight in stacks]
    share = jnp.array([[0.7, 0.4]], jnp.float32)
    given = rows(1), jnp.array([ids], jnp.int32), share
    routed, common = jit_mixture(*given, *stacks, shared, limit=LIMIT, backend="reference")
    parts, of_shared = jax.jit(
        functools.partial(mixture_mlp, limit=LIMIT, backend="mosaic_gpu", may_stay_in_parts=True)
    )(*given, *poisoned, shared)
    assert isinstance(parts, SplitSums)
    assert of_shared is None  # its result is among the parts
    assert parts.shape == (1, D)
    close(lane, jax.jit(SplitSums.value)(parts), np.float32(routed) + np.float32(common))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow.all_but(["none"], ["none", "random", "one expert"]))
def test_few_tokens_sums_may_be_left_to_who_reads_them(lane, name):
    """Rows of the picked experts and of the shared one, which no launch adds up."""
    stacks = make(width=128)
    given = rows(5), *routing(name, 5)
    routed, common = jit_mixture(*given, *stacks, shared_expert(), limit=LIMIT, backend="reference")
    sums, of_shared = jax.jit(
        functools.partial(mixture_mlp, limit=LIMIT, backend="mosaic_gpu", may_stay_in_parts=True)
    )(*given, *stacks, shared_expert())
    assert isinstance(sums, PickedSums)
    assert of_shared is None
    assert sums.shape == (5, D)
    close(lane, jax.jit(finish)(sums), np.float32(routed) + np.float32(common))


@pytest.mark.parametrize(("num_tokens", "rounds"), [(1, True), (8, True), (16, False), (64, False)])
def test_products_of_up_to_eight_tokens_round_their_rows(num_tokens, rounds):
    """Of V4-Flash's experts; more CTAs would each wait for rows of their own."""
    weight = _specs(num_tokens, 256, 4096, 2048, "fp8")[3]
    shapes, _ = choose_tiling.plan(
        [weight, weight],
        jnp.bfloat16,
        num_rows=mosaic_gpu.expected_rows(num_tokens, 6, 256),
        num_weights=min(6 * num_tokens, 256),
        may_split=False,
        is_gated=True,
        shares_items=True,
        core=HOPPER,
    )
    assert shapes.rounds_rows == rounds


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_shared_expert_of_another_width_may_stay_in_parts_too(lane, num_tokens):
    """As on a mesh, where each device has some columns of it: the same sums, of two results."""
    given = (rows(num_tokens), *routing("random", num_tokens), *make(width=128), shared_expert(256))
    plain, expected = (
        jit_mixture(*given, limit=LIMIT, backend=name) for name in ("mosaic_gpu", "reference")
    )
    parts = jax.jit(
        functools.partial(mixture_mlp, limit=LIMIT, backend="mosaic_gpu", may_stay_in_parts=True)
    )(*given)
    assert isinstance(parts[0], SplitSums) == (num_tokens == 1)
    for mine, whole, wanted in zip(parts, plain, expected, strict=True):
        np.testing.assert_array_equal(jax.jit(finish)(mine), whole)
        close(lane, whole, wanted)


def _poison_all_but(ids):
    """Codes or scales in which every expert that is not picked is all ones: NaN."""

    def poison(leaf):
        leaf = np.array(leaf)
        leaf[~np.isin(np.arange(E), ids)] = 255
        return leaf

    return poison


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_tokens", "activations"),
    [
        ("random", 1, "fp8"),
        ("random", 9, "bfloat16"),
        ("one expert", 20, "fp8"),
        ("none", 9, "fp8"),
    ],
)
def test_results_are_the_reference_s(lane, name, num_tokens, activations):
    arguments = (rows(num_tokens), *routing(name, num_tokens), *make(activations=activations))
    expected = jit_expert_mlp(*arguments, limit=LIMIT, backend="reference")
    close(lane, run(*arguments), expected)


@pytest.mark.parametrize("kind", slow.all_but([], ["dense", "fp8"]))
def test_experts_of_other_formats(lane, kind):
    """Of dense ones, all of those that nobody picked are NaN."""
    ids, share = routing("one expert", 11)
    arguments = (rows(11), ids, share, *make(kind, width=128))
    expected = jit_expert_mlp(*arguments, limit=LIMIT, backend="reference")
    if kind == "dense":
        poisoned = [w.at[jnp.array([1, 2])].set(jnp.nan) for w in arguments[3:]]
        arguments = (*arguments[:3], *poisoned)
    close(lane, run(*arguments), expected)


BLACKWELL_CASES = [
    ("mxfp4", "fp8", "random", 1),
    ("mxfp4", "bfloat16", "none", 9),
    ("mxfp4", "fp8", "one expert", 20),
    ("fp8", "bfloat16", "none", 9),
    ("dense", "fp8", "one expert", 20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "activations", "name", "num_tokens"), BLACKWELL_CASES)
def test_blackwell_s_tensor_cores_give_the_same(kind, activations, name, num_tokens):
    """Its scales, or the values, of experts that nobody picked are NaN."""
    ids, share = routing(name, num_tokens)
    stacks = make(kind, activations, WIDTH if kind == "mxfp4" else 128)
    expected = jit_expert_mlp(
        rows(num_tokens), ids, share, *stacks, limit=LIMIT, backend="reference"
    )
    nobody = np.array([e for e in range(E) if e not in np.asarray(ids)], np.int32)

    def poison(weight):
        if kind == "dense":
            return weight.at[nobody].set(jnp.nan)
        return dataclasses.replace(weight, scale=weight.scale.at[nobody].set(-1))

    with gpu_interpreter():
        found = run(rows(num_tokens), ids, share, *map(poison, stacks), core=BLACKWELL)
    close("interpreter", found, expected)


@pytest.mark.slow
def test_tiles_of_an_expert_share_its_rows(lane):
    arguments = (rows(20), *routing("one expert", 20), *make())
    expected = jit_expert_mlp(*arguments, limit=LIMIT, backend="reference")
    small, large = (Tiling(8, 256, 2), Tiling(8, 128, 2)), (Tiling(16, 128, 3),) * 2
    close(lane, run(*arguments, tilings=small), expected)
    np.testing.assert_array_equal(run(*arguments, tilings=small), run(*arguments, tilings=large))


PERSISTENT = [
    (Tiling(8, 128, 2, persistent=1, packed_stores=True),) * 2,
    (Tiling(8, 128, 2, persistent=2), Tiling(8, 128, 2, persistent=1, band=3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("which", slow.all_but([1], [0, 1]))
@pytest.mark.parametrize("name", slow.all_but(["none"], ["none", "random", "one expert"]))
def test_ctas_may_go_through_the_tiles_of_experts(name, which):
    """Gate and up exchange in turns; results have the bits that a CTA for each tile gives."""
    arguments, tilings = (rows(12), *routing(name, 12), *make()), PERSISTENT[which]
    few = dataclasses.replace(HOPPER.device, num_sms=4)
    core = dataclasses.replace(HOPPER, device=few)
    with gpu_interpreter():
        found = run(*arguments, tilings=tilings, core=core)
        alone = run(*arguments, tilings=(Tiling(16, 128, 3),) * 2)
    np.testing.assert_array_equal(found, alone)


@pytest.mark.slow
def test_more_rows_than_a_product_has_are_several():
    arguments = (rows(140), *routing("one expert", 140), *make())
    tilings = (Tiling(144, 128, 2), Tiling(144, 128, 2, persistent=1))
    with gpu_interpreter():
        found = run(*arguments, tilings=tilings)
        alone = run(*arguments, tilings=(Tiling(16, 128, 2),) * 2)
    np.testing.assert_array_equal(found, alone)


@pytest.mark.slow
def test_rows_may_be_the_left_operand_of_fp8_experts(lane):
    """Each row's share of its expert follows it; weights on the left give the same."""
    arguments = (rows(140), *routing("none", 140), *make("fp8", width=128))
    tilings = (Tiling(128, 128, 2, swap_ab=False),) * 2
    expected = run(*arguments, tilings=(Tiling(16, 128, 2),) * 2)
    close(lane, run(*arguments, tilings=tilings), np.asarray(expected))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 1), (8, 8), (32, 8), (256, 12), (2048, 60)]
)
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_tiles_are_cut_for_the_rows_of_an_expert_wherever_it_lies(
    num_tokens, expected, devices, monkeypatch
):
    """Flash: 6 of 256 experts for a token. A device's experts get what they get on one device."""
    ids = jax.ShapeDtypeStruct((num_tokens, 6), jnp.int32)
    assert mosaic_gpu.expected_rows(*ids.shape, 256) == expected
    stack = weights.MXFP4(
        codes=jax.ShapeDtypeStruct((256 // devices, 32, 32, 64, 64), jnp.uint8),
        scale=jax.ShapeDtypeStruct((256 // devices, 32, 32, 64), jnp.int32),
        size=(2048, 4096),
        dtype="bfloat16",
        activations="fp8",
    )
    seen = []

    def choose(shapes, num_rows, *_, **__):
        seen.append(num_rows)
        raise StopIteration

    x = jax.ShapeDtypeStruct((num_tokens, 4096), jnp.bfloat16)
    share = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    arguments = Arguments(x, ids, share, *[stack] * 3, LIMIT, picked_among=256)
    monkeypatch.setattr(choose_tiling, "choose_tiling", choose)
    with pytest.raises(StopIteration):
        mosaic_gpu.expert_mlp(arguments)
    assert seen == [expected]


@pytest.mark.parametrize("num_sms", [30, 132])
def test_both_products_of_fp8_experts_have_tiles_of_as_many_rows(num_sms, monkeypatch):
    """They take the same items. The down projection has more outputs here."""
    found = []

    def see(*arguments, **options):
        found.append(plan(*arguments, **options))
        return found[-1]

    plan = mosaic_gpu.plan
    monkeypatch.setattr(mosaic_gpu, "plan", see)
    device = dataclasses.replace(HOPPER.device, num_sms=num_sms)
    core = dataclasses.replace(HOPPER, device=device)
    given = rows(140, 384), *routing("random", 140), *make("fp8", width=128, dim=384)
    jax.eval_shape(functools.partial(run.__wrapped__, core=core), *given)
    assert [tiling.tile_m for _, tiling in found] == [128, 128]


@pytest.mark.slow
def test_results_do_not_depend_on_experts_elsewhere(lane):
    arguments = (rows(20), *routing("none", 20), *make())
    alone = jit_expert_mlp(*arguments, limit=LIMIT, backend="mosaic_gpu")
    among = jit_expert_mlp(*arguments, limit=LIMIT, picked_among=64, backend="mosaic_gpu")
    np.testing.assert_array_equal(among, alone)


@pytest.mark.slow
@pytest.mark.parametrize("nobody", slow.all_but([False], [False, True]))
def test_of_many_pairs_those_of_experts_elsewhere_are_not_rounded(lane, nobody, monkeypatch):
    """Four of five tokens picked experts of other devices, or all did."""
    seen, make_rows = [], mosaic_gpu.make_rows

    def see(*arguments, num_used, **options):
        seen.append(int(num_used))
        return make_rows(*arguments, num_used=num_used, **options)

    monkeypatch.setattr(mosaic_gpu, "_MANY_PAIRS", 40)
    monkeypatch.setattr(mosaic_gpu, "make_rows", see)
    num_tokens, tiling = 20, Tiling(16, 128, 2)
    ids, share = routing("random", num_tokens)
    token = jnp.arange(num_tokens)[:, None]
    here = (token % 5 == 0) & (not nobody)
    ids = jnp.where(here, ids, jnp.where(token % 2 > 0, ids + E, ids - E))
    given = rows(num_tokens), ids, share, *make()
    arguments = Arguments(*given, LIMIT, picked_among=64)
    found, _ = mosaic_gpu.expert_mlp(arguments, tilings=(tiling, tiling))
    expected = jit_expert_mlp(*given, limit=LIMIT, backend="reference")
    close(lane, found, expected)
    counts = np.bincount(np.asarray(ids)[(ids >= 0) & (ids < E)], minlength=E)
    assert seen == 2 * [max_rows_of(counts)]
    assert nobody == (not counts.any())


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", slow.all_but([20], [20, 150]))
def test_experts_of_many_rows_are_unpacked_first(lane, monkeypatch, num_tokens):
    """From 65 rows on those of block FP8 are the left operand."""
    seen, make_rows = [], mosaic_gpu.make_rows

    def see(x, weight, **options):
        seen.append(type(weight))
        return make_rows(x, weight, **options)

    monkeypatch.setattr(mosaic_gpu, "make_rows", see)
    given = rows(num_tokens), *routing("random", num_tokens), *make(width=128)
    found = {}
    for threshold, kind in ((num_tokens // 2, weights.BlockFP8), (num_tokens, weights.MXFP4)):
        monkeypatch.setattr(mosaic_gpu, "UNPACKED_ROWS", threshold)
        traced_anew = jax.jit(lambda *given: mosaic_gpu.expert_mlp(Arguments(*given, LIMIT))[0])
        found[kind] = traced_anew(*given)
        assert seen == [kind, kind]
        seen.clear()
    close(lane, found[weights.BlockFP8], found[weights.MXFP4])


def max_rows_of(counts):
    """Rows up to the last of an expert's, each of which begins at a multiple of eight."""
    first = np.cumsum([0, *(-(-counts // 8) * 8)])[:-1]
    return int(np.max(np.where(counts > 0, first + counts, 0)))


@pytest.mark.slow
def test_an_expert_that_nobody_picked_is_never_seen(lane):
    ids, share = routing("one expert", 3)
    poisoned = [
        weights.MXFP4(
            codes=w.codes,
            scale=w.scale.at[jnp.array([1, 2])].set(-1),
            size=w.size,
            dtype=w.dtype,
            activations=w.activations,
        )
        for w in make()
    ]
    clean = run(rows(3), ids, share, *make())
    np.testing.assert_array_equal(run(rows(3), ids, share, *poisoned), clean)


@pytest.mark.slow
def test_a_token_gets_the_same_bits_whatever_else_is_in_the_call(lane):
    x, (ids, share) = rows(9), routing("random", 9)
    together = np.asarray(run(x, ids, share, *make()))
    order = np.random.default_rng(5).permutation(9)
    np.testing.assert_array_equal(run(x[order], ids[order], share[order], *make()), together[order])
    others, _ = routing("one expert", 9)
    others = others.at[7].set(ids[7])
    spoilt = x.at[jnp.arange(9) != 7].set(jnp.nan)
    np.testing.assert_array_equal(run(spoilt, others, share, *make())[7], together[7])


def _specs(num_tokens, num_experts, dim, width, activations):
    """Of experts in MXFP4, or dense ones where activations are "dense"."""

    def shape(*size, dtype):
        return jax.ShapeDtypeStruct(size, dtype)

    def weight(out, into):
        if activations == "dense":
            return shape(num_experts, out, into, dtype=jnp.bfloat16)
        return weights.MXFP4(
            codes=shape(num_experts, out // 64, into // 128, 64, 64, dtype=jnp.uint8),
            scale=shape(num_experts, out // 64, into // 128, 64, dtype=jnp.int32),
            size=(out, into),
            dtype="bfloat16",
            activations=activations,
        )

    return [
        shape(num_tokens, dim, dtype=jnp.bfloat16),
        shape(num_tokens, 6, dtype=jnp.int32),
        shape(num_tokens, 6, dtype=jnp.float32),
        weight(width, dim),
        weight(width, dim),
        weight(dim, width),
    ]


def _experts(*arguments, picked_among):
    return expert_mlp(*arguments, limit=10.0, picked_among=picked_among, backend="mosaic_gpu")


def _mixture(*arguments):
    return mixture_mlp(*arguments, limit=10.0, backend="mosaic_gpu", may_stay_in_parts=True)


def _shared_specs(dim, width, block=128):
    """Of a shared expert in block FP8."""
    return tuple(
        weights.BlockFP8(
            codes=jax.ShapeDtypeStruct((out, into), jnp.float8_e4m3fn),
            scale=jax.ShapeDtypeStruct((out // block, into // block), jnp.uint8),
            dtype="bfloat16",
            activations="fp8",
            block=block,
        )
        for out, into in ((width, dim), (width, dim), (dim, width))
    )


AOT_CASES = [
    (
        f"{case.name} mixture {case.tokens} fp8@{target}",
        _mixture,
        [
            *_specs(case.tokens, *case.experts, "fp8"),
            _shared_specs(case.experts.dim, case.experts.width, block=case.block),
        ],
    )
    for case in cases.COMPILED_MIXTURES
    for target in case.targets
] + [
    (
        f"{case.name} {case.tokens} {case.activations}@{target}",
        functools.partial(_experts, picked_among=case.picked_among),
        _specs(case.tokens, *case.experts, case.activations),
    )
    for target in BOTH
    for case in cases.COMPILED
]
