"""Checkpoint files that come from outside: each way in which one was once trusted."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dsv4_jax as ds
from dsv4_jax.checkpoint import finite
from dsv4_jax.checkpoint.files import INDEX, list_tensors
from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.checkpoint.header import MAX_TENSORS
from dsv4_jax.checkpoint.inventory import read_inventory
from dsv4_jax.checkpoint.names import canonical_name
from dsv4_jax.config.formats import HF_QUANT_CONFIG
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers import slow
from helpers.checkpoints import released_tensors, write_released, write_tensors

SAVED = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny"
WEIGHTS = "model.safetensors"
ONE_LAYER = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(ds.AttentionType.SWA,),
    router_types=(ds.RouterType.LEARNED,),
    num_mtp_layers=0,
)


def load(folder, **options):
    return ds.load_checkpoint(folder, dtype=jnp.float32, progress=False, **options)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in a folder of its own, with a tokenizer."""
    made = tmp_path / "checkpoint"
    shutil.copytree(SAVED, made)
    shutil.copy(ds.SHIPPED_CHECKPOINT / "tokenizer.json", made)
    return made


def write_config(folder, **changes):
    fields = json.loads((SAVED / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(fields))


def write_header(file, header, body=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def entry(begin=0, end=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# Paths and links.


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "sub/../../x", "", "a\nb"])
def test_an_index_names_files_of_its_directory_alone(folder, name):
    outside = folder.parent / "outside.safetensors"
    shutil.copy(folder / WEIGHTS, outside)
    name = name.format(outside=outside)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    with pytest.raises(ValueError, match="must be named by a path inside of it") as caught:
        load(folder)
    assert str(folder / INDEX) in str(caught.value)
    assert repr(name)[:60] in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json", INDEX])
def test_a_link_out_of_the_directory_is_followed_only_if_told(folder, name):
    target = folder.parent / "elsewhere"
    if name == INDEX:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": WEIGHTS}}))
    (folder / name).rename(target)
    (folder / name).symlink_to("../elsewhere")
    read = load_tokenizer if name == "tokenizer.json" else load
    with pytest.raises(ValueError, match="--follow-links") as caught:
        read(folder)
    assert f"{folder / name} is a link to {target}" in str(caught.value)
    load(folder, follow_links=True)
    assert load_tokenizer(folder, follow_links=True) is not None


def test_a_snapshot_of_a_hub_cache_loads_without_being_told(folder, tmp_path):
    """Its files are links to the blobs of that model; not so to those of another."""
    model, other = (tmp_path / "hub" / f"models--owner--{name}" for name in "ab")
    snapshot = model / "snapshots" / "0123abcd"
    for made in (snapshot, model / "blobs", other / "blobs"):
        made.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, model / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    load(snapshot)
    load(os.path.relpath(snapshot))
    (tmp_path / "chosen").symlink_to(snapshot)
    load(tmp_path / "chosen")  # a link to a checkpoint, which the user has named
    assert load_tokenizer(snapshot) is not None
    (snapshot / WEIGHTS).unlink()
    shutil.copy(folder / WEIGHTS, other / "blobs" / "0")
    (snapshot / WEIGHTS).symlink_to("../../../models--owner--b/blobs/0")
    with pytest.raises(ValueError, match="outside of the checkpoint directory"):
        load(snapshot)


def test_links_inside_of_the_directory_are_followed_and_circles_refused(folder):
    (folder / WEIGHTS).rename(folder / "weights.bin")
    (folder / WEIGHTS).symlink_to("weights.bin")
    load(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)
    with pytest.raises((ValueError, FileNotFoundError), match="safetensors"):
        load(folder)


# What is no regular file, and what is no file of weights.


READERS = {
    "config.json": load,
    HF_QUANT_CONFIG: load,
    WEIGHTS: load,
    INDEX: load,
    "tokenizer.json": load_tokenizer,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "directory", "/dev/zero", "/proc/kmsg"])
