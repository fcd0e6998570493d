"""Checkpoints in and out: three namings, shards, quantised weights, drafts, and damaged files.

`tests/data/hf_saved_tiny` was saved by transformers; the tables below, which the package does not
read, rename its tensors.
"""

import dataclasses
import itertools
import json
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import dsv4_jax as ds
from dsv4_jax import progress
from dsv4_jax.checkpoint import save as checkpoint_save
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.write_json import write_config
from helpers import page_reader, slow, tolerance
from helpers.checkpoints import problems_of, random_fp8, random_scale, write_tensors

SAVED = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny"
NUM_LAYERS, NUM_EXPERTS = 3, 4

# What transformers saves, DeepSeek's own name, what transformers has in memory.
MODEL_NAMES = [
    ("model.embed_tokens.weight", "embed.weight", "model.embed_tokens.weight"),
    ("head.weight", "head.weight", "lm_head.weight"),
    ("model.norm.weight", "norm.weight", "model.norm.weight"),
    ("model.hc_head.hc_fn", "hc_head_fn", "model.hc_head.hc_fn"),
    ("model.hc_head.hc_base", "hc_head_base", "model.hc_head.hc_base"),
    ("model.hc_head.hc_scale", "hc_head_scale", "model.hc_head.hc_scale"),
]
# What DeepSeek and transformers, in memory, call a layer's tensors, after `layers.0.` and
# `model.layers.0.`. transformers saves them by DeepSeek's names, but for one.
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
SAVED_AS = {"attn.kv_norm.weight": "attn.norm.weight"}


def saved_tensors():
    return safetensors.numpy.load_file(SAVED / "model.safetensors")


def saved_config():
    return json.loads((SAVED / "config.json").read_text())


def write_checkpoint(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or saved_config()))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def load(folder, dtype=jnp.float32, weights="stored"):
    return ds.load_checkpoint(folder, dtype=dtype, weights=weights, progress=False)


def released_names(saved, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS):
    """DeepSeek's own names."""
    tensors = {own: saved[name] for name, own, _ in MODEL_NAMES}
    for layer in range(num_layers):
        for own in LAYER_NAMES:
            name = SAVED_AS.get(own, own)
            if f"model.layers.{layer}.{name}" in saved:
                tensors[f"layers.{layer}.{own}"] = saved[f"model.layers.{layer}.{name}"]
        for expert in range(num_experts):
            for w in ("w1", "w2", "w3"):
                own = f"layers.{layer}.ffn.experts.{expert}.{w}.weight"
                tensors[own] = saved[f"model.{own}"]
    assert len(tensors) == sum(not name.startswith("mtp.") for name in saved)
    return tensors


def names_in_memory(saved):
    """transformers' names: the experts of a layer are two tensors."""
    tensors = {memory: saved[name] for name, _, memory in MODEL_NAMES}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        for own, memory in LAYER_NAMES.items():
            name = SAVED_AS.get(own, own)
            if prefix + name in saved:
                tensors[prefix + memory] = saved[prefix + name]

        def stack(w, prefix=prefix):
            return np.stack(
                [saved[f"{prefix}ffn.experts.{e}.{w}.weight"] for e in range(NUM_EXPERTS)]
            )

        fused = np.concatenate([stack("w1"), stack("w3")], axis=1)
        tensors[prefix + "mlp.experts.gate_up_proj"] = fused
        tensors[prefix + "mlp.experts.down_proj"] = stack("w2")
    return tensors


def draft_tensors():
    """An MTP block in DeepSeek's names: a window layer with learned routing, and its own."""
    rng = np.random.default_rng(5)
    released = released_names(saved_tensors())
    layer = {n.removeprefix("layers.0."): a for n, a in released.items() if "layers.0." in n}
    layer["ffn.gate.bias"] = released["layers.1.ffn.gate.bias"]
    del layer["ffn.gate.tid2eid"]
    layer |= {f"{name}.weight": released["norm.weight"] for name in ("enorm", "hnorm", "norm")}
    layer |= {f"hc_head_{part}": released[f"hc_head_{part}"] for part in ("fn", "base", "scale")}
    layer |= {f"{name}.weight": np.zeros((32, 32), np.float32) for name in ("e_proj", "h_proj")}
    return {
        f"mtp.0.{name}": rng.standard_normal(array.shape, dtype=np.float32)
        for name, array in layer.items()
    }


