"""A checkpoint by directory, which asks no network, or by its name on a hub, here on loopback."""

import collections
import json
import os
import pathlib
import re
import shutil
import socket

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

import dsv4_jax as ds
from dsv4_jax.checkpoint import find, find_checkpoint
from helpers import hub

WEIGHTS = "model.safetensors"
SAVED = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny"
NAME = "someone/tiny-v4"
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def served(tmp_path, cache, monkeypatch):
    """The folder of a model on the hub, and the paths that were asked for."""
    folder = tmp_path / "served"
    shutil.copytree(SAVED, folder)
    (folder / "inference").mkdir()
    (folder / "inference" / "config.json").write_text("{}")
    (folder / "README.md").write_text("not loaded")
    with hub.serve({NAME: folder, "someone/other": SAVED.parent}) as (address, asked):
        hub.point_to(address, monkeypatch)
        yield folder, asked


def files_asked(asked):
    return {path.rpartition("/")[2] for path in asked if "/resolve/" in path}


def test_a_model_is_downloaded_once_and_found_again_offline(served, cache, monkeypatch, capsys):
    _, asked = served
    engine = ds.Engine.from_checkpoint(
        NAME, revision="v1", max_requests=1, max_context_tokens=64, dtype="float32"
    )
    assert engine.config.layer_types == ds.DSV4Config.from_hf(SAVED).layer_types
    assert f"/api/models/{NAME}/revision/v1" in asked
    assert files_asked(asked) == {"config.json", "generation_config.json", "model.safetensors"}
    assert capsys.readouterr().err == "", "quickly done, and not on a terminal"
    asked.clear()
    first = find_checkpoint(NAME)
    assert first.is_relative_to(cache)
    assert first.name == hub.COMMIT
    assert (first / "model.safetensors").read_bytes() == (SAVED / "model.safetensors").read_bytes()
    assert "model.safetensors" not in files_asked(asked)
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        hub.point_to(f"http://127.0.0.1:{closed.getsockname()[1]}", monkeypatch)
        assert find_checkpoint(NAME) == find_checkpoint(NAME, revision="v1") == first
        (first / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=f"found no checkpoint {NAME}; tried: no directory .*"):
            find_checkpoint(NAME)


def test_what_the_disk_does_not_hold_is_not_downloaded(served, cache, monkeypatch):
    folder, asked = served
    (folder / "model-2.safetensors.size").write_text(str(3 * 2**40))
    monkeypatch.setattr(find.shutil, "disk_usage", lambda path: Usage(0, 0, 2**40))
    with pytest.raises(OSError, match=r"takes 3,072\.00 GiB more, .* has 1,024\.00 GiB free; .*HF"):
        find_checkpoint(NAME)
    assert files_asked(asked) == {"config.json"}


def test_another_model_is_refused_by_its_config(served):
    folder, asked = served
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type"):
        find_checkpoint(NAME)
    assert files_asked(asked) == {"config.json"}
    with pytest.raises(ValueError, match=r"someone/other at http.* must have a config\.json and"):
        find_checkpoint("someone/other")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "nobody/nothing",
            {},
            r"no checkpoint nobody/nothing; tried: no directory .*; http:",
        ),
        (
            NAME,
            {"revision": "v9"},
            r"no checkpoint someone/tiny-v4 of revision 'v9'; tried:",
        ),
        (str(SAVED), {"revision": "v1"}, r"revision='v1' is for a model on the hub .*leave it out"),
        (None, {"revision": "v1"}, "is for a model on the hub"),
        (3, {}, r"checkpoint must be a directory or a name on the hub \(owner/model\), got 3"),
        (NAME, {"revision": 7}, "revision must be"),
    ],
)
def test_what_is_nowhere_is_said_with_what_was_tried(served, name, options, message):
    with pytest.raises(ValueError, match=message):
        find_checkpoint(name, **options)


def test_a_directory_asks_no_network(served, tmp_path, monkeypatch):
    """Even where a model of the hub has its name."""
    _, asked = served
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAVED, tmp_path / NAME)
    assert find_checkpoint(NAME) == pathlib.Path(NAME)
    assert find_checkpoint(tmp_path / NAME) == tmp_path / NAME
    assert find_checkpoint(pathlib.Path("a/b")) == pathlib.Path("a/b")
    assert find_checkpoint("./nobody/nothing/at/all") == pathlib.Path("nobody/nothing/at/all")
    assert find_checkpoint() == ds.SHIPPED_CHECKPOINT
    assert asked == []


# What the hub's library makes of its cache. All is its own, but for the transport of Xet's bytes.


@pytest.fixture
def in_xet(tmp_path, cache, monkeypatch):
    """The model with its weights in Xet storage, and its folder on the hub."""
    folder = tmp_path / "stored"
    shutil.copytree(SAVED, folder)
    hub.copy_from_xet(folder, monkeypatch)
    with hub.serve({NAME: folder, "else/same": folder}, xet=[".safetensors"]) as (address, _):
        hub.point_to(address, monkeypatch)
        yield folder


