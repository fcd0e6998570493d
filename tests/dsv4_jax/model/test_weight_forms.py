"""`weights` has one vocabulary: Python, every command and the tools read it by the same rule."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax as ds
from dsv4_jax.bench.placement import place
from dsv4_jax.bench.weights import random_params
from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.cli import make_parser
from dsv4_jax.model.weight_forms import RELEASE_FORMS, STORED, WEIGHT_FORMS, dtype_beside
from pallas_kernels.common.weights import is_quantized

TINY = ds.DSV4Config.tiny()
ALL, RELEASED = ("stored", "bfloat16", "float32"), ("stored", "bfloat16")
COMMANDS = {
    ("generate",): (ALL, "stored"),
    ("serve",): (ALL, "stored"),
    ("batch", "a.jsonl", "b.jsonl"): (ALL, "stored"),
    ("plan", "flash"): (ALL, "stored"),
    ("bench", "decode"): (ALL, "bfloat16"),
    ("bench", "prefill"): (ALL, "bfloat16"),
    ("convert", "a", "b"): (RELEASED, None),
}


def forms_of(params):
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    return {type(leaf) for leaf in leaves if is_quantized(leaf)}, params.dtype


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_reads_the_words(command):
    parser, (words, default) = make_parser(), COMMANDS[command]
    for word in words:
        assert parser.parse_args([*command, "--weights", word]).weights == word
    assert parser.parse_args([*command, "--weights", "released"]).weights == STORED
    refused = {"dense", "fp8", *ALL}.difference(words)
    for word in refused:
        with pytest.raises(ValueError, match="argument --weights: invalid choice"):
            parser.parse_args([*command, "--weights", word])
    if default is None:
        with pytest.raises(ValueError, match="required: --weights"):
            parser.parse_args([*command])
    else:
        assert parser.parse_args([*command]).weights == default


def test_python_reads_the_words(tmp_path):
    where = {"data": 1, "model": 1, "gpu_bytes": 0, "context": 1}
    calls = {
        "param_shapes": lambda word: ds.model.param_shapes(TINY, weights=word),
        "place": lambda word: place(TINY, **where, weights=word),
        "random_params": lambda word: random_params(TINY, weights=word),
        "load_checkpoint": lambda word: ds.load_checkpoint(tmp_path, weights=word),
        "convert_checkpoint": lambda word: convert_checkpoint(
            tmp_path, tmp_path / "x", weights=word
        ),
    }
    for (name, call), word in itertools.product(calls.items(), ("dense", "fp8", 8, None)):
        if word is None and name in ("param_shapes", "place", "random_params"):
            continue  # dense in the dtype that is given
        with pytest.raises(ValueError, match=rf"^weights must be one of .*, got {word!r}$"):
            call(word)
    for word in (*ALL, "released"):
        with pytest.raises(FileNotFoundError):  # there is nothing to load
            calls["load_checkpoint"](word)


def test_shapes_of_each_form():
    quantised, dtype = forms_of(ds.model.param_shapes(TINY, weights="stored"))
    assert len(quantised) == 2
    assert dtype == jnp.bfloat16
    for word in ("bfloat16", "float32"):
        assert forms_of(ds.model.param_shapes(TINY, weights=word)) == (set(), jnp.dtype(word))
    same = ds.model.param_shapes(TINY, weights="released")
    assert same == ds.model.param_shapes(TINY, weights="stored")
    assert forms_of(ds.model.param_shapes(TINY)) == (set(), jnp.float32)
    assert forms_of(ds.model.param_shapes(TINY, jnp.float16)) == (set(), jnp.float16)
    with pytest.raises(ValueError, match="dtype must be that of the decoded weights, float32"):
        ds.model.param_shapes(TINY, jnp.bfloat16, weights="float32")


def test_the_dtype_beside_weights():
    assert [dtype_beside(word) for word in ALL] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert dtype_beside(STORED, jnp.float32) == jnp.float32
    assert dtype_beside("float32", "float32") == jnp.float32
    with pytest.raises(ValueError, match="weights, bfloat16, got float32; leave it out"):
        dtype_beside("bfloat16", jnp.float32)


def test_the_words_are_those_of_the_page():
    assert (WEIGHT_FORMS.known, RELEASE_FORMS.known) == (ALL, RELEASED)


@pytest.mark.parametrize("text", ["6ȇɘ", "(,>", "f4,f4", "", "float64", 7])
def test_what_is_no_dtype_is_refused_wherever_one_is_asked_for(text):
    """NumPy refuses texts with errors of three types, and takes some for records."""
    config, told = ds.DSV4Config.tiny(), "dtype must be float32, bfloat16 or float16, got "
    with pytest.raises(ValueError, match=f"^{told}"):
        ds.model.param_shapes(config, text)
    with pytest.raises(ValueError, match=f"^{told}"):
        ds.init_params(config, jax.random.key(0), text)
    with pytest.raises(ValueError, match=f"^{told}"):
        ds.load_checkpoint(ds.SHIPPED_CHECKPOINT, dtype=text, progress=False)