def random_params(config, dtype=jnp.float32, seed=2):
    """No two tensors alike; not for computing."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if "tid2eid" in str(path[-1]):
            return jax.device_put(rng.integers(0, config.num_routed_experts, leaf.shape, np.int32))
        return jax.device_put(rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype))

    return jax.tree.map_with_path(draw, ds.model.param_shapes(config, dtype))


def assert_same(actual, expected):
    """Bit for bit, with structure and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(actual)[0], jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


@pytest.fixture(scope="module")
def fixture_params():
    return load(SAVED)


# Namings.


def test_logits_of_a_checkpoint_that_transformers_saved(fixture_params):
    config, params = fixture_params
    with np.load(SAVED / "logits.npz") as data:
        token_ids, expected = data["token_ids"], data["logits"]
    forward = jax.jit(ds.forward, static_argnames="config")
    logits = forward(params, jnp.asarray(token_ids), config=config)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance.INTERMEDIATE)
    # What the bound would not let pass: two experts' gates exchanged.
    ffn = params.layers["hca_learned"].ffn
    swapped = dataclasses.replace(ffn, w1=ffn.w1[:, jnp.array([1, 0, 2, 3])])
    layers = dict(params.layers)
    layers["hca_learned"] = dataclasses.replace(layers["hca_learned"], ffn=swapped)
    broken = dataclasses.replace(params, layers=layers)
    wrong = forward(broken, jnp.asarray(token_ids), config=config)
    assert np.max(np.abs(wrong - expected)) > 100 * tolerance.INTERMEDIATE


def test_namings_load_alike(tmp_path, fixture_params):
    """Also with the released form of the config beside DeepSeek's own names."""
    config, params = fixture_params
    data = saved_config()
    dropped = ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor")
    own_form = {name: value for name, value in data.items() if name not in dropped}
    own_form |= {"compress_ratios": [0, 4, 8, 0], "num_hash_layers": 1}
    yarn = own_form.pop("rope_parameters")["compress"]
    own_form["rope_scaling"] = {
        "type": "yarn",
        **{
            name: yarn[name]
            for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        },
    }
    saved = saved_tensors()
    for name, tensors, form in [
        ("own", released_names(saved), own_form),
        ("memory", names_in_memory(saved), data),
        ("copied", saved, data),
    ]:
        assert name == "copied" or tensors.keys() != saved.keys()
        loaded_config, loaded = load(write_checkpoint(tmp_path / name, tensors, form))
        assert loaded_config == config
        assert_same(loaded, params)


def test_layers_are_stacked_by_kind(tmp_path):
    config = ds.DSV4Config.tiny()
    params = random_params(config)
    ds.save_checkpoint(config, params, tmp_path)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for layer, kind, index in [
        (0, "swa_hash", 0),
        (1, "csa_hash", 0),
        (2, "hca_learned", 0),
        (3, "csa_learned", 0),
        (4, "hca_learned", 1),
        (5, "csa_learned", 1),
        (6, "swa_learned", 0),
    ]:
        layer_params, prefix = params.layers[kind], f"model.layers.{layer}."
        for name, leaf in [
            ("attn.wq_a.weight", layer_params.attn.wq_a[index]),
            ("attn.norm.weight", layer_params.attn.kv_norm[index]),
            ("hc_ffn_scale", layer_params.hc_ffn.scale[index]),
            ("ffn.experts.5.w2.weight", layer_params.ffn.w2[index, 5]),
            ("ffn.experts.0.w3.weight", layer_params.ffn.w3[index, 0]),
        ]:
            np.testing.assert_array_equal(stored[prefix + name], leaf)