def test_what_is_no_regular_file_is_not_opened(folder, name, kind):
    """Links are followed here as if told to; a pipe without a writer would block for ever."""
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "directory":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(kind)
    with pytest.raises(ValueError, match=f"{name} must be a regular file, got ") as caught:
        READERS[name](folder, follow_links=True)
    assert len(str(caught.value)) < 300
    if kind.startswith("/"):
        with pytest.raises(ValueError, match="--follow-links"):
            READERS[name](folder)


def test_weights_that_are_replaced_after_their_header_was_read_are_not_waited_for(folder):
    tensor = next(iter(list_tensors(folder / WEIGHTS).values()))
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(ValueError, match="must be a regular file, got a pipe"):
        tensor.read()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, "model.safetensors.bak"])
def test_an_index_that_names_other_files_as_weights_is_told_so(folder, name):
    shutil.copy(folder / WEIGHTS, folder / "model.safetensors.bak")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": name}}))
    with pytest.raises(ValueError, match=rf"weights must be in \*\.safetensors files, got {name}"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "count"),
    slow.all_but(
        [("x" * 200 + "{}.safetensors", 99)],
        [("model-{:05}-of-09999.safetensors", 9999), ("x" * 200 + "{}.safetensors", 99)],
    ),
)
def test_many_missing_files_are_told_in_a_few_lines(folder, name, count):
    weight_map = {f"t{i}": name.format(i) for i in range(count)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileNotFoundError, match=rf"and {count - 10:,} more") as caught:
        load(folder)
    assert len(str(caught.value)) < 1200


def test_thousands_of_stages_are_told_in_a_few_lines(folder):
    tensors = {f"mtp.{2 * i}.x": np.zeros(1, np.float32) for i in range(9999)}
    write_tensors(folder / WEIGHTS, tensors)
    with pytest.raises(ValueError, match="numbered from 0 without a gap") as caught:
        load(folder)
    assert len(str(caught.value)) < 400


def test_a_long_path_is_cut_in_errors(tmp_path):
    folder = tmp_path.joinpath(*["d" * 200] * 15)
    folder.mkdir(parents=True)
    shutil.copy(SAVED / "config.json", folder)
    for text in ("", "{}", json.dumps({"weight_map": {"a": "x.safetensors"}})):
        (folder / INDEX).write_text(text)
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            load(folder)
        assert INDEX in str(caught.value)
        assert len(str(caught.value)) < 500
    with pytest.raises(ValueError, match="must be a directory") as caught:
        find_checkpoint("x" * 5000)
    assert len(str(caught.value)) < 500


# Headers.


@pytest.mark.slow
def test_a_header_of_more_tensors_than_a_model_has_is_not_parsed(tmp_path, monkeypatch):
    count = MAX_TENSORS + 1
    text = b",".join(b'"%d":%s' % (i, json.dumps(entry(0, 0, (0,))).encode()) for i in range(count))
    write_header(tmp_path / WEIGHTS, b"{" + text + b"}", b"")
    monkeypatch.setattr("dsv4_jax.checkpoint.header.parse_json_object", None)
    monkeypatch.setattr("dsv4_jax.checkpoint.header.safe_open", None)
    with pytest.raises(ValueError, match=r"must have at most 262,144 tensors, got 262,145"):
        list_tensors(tmp_path / WEIGHTS)


def test_tensors_of_all_files_are_counted(folder, monkeypatch):
    shutil.copy(folder / WEIGHTS, folder / "model-2.safetensors")
    count = len(list_tensors(folder / WEIGHTS))
    monkeypatch.setattr("dsv4_jax.checkpoint.files.MAX_TENSORS", 2 * count - 1)
    for read in (load, read_inventory):
        with pytest.raises(ValueError, match=rf"at most {2 * count - 1} tensors in all files"):
            read(folder)


