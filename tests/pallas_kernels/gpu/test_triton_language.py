"""Kernels in Triton's language do what Pallas's interpreter does of the same kernels.

They run on NumPy (`helpers.triton_on_numpy`), so that neither a GPU nor the package `triton` is
needed; `test_triton_compiled.py` has what Triton itself makes of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.state.primitives import ref_swap as swap
from jax.experimental import pallas as pl

from helpers import slow, triton_on_numpy
from pallas_kernels import gpu_interpreter
from pallas_kernels.gpu import triton, triton_lowering
from pallas_kernels.gpu.triton_language import source
from tools import kernels_alone

pytestmark = pytest.mark.unoptimised  # whose sums and products LLVM would fuse

I4, F4, U1 = np.int32, np.float32, np.uint8
FLOATS = np.float32([[-2.5, -1.0, -0.0, 0.0], [0.5, 1.5, 7.0, 1e9]])
INTEGERS = np.int32([[-7, -3, -2, -1], [2, 3, 7, 2**31 - 1]])
BYTES = np.uint8([[0, 1, 2, 127], [128, 200, 254, 255]])
BOOLS = FLOATS > 0.25
ROWS = np.arange(32, dtype=F4).reshape(4, 8)
UNITS = np.float32([[-1.0, -0.5, 0.0, 0.25], [0.5, 1.0, 1.0, 0.25]])


def of_one_program(function, *arrays):
    """function(*arrays) in a kernel."""

    def kernel(inputs, output):
        output[...] = function(*(ref[...] for ref in inputs))

    result = jax.eval_shape(function, *arrays)
    return triton.launch(
        kernel, grid=(1,), inputs=arrays, outputs=result, num_warps=1, name="kernel"
    )


def doubled_below(x):
    return lax.while_loop(lambda v: jnp.max(v) < 100.0, lambda v: v * 2.0 + 1.0, x)


def swapped(x):
    """The two halves of a carry change places in each round."""
    return lax.fori_loop(0, 3, lambda i, pair: (pair[1] + 1, pair[0]), (x, 2 * x))[0]


def in_four(x):
    first, second, third, fourth = jnp.split(x, 4, 1)
    return first + 3 * second + 5 * third + 7 * fourth


CASES = {
    "sum": (lambda x, y: x + y, (FLOATS, FLOATS.T.reshape(2, 4))),
    "difference": (lambda x, y: x - y, (FLOATS, UNITS)),
    "comparisons": (
        lambda x, y: jnp.where((x < y) | (x == 7.0) & ~(y >= 1.0), x, y),
        (FLOATS, UNITS),
    ),
    "negative zeros": (lambda x: jnp.where(x > 1.0, x, -0.0), (FLOATS,)),
    "negative zeros of two bytes": (
        lambda x: jnp.where(x > 1.0, x, jnp.bfloat16(-0.0)),
        (FLOATS.astype(jnp.bfloat16),),
    ),
    "largest and least of two bytes": (
        lambda x: jnp.max(x, axis=1) - jnp.min(x, axis=1),
        (FLOATS.astype(jnp.bfloat16),),
    ),
    "constants of one byte": (
        lambda x: jnp.where(x > 1.0, jnp.float8_e4m3fn(1.5), jnp.float8_e4m3fn(-0.0)),
        (FLOATS,),
    ),
    "integers": (lambda x: (x * 3 ^ 5) & 0xFF | 1, (INTEGERS,)),
    "quotient of integers": (lambda x: lax.div(x, jnp.int32(2)), (INTEGERS,)),
    "remainder of integers": (lambda x: lax.rem(x, jnp.int32(3)), (INTEGERS,)),
    "floor division": (lambda x: x // 2, (INTEGERS,)),
    "arithmetic shift": (lambda x: x >> 1, (INTEGERS,)),
    "logical shift": (lambda x: lax.shift_right_logical(x, jnp.int32(1)), (INTEGERS,)),
    "arithmetic shift of bytes": (lambda x: lax.shift_right_arithmetic(x, U1(1)), (BYTES,)),
    "shift of bytes": (lambda x: (x >> 3) | (x << 1), (BYTES,)),
    "clamp": (lambda x: jnp.clip(x, -1.0, 2.0), (FLOATS,)),
    "sign": (lambda x: lax.sign(x), (UNITS,)),
    "powers": (lambda x: x**2 + x**3, (UNITS,)),
    "not": (lambda x, y: jnp.where(~y, x, 0.0), (FLOATS, BOOLS)),
    "is finite": (lambda x: jnp.isfinite(x / (x - x)), (FLOATS,)),
    "to integers": (lambda x: x.astype(jnp.int32), (FLOATS * 10,)),
    "to bytes": (lambda x: x.astype(jnp.int32).astype(jnp.uint8), (UNITS * 100,)),
    "to bf16": (lambda x: (x * 1.001).astype(jnp.bfloat16).astype(jnp.float32), (FLOATS,)),
    "halves of bf16": (
        lambda x: lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),
        (FLOATS,),
    ),
    "bf16 to integers": (lambda x: x.astype(jnp.bfloat16).astype(jnp.int32), (UNITS * 50,)),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32) + 1, (FLOATS,)),
    "greatest of bf16": (
        lambda x, y: jnp.maximum(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)),
        (FLOATS, UNITS),
    ),
    "reduced": (lambda x: jnp.sum(x, 1) + jnp.max(x, 1) * jnp.min(x, 1), (UNITS,)),
    "reduced over both axes": (lambda x: jnp.full((2, 4), jnp.max(x)) + jnp.sum(x), (UNITS,)),
    "first of the greatest": (lambda x: jnp.argmax(x, 1), (UNITS,)),
    "first of the least": (lambda x: jnp.argmin(-x, 0), (UNITS,)),
    "running sum": (lambda x: jnp.cumsum(x, 1), (INTEGERS >> 8,)),
    "transposed": (lambda x: x.T, (FLOATS,)),
    "rows to columns": (lambda x: x.reshape(8, 4), (ROWS,)),
    "two to a pair": (lambda x, y: jnp.stack([x, y], -1), (FLOATS, UNITS)),
    "split in four": (in_four, (ROWS,)),
    "split of rows": (lambda x: jnp.split(x, 2, 0)[1] - jnp.split(x, 2, 0)[0], (ROWS,)),
    "numbered": (lambda x: x + lax.broadcasted_iota(jnp.int32, (2, 4), 0) * 8, (INTEGERS >> 9,)),
    "product": (lambda x, y: jnp.dot(x, y.T, precision="highest"), (UNITS, FLOATS)),
    "product of columns": (
        lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ())), precision="highest"),
        (UNITS, FLOATS),
    ),
    "loop until": (doubled_below, (UNITS,)),
    "loop that exchanges": (swapped, (ROWS,)),
}
INEXACT = {
    "exponential": (lambda x: jnp.exp(-jnp.abs(x)), (UNITS,)),
    "logistic": (lambda x: jax.nn.sigmoid(x) * x, (UNITS,)),
    "roots": (lambda x: lax.rsqrt(x * x + 1.0) + jnp.sqrt(jnp.abs(x)), (UNITS,)),
    "sine": (lambda x: jnp.sin(x) + jnp.cos(x), (UNITS,)),
}


KERNELS = {}
"""By name: a kernel of refs, its grid, its inputs, what it updates and what it makes."""
TABLE = np.int32([5, 0, 3, 1])


def kernel(grid, inputs, in_place=None, outputs=None):
    def register(function):
        KERNELS[function.__name__.replace("_", " ")] = (function, grid, inputs, in_place, outputs)
        return function

    return register


def of(shape, dtype=F4):
    return jax.ShapeDtypeStruct(shape, dtype)


@kernel((4,), (ROWS,), outputs=of((4, 8)))
def rows_of_programs(inputs, out):
    row = pl.program_id(0)
    out[3 - row, :] = inputs[0][row, :] * 2.0


@kernel((2, 3, 2, 2), (), outputs=of((24,), I4))
def four_axes_of_a_grid(_, out):
    i, j, k, m = (pl.program_id(axis) for axis in range(4))
    out[((i * 3 + j) * 2 + k) * 2 + m] = 1000 * i + 100 * j + 10 * k + m


@kernel((1,), (ROWS, TABLE), outputs=of((4, 4)))
def rows_from_a_table(inputs, out):
    rows, table = inputs
    which = table[...] & 3
    out[...] = rows[which[:, None], jnp.arange(4)[None, :] * 2]


@kernel((4,), (TABLE,), in_place=(ROWS,))
def rows_in_place(inputs, arrays):
    row, columns = inputs[0][pl.program_id(0)], jnp.arange(8)
    index = (jnp.minimum(row, 3), columns)
    found = triton.load_where(arrays[0], index, jnp.full(8, row < 4) & (columns > 1), -1.0)
    triton.store_where(arrays[0], index, found + 100.0, jnp.full(8, row < 4) & (columns < 6))


@kernel((1,), (ROWS,), outputs=of((8,)))
def a_part_from_a_computed_start(inputs, out):
    start = jnp.int32(inputs[0][0, 2])
    out[pl.ds(4, 4)] = inputs[0][1, pl.ds(start, 4)]
    out[pl.ds(0, 4)] = inputs[0][start, pl.ds(0, 4, 2)]


@kernel((1,), (ROWS, TABLE), outputs=of((8,), I4))
def a_loop_to_a_computed_end(inputs, out):
    total = lax.fori_loop(0, inputs[1][0], lambda i, total: total + i * i, jnp.int32(0))
    out[...] = total + lax.fori_loop(inputs[1][3], 4, lambda i, found: found * 2 + i, jnp.arange(8))


@kernel((4,), (ROWS, TABLE), outputs=of((4, 8)))
def one_of_three(inputs, out):
    row = inputs[0][pl.program_id(0), :] + 1.0  # of 0 both of Triton's backends have 0 - 0
    cases = [lambda: row, lambda: row * 2.0, lambda: -row]
    out[pl.program_id(0), :] = lax.switch(inputs[1][pl.program_id(0)], cases)


@kernel((4,), (TABLE,), in_place=(ROWS,))
def stores_where_a_scalar_says(inputs, arrays):
    row = pl.program_id(0)

    @pl.when(inputs[0][row] > 2)
    def _():
        arrays[0][row, :] = jnp.zeros(8)


@kernel((1,), (), in_place=(np.arange(8, dtype=I4),))
def a_swap_gives_what_was_there(_, arrays):
    before = swap(arrays[0], (pl.ds(0, 4),), jnp.full(4, 9, I4))
    arrays[0][pl.ds(4, 4)] = before + 1


def launch_all():
    """Results of all kernels, by name."""
    given = {
        name: of_one_program(function, *arrays)
        for name, (function, arrays) in (CASES | INEXACT).items()
    }
    for name, (function, grid, inputs, in_place, outputs) in KERNELS.items():
        arrays = {"inputs": jax.tree.map(jnp.asarray, inputs), "in_place": in_place}
        given[name] = triton.launch(
            function, grid=grid, **arrays, outputs=outputs, num_warps=1, name="kernel"
        )
    return given


@pytest.fixture(scope="module")
def results():
    """Of the interpreter, and of Triton's language; each is one program."""
    with gpu_interpreter():
        expected = jax.tree.map(np.asarray, jax.jit(launch_all)())
        with triton_on_numpy.translated() as names:
            found = jax.tree.map(np.asarray, jax.jit(lambda: launch_all())())
    assert len(names) == len(CASES | INEXACT | KERNELS)
    return expected, found