def test_shards_with_an_index(tmp_path, fixture_params):
    tensors = released_names(saved_tensors())
    folder = write_checkpoint(tmp_path / "sharded", tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"part-{i}.safetensors": names[i::3] for i in range(3)}
    for file, part in shards.items():
        write_tensors(folder / file, {name: tensors[name] for name in part})
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_tensors(folder / "not_in_the_index.safetensors", {"x": np.zeros(3, np.float32)})
    assert_same(load(folder)[1], fixture_params[1])

    (folder / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors"):
        load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index(tmp_path, text):
    folder = write_checkpoint(tmp_path / "broken", saved_tensors())
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load(folder)


# Number formats.


@pytest.mark.parametrize(
    ("stored", "dtype"),
    slow.all_but(
        [(ml_dtypes.bfloat16, jnp.float32), (np.float32, jnp.float16), (np.float16, jnp.bfloat16)],
        list(
            itertools.product(
                [ml_dtypes.bfloat16, np.float16, np.float32],
                [jnp.bfloat16, jnp.float16, jnp.float32],
            )
        ),
    ),
)
def test_dtypes(tmp_path, fixture_params, stored, dtype):
    """Matrices come in the dtype asked for; what is f32 in the release stays f32."""
    float32 = re.compile(r"hc_|\.ape$|attn_sink$|gate\.bias$")
    tensors = {
        name: array.astype(stored)
        if array.dtype == np.float32 and not float32.search(name)
        else array
        for name, array in saved_tensors().items()
    }
    _, params = load(write_checkpoint(tmp_path / "x", tensors), dtype)
    shapes = ds.model.param_shapes(fixture_params[0], jnp.bfloat16)

    def expected(leaf, shape):
        leaf = np.asarray(leaf)
        return leaf.astype(stored).astype(dtype) if shape.dtype == jnp.bfloat16 else leaf

    assert_same(params, jax.tree.map(expected, fixture_params[1], shapes))
    assert params.dtype == dtype
    assert params.hc_head.fn.dtype == jnp.float32
    assert params.layers["swa_hash"].ffn.tid2eid.dtype == jnp.int32


QUANTISED = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(AttentionType.SWA,),
    router_types=(RouterType.LEARNED,),
    hidden_size=176,  # neither 128 nor 32 divides it
    moe_intermediate_size=160,
    q_lora_rank=136,
    num_routed_experts=2,
    num_experts_per_token=1,
    num_mtp_layers=0,
)
FP8_NAMES = {"attn.wq_a": "wq_a", "attn.wq_b": "wq_b", "attn.wkv": "wkv", "attn.wo_b": "wo_b"}


@pytest.fixture(scope="module")
def unquantised(tmp_path_factory):
    """f32 tensors of QUANTISED in DeepSeek's names."""
    folder = tmp_path_factory.mktemp("unquantised")
    ds.save_checkpoint(QUANTISED, random_params(QUANTISED), folder)
    saved = safetensors.numpy.load_file(folder / "model.safetensors")
    return released_names(saved, num_layers=1, num_experts=2)


def scale_value(scale):
    """f64; UE8M0 by its bits."""
    if scale.dtype == np.float32:
        return scale.astype(np.float64)
    return page_reader.ue8m0_values(scale.view(np.uint8))


