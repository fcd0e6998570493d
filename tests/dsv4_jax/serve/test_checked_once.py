"""How a request draws is checked once, where it comes in, and never again on its way."""

import pytest

import dsv4_jax as ds
from dsv4_jax.serve import ServeSettings
from dsv4_jax.serve.intake import Intake
from dsv4_jax.serving import AsyncEngine
from helpers import serve


@pytest.fixture
def count_checks(monkeypatch):
    """How often settings were checked so far."""
    checked, check = [0], ds.SamplingParams.__post_init__

    def count(self):
        checked[0] += 1
        check(self)

    monkeypatch.setattr(ds.SamplingParams, "__post_init__", count)
    return lambda: checked[0]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", [None, 5])
def test_an_answer_over_http(count_checks, n, seed):
    engine = serve.warm_engine()
    with AsyncEngine(engine) as shared:
        intake = Intake(shared, ServeSettings(model_name=serve.MODEL))
        body = {"model": serve.MODEL, "prompt": "hello", "max_tokens": 4, "n": n, "temperature": 0}
        streams, _ = intake.start("/v1/completions", body, seed=seed)
    assert len(streams) == n
    assert count_checks() == 1


def test_requests_of_python(count_checks):
    engine = serve.warm_engine()
    params = ds.SamplingParams(max_new_tokens=2)
    assert count_checks() == 1
    first = engine.submit([1, 2], sampling=params)
    engine.fork(first, seed=3)
    engine.submit_many([1, 2], 3, sampling=params)
    engine.generate([[1], [2]], sampling=params)
    assert count_checks() == 1
    engine.generate([[1], [2]], max_new_tokens=2, seed=[1, 2])
    assert count_checks() == 2


def test_what_is_derived_is_what_would_be_built():
    params = ds.SamplingParams(temperature=0.5, seed=7)
    assert params.with_seed(-1) == ds.SamplingParams(temperature=0.5, seed=-1)
    assert params.with_plain(max_new_tokens=3) == ds.SamplingParams(
        temperature=0.5, seed=7, max_new_tokens=3
    )
    assert hash(params.with_seed(7)) == hash(params)
