"""Three namings of a checkpoint's tensors, and its shards."""

import dataclasses
import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dsv4_jax as ds
from dsv4_jax.checkpoint.names import _TO_CANONICAL, canonical_name
from helpers import tolerance
from helpers.checkpoints import write_tensors
from helpers.saved_checkpoint import (
    LAYER_NAMES,
    SAVED,
    assert_same,
    load,
    names_in_memory,
    random_params,
    released_names,
    saved_config,
    saved_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.unoptimised


@pytest.mark.slow
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


def test_a_name_that_is_left_as_it_is_fits_none_of_the_patterns():
    """Names that are canonical by a quick look are not taken through all the patterns."""
    words = {word for pattern, _ in _TO_CANONICAL for word in re.findall(r"\w+", pattern.pattern)}
    words |= {word for names in LAYER_NAMES.items() for name in names for word in name.split(".")}
    words |= {"model", "language_model", "layers", "mtp", "0", "12", "x", "gate_up_proj_scale_inv"}
    pick = random.Random(0)
    for _ in range(20_000):
        name = ".".join(pick.choices(sorted(words), k=pick.randint(1, 6)))
        expected = name
        for pattern, replacement in _TO_CANONICAL:
            expected = pattern.sub(replacement, expected)
        assert canonical_name(name) == expected


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
