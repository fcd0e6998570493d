"""What sanitizers are given runs: each call here in the interpreter, on a GPU under their eyes."""

import jax
import pytest

from helpers import slow
from pallas_kernels import gpu_interpreter
from programs import kernels_alone


@pytest.mark.parametrize("name", slow.all_but(["gather"], list(kernels_alone.CALLS)))
def test_a_call_alone_runs(name):
    with gpu_interpreter():
        assert all(leaf.size for leaf in jax.tree.leaves(kernels_alone.CALLS[name]()))


@pytest.mark.slow
def test_what_racecheck_has_to_find_can_still_be_planted():
    """Here barriers are nothing, and left out they change nothing."""
    with gpu_interpreter():
        expected, given = (
            kernels_alone.select(5000, 512),
            kernels_alone.PLANTED["without_barriers"](),
        )
    assert (given == expected).all()


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.11 prints a race and goes on")
def test_the_interpreter_sees_a_race_where_nobody_waits():
    """As racecheck does not: so the others of these calls have none."""
    with gpu_interpreter(), pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)race"):
        jax.block_until_ready(kernels_alone.PLANTED["without_waiting"]())