def slow_fp8(codes, scale):
    values, scale = np.empty(codes.shape), scale_value(scale)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            values[i, j] = page_reader.E4M3[codes[i, j]] * scale[i // 128, j // 128]
    return values.astype(np.float32)  # a product of 4 and 24 bits is exact in f64


def slow_fp4(pairs, scale):
    values, scale = np.empty((pairs.shape[0], 2 * pairs.shape[1])), scale_value(scale)
    for i in range(pairs.shape[0]):
        for j in range(values.shape[1]):
            code = pairs[i, j // 2] >> 4 if j % 2 else pairs[i, j // 2] & 15
            values[i, j] = page_reader.E2M1[code] * scale[i, j // 32]
    return values.astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    slow.all_but(
        [("UE8M0", "scale"), ("F32", "weight_scale_inv")],
        list(itertools.product(["UE8M0", "F32"], ["scale", "weight_scale_inv"])),
    ),
)
def test_fp8_blocks(tmp_path, unquantised, kind, suffix):
    rng = np.random.default_rng(7)
    tensors, expected = dict(unquantised), {}
    for name, leaf in FP8_NAMES.items():
        out, into = tensors[f"layers.0.{name}.weight"].shape
        codes = random_fp8(rng, (out, into))
        scale = random_scale(rng, (-(-out // 128), -(-into // 128)), kind)
        tensors[f"layers.0.{name}.weight"] = codes.view(ml_dtypes.float8_e4m3fn)
        tensors[f"layers.0.{name}.{suffix}"] = scale
        expected[leaf] = slow_fp8(codes, scale)
    assert any(array.shape[0] > 128 and array.shape[1] > 128 for array in expected.values())
    folder = write_checkpoint(tmp_path / "x", tensors, write_config(QUANTISED))
    attn = load(folder, weights="float32")[1].layers["swa_learned"].attn
    for leaf, values in expected.items():
        np.testing.assert_array_equal(getattr(attn, leaf)[0], values)
    rounded = load(folder, jnp.bfloat16, "bfloat16")[1].layers["swa_learned"].attn
    for leaf, values in expected.items():
        np.testing.assert_array_equal(getattr(rounded, leaf)[0], values.astype(jnp.bfloat16))


@pytest.mark.parametrize("packed", [np.int8, np.uint8])
def test_packed_fp4_experts(tmp_path, unquantised, packed):
    rng = np.random.default_rng(8)
    tensors = dict(unquantised)
    expected = {w: [] for w in ("w1", "w2", "w3")}
    for expert in range(2):
        for w in expected:
            name = f"layers.0.ffn.experts.{expert}.{w}"
            out, into = tensors[f"{name}.weight"].shape
            pairs = rng.integers(0, 256, (out, into // 2), dtype=np.uint8)
            scale = random_scale(rng, (out, -(-into // 32)), "UE8M0")
            tensors |= {f"{name}.weight": pairs.view(packed), f"{name}.scale": scale}
            expected[w].append(slow_fp4(pairs, scale))
    folder = write_checkpoint(tmp_path / "x", tensors, write_config(QUANTISED))
    ffn = load(folder, weights="float32")[1].layers["swa_learned"].ffn
    for w, values in expected.items():
        np.testing.assert_array_equal(getattr(ffn, w)[0], np.stack(values))


def test_quantised_weights_that_do_not_fit(tmp_path, unquantised):
    e4m3, f32 = ml_dtypes.float8_e4m3fn, np.float32
    wq_a, wkv = (unquantised[f"layers.0.attn.{name}.weight"] for name in ("wq_a", "wkv"))
    expert = unquantised["layers.0.ffn.experts.0.w1.weight"]
    tensors = unquantised | {
        "layers.0.attn.wq_a.weight": wq_a.astype(e4m3),  # without a scale
        "layers.0.attn.wkv.weight": wkv.astype(e4m3),
        "layers.0.attn.wkv.scale": np.ones((2, 1), f32),
        "layers.0.attn_norm.weight": np.ones(176, e4m3),
        "layers.0.attn_norm.scale": np.ones((1, 1), f32),
        "layers.0.attn.wo_b.scale": np.ones((2, 1), f32),  # of a weight that is not quantised
        "layers.0.ffn.experts.0.w1.weight": np.zeros((len(expert), 88), np.int8),
    }
    folder = write_checkpoint(tmp_path / "x", tensors, write_config(QUANTISED))
    assert problems_of(folder, dtype=jnp.float32) == [
        "missing: scale of layers.0.attn.wq_a.weight, which is float8_e4m3fn",
        "missing: scale of layers.0.ffn.experts.0.w1.weight, which is int8",
        "unexpected: layers.0.attn.wo_b.scale [2, 1]",
        "wrong dtype: layers.0.attn_norm.weight, which is float8_e4m3fn",
        "wrong shape: scale of layers.0.attn.wkv.weight must be [1, 2], is [2, 1]",
    ]


@pytest.mark.parametrize("dtype", [np.int32, np.float64, "float8_e4m3fn"])
def test_dtype_that_parameters_cannot_have(dtype):
    with pytest.raises(ValueError, match="dtype must be one of"):
        load(SAVED, dtype)


# The draft block.


def test_draft_absent(fixture_params):
    """The config announces a draft block, as transformers' own saves do; the file has none."""
    assert saved_config()["num_nextn_predict_layers"] == 1
    config, params = fixture_params
    assert config.num_mtp_layers == 0
    assert params.mtp is None


def test_draft_whole(tmp_path, fixture_params):
    draft = draft_tensors()
    config, params = load(write_checkpoint(tmp_path / "x", saved_tensors() | draft))
    assert config == dataclasses.replace(fixture_params[0], num_mtp_layers=1)
    assert_same(dataclasses.replace(params, mtp=None), fixture_params[1])
    mtp = params.mtp
    for name, leaf in [
        ("e_proj.weight", mtp.e_proj),
        ("h_proj.weight", mtp.h_proj),
        ("enorm.weight", mtp.enorm),
        ("hnorm.weight", mtp.hnorm),
        ("norm.weight", mtp.norm),
        ("hc_head_fn", mtp.hc_head.fn),
        ("hc_head_base", mtp.hc_head.base),
        ("hc_head_scale", mtp.hc_head.scale),
        ("attn_norm.weight", mtp.block.attn_norm),
        ("attn.wq_a.weight", mtp.block.attn.wq_a),
        ("attn.kv_norm.weight", mtp.block.attn.kv_norm),
        ("attn.attn_sink", mtp.block.attn.attn_sink),
        ("hc_attn_fn", mtp.block.hc_attn.fn),
        ("ffn.gate.bias", mtp.block.ffn.bias),
        ("ffn.experts.3.w3.weight", mtp.block.ffn.w3[3]),
        ("ffn.shared_experts.w2.weight", mtp.block.ffn.shared_w2),
    ]:
        np.testing.assert_array_equal(leaf, draft[f"mtp.0.{name}"])


def test_draft_in_part_is_an_error(tmp_path):
    draft = draft_tensors()
    del draft["mtp.0.enorm.weight"], draft["mtp.0.ffn.experts.2.w1.weight"]
    folder = write_checkpoint(tmp_path / "x", saved_tensors() | draft)
    assert problems_of(folder, dtype=jnp.float32) == [
        "missing: mtp.0.enorm.weight [32]",
        "missing: mtp.0.ffn.experts.2.w1.weight [20, 32]",
    ]


@pytest.mark.parametrize("num_nextn", [0, 3])
def test_draft_is_ignored_where_the_config_has_none(tmp_path, fixture_params, num_nextn):
    """With three stages, which are of another kind, too."""
    draft = draft_tensors()
    draft |= {name.replace("mtp.0", f"mtp.{i}"): a for name, a in draft.items() for i in (1, 2)}
    form = saved_config() | {"num_nextn_predict_layers": num_nextn}
    config, params = load(write_checkpoint(tmp_path / "x", saved_tensors() | draft, form))
    assert config.num_mtp_layers == 0
    assert_same(params, fixture_params[1])


# Files that do not fit, and damaged ones.


def test_all_problems_are_listed(tmp_path):
    tensors = released_names(saved_tensors())
    del tensors["layers.0.attn.wq_a.weight"], tensors["layers.2.ffn.experts.3.w2.weight"]
    tensors |= {
        "layers.1.attn.wkv.weight": np.zeros((16, 31), np.float32),
        "layers.1.ffn.experts.0.w1.weight": np.zeros((20, 32, 1), np.float32),
        "layers.3.attn_norm.weight": np.zeros(32, np.float32),
        "layers.0.attn.compressor.ape": np.zeros((4, 32), np.float32),
        "lm_head.weight": tensors["head.weight"],
        "layers.0.ffn.gate.tid2eid": np.zeros((64, 2), np.float32),
        "norm.weight": np.ones(32, np.int32),
    }
    folder = write_checkpoint(tmp_path / "x", tensors)
    assert problems_of(folder, dtype=jnp.float32) == [
        "missing: layers.0.attn.wq_a.weight [12, 32]",
        "missing: layers.2.ffn.experts.3.w2.weight [32, 20]",
        "twice: head.weight, as head.weight and lm_head.weight",
        "unexpected: layers.0.attn.compressor.ape [4, 32]",
        "unexpected: layers.3.attn_norm.weight [32]",
        "wrong dtype: layers.0.ffn.gate.tid2eid, which is float32",
        "wrong dtype: norm.weight, which is int32",
        "wrong shape: layers.1.attn.wkv.weight must be [16, 32], is [16, 31]",
        "wrong shape: layers.1.ffn.experts.0.w1.weight must be [20, 32], is [20, 32, 1]",
    ]


@pytest.mark.parametrize("shape", [(4, 38, 32), (3, 40, 32), (5, 40, 32), (40, 32), ()])
def test_fused_experts_of_a_wrong_shape(tmp_path, shape):
    tensors = names_in_memory(saved_tensors())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"gate_up_proj|layers\.1\.ffn\.experts\.3\.w1"):
        load(write_checkpoint(tmp_path / "x", tensors))


def test_one_tensor_in_two_files(tmp_path):
    folder = write_checkpoint(tmp_path / "x", saved_tensors())
    write_tensors(folder / "other.safetensors", {"head.weight": saved_tensors()["head.weight"]})
    with pytest.raises(ValueError, match=r"head\.weight, in model\.safetensors and other\."):
        load(folder)


def test_truncated_file(tmp_path):
    whole = (SAVED / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    folder = write_checkpoint(tmp_path / "x", {})
    file = folder / "model.safetensors"
    for size in [0, 4, 8, header // 2, header - 1, header, header + 1, len(whole) // 2]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
            load(folder)
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"of {len(whole) - 1:,}$"):
        load(folder)
    file.write_bytes(whole)
    load(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        (4).to_bytes(8, "little") + b"{{{{",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        (4).to_bytes(8, "little") + b"1234",
    ],
)
def test_no_safetensors_file(tmp_path, content):
    folder = write_checkpoint(tmp_path / "x", {})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is.* no safetensors file"):
        load(folder)


def test_shape_and_bytes_disagree(tmp_path):
    folder = write_checkpoint(tmp_path / "x", {"norm.weight": np.zeros(32, np.float32)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape": [32]', b'"shape": [31]'))
    with pytest.raises(ValueError, match=r"damaged: norm\.weight"):
        load(folder)


def test_stored_dtype_that_is_unknown(tmp_path):
    tensors = saved_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* has dtype F64"):
        load(write_checkpoint(tmp_path / "x", tensors))


@pytest.mark.parametrize("expert", [-1, NUM_EXPERTS])
def test_hash_table_that_names_no_expert(tmp_path, expert):
    tensors = saved_tensors()
    tensors["model.layers.0.ffn.gate.tid2eid"][17, 1] = expert
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.gate\.tid2eid must hold experts 0\.\.3"):
        load(write_checkpoint(tmp_path / "x", tensors))


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    write_tensors(tmp_path / "model.safetensors", saved_tensors())
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"pass one that holds a config\.json"):
        load(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(saved_config()))
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        load(tmp_path)


def test_progress_is_on_stderr_and_can_be_off(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0)  # else a short work shows nothing
    ds.load_checkpoint(SAVED, dtype=jnp.float32)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loading" in shown.err
    ds.load_checkpoint(SAVED, dtype=jnp.float32, progress=False)
    assert capsys.readouterr() == ("", "")


# Saving.


def tiny_params(dtype=jnp.float32, **changes):
    config = dataclasses.replace(ds.DSV4Config.tiny(), **changes)
    return config, random_params(config, dtype)


@pytest.mark.parametrize(
    "dtype", slow.all_but([jnp.bfloat16], [jnp.float32, jnp.bfloat16, jnp.float16])
)
def test_round_trip(tmp_path, dtype):
    config, params = tiny_params(dtype)
    assert params.mtp is not None
    ds.save_checkpoint(config, params, tmp_path / "new" / "folder")
    loaded_config, loaded = load(tmp_path / "new" / "folder", dtype)
    assert loaded_config == config
    assert_same(loaded, params)
    names = {file.name for file in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_round_trip_without_a_draft(tmp_path):
    config, params = tiny_params(num_mtp_layers=0)
    ds.save_checkpoint(config, params, tmp_path)
    loaded_config, loaded = load(tmp_path)
    assert loaded_config == config
    assert_same(loaded, params)


def test_saved_names_are_those_of_transformers(tmp_path, fixture_params):
    """Names, dtypes and bytes, for a reader that knows nothing of us."""
    config, params = fixture_params
    ds.save_checkpoint(config, params, tmp_path)
    stored, expected = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (tmp_path, SAVED)
    )
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        assert stored[name].dtype == array.dtype, name
        np.testing.assert_array_equal(stored[name], array)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("limit", [200_000, 2500])  # 2500: a hash table counts as i64
def test_sharded_save(tmp_path, limit):
    config, params = tiny_params(jnp.bfloat16)
    ds.save_checkpoint(config, params, tmp_path, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[1] == f"model-00002-of-{len(shards):05}.safetensors"
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors.index.json", *shards}
    for shard in shards:
        with safetensors.safe_open(tmp_path / shard, "numpy") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert len(held) == 1 or sum(array.nbytes for array in held.values()) <= limit
        assert held.keys() == {n for n, where in index["weight_map"].items() if where == shard}
    assert_same(load(tmp_path, jnp.bfloat16)[1], params)


def test_a_shard_for_each_tensor_that_is_too_large(tmp_path, fixture_params):
    config, params = fixture_params
    ds.save_checkpoint(config, params, tmp_path, max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(saved_tensors())
    assert_same(load(tmp_path)[1], params)


@pytest.mark.parametrize(
    ("first", "second"),
    slow.all_but(
        [(None, 300_000), (100_000, None), (100_000, 300_000)],
        list(itertools.product([None, 100_000, 300_000], repeat=2)),
    ),
)
def test_saving_over_another_checkpoint(tmp_path, first, second):
    """Shards and index of the first would be found by readers of the second."""

    def limit(size):
        return {} if size is None else {"max_shard_bytes": size}

    config, old = tiny_params(jnp.bfloat16)
    new = random_params(config, jnp.bfloat16, seed=4)
    (tmp_path / "tokenizer.json").write_text("{}")
    ds.save_checkpoint(config, old, tmp_path, **limit(first))
    ds.save_checkpoint(config, new, tmp_path, **limit(second))
    assert_same(load(tmp_path, jnp.bfloat16)[1], new)
    ds.save_checkpoint(config, new, tmp_path / "fresh", **limit(second))
    fresh = files_of(tmp_path / "fresh")
    for file in (tmp_path / "fresh").iterdir():
        file.unlink()
    (tmp_path / "fresh").rmdir()
    assert files_of(tmp_path) == fresh | {"tokenizer.json": b"{}"}


def test_params_that_do_not_fit_are_all_listed(tmp_path):
    config, params = tiny_params()
    layers = dict(params.layers)
    del layers["swa_hash"]
    hca = layers["hca_learned"]
    attn = dataclasses.replace(hca.attn, wq_a=hca.attn.wq_a[:, :-1])
    layers["hca_learned"] = dataclasses.replace(hca, attn=attn)
    wrong = dataclasses.replace(
        params,
        layers=layers,
        mtp=None,
        norm=params.norm.astype(jnp.bfloat16),
        head=params.head[:-1],
    )
    with pytest.raises(ValueError, match="params are not those of config") as caught:
        ds.save_checkpoint(config, wrong, tmp_path / "x")
    message = str(caught.value)
    for line in [
        "head must be float32[96, 64], is float32[95, 64]",
        "norm must be float32[64], is bfloat16[64]",
        "layers.hca_learned.attn.wq_a must be float32[2, 24, 64], is float32[2, 23, 64]",
        "layers.swa_hash.attn.wkv must be float32[1, 32, 64], is absent",
        "mtp.e_proj must be float32[64, 64], is absent",
    ]:
        assert line in message
    assert not (tmp_path / "x").exists()
    without = dataclasses.replace(config, num_mtp_layers=0)
    with pytest.raises(ValueError, match=r"mtp\.h_proj must be absent, is float32\[64, 64\]"):
        ds.save_checkpoint(without, params, tmp_path / "x")


def test_saving_onto_a_file(tmp_path, fixture_params):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(NotADirectoryError, match="file"):
        ds.save_checkpoint(*fixture_params, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


class DiskFullError(OSError):
    pass


def fail_at(monkeypatch, number):
    """The given call of `save_file` writes half a file and raises."""
    calls = []

    def save_file(tensors, file, metadata):
        calls.append(file)
        safetensors.numpy.save_file(tensors, file, metadata)
        if len(calls) == number:
            file.write_bytes(file.read_bytes()[:100])
            raise DiskFullError

    monkeypatch.setattr(checkpoint_save, "save_file", save_file)


def test_a_failing_save_leaves_no_file_that_readers_take(tmp_path, monkeypatch):
    config, params = tiny_params(jnp.bfloat16)
    fail_at(monkeypatch, 2)
    with pytest.raises(DiskFullError):
        ds.save_checkpoint(config, params, tmp_path, max_shard_bytes=300_000)
    assert all(file.suffix == ".partial" for file in tmp_path.iterdir())


def test_a_failing_save_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    config, old = tiny_params(jnp.bfloat16)
    new = random_params(config, jnp.bfloat16, seed=4)
    ds.save_checkpoint(config, old, tmp_path, max_shard_bytes=300_000)
    before = files_of(tmp_path)
    with monkeypatch.context() as patch:
        fail_at(patch, 2)
        with pytest.raises(DiskFullError):
            ds.save_checkpoint(config, new, tmp_path, max_shard_bytes=300_000)
    after = files_of(tmp_path)
    assert {name: data for name, data in after.items() if name in before} == before
    assert_same(load(tmp_path, jnp.bfloat16)[1], old)
    ds.save_checkpoint(config, new, tmp_path, max_shard_bytes=300_000)
    assert files_of(tmp_path).keys() == before.keys()
    assert_same(load(tmp_path, jnp.bfloat16)[1], new)


# Other readers.


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_bytes", [2**30, 100_000])
def test_transformers_loads_what_we_save(tmp_path, max_shard_bytes):
    """Nothing missing, nothing unexpected but the draft block, which it ignores; equal logits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        config = ds.DSV4Config.tiny()
        params = ds.init_params(config, jax.random.key(0))
        ds.save_checkpoint(config, params, tmp_path, max_shard_bytes=max_shard_bytes)
        model, info = transformers.DeepseekV4ForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True, attn_implementation="eager"
        )
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 80))
        with torch.no_grad():
            expected = model.eval()(torch.from_numpy(ids), use_cache=False).logits.numpy()
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in info["unexpected_keys"])
    logits = ds.forward(params, jnp.asarray(ids, jnp.int32), config=config)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance.INTERMEDIATE)