@pytest.mark.parametrize("name", CASES | KERNELS)
def test_an_operation_is_what_the_interpreter_has(results, name):
    for expected, found in zip(*map(jax.tree.leaves, (r[name] for r in results)), strict=True):
        size = expected.dtype.itemsize
        np.testing.assert_array_equal(found.view(f"u{size}"), expected.view(f"u{size}"))


@pytest.mark.parametrize("name", INEXACT)
def test_a_function_of_libdevice_is_called(results, name):
    expected, found = (r[name] for r in results)
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    slow.all_but(
        ["pick"], ["pick", "join", "mix", "gather", "round_queries", "write", "move_rows"]
    ),
)
def test_a_kernel_of_the_project_gives_what_the_interpreter_gives(name):
    """Integers and bytes are equal; sums are taken in another order."""
    with gpu_interpreter():
        expected = jax.tree.map(np.asarray, kernels_alone.CALLS[name]())
        with triton_on_numpy.translated() as names:
            found = jax.tree.map(np.asarray, kernels_alone.CALLS[name]())
    assert names
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
        else:
            np.testing.assert_array_equal(got, want)


def trace(function, *arrays):
    """The jaxpr of a kernel's body."""
    with gpu_interpreter():
        (equation,) = jax.make_jaxpr(lambda *given: of_one_program(function, *given))(*arrays).eqns
    return equation.params["jaxpr"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: jnp.sort(x), "sort"),
        (lambda x: x[:, 1:3], "slice"),
        (lambda x: jnp.concatenate([x, x], 0), "joins 2 arrays"),
        (lambda x: lax.cumsum(x, 1, reverse=True), "sums from behind"),
        (lambda x: jnp.exp(x.astype(jnp.bfloat16)), "exp of bfloat16"),
    ],
)
def test_what_has_no_line_is_refused_by_name(function, said):
    with pytest.raises(NotImplementedError, match=f"kernel .*{said}"):
        source.translate(trace(function, UNITS), name="kernel", grid=(1,))


