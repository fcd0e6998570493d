"""A launcher gives what the jitted function gives, and finds programs by all but the parameters."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.serving.device.launcher import Launcher

ON_A_MESH = """
import json
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from dsv4_jax.mesh import make_mesh
from dsv4_jax.serving.device.launcher import Launcher
mesh = make_mesh(data=2, model=2)
def put(value, *axes):
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))
launcher = Launcher(put(np.ones(4, np.float32)))
double, x = jax.jit(lambda params, x: 2 * x + params), np.arange(16, dtype=np.float32).reshape(4, 4)
found = [launcher(double, put(x, *axes)) for axes in (("data",), ("model",), (None, "data"))]
print(json.dumps([np.array_equal(one, 2 * x + 1) for one in found]))
"""


@pytest.fixture
def params():
    return {"a": jnp.arange(4.0), "b": (jnp.ones(3), jnp.full(2, 7.0))}


def step_of(traced, **options):
    """A step that notes each time that it is traced."""

    @functools.partial(
        jax.jit, static_argnames="times", donate_argnames="cache", keep_unused=True, **options
    )
    def step(params, cache, call, *, times=1):
        traced.append(times)
        cache = {
            "rows": cache["rows"] + times * params["a"].sum() + call["x"].sum().astype(jnp.float32)
        }
        return cache, {"drawn": call["x"].astype(jnp.int32) + times}

    return step


def inputs(size=5, dtype=jnp.float32):
    return {"rows": jnp.zeros(6)}, {"x": jnp.arange(size, dtype=dtype)}


def test_a_launch_is_the_call_of_the_function(params):
    traced = []
    step, launcher = step_of(traced), Launcher(params, times=3)
    (cache, call), (other, same) = inputs(), inputs()
    wanted = step(params, other, same, times=3)
    found = launcher(step, cache, call)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert cache["rows"].is_deleted()
    assert not call["x"].is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert [one.committed for one in jax.tree.leaves(found)] == [False, False]
    again, _ = launcher(step, found[0], call)
    assert (again["rows"] == 2 * wanted[0]["rows"]).all()
    assert traced == [3]


@pytest.mark.parametrize(
    ("sizes", "static"),
    [({"size": 7}, {}), ({"dtype": jnp.int32}, {}), ({}, {"times": 2})],
)
def test_what_differs_has_a_program_of_its_own(params, sizes, static):
    traced = []
    step, launcher = step_of(traced), Launcher(params)
    launcher(step, *inputs(), times=1)
    cache, call = inputs(**sizes)
    static = {"times": 1} | static
    wanted = step(params, {"rows": jnp.zeros(6)}, call, **static)
    found = launcher(step, cache, call, **static)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert len(traced) == 2


def test_programs_that_leave_out_what_they_do_not_use(params):
    launcher = Launcher(params)
    first = jax.jit(lambda params, x, unused: params["b"][1] + x)
    second = jax.jit(lambda params, x, unused: params["b"][1] - x)
    x, unused = jnp.ones(2), jnp.zeros(9)
    assert launcher(first, x, unused).tolist() == [8.0, 8.0]
    assert launcher(second, x, unused).tolist() == [6.0, 6.0]


def test_who_asks_jax_to_look_for_nan_is_heard(params):
    """JAX looks at the results of its own calls alone."""
    launcher, divide = Launcher(params), jax.jit(lambda params, x: x / x)
    assert np.isnan(launcher(divide, jnp.zeros(1))).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        launcher(divide, jnp.zeros(1))


def test_arrays_that_are_gone_are_refused(params):
    step, launcher = step_of([]), Launcher(params)
    cache, call = inputs()
    launcher(step, cache, call)
    with pytest.raises((RuntimeError, ValueError), match=r"delete|donated"):
        launcher(step, cache, call)


def test_on_a_mesh_what_lies_otherwise_has_a_program_of_its_own():
    """Its shards have the same sizes, so that XLA would take them."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_A_MESH]
    done = subprocess.run(
        command, env=os.environ | flags, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [True] * 3
