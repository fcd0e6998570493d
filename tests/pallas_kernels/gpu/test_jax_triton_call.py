"""Kernels launched by jax-triton find each buffer, with no package of that name."""

import sys
import types

import jax
import numpy as np
import pytest

from pallas_kernels.gpu.triton_language import lowering, source


def launch_as_jaxlib(*operands, kernel, out_type, grid, input_output_aliases, **_):
    """Each parameter of a kernel takes the next buffer of the operands, then of the results."""
    operands = [np.array(operand) for operand in operands]
    results = [np.full(one.shape, 7, one.dtype) for one in out_type]
    for operand, result in input_output_aliases.items():
        results[result] = operands[operand]
    count = len(operands) + len(results) - len(input_output_aliases)
    assert grid == (1, 1, 1)
    kernel(*[*operands, *results][:count])
    return results


def move(given, first, last, made, also_made):
    """Adds what is given to two arrays in place, and makes two others."""
    first += given
    last -= given
    made[...] = 2 * given
    also_made[...] = 3 * given


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (2, 0, 3, 1)], ids=str)
def test_results_in_place_and_others_have_their_buffers(order, monkeypatch):
    fake = types.ModuleType("jax_triton")
    fake.triton_call = launch_as_jaxlib
    monkeypatch.setitem(sys.modules, "jax_triton", fake)
    monkeypatch.setattr(lowering, "load_function", lambda source: move)
    given, first, last = np.float32([1, 2]), np.float32([10, 20]), np.float32([5, 5])
    expected = [first + given, last - given, 2 * given, 3 * given]
    found = lowering._triton_call(
        given,
        first,
        last,
        source=source.Source("", "move", ("p0", "p1", "p2", "p5", "p6"), (1, 1, 1)),
        outputs=[jax.ShapeDtypeStruct((2,), np.float32)] * 4,
        aliases={1 + kept: order.index(kept) for kept in (0, 1)},
        params=lowering.CompilerParams(1),
    )
    for place, which in enumerate(order):
        np.testing.assert_array_equal(found[place], expected[which])


def test_who_lacks_jax_triton_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    told = "lowering jax_triton .*PALLAS_KERNELS_TRITON.*pip install 'jax-triton>=0.4,<0.5'"
    with pytest.raises(ModuleNotFoundError, match=told):
        lowering._load_jax_triton()
