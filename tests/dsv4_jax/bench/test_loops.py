"""The loops that are timed; times are not looked at."""

import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench import loops
from helpers.arrays import on_device

INPUTS = [(on_device(n, jnp.float32),) for n in (1, 2, 4)]


def add_to_state(state, x):
    return state + x, state * x


def test_every_round_calls_with_every_input_in_order():
    loop = loops.loop_over(add_to_state, has_state=True)
    _, state, outs = loop(5, jnp.float32(0), INPUTS)
    assert state == 5 * 7
    np.testing.assert_array_equal(jnp.stack(outs), [28 * 1, 29 * 2, 31 * 4])


def test_a_loop_without_state_gives_the_last_results():
    _, state, outs = loops.loop_over(jnp.square, has_state=False)(3, None, INPUTS)
    assert state is None
    np.testing.assert_array_equal(jnp.stack(outs), [1, 4, 16])


def test_clearing_l2_changes_no_result():
    cleared = loops.clear_before(add_to_state, has_state=True)
    loop = loops.loop_over(cleared, has_state=True)
    _, (lines, state), outs = loop(5, (jnp.zeros(8, jnp.uint32), 0.0), [(i,) for i in INPUTS])
    assert state == 5 * 7
    assert (lines == 15).all()
    np.testing.assert_array_equal(jnp.stack(outs), [28 * 1, 29 * 2, 31 * 4])


def test_a_state_is_not_the_callers_own_that_is_donated():
    state = jnp.float32(3)
    loops.median_us(add_to_state, INPUTS, state=state, rounds=1, repeats=1)
    assert state == 3


def test_a_function_is_traced_once_for_all_inputs_and_both_loops():
    calls = []

    def function(x):
        calls.append(x)
        return x + 1

    loops.median_us(function, INPUTS, rounds=1, repeats=1)
    assert len(calls) == 1
