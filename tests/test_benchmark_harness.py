"""What the benchmarks' loop does, and what a report keeps; times are not looked at."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bench_decode_rivals, harness

INPUTS = [(jnp.float32(n),) for n in (1, 2, 4)]


def add_to_state(state, x):
    return state + x, state * x


def test_every_round_calls_with_every_input_in_order():
    loop = harness._loop(add_to_state, has_state=True)
    _, state, outs = loop(5, jnp.float32(0), INPUTS)
    assert state == 5 * 7
    np.testing.assert_array_equal(jnp.stack(outs), [28 * 1, 29 * 2, 31 * 4])


def test_a_loop_without_state_gives_the_last_results():
    _, state, outs = harness._loop(jnp.square, has_state=False)(3, None, INPUTS)
    assert state is None
    np.testing.assert_array_equal(jnp.stack(outs), [1, 4, 16])


def test_flushing_changes_no_result():
    flushed = harness._after_flush(add_to_state, has_state=True)
    loop = harness._loop(flushed, has_state=True)
    _, (lines, state), outs = loop(5, (jnp.zeros(8, jnp.uint32), 0.0), [(i,) for i in INPUTS])
    assert state == 5 * 7
    assert (lines == 15).all()
    np.testing.assert_array_equal(jnp.stack(outs), [28 * 1, 29 * 2, 31 * 4])


def test_a_state_is_not_the_callers_own_that_is_donated():
    state = jnp.float32(3)
    harness.median_us(add_to_state, INPUTS, state=state, rounds=1, repeats=1)
    assert state == 3


def test_a_report_replaces_the_rows_of_its_ops(tmp_path, capsys):
    path = tmp_path / "results.json"
    old = [harness.row(op, "8 x 8", 10.0, limit_us=8.0) for op in ("gather", "flush")]
    harness.report(old, path)
    new = harness.row("gather", "8 x 8", 5.0, rival="other", rival_us=10.0)
    harness.report([new], path)
    assert json.loads(path.read_text())["rows"] == [old[1], new]
    assert (old[0]["limit_share"], new["ratio"]) == (0.8, 0.5)
    assert "gather" in capsys.readouterr().out


def test_a_rivals_launches_are_summed_over_the_layers_of_flash():
    us = {"swa append": 5.0, "csa append": 10.0, "csa topk": 2.0, "hca attention": 20.0}
    found = bench_decode_rivals.summed(us) | {"batch": 64, "context": 16_384}
    assert found["layers"] == {"swa": 2, "csa": 21, "hca": 20}
    assert found["rival_ms"] == pytest.approx((2 * 5 + 21 * 12 + 20 * 20) / 1e3)
    row = {"batch": 64, "context": 16_384, "cache_part_ms": found["rival_ms"] / 2}
    compared = bench_decode_rivals.compared(found, [{"batch": 8, "context": 16_384}, row])
    assert compared["times_the_rivals_tokens"] == pytest.approx(2)
    assert compared["ours_tokens_per_s"] == pytest.approx(64 / row["cache_part_ms"] * 1e3)
    assert bench_decode_rivals.compared(found, []) == {}