def test_files_of_xet_storage_load(in_xet, cache):
    """Newer versions keep them beside all models, so that two models may share them."""
    for name in (NAME, "else/same"):
        folder = find_checkpoint(name, progress=False)
        ds.load_checkpoint(folder, progress=False)
        blob = folder / os.readlink(folder / WEIGHTS)
        is_shared = hasattr(constants, "HF_HUB_DISABLE_SHARED_BLOBS")
        assert blob.is_symlink() == is_shared
        assert blob.resolve().is_relative_to(cache / "blobs") == is_shared


def test_a_cache_that_a_link_leads_to_is_as_good(in_xet, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    folder = find_checkpoint(NAME, progress=False)
    ds.load_checkpoint(folder, progress=False)
    with hub.offline():
        assert find_checkpoint(NAME).samefile(folder)
    ds.load_checkpoint(folder.resolve(), progress=False)


def test_a_system_without_links_has_copies(in_xet, monkeypatch):
    monkeypatch.setattr(file_download, "are_symlinks_supported", lambda *_, **__: False)
    folder = find_checkpoint(NAME, progress=False)
    assert not (folder / WEIGHTS).is_symlink()
    ds.load_checkpoint(folder, progress=False)
    with hub.offline():
        assert find_checkpoint(NAME) == folder


@pytest.mark.parametrize(
    "patterns",
    [
        ["*.json", "*.safetensors"],  # without the README
        ["config.json", "model*"],
        None,
    ],
)
def test_what_was_downloaded_by_patterns_is_found_offline(served, cache, patterns):
    folder = huggingface_hub.snapshot_download(
        NAME, cache_dir=cache, endpoint=constants.ENDPOINT, allow_patterns=patterns
    )
    with hub.offline():
        assert find_checkpoint(NAME) == find_checkpoint(NAME, revision=hub.COMMIT)
        assert find_checkpoint(NAME) == pathlib.Path(folder)


SHARDS = [f"model-{number:05}-of-000003.safetensors" for number in (1, 2, 3)]


@pytest.mark.parametrize("has_index", [True, False])
def test_a_cache_that_lacks_a_shard_is_refused_by_its_name(served, has_index):
    folder, _ = served
    for shard in SHARDS:
        shutil.copy(folder / WEIGHTS, folder / shard)
    (folder / WEIGHTS).unlink()
    if has_index:
        index = {"weight_map": {f"{shard}.weight": shard for shard in SHARDS}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = find_checkpoint(NAME, progress=False)
    with hub.offline():
        assert find_checkpoint(NAME) == found
        (found / SHARDS[0]).resolve().unlink()  # the blob of all three, which have the same bytes
        with pytest.raises(ValueError, match=f"the cache: .* {', '.join(SHARDS)}$"):
            find_checkpoint(NAME)
        for shard in SHARDS[1:]:
            (found / shard).unlink()
            (found / shard).write_text("there")
        with pytest.raises(ValueError, match=r"the cache: .*") as caught:
            find_checkpoint(NAME)
        assert str(caught.value).endswith(SHARDS[0])
        (found / SHARDS[0]).unlink()
        with pytest.raises(ValueError, match=f"the cache: .* {SHARDS[0]}$"):
            find_checkpoint(NAME)


def test_another_revision_that_is_whole_is_named(served, cache):
    """A newer config alone moves the branch, and the weights are still those of the older one."""
    whole = find_checkpoint(NAME, progress=False)
    newer = whole.parent / ("f" * 40)
    newer.mkdir()
    shutil.copy(whole / "config.json", newer)
    (whole.parents[1] / "refs" / "main").write_text(newer.name)
    with hub.offline():
        with pytest.raises(ValueError, match=f"it has all of revision {hub.COMMIT}, which can be"):
            find_checkpoint(NAME)
        assert find_checkpoint(NAME, revision=hub.COMMIT) == whole


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted"}
NO_MODEL = "no such model, or none that you may read"
WRONG_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"/resolve/": (403, GATED)}, "gated; accept its terms at http.*/tiny-v4 and log in"),
        ({"/api/": (401, GATED)}, "gated; accept its terms at http.*/tiny-v4 and log in"),
        ({"/api/": (401, {})}, f"{NO_MODEL}; check its name, or log in"),
        ({"/api/": (404, {"X-Error-Code": "RepoNotFound"})}, f"{NO_MODEL}; check its name"),
        ({"/api/": (401, WRONG_TOKEN)}, rf"{NO_MODEL} \(Invalid credentials .*\); check its name"),
        ({"/resolve/": (403, {})}, f"{NO_MODEL}; check its name"),
        ({"/api/": (503, {})}, "no answer that helps .*503"),
        ({"/api/": (200, {})}, "no answer that helps"),  # of a proxy that wants a login
    ],
)
def test_why_a_hub_gives_nothing_is_said(tmp_path, cache, monkeypatch, refused, message):
    with hub.serve({NAME: SAVED}, refused=refused) as (address, _):
        hub.point_to(address, monkeypatch)
        message = f"found no checkpoint {NAME}; tried: no directory .*; {address}: {message}"
        with pytest.raises(ValueError, match=f"{message}.*; the cache .* has no config.json of it"):
            find_checkpoint(NAME)
        answers = dict(refused)
        refused.clear()
        found = find_checkpoint(NAME, progress=False)
        refused.update(answers)
        assert find_checkpoint(NAME, progress=False) == found, "the cache has it all"


