"""DeepSeek-V4.1 over whole sequences, against what an oracle in NumPy and float64 computed.

`tests/data/make_v41_oracle.py` recorded it.
"""

import dataclasses
import functools
import json
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import AbstractMesh

import dsv4_jax as ds
from dsv4_jax.attention.selection import Selection
from dsv4_jax.attention.shared_entries import choose_candidates
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.sources import Candidates
from dsv4_jax.engram import place_tables
from dsv4_jax.engram.hashes import hash_rows
from dsv4_jax.mesh import AXES
from dsv4_jax.model import param_shapes, param_shardings
from dsv4_jax.model.engram import look_up_rows
from dsv4_jax.model.forward import forward, forward_means
from dsv4_jax.model.hyper_connections import Residual
from helpers import capture, v41, v41_cache
from helpers.tolerance import INDEX_MARGIN
from pallas_kernels import CACHE_FORMATS

pytestmark = pytest.mark.unoptimised

INTERMEDIATE = 5e-5
"""Absolute, of f32 against float64; streams reach 30. Measured: at most 2e-5."""
PRESETS = ["tiny", *(pytest.param(p, marks=pytest.mark.slow) for p in ("ratios", "engram"))]


@functools.cache
def recorded(preset):
    with np.load(v41.oracle_path(preset)) as file:
        found = dict(file)
    assert json.loads(str(found.pop("config"))) == v41.contents(preset.removesuffix("_cache"))
    return found


@functools.cache
def model(preset):
    """Config and parameters of a checkpoint whose weights are those that were recorded."""
    seed = int(recorded(preset)["seed"])
    with tempfile.TemporaryDirectory() as name:  # tables that are mapped outlive their files
        folder = v41.write_folder(pathlib.Path(name), preset, seed=seed)
        config, params = ds.load_checkpoint(folder, weights="float32", progress=False)
    sums = v41.weight_sums(v41.draw_weights(config, seed))
    np.testing.assert_allclose(recorded(preset)["weight_sums"], sums, rtol=1e-6)
    return config, params


@pytest.fixture(scope="module", params=PRESETS)
def case(request):
    """Config, parameters, what was recorded, and our values by the same names."""
    config, params = model(request.param)
    found = recorded(request.param)
    run = functools.partial(forward, token_ids=found["token_ids"], config=config)
    return config, params, found, capture.by_layer(capture.capture(run, params))


@pytest.mark.slow
def test_logits_are_those_of_the_oracle(case):
    _, _, wanted, found = case
    np.testing.assert_allclose(found["logits"], wanted["logits"], rtol=0, atol=1e-4)
    assert np.abs(wanted["logits"]).max() > 3


@pytest.mark.slow
def test_every_layer_selects_what_the_oracle_selects(case):
    config, _, wanted, found = case
    layers = [name for name in wanted if name.endswith("/idx/topk")]
    assert [int(re.findall(r"\d+", n)[0]) for n in layers] == list(config.sources.selectors)
    for name in layers:
        assert wanted[name.replace("topk", "margin")].min() > INDEX_MARGIN
        np.testing.assert_array_equal(found[name], wanted[name])
    if config.sources.candidates is not None:
        at = f"L{config.sources.candidates.layer}/idx/candidates"
        seen = (wanted[at].sum(-1) > 0) & (wanted[at].sum(-1) < np.arange(wanted[at].shape[1]) + 1)
        assert seen.any(), "no query has entries that are no candidates"
        visible = np.tril(np.ones(wanted[at].shape[1:], bool))
        np.testing.assert_array_equal(np.asarray(found[at]) & visible, wanted[at] & visible)