def test_the_names_of_all_tensors_are_remembered():
    """Each is asked for several times; with one name too many all would be forgotten by then."""
    assert canonical_name.cache_info().maxsize >= MAX_TENSORS


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(-16, 0)}, r"a\.data_offsets\[0\] must be at least 0, got -16"),
        ({"a": entry(0, 16), "b": entry(8, 16, (2,))}, "invalid offset for tensor `b`"),
        ({"a": entry(8, 16, (2,))}, "invalid offset for tensor `a`"),
        ({"a": entry(0, 8, (2,))}, "incomplete metadata, file not fully covered"),
        ({"a": entry(0, 32, (8,))}, r"truncated: a ends at byte \d+ of \d+"),
        ({"a": entry(16, 0)}, "a does not fill its bytes"),
        ({"a": entry(shape=(-4,))}, r"a\.shape\[0\] must be at least 0, got -4"),
        ({"a": entry(shape=(4.0,))}, r"a\.shape\[0\] must be a number \(int\), got 4\.0"),
        ({"a": entry(shape=(True, 4))}, r"a\.shape\[0\] must be a number \(int\), got True"),
        ({"a": entry(shape="4")}, "a.shape"),
        ({"a": entry(dtype=3)}, "a.dtype must be a text, got 3"),
        ({"a": entry() | {"data_offsets": [0, 8, 16]}}, "a.data_offsets must have at most 2"),
        ({"a": entry() | {"data_offsets": [16]}}, "a.data_offsets must be begin and end"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "a lacks data_offsets"),
        ({"a": [entry()]}, "a must be an object"),
        ([entry()], "must hold a JSON object"),
        ({"a\nb": entry()}, "printable"),
        ({"x" * 600: entry()}, "printable"),
        ({"a": entry(), "b": entry(16, 16, (0, 2**40))}, "b in .* must have at most 8 axes"),
        ({"a": entry(shape=(1,) * 30 + (4,))}, "a in .* must have at most 8 axes"),
        (b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), "'a' is there twice"),
        (b'{"\xff": 1}', "utf-8"),
        (b"[" * 200_000, "nested deeper than 64"),
        (b'{"a": ' * 200_000, "nested deeper than 64"),
    ],
)
def test_a_header_that_is_wrong_is_refused_by_name(tmp_path, header, message):
    """Among them: tensors that begin before the data, lie in each other, or leave bytes out."""
    file = tmp_path / WEIGHTS
    write_header(file, header)
    with pytest.raises(ValueError, match=message) as caught:
        list_tensors(file)
    assert str(file) in str(caught.value)


def test_a_header_without_end_is_not_read(tmp_path):
    file = tmp_path / WEIGHTS
    with file.open("wb") as stream:
        stream.write((2 * 10**8).to_bytes(8, "little") + b"{")
        stream.truncate(3 * 10**8)  # a hole of a sparse file
    with pytest.raises(ValueError, match=r"at most 100,000,000 bytes, got 200,000,000"):
        list_tensors(file)


def test_a_fused_tensor_of_a_billion_experts_is_not_taken_apart(folder):
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.experts.down_proj"
    write_tensors(folder / WEIGHTS, tensors | {name: np.zeros((10**9, 0, 4), np.float32)})
    with pytest.raises(ValueError, match=r"does not fit|unexpected"):
        load(folder)


# Configs and tokenizers.


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"a": ' * 200_000, '{"a": 1, "a": 2}', '{"vocab_size": ' + "9" * 5000 + "}"],
)
def test_json_that_is_no_config_is_refused_with_its_file(folder, text):
    for name in ("config.json", INDEX):
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match="is not valid JSON: ") as caught:
            load(folder)
        assert str(folder / name) in str(caught.value)
        shutil.copy(SAVED / "config.json", folder)


