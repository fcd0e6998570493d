"""What the compilers make of the kernels for H200 and B200, against recorded figures.

Cases come from the `AOT_CASES` of the modules beside this one; `tools.aot` says how to add one.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers import slow
from pallas_kernels.gpu import mosaic, triton_lowering
from pallas_kernels.product import wgmma
from tools import aot, aot_figures

pytestmark = [pytest.mark.compiled, pytest.mark.early]

RECORDED = aot.read_recorded()
SPILLED, OVER_BUDGET = "compiled/spilling", "compiled/over_budget"
WAITING = "compiled/waiting@sm_90a"
_THREADS = 384
"""Of a CTA of a product: one warpgroup that brings in and two that multiply."""
USUAL = {
    "sm_90a": (
        "small_blocks/queries 1 rows@sm_90a",
        "write_streams/16x4096",
    ),
    "sm_100a": (),
}
"""One case of Mosaic's kernels and one of Triton's, which compile fast; `-m slow` has all."""
each_target = pytest.mark.parametrize("target", aot.TARGETS)
usually_one_target = pytest.mark.parametrize("target", slow.all_but(["sm_90a"], aot.TARGETS))


def multiply_in_one_warp(x, y):
    """A 64 x 256 tile of f32 sums is 512 registers a thread, twice what a thread has."""

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((64, 256), jnp.float32),
        compiler_params=triton_lowering.compiler_params(num_warps=1),
        name="multiply_in_one_warp",
    )(x, y)


def copy_through_shared(x):
    """Takes the shared memory of the copied array, 256 KiB."""

    def copy_kernel(x_gmem, out_gmem, x_smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(x_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        copy_kernel,
        out_type=x,
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


def run_a_product_into_the_next_round(left, right):
    """The compiler does not see that it is waited for there, and waits where it begins."""

    def waiting_kernel(left_gmem, right_gmem, out_gmem, left_smem, right_smem, barrier):
        for source, target in ((left_gmem, left_smem), (right_gmem, right_smem)):
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)

        def add(_, carry):
            total, running = carry
            following = wgmma.begin(left_smem, right_smem, [64])
            [product] = wgmma.finish(running, in_flight=1)
            return wgmma.settle(total + product), following

        zeros = plgpu.layout_cast(jnp.zeros((64, 64), jnp.float32), plgpu.Layout.WGMMA)
        first = wgmma.begin(left_smem, right_smem, [64])
        total, running = jax.lax.fori_loop(0, 7, add, (zeros, first))
        [product] = wgmma.finish(running)
        out_gmem[...] = total + product

    operand = plgpu.SMEM((64, 128), left.dtype, transforms=mosaic.SWIZZLED_BYTES)
    return plgpu.kernel(
        waiting_kernel,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[operand, operand, plgpu.Barrier(num_arrivals=2)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(left, right)


AOT_CASES = [
    (
        SPILLED.split("/")[1],
        multiply_in_one_warp,
        [
            jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
        ],
    ),
    (
        OVER_BUDGET.split("/")[1],
        copy_through_shared,
        [jax.ShapeDtypeStruct((256, 256), jnp.float32)],
    ),
    (
        WAITING.split("/")[1],
        run_a_product_into_the_next_round,
        [jax.ShapeDtypeStruct((64, 128), jnp.float8_e4m3fn)] * 2,
    ),
]


@pytest.fixture(scope="module")
def compiled(request):
    """Compiles, once per target, the cases that the selected tests ask for; {case: figures}."""
    here = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params for item in here if "compiled" in item.fixturenames]

    @functools.cache
    def figures(target):
        names = [p["case"] for p in selected if "case" in p and p["target"] == target]
        breaks = any("case" not in p and p["target"] == target for p in selected)
        return aot.figures_of(target, names=(*names, aot.BROKEN) if breaks else tuple(names))

    return figures


@each_target
def test_every_case_is_recorded(target):
    cases = [case for case in aot.collect(target) if not case.startswith(aot.BROKEN)]
    assert cases == list(RECORDED.get(target, {})), "run `python -m tools.aot --record`"


@pytest.mark.parametrize(
    ("target", "case"),
    slow.all_but(
        [
            (target, case)
            for target, cases in RECORDED.items()
            for case in USUAL[target]
            if case in cases
        ],
        [(target, case) for target, cases in RECORDED.items() for case in cases],
    ),
)
def test_a_case_compiles_to_nothing_worse_than_recorded(compiled, target, case):
    assert not aot_figures.complaints(compiled(target)[case], RECORDED[target][case])


@pytest.mark.parametrize("target", ["sm_90a"])
@pytest.mark.parametrize(
    ("case", "count"),
    slow.all_but(
        [("small_blocks/queries 1 rows@sm_90a", 1)],
        [
            ("expert_mlp_kernel/flash mixture 1 fp8@sm_90a", 2),
            ("expert_mlp_kernel/flash mixture 2 fp8@sm_90a", 2),
            ("expert_mlp_kernel/flash mixture 6 fp8@sm_90a", 2),
            ("expert_mlp_kernel/flash mixture 8 fp8@sm_90a", 2),
            ("expert_mlp_kernel/pro mixture 1 fp8@sm_90a", 2),
            ("expert_mlp_kernel/pro mixture 4 fp8@sm_90a", 2),
            ("block_linear_kernel/fp8 8x7168x16384 fp8@sm_90a", 1),
            ("small_blocks/queries 1 rows@sm_90a", 1),
            ("small_blocks/queries 16 rows@sm_90a", 1),
            ("small_blocks/groups 8 rows@sm_90a", 1),
            ("small_blocks/gate and up 8 rows@sm_90a", 1),
        ],
    ),
)
def test_products_of_few_rows_fit_twice_on_an_sm(compiled, target, case, count):
    """With more than 80 registers a thread, two CTAs of 384 threads come one after the other."""
    kernels = compiled(target)[case]["kernels"]
    products = [found for name, found in kernels.items() if name.startswith("multiply")]
    assert len(products) == count
    for found in products:
        assert 2 * _THREADS * -(-found["registers"] // 8) * 8 <= 65536
        assert 2 * (found["shared_bytes"] + 1024) <= 228 << 10


@usually_one_target
def test_a_kernel_that_spills_is_seen(compiled, target):
    found = compiled(target)[SPILLED]
    ((name, kernel),) = found["kernels"].items()
    recorded = found | {"kernels": {name: kernel | {"spill_bytes": 0}}}
    assert "spills" in str(aot_figures.complaints(found, recorded))
    assert not aot_figures.complaints(found, found)


@pytest.mark.parametrize("target", ["sm_90a"])
def test_a_product_that_cannot_run_beside_others_is_seen(compiled, target):
    found = compiled(target)[WAITING]
    recorded = found | {
        "kernels": {name: k | {"waits": False} for name, k in found["kernels"].items()}
    }
    assert "waits" in str(aot_figures.complaints(found, recorded))
    assert not aot_figures.complaints(found, found)


def test_a_kernel_that_keeps_its_registers_is_seen():
    """As nvJitLink says it of a kernel that ptxas has no remark about."""
    report = (
        "ptxas info    : Compiling entry function 'attend' for 'sm_90a'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 136 registers, used 16 barriers, 17 bytes smem\n"
    )
    ignored = (
        "ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain "
        "compatibility across compilation units.\n"
    )
    kept, lost = (
        aot_figures.assembled(".visible .entry attend\n", text)["attend"] | {"shared_bytes": 1024}
        for text in (report, ignored + report)
    )
    rest = {"launches": 1, "alias_bytes": 0, "temp_bytes": 0, "largest_copy_bytes": 0}
    recorded = {"kernels": {"attend": kept}} | rest
    (said,) = aot_figures.complaints({"kernels": {"attend": lost}} | rest, recorded)
    assert "ignores setmaxnreg" in said
    assert not aot_figures.complaints(recorded, recorded)


@usually_one_target
def test_a_kernel_beyond_shared_memory_is_seen(compiled, target):
    assert "memory" in str(aot_figures.complaints(compiled(target)[OVER_BUDGET], {}))