def test_a_grid_is_folded_where_a_launch_has_no_room():
    jaxpr = trace(lambda x: x + x, UNITS)
    sizes = [(5,), (5, 2), (5, 2, 3), (2, 3, 4, 5), (2, 70_000)]
    found = [source.translate(jaxpr, name="kernel", grid=size).grid for size in sizes]
    assert found == [(5, 1, 1), (5, 2, 1), (5, 2, 3), (6, 4, 5), (140_000, 1, 1)]


def test_offsets_in_arrays_beyond_4_gib_have_64_bits():
    def call(x):
        def kernel(inputs, out):
            out[0] = inputs[0][inputs[1][0], 5]

        return triton.launch(
            kernel, grid=(1,), inputs=x, outputs=of((1,)), num_warps=1, name="kernel"
        )

    for rows, bits in ((2**16, 32), (2**16 + 1, 64)):
        with gpu_interpreter():
            given = jax.make_jaxpr(call)((of((rows, 2**14)), of((1,), I4)))
        text = source.translate(given.eqns[0].params["jaxpr"], name="kernel", grid=(1,)).text
        assert f"tl.full([], 16384, tl.int{bits})" in text


def test_equal_kernels_have_equal_sources():
    """So that one is compiled once, and found in a cache."""
    first, second = (
        source.translate(trace(lambda x: x * 2 + x, UNITS), name="kernel", grid=(1,))
        for _ in range(2)
    )
    assert first == second
    assert "def kernel(p0, p1):" in first.text


