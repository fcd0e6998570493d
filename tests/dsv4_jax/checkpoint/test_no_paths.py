"""What is no path is refused by the name of the argument, before a file is touched."""

import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.serving.requests.text import load_tokenizer

CONFIG = ds.DSV4Config.tiny()


def repr_type(value):
    return type(value).__name__


RELEASED = {"weights": "stored"}
CALLS = {
    "load_checkpoint": (ds.load_checkpoint, "path"),
    "load_tokenizer": (load_tokenizer, "path"),
    "use_compilation_cache": (lambda value: ds.use_compilation_cache(value or 0), "folder"),
    "convert, from": (lambda value: convert_checkpoint(value, "x", **RELEASED), "source"),
    "convert, to": (lambda value: convert_checkpoint("x", value, **RELEASED), "destination"),
    "from_hf": (ds.DSV4Config.from_hf, "source"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [None, 3, b"folder", CONFIG, ["folder"]], ids=repr_type)
def test_what_is_no_path_is_refused(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, argument = CALLS[name]
    with pytest.raises(ValueError, match=f"^{argument} must be a path"):
        call(value)
    assert not list(tmp_path.iterdir())


def test_what_is_saved_is_of_its_type(tmp_path):
    params = ds.model.param_shapes(CONFIG)
    for arguments, argument in (
        ((CONFIG, params, None), "path"),
        ((CONFIG, None, tmp_path), "params"),
        ((None, params, tmp_path), "config"),
        ((params, CONFIG, tmp_path), "config"),
        ((CONFIG, tmp_path, params), "params"),
    ):
        with pytest.raises(ValueError, match=f"^{argument} must be a"):
            ds.save_checkpoint(*arguments)
    assert not list(tmp_path.iterdir())
