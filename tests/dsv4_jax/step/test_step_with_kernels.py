"""A step with kernels equals the step with references, on the same device and equal inputs."""

import contextlib
import math

import jax
import pytest

import dsv4_jax as ds
from dsv4_jax.cache.handle import LayerCacheHandle
from helpers.configs import first_layers
from tools import step_check


def small(name, layers):
    return first_layers(getattr(ds.DSV4Config, name)(), layers)


@pytest.mark.slow
def test_references_against_themselves_differ_nowhere():
    """Every op of every type is compared, also where nothing but references runs."""
    compared = step_check.compare_ops(
        small("tiny", 3), batch=2, context=256, references=contextlib.nullcontext
    )
    found = dict(compared)
    assert set(found) == {
        *(
            f"{attn} {op}"
            for attn in ("swa", "csa", "hca")
            for op in ("append", "append in place", "queries", "attend")
        ),
        "csa index queries",
        "csa select",
    }
    for figures in found.values():
        assert not any(figures.get(name) for name in ("different", "flips", "ulps"))
    assert step_check.complaints(found) == []


@pytest.mark.slow
def test_a_flip_and_a_wrong_result_are_seen(monkeypatch):
    """The other way selects one entry less and attends with shorter queries."""
    config = small("tiny", 3)
    select, attend = LayerCacheHandle.select, LayerCacheHandle.attend

    @contextlib.contextmanager
    def broken():
        with monkeypatch.context() as patch:
            patch.setattr(
                LayerCacheHandle,
                "select",
                lambda *given: select(*given).at[:, 0].set(-1),
            )
            patch.setattr(
                LayerCacheHandle, "attend", lambda self, q, s, k: attend(self, q * 0.9, s, k)
            )
            yield

    found = dict(step_check.compare_ops(config, batch=2, context=256, references=broken))
    assert found["csa select"] == {"selected": 2 * (config.indexer_top_k - 1), "flips": 2}
    wrong = " ".join(step_check.complaints(found))
    assert "csa select" in wrong
    assert "swa attend" in wrong


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "batch", "context"),
    [
        ("flash_slim", 43, 1, 1_048_576),  # block ids beyond 2**31 bytes of a pool
        ("flash_slim", 5, 8, 16_384),
        ("pro_slim", 4, 2, 131_072),
    ],
)
def test_op_by_op(name, layers, batch, context):
    config = small(name, layers)
    if context == 1_048_576:
        shapes = ds.cache.cache_shapes(
            config, max_requests=batch, max_context_tokens=context, cache_format="fp8_ue8m0"
        )
        assert math.prod(shapes.paged["csa"].entries["nope"].shape) > 2**31
    found = dict(step_check.compare_ops(config, batch=batch, context=context))
    assert step_check.complaints(found) == [], found


@pytest.mark.gpu
@pytest.mark.slow
def test_whole_steps_agree():
    """Five layers: flips of near ties move logits, so the bound is a share of their spread."""
    found = step_check.compare_steps(small("flash_slim", 5), batch=4, context=16_384)
    assert found["rms_difference"] < 0.1 * found["logits_std"], found
    assert jax.devices()[0].platform == "gpu"