def test_a_config_in_another_encoding_is_refused_with_its_file(folder):
    (folder / "config.json").write_text('{"name": "Größe"}', encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON: 'utf-8'"):
        load(folder)


@pytest.mark.parametrize(
    "tokens", [-1, 1.5, True, "1", [[1]], ["1"], [1, -1], [1, 2.0], {"a": 1}, 64, 2**40, [0] * 5000]
)
def test_end_tokens_are_tokens(folder, tokens):
    write_config(folder, eos_token_id=tokens)
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", 1e-300),  # 0 in f32
        ("hc_eps", float("inf")),
        ("hc_eps", True),
        ("routed_scaling_factor", float("inf")),
        ("swiglu_limit", float("nan")),
        ("rope_theta", -1.0),
        ("vocab_size", -64),
        ("num_hidden_layers", -3),
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", 3.0),
        ("num_nextn_predict_layers", -1),
        ("n_routed_experts", 10**12),
        ("hc_mult", True),
        ("sliding_window", 2**62),
        ("layer_types", 3),
        ("layer_types", [["sliding_attention"]]),
        ("mlp_layer_types", {"moe": 1}),
        ("compress_rates", [4, 8]),
        ("compress_rates", {"compressed_sparse_attention": 2.5}),
        ("rope_parameters", "none"),
        ("rope_scaling", [1]),
        ("rope_parameters", {"main": {"rope_theta": "1"}, "compress": {}}),
        ("bos_token_id", -1),
    ],
)
def test_a_field_that_is_no_such_number_is_refused_with_its_file(folder, field, value):
    write_config(folder, **{field: value})
    with pytest.raises(ValueError, match=rf"config\.json: {field}"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\xff", '{"model": 3}', "[" * 100_000])
def test_a_broken_tokenizer_is_refused_with_its_file(folder, text):
    (folder / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer that can be read"):
        load_tokenizer(folder)


def test_a_tokenizer_that_fails_when_it_is_used_is_refused_with_its_file(folder):
    """The library panics over a special token that is named and not defined."""
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["post_processor"]["special_tokens"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer that can be read"):
        load_tokenizer(folder)


# Values.


def spoiled(folder, **values):
    """Puts a value into a place of a tensor, by the tensor's name."""
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    for name, value in values.items():
        tensors[name].reshape(-1)[3] = value
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)


def test_every_tensor_with_nan_or_infinity_is_named(folder, monkeypatch):
    names = {"model.norm.weight": np.nan, "model.layers.1.ffn.experts.2.w3.weight": -np.inf}
    spoiled(folder, **names)
    with pytest.raises(ValueError, match="not finite: ") as caught:
        load(folder)  # small, so that it is checked unless told otherwise
    lines = str(caught.value).splitlines()[1:]
    assert sorted(line.split()[2] for line in lines) == sorted(names)
    assert "has 1 of 32 values that are NaN or infinity in float32" in str(caught.value)
    load(folder, check_weights=False)
    with monkeypatch.context() as patch:
        patch.setattr("dsv4_jax.checkpoint.sources.CHECKED_BYTES", 1000)
        load(folder)
        with pytest.raises(ValueError, match="not finite: "):
            load(folder, check_weights=True)


def test_values_that_the_dtype_cannot_hold_are_not_finite(folder):
    spoiled(folder, **{"head.weight": 1e30})
    load(folder)
    with pytest.raises(ValueError, match=r"head\.weight has 1 of 2,048 .* infinity in float16"):
        ds.load_checkpoint(folder, dtype=jnp.float16, progress=False)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("wkv.weight", 0x7F, "codes of NaN"), ("wkv.scale", 0xFF, "UE8M0 codes of 0 or 255")],
)
def test_codes_and_scales_that_are_nan_are_named(tmp_path, name, code, message):
    tensors = released_tensors(ONE_LAYER)
    tensors[f"layers.0.attn.{name}"].view(np.uint8).reshape(-1)[0] = code
    folder = write_released(tmp_path / "x", ONE_LAYER, tensors)
    with pytest.raises(ValueError, match=rf"damaged: .*layers\.0\.attn\.wkv.* 1 {message}"):
        load(folder, check_weights=False)


def test_a_count_of_values_that_are_not_finite_is_exact():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        array = rng.standard_normal(2 * finite._CHUNK + 5, np.float32).astype(dtype)
        places = rng.choice(array.size, 1000, replace=False)
        array[places] = rng.choice([np.nan, np.inf, -np.inf], 1000).astype(dtype)
        array[-1] = np.nan
        expected = len({*places, array.size - 1})
        assert finite.count_not_finite(array.reshape(-1, 1)) == expected
    assert finite.count_not_finite(np.arange(9)) == 0
