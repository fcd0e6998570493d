"""A checkpoint by directory, which asks no network, or by its name on a hub, here on loopback."""

import collections
import json
import pathlib
import shutil
import socket

import pytest
from huggingface_hub import constants

import dsv4_jax as ds
from dsv4_jax.checkpoint import find, find_checkpoint
from helpers import hub

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
        point_to(address, monkeypatch)
        yield folder, asked


def point_to(address, monkeypatch):
    """As the environment variable HF_ENDPOINT does, which is read when the library is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
    monkeypatch.setattr(constants, "ENDPOINT", address)


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
        point_to(f"http://127.0.0.1:{closed.getsockname()[1]}", monkeypatch)
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
