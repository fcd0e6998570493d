"""How far it is from an op to the instruction that multiplies, for someone who reads the code."""

import os
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import block_linear, gpu_interpreter
from pallas_kernels.common import weights
from pallas_kernels.product import wgmma

PACKAGE = os.path.dirname(pallas_kernels.__file__) + os.sep


class Reached(Exception):
    """Raised where a product begins, with the functions on the way there."""


def functions_here():
    """(file, function) of the callers in the package, outermost first; a closure is its function's.

    Frames that follow each other in one function are one.
    """
    found, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            place = code.co_filename, code.co_qualname.split(".<locals>")[0]
            if found[-1:] != [place]:
                found.append(place)
        frame = frame.f_back
    return found[::-1]


def test_five_calls_in_four_files_from_the_op_to_the_first_product(monkeypatch):
    """And one more from `dsv4_jax.linear.linear`, which calls the op."""

    def begin(*arguments):
        raise Reached(functions_here())

    monkeypatch.setattr(wgmma, "begin", begin)
    weight = weights.quantize_block_fp8(jnp.ones((128, 256)), dtype="bfloat16")
    x = jnp.ones((3, 256), jnp.bfloat16)
    with gpu_interpreter(), pytest.raises(Reached) as reached:
        jax.eval_shape(lambda x: block_linear(x, weight, backend="mosaic_gpu"), x)
    [places] = reached.value.args
    assert [function for _, function in places] == [
        "block_linear",
        "multiply_rows",
        "launch",
        "mainloop",
        "_add_group",
    ]
    assert len({file for file, _ in places}) == 3  # `wgmma.begin` is the fourth