@pytest.mark.slow
def test_intermediates_are_those_of_the_oracle(case):
    _, _, wanted, found = case
    special = ("idx/topk", "idx/candidates", "engram/hash", "margin", "main_hidden", "logits")
    compared = 0
    for name, values in wanted.items():
        if name in ("seed", "weight_sums", "token_ids") or any(s in name for s in special):
            continue
        if name.endswith("/in") and f"{name[:-3]}/engram/gate" in found:
            continue  # the oracle's is before the Engram write
        ours = np.asarray(found[name])
        batch = len(wanted["token_ids"])
        ours = ours.reshape(batch, -1, *ours.shape[1:]) if len(ours) != batch else ours
        np.testing.assert_allclose(
            v41.sample(ours), values, rtol=0, atol=INTERMEDIATE, err_msg=name
        )
        compared += 1
    assert compared > 12


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_the_tables_are_those_of_the_oracle(preset):
    (config, params), wanted = model(preset), recorded(preset)
    if config.engram is None:
        return
    rows = hash_rows(config.engram, params.engram.normalized, wanted["token_ids"])
    for number, layer in enumerate(config.engram.layers):
        np.testing.assert_array_equal(rows[:, :, number], wanted[f"L{layer}/engram/hash"])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "ratios"])
def test_a_draft_reads_the_inputs_of_its_target_layers(preset):
    config, params = model(preset)
    run = jax.jit(forward_means, static_argnames=("target_layers", "config"))
    wanted, targets = recorded(preset), config.dspark.target_layers
    _, means = run(params, wanted["token_ids"], targets, config=config)
    means = np.asarray(means).reshape(wanted["main_hidden"].shape)
    np.testing.assert_allclose(means, wanted["main_hidden"], rtol=0, atol=INTERMEDIATE)


@pytest.mark.slow
def test_a_prefix_has_the_logits_of_the_whole():
    """Nothing looks ahead: pairs that are open, blocks of candidates and n-grams end with it."""
    config, params = model("tiny")
    wanted = recorded("tiny")
    for length in (1, 2, 3, 9, 22):
        ids = wanted["token_ids"][:, :length]
        logits = jax.jit(forward, static_argnames="config")(params, ids, config=config)
        np.testing.assert_allclose(logits, wanted["logits"][:, :length], rtol=0, atol=1e-4)


def test_tables_are_read_in_a_program_too():
    config, params = model("tiny")
    ids = recorded("tiny")["token_ids"]
    found = jax.jit(functools.partial(look_up_rows, params.engram))(ids)
    np.testing.assert_array_equal(found, params.engram.rows(ids))
    without = dataclasses.replace(params, engram=None)
    with pytest.raises(
        ValueError, match=r"params\.engram must be the Engram tables of config, got"
    ):
        forward(without, ids, config=config)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "engram"])
def test_rounding_of_a_cache_in_the_models_own_formats_is_that_of_the_oracle(preset):
    """Whose values of other layers follow from what was rounded: a midpoint moves all of them.

    In these models none does: logits are within 3e-6 (CPU, jax 0.12.0, 2026-11-29).
    """
    config, params = model(preset)
    wanted, fmt = recorded(f"{preset}_cache"), CACHE_FORMATS["fp4_e4m3"]
    run = functools.partial(
        forward, token_ids=wanted["token_ids"], config=config, cache_format=fmt.name
    )
    found = capture.by_layer(capture.capture(run, params))
    off = np.abs(found["logits"] - wanted["logits"])
    assert np.median(off) < 1e-4
    assert np.mean(off.max(-1) < 1e-3) > 0.9
    exact = recorded(preset)["logits"]
    assert np.median(np.abs(exact - wanted["logits"])) > 1e-2, "rounding changes nothing"
    for layer in config.sources.selectors:
        selected, margin = (wanted[f"L{layer}/idx/{name}"] for name in ("topk", "margin"))
        clear = margin > INDEX_MARGIN
        np.testing.assert_array_equal(found[f"L{layer}/idx/topk"][clear], selected[clear])
    for layer in config.sources.makers:
        entries = fmt.round_entry(found[f"L{layer}/comp/entries"], config.rope_dim)
        keys = fmt.round_index(found[f"L{layer}/idx/keys"])
        for name, values in (("comp/entries", entries), ("idx/keys", keys)):
            differs = np.abs(v41.sample(np.asarray(values)) - wanted[f"L{layer}/{name}"]) > 1e-3
            assert differs.mean() < 0.01


