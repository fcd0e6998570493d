"""What is refused and said of a model on a hub before its weights are downloaded."""

import json

import pytest

from dsv4_jax.checkpoint import LeftOutWarning
from dsv4_jax.checkpoint.before_weights import check_before_weights
from dsv4_jax.checkpoint.files import INDEX
from helpers.released_configs import FLASH, FLASH_0731, FLASH_VISION

DRAFT = ["norm.weight", "model.mtp.0.main_proj.weight", "mtp.1.norm.weight", "mtp.2.norm.weight"]
FILES = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json")


@pytest.fixture
def check(tmp_path):
    """Asks about a model of these contents; gives what was fetched beside the config."""

    def run(contents, files=FILES, beside=None, needs_tokenizer=True, names=None, drafts=True):
        (tmp_path / "config.json").write_text(json.dumps(contents))
        fetched = []
        index = {"weight_map": dict.fromkeys(names or (), FILES[1])}
        files = files if names is None else (*files, INDEX)

        def fetch(name):
            fetched.append(name)
            (tmp_path / name).write_text(json.dumps(index if name == INDEX else beside))

        options = {"needs_tokenizer": needs_tokenizer, "drafts": drafts}
        check_before_weights("owner/model", tmp_path, files, fetch, **options)
        return fetched

    return run


def test_a_release_is_taken_without_another_file(check):
    assert check(FLASH) == []


def test_formats_are_refused_by_config_or_by_modelopts_file(check):
    nvfp4 = FLASH["quantization_config"] | {"moe_quant_algo": "NVFP4"}
    with pytest.raises(ValueError, match=r"config\.json: .*moe_quant_algo is 'NVFP4'.*take "):
        check(FLASH | {"quantization_config": nvfp4})
    beside = {"quantization": {"quant_algo": "NVFP4"}}
    files = (*FILES, "hf_quant_config.json")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: .*'NVFP4'"):
        check(FLASH, files, beside)
    assert check(FLASH, files, {"quantization": {}}) == ["hf_quant_config.json"]


def test_a_missing_tokenizer_is_told_where_one_is_needed(check):
    files = ("config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json")
    with pytest.raises(ValueError, match=r"owner/model has no tokenizer\.json"):
        check(FLASH, files)
    assert check(FLASH, files, needs_tokenizer=False) == []


def test_a_broken_draft_is_refused_where_the_files_hold_one(check):
    broken = FLASH_0731 | {"dspark_markov_rank": None}
    with pytest.raises(ValueError, match=r"config\.json: dspark_markov_rank is missing"):
        check(broken, names=DRAFT)
    with pytest.raises(ValueError, match=r"lists 3 DSpark stages, and the files hold 2"):
        check(FLASH_0731, names=DRAFT[:-1])
    assert check(broken, names=DRAFT, drafts=False) == [INDEX]
    # Of a small copy, which has no stages, or one file whose header will tell.
    assert check(broken, names=["norm.weight"]) == [INDEX]
    assert check(broken) == []


def test_what_will_not_be_loaded_is_said(check, tmp_path):
    with pytest.warns(LeftOutWarning, match=r"draft \(DSpark stages, mtp\.\) is left out"):
        check(FLASH_0731 | {"num_hidden_layers": 4}, names=DRAFT)
    with pytest.warns(LeftOutWarning, match=r"images \(image, vision\) is left out") as caught:
        check(FLASH_VISION, names=[*DRAFT, "vision.norm.weight", "image_pad"])
    assert len(caught) == 1
    assert str(caught[0].message).startswith(str(tmp_path))
