"""`dsv4-jax convert`: to the formats of the release and back, restarted, and refused."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint import convert
from dsv4_jax.checkpoint.conversion_record import alone_in
from dsv4_jax.cli import convert as command
from dsv4_jax.cli import main
from dsv4_jax.model import param_shapes, quantize_params
from helpers.checkpoints import read_tensors, released_tensors, write_released

pytestmark = pytest.mark.unoptimised

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


@pytest.mark.slow
def test_a_dense_checkpoint_in_released_formats(dense, released):
    params = load(released)
    assert_same(params, quantize_params(CONFIG, load(dense)))
    assert {file.name for file in released.iterdir()} == {
        "config.json", "conversion.json", "model.safetensors", "tokenizer.json",
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


@pytest.mark.slow
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
    convert.convert_checkpoint(source, tmp_path / "b", weights="stored", progress=False)
    expected = read_tensors(source / "model.safetensors")
    assert read_tensors(tmp_path / "b" / "model.safetensors") == expected

    name = "layers.1.ffn.experts.1.w1"
    del tensors[f"{name}.scale"]
    tensors[f"{name}.weight"] = np.ones((160, 176), np.float32)
    source = write_released(tmp_path / "a", CONFIG, tensors)
    convert.convert_checkpoint(source, tmp_path / "c", weights="stored", progress=False)
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
        return write(file, header, arrays)

    patch.setattr(convert, "write_tensors", write_tensors)
    return calls


def test_an_interrupted_conversion_goes_on(dense, released, tmp_path, monkeypatch):
    folder = tmp_path / "x"

    def run():
        convert.convert_checkpoint(
            dense, folder, weights="stored", max_shard_bytes=100_000, progress=False
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


class Killed(BaseException):
    """Ends a conversion as a signal does, at any of the calls below."""


def kill_at(patch, number):
    """Raises in place of that one among the calls by which a conversion makes and writes files."""
    counts = itertools.count(1)

    def killing(call):
        def run(*given, **options):
            if next(counts) == number:
                raise Killed
            return call(*given, **options)

        return run

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "open"), (convert, "_convert")):
        patch.setattr(owner, name, killing(getattr(owner, name)))


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def extend(file):
    with file.open("ab") as stream:
        stream.write(b"\0" * 100)


def put_directory(file):
    file.unlink()
    file.mkdir()


def put_link(file):
    """To the same bytes elsewhere, which are not to be written through it."""
    elsewhere = file.parent.parent / f"elsewhere of {file.name}"
    file.rename(elsewhere)
    elsewhere.chmod(0o400)
    file.symlink_to(elsewhere)


DAMAGE = [cut, flip, extend, pathlib.Path.unlink, put_directory, put_link]


def convert_in_shards(source, folder, shard_bytes=400_000):
    convert.convert_checkpoint(
        source, folder, weights="stored", max_shard_bytes=shard_bytes, progress=False
    )


def assert_same_files(folder, undisturbed):
    assert not [file for file in folder.iterdir() if file.is_symlink()]
    assert files_of(folder) == files_of(undisturbed)


@pytest.fixture(scope="module")
def undisturbed(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    convert_in_shards(dense, folder)
    assert 3 <= len(list(folder.glob("*.safetensors"))) <= 9
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_finished_conversion_that_is_started_again_mends_what_does_not_fit(
    dense, undisturbed, tmp_path, damage
):
    folder = tmp_path / "x"
    shutil.copytree(undisturbed, folder)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    before = first.stat().st_mtime_ns, first.stat().st_ino
    damage(second)
    convert_in_shards(dense, folder)
    assert_same_files(folder, undisturbed)
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == before, "it is not made again"


def test_a_conversion_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    dense, undisturbed, tmp_path, monkeypatch
):
    """Killed later each time, at one of some 200 calls; what was finished is damaged in between."""
    folder, killed = tmp_path / "x", 0
    pick = random.Random(0)
    while True:
        with monkeypatch.context() as patch:
            kill_at(patch, 1 + 9 * killed)
            try:
                convert_in_shards(dense, folder)
                break
            except Killed:
                killed += 1
        finished = sorted(folder.glob("*.safetensors"))
        if finished and killed % 2:
            DAMAGE[killed // 2 % len(DAMAGE)](pick.choice(finished))
    assert killed >= 12
    assert_same_files(folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    dense, undisturbed, tmp_path, seed
):
    """SIGKILL at random moments of twenty processes; what they had finished is damaged."""
    folder = tmp_path / "x"
    pick = random.Random(seed)
    program = (
        "import sys, dsv4_jax.checkpoint.convert as c\n"
        "print('ready', flush=True)\n"
        "c.convert_checkpoint(sys.argv[1], sys.argv[2], weights='stored',"
        " max_shard_bytes=400_000, progress=False)"
    )
    command = [sys.executable, "-c", program, str(dense), str(folder)]
    started = time.monotonic()
    subprocess.run([*command[:-1], str(tmp_path / "whole")], check=True, stdout=subprocess.PIPE)
    whole_s = time.monotonic() - started
    for _ in range(20):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(pick.random() * whole_s)
            process.kill()
        assert process.returncode in (0, -signal.SIGKILL)
        finished = sorted(folder.glob("*.safetensors"))
        if finished and pick.random() < 0.7:
            pick.choice(DAMAGE)(pick.choice(finished))
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    assert_same_files(folder, undisturbed)
    assert_same_files(tmp_path / "whole", undisturbed)


def test_nothing_is_written_through_links_that_stand_in_the_way(dense, undisturbed, tmp_path):
    """As a shard, as the tokenizer, or where a file lies until it is whole."""
    folder, outside = tmp_path / "x", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("precious")
    for name in ("model-00001-of-{}.safetensors.partial", "tokenizer.json", "config.json.partial"):
        count = len(list(undisturbed.glob("*.safetensors")))
        (folder / name.format(f"{count:05}")).symlink_to(outside)
    convert_in_shards(dense, folder)
    assert outside.read_text() == "precious"
    assert_same_files(folder, undisturbed)


def test_a_directory_that_holds_something_is_not_removed(dense, undisturbed, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(undisturbed, folder)
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    shard.mkdir()
    (shard / "precious").write_text("precious")
    with pytest.raises(OSError, match=f"{shard.name} stands where a file is to be written"):
        convert_in_shards(dense, folder)
    assert (shard / "precious").read_text() == "precious"
    assert not (folder / "config.json").exists(), "it is no whole checkpoint"


def test_one_conversion_at_a_time_writes_into_a_directory(dense, undisturbed, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    with (
        alone_in(folder),
        pytest.raises(ValueError, match="another process converts into"),
    ):
        convert_in_shards(dense, folder)
    assert not list(folder.iterdir())
    convert_in_shards(dense, folder)
    assert_same_files(folder, undisturbed)


@pytest.mark.parametrize(
    "change",
    [
        {"files": 3},
        {"files": {"model-00001-of-{count:05}.safetensors": 3, "../x": {"bytes": 0, "sha256": ""}}},
        {"files": {}},
    ],
)
def test_a_record_that_says_something_else_has_its_files_made_again(
    dense, undisturbed, tmp_path, change
):
    folder = tmp_path / "x"
    shutil.copytree(undisturbed, folder)
    record = json.loads((folder / "conversion.json").read_text())
    count = f"{len(record['files']):05}"
    (folder / "conversion.json").write_text(
        json.dumps(record | change).replace("{count:05}", count)
    )
    convert_in_shards(dense, folder)
    assert_same_files(folder, undisturbed)


def test_a_finished_conversion_is_not_taken_for_another(dense, released, undisturbed, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(undisturbed, folder)
    for source, shard_bytes in ((dense, 100_000), (released, 400_000)):
        with pytest.raises(ValueError, match=r"holds a model already \(config\.json\)"):
            convert_in_shards(source, folder, shard_bytes)
    assert_same_files(folder, undisturbed)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_what_is_copied_are_regular_files(dense, tmp_path, name):
    source = tmp_path / "source"
    shutil.copytree(dense, source)
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    with pytest.raises(ValueError, match=f"{name} must be a regular file, got a pipe"):
        convert_in_shards(source, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    (source / name).unlink()
    (source / "tokenizer").mkdir()  # as some repositories have one
    (source / name).write_text('{"a": 1}')
    convert_in_shards(source, tmp_path / "x")
    assert (tmp_path / "x" / name).read_text() == '{"a": 1}'


def refusal(capsys, *arguments):
    """The one line of an error with status 2."""
    assert main(["convert", *map(str, arguments)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    return line.removeprefix("dsv4-jax convert: ")


def test_the_shipped_model_is_converted_by_its_name_unless_a_directory_has_it(
    tmp_path, monkeypatch
):
    sources = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "convert_checkpoint", lambda *paths, **_: sources.append(paths[0]))
    assert main(["convert", "shipped", "out", "--weights", "bfloat16"]) == 0
    shutil.copytree(ds.SHIPPED_CHECKPOINT, "shipped")
    assert main(["convert", "shipped", "out", "--weights", "bfloat16"]) == 0
    assert list(map(str, sources)) == [str(ds.SHIPPED_CHECKPOINT), "shipped"]


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
    assert "holds a model already" in refusal(capsys, dense, released, "--weights", "bfloat16")
    assert files_of(released) == held
    assert "no directory" in refusal(capsys, tmp_path / "nowhere", tmp_path / "x", *options)
    assert "shard-gib" in refusal(capsys, dense, tmp_path / "x", *options, "--shard-gib", 0)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        line = refusal(capsys, dense, tmp_path / "x" / "y", *options)
        assert "has 1,000 B of free space, and 1.5 MiB are still to be written" in line
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
            convert.convert_checkpoint(dense, folder, weights="stored", progress=False)
    for source, weights in ((released, "stored"), (dense, "bfloat16")):
        with pytest.raises(ValueError, match="unfinished conversion of another"):
            convert.convert_checkpoint(source, folder, weights=weights, progress=False)
    with pytest.raises(ValueError, match="weights must be one of"):
        convert.convert_checkpoint(dense, folder, weights="float32", progress=False)


def test_a_conversion_that_the_earlier_word_began_goes_on(dense, tmp_path):
    """Records hold a digest of what is converted and how, with the word that it was asked in."""
    folder = tmp_path / "x"
    convert.convert_checkpoint(dense, folder, weights="stored", progress=False)
    files = [dense / "config.json", dense / "model.safetensors"]
    described = {
        "source": str(dense.resolve()),
        "weights": "released",
        "max_shard_bytes": convert.MAX_SHARD_BYTES,
        "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    assert json.loads((folder / "conversion.json").read_text())["conversion"] == digest
    convert.convert_checkpoint(dense, folder, weights="released", progress=False)