@pytest.mark.parametrize("cache_format", ["fp8_ue8m0", "fp8_per_entry"])
def test_formats_of_v4_are_refused(cache_format):
    config, params = model("tiny")
    with pytest.raises(NotImplementedError, match="cache_format must be 'f32' or 'bf16'"):
        forward(params, recorded("tiny")["token_ids"], config=config, cache_format=cache_format)


def test_the_first_sublayer_reads_the_first_stream_and_the_weights_survive_a_write():
    streams = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    residual = Residual.start(jnp.asarray(streams), shifted=True)
    np.testing.assert_array_equal(residual.collapsed(), streams[:, 0])
    other = residual.with_streams(jnp.asarray(2 * streams))
    np.testing.assert_array_equal(other.written(), 2 * streams)
    np.testing.assert_array_equal(other.collapsed(), 2 * streams[:, 0])
    assert Residual.start(jnp.asarray(streams)).pre is None


def candidates_of(scores, visible, blocks, size):
    """deepseek_v41.md section 7, query by query."""
    chosen = np.zeros(scores.shape, bool)
    for place in np.ndindex(scores.shape[:-1]):
        count = visible[place]
        best = {}
        for entry in range(count):
            best[entry // size] = max(best.get(entry // size, -np.inf), scores[place][entry])
        if count:
            best[(count - 1) // size] = np.inf
        kept = sorted(best, key=lambda block: (-best[block], block))[:blocks]
        for block in kept:
            chosen[place][block * size : (block + 1) * size] = True
    return chosen


@pytest.mark.parametrize(
    ("blocks", "size"),
    [(3, 3), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((2, 4), (1, 8), (50, 2)))],
)
def test_candidates_are_the_best_blocks_and_the_newest(blocks, size):
    rng = np.random.default_rng(3)
    scores = rng.integers(-3, 4, (2, 12, 23)).astype(np.float32)  # with ties
    visible = np.broadcast_to(np.arange(12) * 2, (2, 12)).astype(np.int32)
    scores = np.where(np.arange(23) < visible[..., None], scores, 99)  # what may not be seen
    limit = Candidates(layer=0, blocks=blocks, block_size=size)
    sized = {"scores": scores, "visible": visible, "positions": visible}

    @jax.jit
    def choose(arrays):
        return choose_candidates(Selection(**arrays, top_k=4, queries=None, entries=None), limit)

    found = choose(sized)
    wanted = candidates_of(scores, visible, blocks, size)
    np.testing.assert_array_equal(found, wanted)
    for query in range(1, 12):
        assert found[0, query, 2 * query - 1], "the newest entry is always a candidate"


@pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_the_width_of_experts_divides_by_blocks_of_32(devices):
    """2304 is no multiple of 128 times 8, and 288 is one of 32."""
    config, mesh = DSV4Config.v41_flash(), AbstractMesh((1, devices), AXES)
    shapes = param_shapes(config, weights="stored")
    param_shardings(config, mesh, shapes)
    by_128 = param_shapes(dataclasses.replace(config, weight_block=128), weights="stored")
    if devices > 2:
        with pytest.raises(ValueError, match="128"):
            param_shardings(config, mesh, by_128)


def test_random_parameters_have_every_leaf():
    config = DSV4Config.from_hf(v41.contents("ratios"))
    params = ds.init_params(config, jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, param_shapes(config))
    assert params.hc_head is None
    assert params.mtp.hc_head is None


def test_flax_writes_arrays_of_the_model_and_no_tables():
    _, params = v41_cache.model()
    placed = dataclasses.replace(params, engram=place_tables(params.engram, "pinned"))
    state = serialization.to_bytes(params)
    assert serialization.to_bytes(placed) == state
    empty = jax.tree.map(jnp.zeros_like, params)
    for target in (empty, dataclasses.replace(empty, engram=placed.engram)):
        found = serialization.from_bytes(target, state)
        assert found.engram is target.engram
        plain = dataclasses.replace(found, engram=None), dataclasses.replace(params, engram=None)
        jax.tree.map(np.testing.assert_array_equal, *plain)
    missing = serialization.to_state_dict(params)
    del missing["norm"]
    with pytest.raises(ValueError, match=r"a state must have the fields .*'norm'"):
        serialization.from_state_dict(params, missing)
