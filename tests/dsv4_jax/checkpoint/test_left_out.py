"""Checkpoints with parts that are not loaded: a draft, and what belongs to images."""

import dataclasses
import json
import re
import warnings

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint import LeftOutWarning, convert_checkpoint
from dsv4_jax.cli import main, make_parser
from dsv4_jax.cli.arguments import chosen_fields
from dsv4_jax.cli.engine_options import build_engine, find_model
from dsv4_jax.config.write_json import write_config
from dsv4_jax.serving.options import EngineOptions
from helpers import slow
from helpers.checkpoints import read_tensors, released_tensors
from helpers.dspark import (
    DRAFT,
    TRUNK,
    dspark_config,
    dspark_tensors,
    write_checkpoint,
    write_dspark,
)
from helpers.released_configs import VISION_FIELDS

WITH_STAGES = dataclasses.replace(TRUNK, dspark=DRAFT)
LINE = r"its draft \(DSpark stages, mtp\.\) is left out; .*without a draft"


def load(folder, **options):
    return ds.load_checkpoint(folder, progress=False, **options)


def same(params, others):
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """Of all checkpoints here, without what is left out."""
    folder = tmp_path_factory.mktemp("trunk")
    contents = dspark_config() | {"num_nextn_predict_layers": 0}
    contents = {n: value for n, value in contents.items() if not n.startswith("dspark")}
    return load(write_checkpoint(folder, contents, released_tensors(TRUNK)))


@pytest.mark.parametrize("changes", [{}, {"dspark_markov_rank": None}, {"dspark_block_size": 99}])
def test_the_trunk_loads_without_its_stages_where_it_is_asked_to(tmp_path, trunk, changes):
    """In silence, and whatever the config says of them."""
    folder = write_dspark(tmp_path / "x", **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config, params = load(folder, drafts=False)
    assert config == TRUNK == trunk[0]
    same(params, trunk[1])


@pytest.mark.parametrize("drafts", ["off", None, 1])
def test_what_is_no_flag_is_refused(tmp_path, drafts):
    with pytest.raises(ValueError, match=r"^drafts must be"):
        load(write_dspark(tmp_path), drafts=drafts)


@pytest.mark.parametrize("num_nextn", [0, 3])
def test_stages_that_the_config_does_not_have_are_left_out(tmp_path, trunk, num_nextn):
    contents = {n: v for n, v in dspark_config().items() if not n.startswith("dspark")}
    contents["num_nextn_predict_layers"] = num_nextn
    tensors = released_tensors(TRUNK) | dspark_tensors()
    with pytest.warns(LeftOutWarning, match=LINE) as caught:
        config, params = load(write_checkpoint(tmp_path / "x", contents, tensors))
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert config == TRUNK
    same(params, trunk[1])


def test_files_without_a_draft_say_nothing(tmp_path, trunk):
    folder = write_checkpoint(tmp_path / "x", dspark_config(), released_tensors(TRUNK))
    config, params = load(folder)
    assert config == TRUNK
    same(params, trunk[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"dspark_noise_token_id": 128_799},  # of a vocabulary that was cut
        {"dspark_target_layer_ids": [40, 41, 42], "compress_ratios": [0, 4, 32, 4]},
        {"dspark_markov_rank": None},
    ],
)
def test_fields_of_a_draft_that_the_files_do_not_hold_are_not_read(tmp_path, trunk, changes):
    """What transformers writes of a small copy: it drops the draft, and keeps fields of it."""
    folder = write_checkpoint(tmp_path / "x", dspark_config() | changes, released_tensors(TRUNK))
    config, params = load(folder)
    assert config == TRUNK
    same(params, trunk[1])


def mtp_tensors():
    config = dataclasses.replace(TRUNK, num_mtp_layers=1)
    return {n: a for n, a in released_tensors(config).items() if n.startswith("mtp.")}


def renamed(tensors, old, new):
    return {name.replace(old, new): array for name, array in tensors.items()}


