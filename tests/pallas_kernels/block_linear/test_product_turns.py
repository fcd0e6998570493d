"""Products in turns: with the waits that the kernel asks for, both warpgroups come to their end.

The interpreter has no hardware barriers. Here it says who would ask for what, and a model of them
replays it.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import slow
from pallas_kernels import gpu_interpreter
from pallas_kernels.block_linear import mosaic_gpu
from pallas_kernels.block_linear.call_shapes import Tiling
from pallas_kernels.common import weights
from pallas_kernels.gpu import product_turns

BEGIN = "begin"
CASES = {
    "two tiles": (20, "fp8", Tiling(16, 1, 2, programs=1, in_turns=True)),
    "two groups of a stage, two parts": (9, "bfloat16", Tiling(16, 2, 2, in_turns=True)),
    "two pieces": (130, "fp8", Tiling(144, 1, 2, programs=1, in_turns=True)),
}


@pytest.mark.parametrize("case", slow.all_but(list(CASES)[:2], list(CASES)))
def test_no_warpgroup_waits_for_ever(monkeypatch, case):
    num_rows, activations, tiling = CASES[case]
    seen = watch(monkeypatch)
    into = 2 * tiling.blocks * weights.INPUTS
    values = jnp.ones((1, 128, into))
    weight = weights.quantize_block_fp8(values, dtype="bfloat16", activations=activations)
    x = jnp.ones((1, num_rows, into), jnp.bfloat16)
    with gpu_interpreter():
        jax.jit(functools.partial(mosaic_gpu.block_linear, tiling=tiling))(x, [weight])
        jax.effects_barrier()
    parts = 1 if activations == "fp8" else 2
    products = into // weights.INPUTS * -(-num_rows // tiling.columns) * len(tiling.pieces) * parts
    assert sum(event != BEGIN for _, event in seen) == 2 * products
    assert ends(seen)
    assert not ends([event for event in seen if event[1] != BEGIN])
    assert not ends([(group, event if event == BEGIN else False) for group, event in seen])


def watch(monkeypatch):
    """[(warpgroup, BEGIN or whether the product is its last)], as the interpreter comes to them."""
    seen, multiply = [], product_turns.multiply

    def note_begin(group):
        jax.debug.callback(lambda group: seen.append((int(group), BEGIN)), group)

    def note(left, right, group, is_last):
        jax.debug.callback(
            lambda group, last: seen.append((int(group), bool(last))), group, is_last
        )
        return multiply(left, right, group, is_last)

    monkeypatch.setattr(product_turns, "begin", note_begin)
    monkeypatch.setattr(product_turns, "multiply", note)
    return seen


def ends(events):
    """Whether both come to their end, and leave the barriers as they found them."""
    queues = [collections.deque(e for g, e in events if g == group) for group in range(2)]
    arrived, moved = [0, 0], True
    while moved:
        moved = False
        for group, own in enumerate(queues):
            while own and (own[0] == BEGIN or arrived[group]):
                event = own.popleft()
                if event == BEGIN:
                    arrived[0] += group
                else:
                    arrived[group] -= 1
                    arrived[1 - group] += int(product_turns.lets_other(group, np.bool_(event)))
                if max(arrived) > 1:  # by a warpgroup that runs ahead
                    return False
                moved = True
    return not any(queues) and arrived == [0, 0]