def raise_error(error):
    raise error


GONE = [
    None,
    ModuleNotFoundError("No module named 'jax.experimental.pallas.triton'"),
    AttributeError("jax.experimental.pallas.triton has been removed"),
]
"""What jax does where it has the backend, and where it has it no longer."""


@pytest.mark.parametrize("gone", GONE, ids=["there", "no module", "what is left raises"])
def test_the_default_is_the_backend_of_pallas_while_jax_has_it(monkeypatch, gone):
    monkeypatch.delenv(triton_lowering.LOWERING_VARIABLE, raising=False)
    if gone:
        monkeypatch.setattr(triton_lowering.importlib, "import_module", lambda _: raise_error(gone))
    assert triton_lowering._of_process.__wrapped__() == ("ir" if gone else "pallas")


@pytest.mark.parametrize("ask", [triton_lowering.operations, triton_lowering.compiler_params])
def test_who_asks_for_a_backend_that_is_gone_is_told_what_to_choose(monkeypatch, ask):
    monkeypatch.setattr(triton_lowering.importlib, "import_module", lambda _: raise_error(GONE[1]))
    told = r"lowering pallas \(PALLAS_KERNELS_TRITON.*jax 0\..* lacks; choose ir or ptx"
    with triton_lowering.use_lowering("pallas"), pytest.raises(ModuleNotFoundError, match=told):
        ask(4) if ask is triton_lowering.compiler_params else ask()


def test_the_environment_names_a_lowering(monkeypatch):
    monkeypatch.setenv(triton_lowering.LOWERING_VARIABLE, "ptx")
    assert triton_lowering._of_process.__wrapped__() == "ptx"
    monkeypatch.setenv(triton_lowering.LOWERING_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=r"PALLAS_KERNELS_TRITON must be one of .*'ptx'.*'cuda'"):
        triton_lowering._of_process.__wrapped__()


def test_a_lowering_is_chosen_by_name():
    with triton_lowering.use_lowering("ir"):
        assert triton_lowering.lowering() == "ir"
        assert triton_lowering.compiler_params(4).launch == "ir"
    assert triton_lowering.lowering() != "ir"
    with (
        pytest.raises(ValueError, match=r"name must be one of .*'ptx'.*, got 'cuda'"),
        triton_lowering.use_lowering("cuda"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "written"),
    [
        (name, name + "_")
        for name in ("add", "argmin", "tl", "libdevice", "lambda", "float", "range")
    ]
    + [("addition", "addition"), ("sin.cos", "sin_cos"), ("in place", "in_place")],
)
def test_a_kernel_may_have_a_name_that_its_module_needs(name, written):
    found = source.translate(trace(lambda x: jnp.sum(x, axis=0), UNITS), name=name, grid=(1,))
    assert found.name == written
    defined = [line for line in found.text.splitlines() if line.startswith("def ")]
    assert len(defined) == len(set(defined)) == 6  # five functions of reductions, and it
    assert f"def {found.name}(p0, p1):" in defined
    compile(found.text, "module", "exec")
