"""Random inputs of the benchmarks."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import draws


def test_drawn_arrays_have_their_values_and_differ():
    made = draws.make(
        {
            "normal": [draws.Draw((100, 64), jnp.bfloat16)] * 2,
            "codes": draws.Draw((100, 64), jnp.float8_e4m3fn, as_bytes=True),
            "scale": draws.Draw((1000, 4), jnp.uint8, among=range(125, 129)),
            "zeros": jax.ShapeDtypeStruct((3, 5), jnp.int32),
        }
    )
    first, second = (np.asarray(x, np.float32) for x in made["normal"])
    codes = np.asarray(made["codes"]).view(jnp.float8_e4m3fn).astype(np.float32)
    for values in (first, second, codes):
        assert abs(values.mean()) < 0.1
        assert abs(values.std() - 1) < 0.1
        assert abs(np.corrcoef(values)[np.triu_indices(100, 1)]).max() < 0.7
    assert made["codes"].dtype == jnp.uint8
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    assert (np.bincount(np.ravel(made["scale"]))[125:] > 800).all()
    assert made["zeros"].shape == (3, 5)
    assert not made["zeros"].any()


def test_no_row_of_a_large_array_is_another():
    (array,) = draws.make([draws.Draw((20_000, 512), jnp.uint8, among=range(256))])
    assert len(np.unique(np.asarray(array)[:, :16], axis=0)) == 20_000


def test_chosen_numbers_differ_and_blocks_are_in_any_order():
    rng = np.random.default_rng(0)
    chosen = draws.different(rng, 20, 30, 40)
    assert chosen.dtype == np.int32
    assert all(len(set(row)) == 30 for row in chosen)
    assert set(np.ravel(chosen)) == set(range(40))
    table = draws.blocks(rng, 4, 5)
    assert sorted(np.ravel(table)) == list(range(20))
    assert (np.ravel(table) != range(20)).any()
