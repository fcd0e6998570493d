"""Any schedule of layers: what a cache gives is what the whole history gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers.schedules import run_cuts

pytestmark = [pytest.mark.unoptimised, pytest.mark.slow]

SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA


def schedule(name, *layer_types, **changes):
    config = dataclasses.replace(
        ds.DSV4Config.tiny(),
        num_mtp_layers=0,
        layer_types=layer_types,
        router_types=(ds.RouterType.HASH, *(ds.RouterType.LEARNED,) * (len(layer_types) - 1)),
        **changes,
    )
    return pytest.param(config, id=name)


TINY = ds.DSV4Config.tiny().layer_types


@pytest.mark.parametrize(
    "config",
    [
        schedule("window-beyond-a-block", SWA, sliding_window=130),
        schedule("csa-odd-rate", CSA, csa_compression_ratio=3, sliding_window=5),
        schedule("hca-odd-rate", HCA, hca_compression_ratio=20, sliding_window=5),
        schedule("swa-only", SWA, SWA),
        schedule("csa-only", CSA, CSA),
        schedule("hca-only", HCA, HCA),
        schedule("pro-order", HCA, HCA, CSA, HCA, CSA),
        schedule(
            "odd-rates", *TINY, csa_compression_ratio=3, hca_compression_ratio=20,
            sliding_window=5,
        ),
        schedule("long-window", *TINY, sliding_window=130, hca_compression_ratio=128),
        schedule("all-selected", *TINY, hca_compression_ratio=64, indexer_top_k=64),
    ],
)  # fmt: skip
def test_every_schedule_agrees_with_the_whole_history(config):
    """Prefill in chunks longer and shorter than the window, then decode, against `forward`.

    Known bugs B20, B28: window roll-over for every kind of layer, and empty families.
    """
    cache = ds.init_cache(config, max_requests=4, max_context_tokens=200, cache_format="f32")
    params, rng = ds.init_params(config, jax.random.key(0)), np.random.default_rng(0)
    texts = [rng.integers(0, config.vocab_size, n).tolist() for n in (150, 33)]
    padded = jnp.asarray([texts[0], texts[1] + [0] * 117], jnp.int32)
    whole = jax.jit(ds.forward, static_argnames="config")(params, padded, config=config)
    cuts = [[40, 37, 30, *[1] * 43], [1, 2, 30]]
    run = run_cuts(config, params, cache, texts, cuts, slots=[3, 1], num_tokens=80)
    for got, want in zip(run.logits, whole, strict=True):
        np.testing.assert_allclose(np.stack(got), want[: len(got)], atol=2e-5, rtol=0)
