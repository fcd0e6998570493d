"""What is saved, what a failing save leaves, and who reads it."""

import dataclasses
import itertools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dsv4_jax as ds
from dsv4_jax.checkpoint import save as checkpoint_save
from helpers import slow, tolerance
from helpers.saved_checkpoint import (
    SAVED,
    assert_same,
    load,
    random_params,
    saved_tensors,
)

pytestmark = pytest.mark.unoptimised


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