def test_an_empty_cache_offline_is_said(served):
    with hub.offline(), pytest.raises(ValueError, match="not asked, since HF_HUB_OFFLINE is set"):
        find_checkpoint(NAME)


@pytest.mark.parametrize(
    "file", ["hf_quant_config.json", f"{WEIGHTS}.index.json", "generation_config.json", WEIGHTS]
)
def test_a_download_that_breaks_off_says_where_and_goes_on_later(
    cache, tmp_path, monkeypatch, file
):
    refused = {f"/{file}$": (403, GATED)}
    folder = shutil.copytree(SAVED, tmp_path / "served")
    (folder / "hf_quant_config.json").write_text("{}")
    index = {"weight_map": {"head.weight": WEIGHTS}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with hub.serve({NAME: folder}, refused=refused) as (address, asked):
        hub.point_to(address, monkeypatch)
        with pytest.raises(OSError, match=rf"of {NAME} broke off at {file}: gated; .*so try again"):
            find_checkpoint(NAME)
        refused.clear()
        asked.clear()
        ds.load_checkpoint(find_checkpoint(NAME), progress=False)
        assert (file in files_asked(asked), "config.json" in files_asked(asked)) == (True, True)


def test_weights_come_last(served):
    folder, asked = served
    (folder / "tokenizer.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(b"first of the alphabet")
    find_checkpoint(NAME, progress=False)
    gets = [path.rpartition("/")[2] for path in asked if "/resolve/" in path]
    small = [place for place, file in enumerate(gets) if file.endswith(".json")]
    assert max(small) < min(place for place, file in enumerate(gets) if "safetensors" in file)


def test_contents_of_another_revision_need_no_room(served, monkeypatch):
    found = find_checkpoint(NAME, progress=False)
    (found / WEIGHTS).unlink()  # and its blob is there, as when the config alone has changed
    monkeypatch.setattr(find.shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    assert (find_checkpoint(NAME, progress=False) / WEIGHTS).is_file()


def test_an_error_of_the_disk_is_said_as_it_is(served, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "hub")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(PermissionError, match="denied: 'hub'"):
        find_checkpoint(NAME)
    with pytest.raises(ValueError, match=r"'a--b/c'"):
        find_checkpoint("a--b/c")


@pytest.mark.parametrize(
    ("written", "way_out"),
    [
        (f"{NAME}@v1", f"'{NAME}' and revision='v1' \\(--revision\\)"),
        (f"https://huggingface.co/{NAME}", f"'{NAME}'$"),
        (f"https://huggingface.co/{NAME}/tree/refs/pr/1", f"'{NAME}' and revision='refs/pr/1'"),
        (f"hf://{NAME}@v1", "revision='v1'"),
        (f"{NAME}/", f"'{NAME}'$"),
    ],
)
def test_a_name_in_another_form_is_refused_with_the_right_one(served, written, way_out):
    with pytest.raises(ValueError, match=f"which is no directory; pass .*{way_out}"):
        find_checkpoint(written)
    assert served[1] == []


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("shiped", "got 'shiped'; did you mean shipped?"),
        ("flash", "or shipped, got 'flash'; did you mean deepseek-ai/DeepSeek-V4-Flash?"),
    ],
)
def test_a_word_that_is_no_directory_is_refused_with_what_may_stand_there(served, word, told):
    with pytest.raises(ValueError, match=f"{re.escape(told)}$"):
        find_checkpoint(word)
    assert served[1] == []
    assert find_checkpoint(f"./{word}") == pathlib.Path(word)


@pytest.mark.parametrize(
    ("changes", "beside", "options", "message", "asked_for"),
    [
        (
            {"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}},
            None,
            {},
            r"config\.json: quantization_config\.moe_quant_algo is 'NVFP4'.*; take ",
            {"config.json"},
        ),
        (
            {},
            {"quantization": {"quant_algo": "NVFP4"}},
            {},
            r"hf_quant_config\.json: quantization\.quant_algo is 'NVFP4'.*; take ",
            {"config.json", "hf_quant_config.json"},
        ),
        (
            {},
            None,
            {"needs_tokenizer": True},
            rf"{NAME} has no tokenizer\.json, so text cannot be encoded",
            {"config.json"},
        ),
    ],
    ids=["by its config", "by modelopt's file", "without a tokenizer"],
)
def test_a_model_is_refused_before_its_weights_come(
    served, changes, beside, options, message, asked_for
):
    folder, asked = served
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(ValueError, match=message):
        find_checkpoint(NAME, **options)
    assert files_asked(asked) == asked_for
