"""Whatever stands in the place of an argument is refused by name, or is as good as a good one."""

import inspect
import itertools

import jax
import numpy as np
import pytest

import pallas_kernels as pk
from helpers import bad_op_arguments as bad
from helpers.bad_op_arguments import FREQUENCIES, NORM_ROPE, T, f32

CALLS, COLLECTIVES = bad.calls(), bad.collectives()
MOVED = {("x", word) for word in ("integers", "bools", "complex numbers", "one axis less")}
"""What is as good for a collective."""


@pytest.fixture(autouse=True)
def _whole_tracebacks():
    """To shorten one takes JAX longer than the checks that raise the error."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


def problems_of(function, given, step=1):
    found = []
    for name, place, word, value in itertools.islice(bad.cases(given), 0, None, step):
        problem = bad.problem_with(function, given, name, place, word, value)
        if problem is not None:
            found.append(f"{place}: {word}: {problem}")
    return found


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_an_op_refuses_each_bad_argument_by_its_name(name, step):
    """Every fifth of 4,900 by default."""
    given, op = CALLS[name], getattr(pk, name.split()[0])
    bad.trace(op, **given)  # which is good
    found = problems_of(op, given, step)
    assert not found, f"{len(found)}:\n" + "\n".join(found[:40])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_refuses_each_bad_argument_by_its_name(name):
    """Arrays are traced there; other values are not."""
    given, op = COLLECTIVES[name], getattr(pk, name)
    shapes = {key: value for key, value in given.items() if isinstance(value, tuple)}
    arrays = {key: np.zeros((2, *shape), np.float32) for key, shape in shapes.items()}
    fixed = {key: value for key, value in given.items() if key not in shapes}

    def on_two_devices(**changes):
        def of_one(own):
            return op(**fixed | own | changes)

        return jax.vmap(of_one, axis_name="devices")(arrays)

    on_two_devices.__name__ = name
    bad.trace(on_two_devices)
    good = fixed | {key: f32(*shape) for key, shape in shapes.items()}
    found = []
    for argument, place, word, value in bad.cases(good):
        problem = bad.problem_with(on_two_devices, {}, argument, place, word, value)
        if problem is not None and (argument, word) not in MOVED:
            found.append(f"{place}: {word}: {problem}")
    assert not found, f"{len(found)}:\n" + "\n".join(found[:40])


def test_a_collective_refuses_what_is_none():
    x = f32(2, 3)

    def gather(*arrays, axis_name="devices", **options):
        return jax.vmap(
            lambda own: pk.all_gather(own, *arrays, axis_name=axis_name, **options),
            axis_name="devices",
        )(x)

    for wrong in (None, "x", [1], NORM_ROPE, int):
        with pytest.raises(ValueError, match=r"arrays\[1\] must be an array"):
            gather(wrong)
        with pytest.raises(ValueError, match="axis_name must be an axis of the mesh"):
            gather(axis_name=wrong)
    with pytest.raises(ValueError, match="buffer must"):
        gather(buffer=f32(3))
    with pytest.raises(ValueError, match="arrays must be one or more, got none"):
        jax.vmap(lambda _: pk.all_gather(axis_name="devices"), axis_name="devices")(x)


@pytest.mark.parametrize(
    "name",
    ["append_tokens", "flush_write", "index_topk"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("append_and_flush", "flush_csa", "flush_hca", "sparse_attention", "expert_mlp")
    ],
)
def test_arrays_of_numpy_are_as_good_within_jit_too(name):
    """They cannot be updated, nor be indexed by what is traced."""
    given, op = CALLS[name], getattr(pk, name)
    arrays = {key: value for key, value in given.items() if jax.tree.leaves(value)}
    arrays = {k: v for k, v in arrays.items() if isinstance(jax.tree.leaves(v)[0], jax.Array)}
    as_numpy = jax.tree.map(np.asarray, arrays)
    expected = jax.jit(lambda: op(**given))()
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda: op(**given | as_numpy))(), expected)


def test_a_layer_that_is_not_there_is_refused():
    given = CALLS["flush_write"]
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=rf"layer must be within 0 \.\. 1, got {wrong}"):
            pk.flush_write(**given | {"layer": np.int32(wrong)})


@pytest.mark.parametrize("name", ["index_scores", "index_topk"])
def test_integer_weights_of_index_heads_are_refused(name):
    given = CALLS[name] | {"weights": np.ones((T, 2), np.int32)}
    with pytest.raises(ValueError, match="weights must be an array of floats, got int32"):
        getattr(pk, name)(**given)


def test_every_public_function_is_tried_with_all_its_arguments():
    """Or it is said why not."""
    tried = {name.split()[0] for name in [*CALLS, *COLLECTIVES]}
    assert set(pk.__all__) - tried == set(bad.LEFT_OUT)
    for name in CALLS | COLLECTIVES:
        op = name.split()[0]
        forms = [more for one, more in (CALLS | COLLECTIVES).items() if one.split()[0] == op]
        tried = set().union(*forms) | bad.UNTRIED.get(op, set())
        assert set(inspect.signature(getattr(pk, op)).parameters) <= tried, name


def test_a_place_that_is_checked_by_none_would_be_seen():
    def careless(frequencies):
        return frequencies.sum()

    found = problems_of(careless, {"frequencies": FREQUENCIES})
    assert len(found) > 5
    assert any("raised AttributeError" in one for one in found)