DISAGREEMENTS = {
    "fields of DSpark, files of MTP": ({}, mtp_tensors, r"dspark_\* fields, .*e_proj"),
    "one block announced, files of DSpark": (
        dict.fromkeys((n for n in dspark_config() if n.startswith("dspark")), None),
        dspark_tensors,
        r"DSpark stages .*main_proj.* no dspark_\* fields",
    ),
    "one block announced, two in the files": (
        dict.fromkeys((n for n in dspark_config() if n.startswith("dspark")), None),
        lambda: mtp_tensors() | renamed(mtp_tensors(), "mtp.0", "mtp.1"),
        "announces one MTP block, and the files hold 2",
    ),
    "three stages listed, two in the files": (
        {},
        lambda: {n: a for n, a in dspark_tensors().items() if not n.startswith("mtp.2")},
        "lists 3 DSpark stages, and the files hold 2",
    ),
    "a gap": (
        {},
        lambda: renamed(dspark_tensors(), "mtp.1.", "mtp.4."),
        r"without a gap, got \[0, 2, 4\]",
    ),
    "no number": ({}, lambda: renamed(dspark_tensors(), "mtp.1.", "mtp.x."), r"must name a stage"),
    "both kinds": ({}, lambda: dspark_tensors() | mtp_tensors(), "one kind of draft"),
    "neither kind": (
        {},
        lambda: {n: a for n, a in dspark_tensors().items() if "main_proj" not in n},
        r"no stages of that kind under mtp\., without mtp\.0\.main_proj",
    ),
    "a field is missing": (
        {"dspark_markov_rank": None},
        dspark_tensors,
        r"dspark_markov_rank is missing beside dspark_block_size",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_config_and_files_must_agree(tmp_path, trunk, name):
    changes, draft, message = DISAGREEMENTS[name]
    tensors = released_tensors(TRUNK) | draft()
    folder = write_checkpoint(tmp_path / "x", dspark_config() | changes, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert str(caught.value).startswith(str(folder))
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).endswith("--drafts off, loads the model without its draft")
    config, params = load(folder, drafts=False)
    assert config == TRUNK
    same(params, trunk[1])


def test_a_small_copy_that_was_cut_by_a_number_loads(tmp_path):
    """Its lists name all layers and stages that there were, and its files the first layers."""
    tensors = {
        name: array
        for name, array in released_tensors(TRUNK).items()
        if not name.startswith(("layers.2.", "layers.3."))
    }
    contents = dspark_config() | {"num_hidden_layers": 2}
    config, _ = load(write_checkpoint(tmp_path / "x", contents, tensors))
    assert config.layer_types == TRUNK.layer_types[:2]
    with pytest.warns(LeftOutWarning, match=LINE):
        load(write_checkpoint(tmp_path / "y", contents, tensors | dspark_tensors()))
    with pytest.raises(ValueError, match=r"unexpected: layers\.2\.") as caught:
        load(write_checkpoint(tmp_path / "z", contents, released_tensors(TRUNK)))
    assert len(str(caught.value).splitlines()) <= 12


def test_what_is_written_announces_no_draft(tmp_path, trunk):
    folder = write_dspark(tmp_path / "x", n_mtp_layers=3)
    config, params = load(folder, drafts=False)
    ds.save_checkpoint(config, params, tmp_path / "saved")
    options = {"weights": "stored", "progress": False, "drafts": False}
    convert_checkpoint(folder, tmp_path / "made", **options)
    for made in ("saved", "made"):
        contents = json.loads((tmp_path / made / "config.json").read_text())
        assert contents["num_nextn_predict_layers"] == 0
        assert not any(name.startswith(("dspark", "n_mtp")) for name in contents)
        assert all(len(contents.get(name, ())) in (0, 4) for name in ("compress_ratios",))
        tensors = read_tensors(tmp_path / made / "model.safetensors")
        assert not any(name.startswith("mtp.") for name in tensors)
        again, others = load(tmp_path / made)
        assert again == config
        same(others, trunk[1])


def vision_tensors(prefix):
    rng = np.random.default_rng(1)
    names = [f"{prefix}.blocks.0.attn.wqkv.weight", f"{prefix}.norm.weight", "aligner.w1.weight"]
    names += ["image_start", "image_pad"]
    made = {name: rng.standard_normal((4, 4), np.float32) for name in names}
    biases = [f"layers.{layer}.ffn.gate.bias_vl" for layer in range(4)]
    biases += ["layers.0.ffn.gate.bias", "mtp.1.ffn.gate.bias_vl"]
    return made | {name: np.zeros(TRUNK.num_routed_experts, np.float32) for name in biases}


@pytest.mark.parametrize(
    "prefix",
    slow.all_but(
        ["vision"],
        ["vision", "model.visual", "vision_tower", "model.vision_model"],
    ),
)
def test_the_text_part_of_a_model_that_reads_images(tmp_path, trunk, prefix):
    tensors = released_tensors(TRUNK) | dspark_tensors() | vision_tensors(prefix)
    contents = dspark_config() | VISION_FIELDS | {"num_nextn_predict_layers": 3}
    folder = write_checkpoint(tmp_path / "x", contents, tensors)
    with pytest.warns(LeftOutWarning) as caught:
        config, params = load(folder)
    (line,) = [str(warning.message) for warning in caught]
    assert "its draft" not in line
    for part in (
        "aligner",
        "image",
        "gate.bias_vl",
        "gate.bias of hash layers",
        prefix.split(".")[-1].split("_")[0],
    ):
        assert part in line
    assert config == WITH_STAGES
    same(dataclasses.replace(params, mtp=None), trunk[1])
    with pytest.warns(LeftOutWarning):
        convert_checkpoint(folder, tmp_path / "made", weights="bfloat16", progress=False)
    made = json.loads((tmp_path / "made" / "config.json").read_text())
    assert not any(name.startswith("vision") for name in made)
    assert load(tmp_path / "made")[0] == WITH_STAGES


def test_text_tensors_are_never_left_out(tmp_path):
    """Of layers that are not there, of other names, and biases that no image explains."""
    extra = {
        "layers.9.ffn.gate.bias_vl": np.zeros(8, np.float32),
        "layers.1.attn.vision.weight": np.zeros(8, np.float32),
        "adapter.weight": np.zeros(8, np.float32),
    }
    for contents in (dspark_config(), dspark_config() | VISION_FIELDS):
        folder = write_checkpoint(tmp_path / "x", contents, released_tensors(TRUNK) | extra)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LeftOutWarning)
            with pytest.raises(ValueError, match="does not fit") as caught:
                load(folder)
        for name in extra:
            is_of_images = "bias_vl" in name and "vision_dim" in contents
            assert (f"unexpected: {name}" in str(caught.value)) != is_of_images


def test_a_nested_text_model_loads_under_its_prefix(tmp_path, trunk):
    named = {f"model.language_model.{n}": array for n, array in released_tensors(TRUNK).items()}
    named |= {"model.visual.norm.weight": np.zeros(4, np.float32)}
    text = {n: v for n, v in dspark_config().items() if not n.startswith("dspark")}
    contents = {
        "model_type": "deepseek_v4_vl",
        "text_config": text,
        "vision_config": {"num_hidden_layers": 1},
    }
    with pytest.warns(LeftOutWarning, match=r"images \(visual\) is left out"):
        config, params = load(write_checkpoint(tmp_path / "x", contents, named))
    assert config == TRUNK
    same(params, trunk[1])


def write_cut(folder):
    """A copy of two layers whose stages read layers that are not there."""
    trunk = {
        name: array
        for name, array in released_tensors(TRUNK).items()
        if not name.startswith(("layers.2.", "layers.3."))
    }
    contents = dspark_config() | {"num_hidden_layers": 2}
    return write_checkpoint(folder, contents, trunk | dspark_tensors())


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_commands_say_it_once_in_one_line(tmp_path, capsys, recwarn, command):
    folder = write_cut(tmp_path / "x")
    words = {
        "plan": [folder],
        "convert": [folder, tmp_path / "made", "--weights", "released"],
    }[command]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        main([command, *map(str, words)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    lines += [str(warning.message) for warning in recwarn]
    assert len(lines) == 1
    assert re.search(LINE, lines[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        off = [*map(str, words), "--drafts", "off"]
        assert main([command, *(f"{w}2" if w.endswith("made") else w for w in off)]) == 0
    assert "left out" not in capsys.readouterr().err


def test_a_warning_that_was_made_an_error_ends_a_command_in_one_line(tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["plan", str(write_cut(tmp_path / "x"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dsv4-jax plan: ")
    assert re.search(LINE, line)


def words_of(folder, *words):
    """Options of `generate`, which finds a model and builds its engine as `serve` does."""
    return make_parser().parse_args(["generate", str(folder), "a", *words])


@pytest.mark.parametrize("words", [(), ("--drafts", "off")])
def test_an_engine_without_drafts_does_not_hold_them(tmp_path, words):
    args = words_of(write_dspark(tmp_path / "x"), *words)
    found, config = find_model(args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = build_engine(args, found, config, max_requests=1, max_context_tokens=256)
    assert engine.config == config == TRUNK
    assert engine.params.mtp is None
    engine.close()


def test_drafts_are_asked_for_before_anything_is_loaded(tmp_path):
    folder = write_dspark(tmp_path / "x")
    assert find_model(words_of(folder, "--draft-tokens", "5")) == (folder, WITH_STAGES)
    for words, message in (
        (("--draft-tokens", "6"), "--draft-tokens must be at most 5, which the draft of"),
        (("--draft-tokens", "1", "--drafts", "off"), "--drafts off loads no draft, .*-tokens 1"),
        (
            ("--draft-tokens", "1", "--drafts", "auto"),
            "--drafts auto chooses how many, got",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            find_model(words_of(folder, *words))
    contents = dspark_config() | {"dspark_markov_rank": None}
    trunk = write_checkpoint(tmp_path / "trunk", contents, released_tensors(TRUNK))
    assert find_model(words_of(trunk)) == (trunk, TRUNK)
    with pytest.raises(ValueError, match=r"--draft-tokens 1 needs a draft, and .*trunk has none"):
        find_model(words_of(trunk, "--draft-tokens", "1"))


def test_drafts_auto_takes_what_the_draft_guesses(tmp_path):
    """A block of stages, cut; one of an MTP block; and none without a draft."""
    stages = write_dspark(tmp_path / "stages")
    mtp = dataclasses.replace(TRUNK, num_mtp_layers=1)
    one = write_checkpoint(tmp_path / "mtp", write_config(mtp), released_tensors(mtp))
    none = write_checkpoint(tmp_path / "none", write_config(TRUNK), released_tensors(TRUNK))
    for folder, config, chosen in (
        (stages, WITH_STAGES, (5, True)),
        (one, mtp, (1, False)),
        (none, TRUNK, (0, False)),
    ):
        args = words_of(folder, "--drafts", "auto")
        assert find_model(args) == (folder, config)
        fields = chosen_fields(args, EngineOptions)
        assert (fields["draft_tokens"], fields["draft_cut"]) == chosen


def test_a_draft_that_does_not_agree_is_refused_though_nobody_asked_for_it(tmp_path):
    folder = write_dspark(tmp_path / "x", dspark_markov_rank=None)
    with pytest.raises(ValueError, match="dspark_markov_rank is missing"):
        find_model(words_of(folder))
    assert find_model(words_of(folder, "--drafts", "off")) == (folder, TRUNK)


def test_plan_counts_what_is_there(tmp_path, capsys):
    tensors = released_tensors(TRUNK)
    draft, images = dspark_tensors(), vision_tensors("vision")
    contents = dspark_config() | VISION_FIELDS
    folder = write_checkpoint(tmp_path / "x", contents, tensors | draft | images)

    def line(label, *parts):
        arrays = [array for part in parts for array in part.values()]
        return f"{label}: {len(arrays):,} tensors, {sum(a.nbytes for a in arrays):,} bytes"

    of_draft = draft | {n: a for n, a in images.items() if n.startswith("mtp.")}
    of_images = {n: a for n, a in images.items() if not n.startswith("mtp.")}
    whole = [
        line("files", tensors, draft, images),
        line("loaded", tensors, draft),
        line("of that, draft (3 DSpark stages)", draft),
        line("left out: images", images),
    ]
    trunk = [
        line("files", tensors, draft, images),
        line("loaded", tensors),
        line("left out: draft (3 DSpark stages)", of_draft),
        line("left out: images", of_images),
    ]
    for words, expected in (((), whole), (("--drafts", "off"), trunk)):
        with pytest.warns(LeftOutWarning):
            assert main(["plan", str(folder), *words]) == 0
        text = capsys.readouterr().out
        assert text.splitlines()[-6:-2] == expected
        assert ("3 draft stages included" in text) == (expected is whole)
