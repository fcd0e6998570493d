"""`dsv4-jax convert`: to the formats of the release and back, restarted, and refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint import convert
from dsv4_jax.cli import main
from dsv4_jax.model import param_shapes, quantize_params
from helpers.checkpoints import read_tensors, released_tensors, write_released

CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(ds.AttentionType.SWA, ds.AttentionType.CSA),
    router_types=(ds.RouterType.HASH, ds.RouterType.LEARNED),
    hidden_size=176,
    moe_intermediate_size=160,
    q_lora_rank=136,
    num_routed_experts=3,
)


def load(folder, **options):
    return ds.load_checkpoint(folder, progress=False, **options)[1]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A checkpoint in BF16, with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("dense")
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if "tid2eid" in jax.tree_util.keystr(path):
            return jnp.asarray(rng.integers(0, CONFIG.num_routed_experts, leaf.shape), leaf.dtype)
        return jax.device_put(rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype))

    params = jax.tree.map_with_path(draw, param_shapes(CONFIG, jnp.bfloat16))
    ds.save_checkpoint(CONFIG, params, folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "optimizer.bin").write_text("not ours")
    return folder


@pytest.fixture(scope="module")
def released(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parent") / "new" / "released"
    assert main(["convert", str(dense), str(folder), "--weights", "released"]) == 0
    return folder


def test_a_dense_checkpoint_in_released_formats(dense, released):
    params = load(released)
    assert_same(params, quantize_params(CONFIG, load(dense)))
    assert {file.name for file in released.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    fields = json.loads((released / "config.json").read_text())
    before = json.loads((dense / "config.json").read_text())
    assert fields.pop("expert_dtype") == "fp4"
    assert fields.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }
    assert fields == before | {"dtype": "bfloat16"}
    stored = read_tensors(released / "model.safetensors")
    assert stored["layers.1.ffn.experts.2.w2.weight"][:2] == ("I8", (176, 80))
    assert stored["layers.1.ffn.experts.2.w2.scale"][:2] == ("F8_E8M0", (176, 5))
    assert stored["mtp.0.e_proj.weight"][:2] == ("F8_E4M3", (176, 176))
    assert stored["layers.0.attn.wo_b.scale"][:2] == ("F8_E8M0", (2, 1))


def test_what_was_written_is_what_saving_writes(released, tmp_path):
    ds.save_checkpoint(CONFIG, load(released), tmp_path)
    written = read_tensors(tmp_path / "model.safetensors")
    assert written == read_tensors(released / "model.safetensors")


def test_back_to_bf16(released, tmp_path, capsys):
    folder = tmp_path / "x"
    arguments = ["convert", str(released), str(folder), "--weights", "bfloat16"]
    assert main([*arguments, "--shard-gib", str(200_000 / 2**30)]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("file(s)\n")
    assert shown.err == "", "quickly done, and not on a terminal"
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_same(load(folder), load(released, weights="bfloat16"))
    fields = json.loads((folder / "config.json").read_text())
    assert fields["dtype"] == "bfloat16"
    assert fields.keys().isdisjoint({"quantization_config", "expert_dtype"})


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_what_is_quantised_keeps_its_bytes(tmp_path, experts):
    """With f32 scales too; but not beside others of its layers that are dense."""
    tensors = released_tensors(CONFIG, scales="F32", experts=experts)
    source = write_released(tmp_path / "a", CONFIG, tensors)
    convert.convert_checkpoint(source, tmp_path / "b", weights="released", progress=False)
    expected = read_tensors(source / "model.safetensors")
    assert read_tensors(tmp_path / "b" / "model.safetensors") == expected

    name = "layers.1.ffn.experts.1.w1"
    del tensors[f"{name}.scale"]
    tensors[f"{name}.weight"] = np.ones((160, 176), np.float32)
    source = write_released(tmp_path / "a", CONFIG, tensors)
    convert.convert_checkpoint(source, tmp_path / "c", weights="released", progress=False)
    ffn = load(tmp_path / "c").layers["csa_learned"].ffn
    assert type(ffn.w1).__name__ == "MXFP4"
    np.testing.assert_array_equal(ffn.w1.decode()[0, 1], np.ones((160, 176)))
    if experts == "fp4":  # values of FP4 are values of FP4 once more
        before = load(source, weights="float32").layers["csa_learned"].ffn.w1
        np.testing.assert_array_equal(ffn.w1.decode(), before)


class Interrupted(Exception):
    pass


def interrupt_at(patch, number):
    """The given call of `write_tensors` writes half of its file and raises."""
    calls, write = [], convert.write_tensors

    def write_tensors(file, header, arrays):
        calls.append(file.name)
        if len(calls) == number:
            file.with_name(f"{file.name}.partial").write_bytes(b"half")
            raise Interrupted
        write(file, header, arrays)

    patch.setattr(convert, "write_tensors", write_tensors)
    return calls


def test_an_interrupted_conversion_goes_on(dense, released, tmp_path, monkeypatch):
    folder = tmp_path / "x"

    def run():
        convert.convert_checkpoint(
            dense, folder, weights="released", max_shard_bytes=100_000, progress=False
        )

    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        with pytest.raises(Interrupted):
            run()
    assert not (folder / "config.json").exists()
    finished = sorted(file for file in folder.glob("*.safetensors"))
    assert len(finished) == 3
    kept = {file: file.stat().st_mtime_ns for file in finished}
    finished[1].write_bytes(finished[1].read_bytes()[:-1])  # lost by the disk
    with monkeypatch.context() as patch:
        calls = interrupt_at(patch, 0)
        run()
    assert calls[:2] == [finished[1].name, "model-00004-of-" + finished[0].name[-17:]]
    assert {finished[0].name, finished[2].name}.isdisjoint(calls)
    assert all(file.stat().st_mtime_ns == kept[file] for file in (finished[0], finished[2]))
    assert_same(load(folder), load(released))
    assert all(file.suffix in (".safetensors", ".json") for file in folder.iterdir())
    with pytest.raises(ValueError, match=r"holds a model already \(config\.json\)"):
        run()


def refusal(capsys, *arguments):
    """The one line of an error with status 2."""
    assert main(["convert", *map(str, arguments)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    return line.removeprefix("dsv4-jax convert: ")


def test_refusals_write_nothing(dense, released, tmp_path, capsys, monkeypatch):
    options = ("--weights", "released")
    before = files_of(dense)
    link = tmp_path / "link"
    link.symlink_to(dense)
    for same in (dense, link):
        assert "another directory than the source" in refusal(capsys, dense, same, *options)
    (tmp_path / "file").write_text("precious")
    assert "is a file" in refusal(capsys, dense, tmp_path / "file", *options)
    held = files_of(released)
    assert "holds a model already" in refusal(capsys, dense, released, *options)
    assert files_of(released) == held
    assert "no directory" in refusal(capsys, tmp_path / "nowhere", tmp_path / "x", *options)
    assert "shard-gib" in refusal(capsys, dense, tmp_path / "x", *options, "--shard-gib", 0)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        line = refusal(capsys, dense, tmp_path / "x" / "y", *options)
        assert "has 0.0 GiB of free space" in line
    assert not (tmp_path / "x").exists()
    assert files_of(dense) == before


def test_a_damaged_source_is_refused_with_all_its_damage(released, tmp_path):
    source = tmp_path / "a"
    shutil.copytree(released, source)
    file = source / "model.safetensors"
    stored = read_tensors(file)
    data = file.read_bytes()
    for name in ("layers.0.attn.wq_a.scale", "layers.1.ffn.experts.0.w3.scale"):
        place = data.index(stored[name][2])
        data = data[:place] + b"\xff" + data[place + 1 :]
    file.write_bytes(data)
    with pytest.raises(ValueError, match="does not fit") as caught:
        convert.convert_checkpoint(source, tmp_path / "b", weights="bfloat16", progress=False)
    assert str(caught.value).count("damaged: scale of ") == 2
    assert not (tmp_path / "b").exists()


def test_another_unfinished_conversion_is_not_continued(dense, released, tmp_path, monkeypatch):
    folder = tmp_path / "x"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        with pytest.raises(Interrupted):
            convert.convert_checkpoint(dense, folder, weights="released", progress=False)
    for source, weights in ((released, "released"), (dense, "bfloat16")):
        with pytest.raises(ValueError, match="unfinished conversion of another"):
            convert.convert_checkpoint(source, folder, weights=weights, progress=False)
    with pytest.raises(ValueError, match="weights must be one of"):
        convert.convert_checkpoint(dense, folder, weights="stored", progress=False)
