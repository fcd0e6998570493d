"""Files that are wrong somewhere, by the thousand: refused by name, or read as what they are."""

import itertools
import json
import math
import pathlib

import pytest
from hypothesis import HealthCheck, given, settings

import dsv4_jax as ds
from dsv4_jax.checkpoint.files import INDEX, find_weight_files, list_tensors
from dsv4_jax.config.write_json import write_config
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers import bad_files

SAVED = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny"
COUNTS = pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.slow)])
TOO_DEEP = "nested deeper than"
OUR_NAMES = {
    "num_attention_heads": "o_groups",
    "index_n_heads": "indexer_num_heads",
    "index_head_dim": "indexer_head_dim",
    "index_topk": "indexer_top_k",
    "n_routed_experts": "num_routed_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "qk_rope_head_dim": "rope_dim",
    "compressed_sparse_attention": "csa_compression_ratio",
    "heavily_compressed_attention": "hca_compression_ratio",
    "main": "rope_parameters",
    "compress": "rope_parameters",
    "rope_type": "rope_",
}
"""Names of fields by which a message may call those of a `config.json`."""


def try_all(count, strategy, check):
    """Runs the check on that many cases, the same ones each time."""
    options = settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    tried = itertools.count()

    @options
    @given(strategy)
    def run(case):
        next(tried)
        check(case)

    run()
    assert next(tried) >= count


def refusal(case, file, read):
    """The message by which `read` refuses, checked to be clear; None if it accepts."""
    try:
        return read() and None
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
    assert str(file) in message
    assert len(message) < 4000
    return message


@COUNTS
def test_headers(tmp_path, count):
    """What is accepted are tensors that lie in the data, one after the other, and can be read."""
    file = tmp_path / "model.safetensors"

    def check(case):
        file.write_bytes(case.data)
        before = file.stat().st_mtime_ns
        tensors = {}
        message = refusal(case, file, lambda: tensors.update(list_tensors(file)))
        assert file.stat().st_mtime_ns == before
        if message is not None:
            named = [name for name in case.names if name != "__metadata__"]
            assert all(name in message for name in named) or TOO_DEEP in message
            return
        end = 8 + int.from_bytes(case.data[:8], "little")
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            assert name.isprintable()
            count = math.prod(tensor.shape)
            assert tensor.offset == end
            end += count * tensor.dtype.itemsize
            if count:
                assert tensor.read().tobytes() == case.data[tensor.offset : end]
        assert end == len(case.data)

    try_all(count, bad_files.headers(), check)


@COUNTS
def test_configs(tmp_path, count):
    """What is accepted is a config of numbers in range, which is written and read back alike."""
    file = tmp_path / "config.json"
    document = json.loads((SAVED / "config.json").read_text())
    unread = {"architectures", "transformers_version", "dtype"}
    paths = [path for path in bad_files.paths_of(document) if path[0] not in unread]

    def check(case):
        file.write_bytes(case.data)
        found = []
        message = refusal(case, file, lambda: found.append(ds.DSV4Config.from_hf(tmp_path)))
        if message is not None:
            if case.names and TOO_DEEP not in message:
                (name,) = case.names
                assert name in message or OUR_NAMES.get(name, name) in message, case
            if case.value is not None:
                said = message.replace("\\\\", "\\")
                shown = case.value.replace("\\\\", "\\") in said
                assert shown or "entries" in message or "contradict" in message, case
            return
        (config,) = found
        hash(config)
        for name, value in vars(config).items():
            if isinstance(value, int | float):
                assert isinstance(value, bool) == (name in ("query_norm", "shifted_streams"))
                assert math.isfinite(value)
                assert 0 <= value < 3.5e38
        assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
        assert ds.DSV4Config.from_hf(write_config(config)) == config

    try_all(count, bad_files.json_cases(document, paths), check)


@COUNTS
def test_indexes(tmp_path, count):
    """What is accepted are files of the directory itself."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("one.safetensors", "two.safetensors", "config.json"):
        (folder / name).write_bytes(b"x")
    (tmp_path / "outside").write_bytes(b"x")
    (folder / "link.safetensors").symlink_to("../outside")

    def check(case):
        (folder / INDEX).write_bytes(case.data)
        files = []
        message = refusal(case, folder, lambda: files.extend(find_weight_files(folder)))
        assert (message is None) == bool(files)
        for file in files:
            assert file.resolve().parent == folder

    try_all(count, bad_files.indexes(), check)


@COUNTS
def test_tokenizers(tmp_path, count):
    """What is accepted takes text and gives text."""
    file = tmp_path / "tokenizer.json"

    def check(case):
        file.write_bytes(case.data)
        found = []
        if refusal(case, file, lambda: found.append(load_tokenizer(tmp_path))) is None:
            (tokenizer,) = found
            assert isinstance(tokenizer.decode(tokenizer.encode("The import é").ids), str)

    try_all(count, bad_files.tokenizers(pathlib.Path(ds.SHIPPED_CHECKPOINT) / file.name), check)
