"""What `dsv4-jax plan` prints: the numbers of deepseek_v4.md section 7."""

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.checkpoint.find import ON_THE_HUB
from dsv4_jax.cli import main, presets
from dsv4_jax.runtime import shown_bytes
from helpers import slow
from helpers.released_configs import FLASH_0731
from pallas_kernels.common.formats import CACHE_FORMATS

MILLION = 1_048_576
OFFICIAL, FP8_INDEX = "fp8_ue8m0", "fp8_ue8m0_fp8_index"


@pytest.fixture
def plan(capsys):
    """Runs the command and gives its table, {row: (MiB per request, bytes per token)}, and text."""

    def run(*arguments):
        status = main(["plan", *map(str, arguments)])
        text = capsys.readouterr().out
        assert text.startswith(("fits ", "does not fit ")[status])
        lines = [line.rsplit(maxsplit=2) for line in text.splitlines()]
        table = {}
        for name, *numbers in (line for line in lines if len(line) == 3):
            if all(number[0].isdigit() and number[-1].isdigit() for number in numbers):
                table[name] = tuple(float(number.replace(",", "")) for number in numbers)
        return table, text

    return run


def test_flash_at_a_million_tokens(plan):
    table, text = plan("flash", "--context", MILLION)
    assert table["csa entries"] == (3066, 3066)  # 21 layers * 2**18 entries * 584 bytes
    assert table["csa index keys"] == (357, 357)  # 21 * 2**18 * 68
    assert table["hca entries"] == (91.25, 91.25)  # 20 * 2**13 * 584
    growing = sum(table[name][1] for name in ("csa entries", "csa index keys", "hca entries"))
    assert growing == pytest.approx(3514.3, abs=0.0501)
    windows = sum(table[f"{attn} window"][0] for attn in ("swa", "csa", "hca"))
    assert windows == pytest.approx(3.07, abs=0.011)
    assert table["blocks and window"][0] == pytest.approx(3517.3, abs=0.05)
    states = table["csa compressor state"][0] + table["csa indexer state"][0]
    assert states == pytest.approx(1.64, abs=0.011)
    assert table["hca compressor state"][0] == 0.12
    assert table["compressor states"][0] == 1.76
    assert "1 request(s) of 1,048,576 tokens, blocks of 128 tokens" in text


def test_what_a_tier_beside_the_devices_holds(plan):
    """Blocks as above, 3,514 bytes a token, and a snapshot's windows and b-streams."""
    _, text = plan("flash", "--context", 131_072, "--host-cache", "64GiB")
    found = re.search(r"prefixes: ([\d,]+) bytes for a block of 128 tokens, ([\d,]+) for a", text)
    block, snapshot = (int(one.replace(",", "")) for one in found.groups())
    assert (block, 10**6 < snapshot < 8 * 10**6) == (round(3514.25 * 128), True)
    count, tokens = 2**36 // (1024 * block + snapshot), 2**36 // block * 128
    line = f"on the host, in 64.00 GiB: {count} prefixes of 131,072 tokens with a snapshot each, or"
    assert f"{line} {tokens:,} tokens of blocks" in text
    assert "prefixes: " not in plan("flash", "--context", 131_072)[1]


@pytest.mark.parametrize(
    ("config", "cache_format", "context", "mib", "published_to"),
    [
        ("flash", OFFICIAL, 8192, 30.52, 0.01),
        ("flash", OFFICIAL, 131_072, 442.4, 0.1),
        ("flash", FP8_INDEX, MILLION, 3853, 1),
        ("flash", "bf16", 8192, 59.12, 0.01),
        ("flash", "bf16", 131_072, 865.4, 0.1),
        ("flash", "bf16", MILLION, 6885.4, 0.1),
        ("pro", OFFICIAL, 8192, 43.66, 0.01),
        ("pro", OFFICIAL, 131_072, 633.3, 0.1),
        ("pro", OFFICIAL, MILLION, 5035.8, 0.1),
        ("pro", FP8_INDEX, MILLION, 5516, 1),
        ("pro", "bf16", MILLION, 9855.6, 0.1),
    ],
)
def test_a_request_takes_the_published_bytes(
    plan, config, cache_format, context, mib, published_to
):
    table, _ = plan(config, "--context", context, "--cache-format", cache_format)
    assert table["blocks and window"][0] == pytest.approx(mib, abs=published_to / 2 + 0.006)
    assert table["compressor states"][0] == {"flash": 1.76, "pro": 2.53}[config]


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("config", slow.all_but(["flash"], ["flash", "pro", "tiny"]))
def test_every_format_is_planned(plan, config, cache_format):
    _, text = plan(config, "--context", 4096, "--requests", 3, "--cache-format", cache_format)
    assert f"\n\n{config}, {cache_format}: 3 request(s) of 4,096 tokens" in text
    assert "workspace: " in text


@pytest.mark.parametrize("requests", slow.all_but([8], [1, 8]))
def test_numbers_are_those_of_the_arrays(plan, requests):
    """`tiny` is small enough to allocate."""
    table, text = plan("tiny", "--context", 20_000, "--requests", requests)
    config = dataclasses.replace(ds.DSV4Config.tiny(), num_mtp_layers=0)
    cache = ds.init_cache(config, max_requests=requests, max_context_tokens=20_000)
    for attn, pool in cache.paged.items():
        assert table[f"{attn} entries"][0] == mib_per_request(pool.entries, requests)
    assert table["csa index keys"][0] == mib_per_request(cache.paged["csa"].index_keys, requests)
    assert table["trunk"][0] == mib_per_request((cache.state, cache.paged), requests)
    with_draft = ds.init_cache(
        ds.DSV4Config.tiny(), max_requests=requests, max_context_tokens=20_000
    )
    assert f": slots and blocks {shown_bytes(with_draft.memory_bytes())}, tables" in text


def mib_per_request(tree, requests):
    num_bytes = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))
    return pytest.approx(num_bytes / 2**20 / requests, abs=0.0051)


def test_requests_share_what_the_weights_leave(plan):
    def fitting(*arguments):
        _, text = plan("flash", "--context", MILLION, *arguments)
        said = re.findall(
            r"left for a cache: ([\d,.]+) GiB of .*\nrequests that fit: ([\d,]+)", text
        )
        return tuple(float(number.replace(",", "")) for found in said for number in found)

    # GiB: trunk, draft window, table; 8 snapshots; 3 rows of logits for a token and its draft
    per_request = (3519.15 + 28.37 + 3 * 2 * 129_280 * 4 / 2**20) / 1024
    step = 0.3  # GiB
    assert fitting("--gpu-gib", 100, "--weights-gib", 0) == (99.7, int(99.7 / per_request))
    assert fitting("--gpu-gib", 100, "--weights-gib", 60) == (39.7, int(39.7 / per_request))
    assert fitting("--gpu-gib", 200) == (51.06, int(51.06 / per_request))
    assert fitting("--gpu-gib", 200, "--requests", 4) == (51.05, int(51.06 / per_request))
    assert fitting("--gpu-gib", 600, "--weights", "bfloat16") == (57.7, int(57.7 / per_request))
    assert fitting("--gpu-gib", 100, "--weights-gib", 100 - step) == ()
    assert fitting() == fitting("--weights", "bfloat16") == ()  # the default is an H200


def test_numbers_have_units_as_people_write_them(plan):
    one = ("--requests", 1)
    assert plan("tiny", "--context", "2K", *one) == plan("tiny", "--context", 2048, *one)
    assert plan("tiny", "--gpu-gib", "1GiB") == plan("tiny", "--gpu-gib", "1024MiB")
    assert plan("tiny", "--gpu-gib", "1") == plan("tiny", "--gpu-gib", "1GiB")


@pytest.mark.parametrize(
    ("arguments", "fits", "would"),
    [
        ((), False, "--gpu b200, --gpu b300, --gpu h200x2"),
        (("--gpu", "b200"), True, None),
        (("--gpu-gib", 80), False, "--gpu b200, --gpu b300, --gpu h100x4, --gpu h200x2"),
        (("--gpu-gib", 152, "--context", MILLION), False, "--context"),
        (("--gpu-gib", 160, "--context", MILLION, "--requests", 4), True, "--requests 3, --gpu b2"),
        (("--gpu-gib", 100, "--weights-gib", 150), False, "--gpu b200, --gpu b300"),
        (("--weights", "bfloat16"), False, "--gpu h200x8"),
    ],
)
def test_what_does_not_fit_is_said_and_what_would(plan, arguments, fits, would):
    """Never with a negative amount; what is proposed fits."""
    _, text = plan("flash", *arguments)
    assert not re.search(r"(?<![\w-])-\d", text)
    assert ("requests that fit" in text) == fits
    said = re.findall(r"^what would: (.*)$", text, re.M)
    assert (said == []) == (would is None)
    assert ("does not fit" in text) == (would is not None)
    if would is None:
        return
    assert said[0].startswith(would)
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
    for option in said[0].split(", "):
        changed = dict([option.split()])
        replaced = {"--gpu-gib"} & pairs.keys() if "--gpu" in changed else set()
        words = {k: v for k, v in (pairs | changed).items() if k not in replaced}
        fitting = [word for pair in words.items() for word in pair]
        _, text = plan("flash", *fitting)
        assert "requests that fit" in text
        assert "does not fit" not in text


def test_several_gpus_of_a_kind_are_a_mesh(plan, capsys):
    """The one of them that holds most requests, unless it is given."""
    _, text = plan("flash", "--gpu", "b200x8", "--context", 8192)
    assert text.startswith("fits b200x8: 1 request(s) of 8,192 tokens; at most 17,688 would fit\n")
    assert "\n\nflash, fp8_ue8m0: data=8, model=1, 8 GPU(s) of 167.6 GiB" in text
    _, text = plan(
        "flash", "--gpu", "b200x8", "--data-shards", 2, "--model-shards", 4, "--context", 8192
    )
    assert "data=2, model=4" in text
    _, text = plan("flash", "--gpu", "h200", "--data-shards", 2, "--context", 8192)
    assert "data=2, model=1, 2 GPU(s) of 131.3 GiB" in text
    for given in (("--model-shards", 4), ("--data-shards", 2)):  # the other takes the rest
        _, text = plan("flash", "--gpu", "b200x8", *given, "--context", 8192)
        assert "data=2, model=4, 8 GPU(s)" in text
    for arguments, message in (
        (
            ("--gpu", "b200x8", "--data-shards", "2", "--model-shards", "2"),
            "must be one GPU, or as many as --data-shards 2 times --model-shards 2",
        ),
        (("--gpu", "a100"), "argument --gpu: must be one of h100, h200, b200, b300, or several"),
        (("--gpu", "h200x0"), "argument --gpu: must be one of"),
        (("--gpu", "h200x7"), "no mesh of 7 GPUs divides"),
        (("--gpu", "h200", "--gpu-gib", "80"), "argument --gpu-gib: not allowed with"),
    ):
        assert main(["plan", "flash", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "published"), [("flash", 159_609_485_896), ("pro", 864_704_792_696)]
)
def test_released_weights_take_the_published_bytes(plan, config, published):
    """But for hash tables, which the release has in i64 and we in i32."""
    _, text = plan(config)
    (said,) = re.findall(r"^weights: .* GiB, ([\d,]+) bytes, draft block included, .*$", text, re.M)
    model = getattr(ds.DSV4Config, config)()
    tables = 3 * model.vocab_size * model.num_experts_per_token * 4
    assert int(said.replace(",", "")) == published - tables
    assert tables < published / 100


@pytest.mark.parametrize(
    ("preset", "lines"),
    [
        (
            "flash-0731",
            [
                "files: 72,317 tensors, 166,878,536,440 bytes",
                "loaded: 72,317 tensors, 166,878,536,440 bytes",
                "of that, draft (3 DSpark stages): 4,705 tensors, 10,862,838,300 bytes",
            ],
        ),
        pytest.param(
            "pro-0813",
            [
                "files: 149,782 tensors, 892,727,580,904 bytes",
                "loaded: 149,782 tensors, 892,727,580,904 bytes",
                "of that, draft (3 DSpark stages): 7,009 tensors, 41,979,375,900 bytes",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_releases_with_dspark_are_counted(plan, preset, lines):
    """The published counts and bytes. Hash tables are i32 in memory, and i64 in files."""
    _, text = plan(preset, "--context", 8192)
    assert text.splitlines()[-3:] == lines
    (said,) = re.findall(
        r"^weights: .* GiB, ([\d,]+) bytes, 3 draft stages included, .*$", text, re.M
    )
    published, stages = (int(lines[i].split()[-2].replace(",", "")) for i in (1, 2))
    assert int(said.replace(",", "")) == published - 3 * 129_280 * 6 * 4
    row = re.findall(r"^draft +[\d,.-]+ .*$", text, re.M)[0].split()[1:]
    in_mib = sum(float(cell.replace(",", "")) for cell in row if cell != "-")
    assert in_mib == pytest.approx(stages / 2**20, abs=0.03)
    rings = 3 * 128 * 584 / 2**20  # of each stage 128 entries of 584 bytes
    assert re.search(rf"^draft window +{rings:.2f}$", text, re.MULTILINE)


def test_stages_are_planned_apart_from_the_trunk(plan):
    """Without them a release is what it was before, and a mesh's devices hold a part of them."""
    _, without = plan("flash-0731", "--drafts", "off", "--context", 8192)
    assert without.splitlines()[-2:] == [
        "loaded: 67,612 tensors, 156,015,698,140 bytes",
        "left out: draft (3 DSpark stages): 4,705 tensors, 10,862,838,300 bytes",
    ]
    assert "included" not in without.partition("\ncache")[2].partition("\nweights: ")[2]
    assert not re.search(r"^draft  ", without, re.M)
    assert re.search(r"^draft window +0\.00$", without, re.MULTILINE)
    _, text = plan("flash-0731", "--gpu", "h200x4", "--context", 8192)
    assert "\n\nflash-0731, fp8_ue8m0: data=" in text
    assert re.search(r"^weights: [\d.]+ GiB, 3 draft stages included, .*$", text, re.M)
    cells = re.findall(r"^draft +.*$", text, re.M)[0].split()
    routed = 3 * 256 * 3 * 2048 * 4096 * (1 / 2 + 1 / 32)
    assert cells[4] == f"{routed / 4 / 2**20:,.2f}"
    assert re.search(r"^files: 72,317 tensors", text, re.M)


def test_stages_of_a_config_alone_must_be_counted(tmp_path, capsys):
    """Where neither the config nor files say how many there are."""
    contents = FLASH_0731 | {"compress_ratios": FLASH_0731["compress_ratios"][:43]}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    assert main(["plan", str(tmp_path)]) == 2
    assert "dspark.num_stages must be known" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--gpu", "b300", "--drafts", "off"]) == 0
    (tmp_path / "config.json").write_text(json.dumps(contents | {"n_mtp_layers": 3}))
    assert main(["plan", str(tmp_path), "--gpu", "b300"]) == 0
    assert "3 draft stages included" in capsys.readouterr().out


def test_weights_are_listed_by_family_and_format(plan):
    """Flash: 43 layers and the draft block; its numbers are those of the released shapes."""
    _, text = plan("flash")
    rows = {line[:28].rstrip(): line[28:].split() for line in text.splitlines()}
    assert rows["weights, stored"] == [
        word for name in ("BF16", "F32", "FP8", "MXFP4", "I32") for word in (name, "MiB")
    ]
    assert rows["embedding"] == rows["head"] == [f"{129_280 * 4096 * 2 / 2**20:,.2f}", *"----"]
    expert = 3 * 2048 * 4096 * (1 / 2 + 1 / 32)
    assert rows["routed experts"] == [*"---", f"{43 * 256 * expert / 2**20:,.2f}", "-"]
    shared = 43 * 3 * 2048 * 4096 * (1 + 1 / 128**2)
    assert rows["shared expert"] == [*"--", f"{shared / 2**20:,.2f}", *"--"]
    assert rows["draft"][3] == f"{256 * expert / 2**20:,.2f}"
    _, text = plan("flash", "--weights", "bfloat16")
    assert "FP8 MiB" not in text
    assert "542.00 GiB" in text


@pytest.mark.parametrize(
    ("config", "mesh", "weights_gb", "left_gb"),
    [
        ("flash", (1, 2), 80.5, 60.5),
        ("flash", (2, 1), 84.3, 56.6),
        ("flash", (1, 8), 21.1, 119.8),
        ("pro", (1, 8), 111.3, 29.6),
        ("pro", (8, 1), 133.6, 7.2),
    ],
)
def test_a_mesh_is_planned_device_by_device(plan, config, mesh, weights_gb, left_gb):
    _, text = plan(config, "--data-shards", mesh[0], "--model-shards", mesh[1], "--context", 8192)
    (weights,) = re.findall(r"^weights: ([\d.]+) GiB", text, re.M)
    (left,) = re.findall(r"^left for a cache: ([\d.]+) GiB", text, re.M)
    assert float(weights) * 2**30 / 1e9 == pytest.approx(weights_gb, abs=0.06)
    assert float(left) * 2**30 / 1e9 == pytest.approx(left_gb, abs=0.2)
    assert not re.search(r"-\d", text.partition("weights, ")[2])  # no negative amount
    (fitting,) = re.findall(r"^requests that fit: ([\d,]+), ([\d,]+) on each of (\d)", text, re.M)
    total, each, shards = (int(number.replace(",", "")) for number in fitting)
    assert total == each * shards
    assert each == pytest.approx(
        left_gb * 1e9 / {"flash": 32.8 + 28.4 + 3, "pro": 47.2 + 40 + 3}[config] / 2**20, rel=0.05
    )


def test_a_step_is_told_of_what_was_asked_for_and_of_the_most_that_fit(plan):
    _, text = plan("flash", "--gpu", "h200x2", "--requests", 200)
    (most,) = re.findall(r"at most (\d+) would fit", text)
    table = text.partition("\nfloor")[2].partition("\ntokens pick")[0].splitlines()[2:]
    assert [line.split()[0] for line in table] == sorted({"1", "32", "200", most, "256"}, key=int)
    assert [line.split()[0] for line in table if "more than fit" in line] == ["256"]


def test_a_checkpoint_in_bf16_is_counted_as_it_is_and_asked_for_no_more_than_it_is_meant_for(plan):
    _, text = plan("shipped")
    assert "1 request(s) of 4,096 tokens" in text
    assert "weights, bfloat16" in text
    (told,) = re.findall(r"^weights: .*?, ([\d,]+) bytes, 3 draft stages", text, re.M)
    (loaded,) = re.findall(r"^loaded: .*?, ([\d,]+) bytes$", text, re.M)
    assert int(told.replace(",", "")) == pytest.approx(int(loaded.replace(",", "")), rel=0.01)


def test_a_split_cache_is_planned(plan):
    _, text = plan("flash", "--model-shards", 8, "--context", MILLION, "--split-cache")
    assert "data=1, model=8, cache split over model, 8 GPU(s)" in text
    assert "requests that fit: 239, 239 on each of 1 data shard(s)" in text
    assert re.search(r"^41 collectives over model, sums of attention: ", text, re.M)


def test_a_mesh_says_what_fits_and_what_a_step_takes_at_least(plan):
    _, text = plan("flash", "--data-shards", 1, "--model-shards", 8, "--context", MILLION)
    assert "requests that fit: 32, 32 on each of 1 data shard(s)" in text
    rows = {line.split()[0]: line for line in text.partition("\nfloor")[2].splitlines() if line}
    assert [name in rows for name in ("1", "32", "256")] == [True] * 3
    assert "more than fit" in rows["256"]
    assert "more than fit" not in rows["32"]
    assert f"a decode step of requests of {MILLION:,} tokens" in text
    _, slower = plan("flash", "--model-shards", 8, "--context", MILLION, "--collective-us", 16)
    assert floor_ms(slower) == pytest.approx(floor_ms(text) + 88 * 0.01, abs=0.011)
    _, small = plan("pro", "--data-shards", 8, "--context", MILLION, "--gpu-gib", "129GiB")
    assert small.startswith("does not fit 8 GPU(s) of 129.0 GiB: 1 request(s) of 1,048,576 tokens")
    assert "requests that fit: 0, 0 on each of 8" in small
    (longest,) = re.findall(r"^the longest context that fits: ([\d,]+) tokens$", small, re.M)
    longest = longest.replace(",", "")
    assert f"\nwhat would: --context {longest}\n" in small
    _, fits = plan("pro", "--data-shards", 8, "--context", longest, "--gpu-gib", 129)
    assert fits.startswith("fits 8 GPU(s)")


def floor_ms(text):
    (row,) = re.findall(r"^1  .*$", text, re.M)
    return float(row.split()[3])


def test_a_checkpoint_directory_names_a_config(plan):
    folder = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny"
    table, text = plan(folder, "--context", 4096)
    assert f"\n\n{folder}, fp8_ue8m0: 1 request(s)" in text
    config = ds.DSV4Config.from_hf(folder)
    cache = ds.init_cache(config, max_requests=1, max_context_tokens=4096)
    assert table["trunk"][0] == mib_per_request((cache.state, cache.paged), 1)


def test_weights_that_are_not_there_are_said(tmp_path, capsys):
    """A download that is not complete is planned by its config, as a config alone is."""
    saved = pathlib.Path(__file__).parents[2] / "data" / "hf_saved_tiny" / "config.json"
    (tmp_path / "config.json").write_text(saved.read_text())
    assert main(["plan", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"head.weight": "model-00001-of-00002.safetensors"}}')
    assert main(["plan", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "files: " not in captured.out
    (line,) = captured.err.splitlines()
    assert line == (
        f"[files are not counted: {index} names files that are not there: "
        "model-00001-of-00002.safetensors]"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flsh"], r"config must be one of \['flash', .* 'shipped'\], a directory, .*; got 'flsh'"),
        (
            ["flash", "--context", "0"],
            r"argument --context: must be a whole number from 1 to .*, got '0'",
        ),
        (
            ["flash", "--requests", "-1"],
            r"argument --requests: must be a whole number from 1 to .*, got '-1'",
        ),
        (["{empty}"], "config.json"),
        (["flash", "--context", "1048577"], "--context must be at most 1,048,576, the longest"),
        (["flash", "--context", "2M"], "--context must be at most 1,048,576, the longest"),
        (["flash", "--data-shards", "3"], "num_routed_experts=256 .* data=3"),
        (["flash", "--model-shards", "2", "--weights-gib", "3"], "--weights-gib is for one device"),
        (["flash", "--split-cache"], "--split-cache deals a cache over .* add --model-shards"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, arguments, message):
    arguments = [argument.format(empty=tmp_path) for argument in arguments]
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert re.search(f"^dsv4-jax plan: .*{message}", line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flash", "--cache-format", "fp16"], "argument --cache-format: invalid choice: 'fp16'"),
        (["flash", "--context", "much"], "argument --context: must be a whole number from 1"),
        ([], "the following arguments are required: CONFIG"),
    ],
)
def test_arguments_that_do_not_parse_are_one_line_and_status_2(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dsv4-jax plan: {message}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sevre"], "; did you mean serve?"),
        (["plan", "flash", "--cache-format", "fp8_ue8m"], "; did you mean fp8_ue8m0?"),
        (["plan", "flash-0371"], "got 'flash-0371'; did you mean flash-0731?"),
        (["plan", "V4-Flash"], "got 'V4-Flash'; did you mean deepseek-ai/DeepSeek-V4-Flash?"),
        (["plan", "v4-pro"], "got 'v4-pro'; did you mean deepseek-ai/DeepSeek-V4-Pro?"),
        (["plan", "DeepSeek-V4.1-Flahs"], "did you mean deepseek-ai/DeepSeek-V4.1-Flash?"),
        (["plan", "flash", "--cache-format", "zzz"], "'fp4_e4m3')"),
    ],
)
def test_a_choice_that_is_near_is_named(capsys, arguments, told):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(told)


def test_v41_flash_on_four_cards(plan):
    """deepseek_v41.md sections 3, 9 and 10: bytes of a card, of a token, and of the host."""
    _, text = plan("v41-flash", "--gpu", "h200x4")
    assert "weights: 78.75 GiB, 3 draft stages included" in text
    assert "a token takes 890 bytes in fp4_e4m3: 4 of 40 layers make entries" in text
    million = re.search(r"and one of a million tokens ([\d.]+) GB", text)
    assert float(million[1]) == pytest.approx((890 * 2**20 + 43 * 128 * 528) / 1e9, rel=1e-3)
    assert float(million[1]) <= 0.95
    assert "Engram tables: 202,758,032,400 bytes, 188.83 GiB, of each host's memory" in text
    assert "a token reads 12.7 KB of them" in text
    assert re.match(r"fits .* would fit, beside 188\.83 GiB of Engram tables in a host", text)
    assert re.search(r"requests that fit: \d", text)
    assert "files: 96,085 tensors, 510,286,023,000 bytes" in text
    assert "left out: images: 309 tensors" in text
    floor = [float(cell) for cell in _row(text, "256")[:3]]
    assert floor == pytest.approx([19.67, 0.83, 20.50], rel=0.01)
    assert "rows of 32 token(s): 0.406 MB to a GPU, 0.041 ms at 10 GB/s" in text
    assert "from a disk 3,072 reads of a page" in text
    assert re.search(r"the [\d.,]+ GiB of .* (do not )?hold them, and [\d.,]+ GiB are free", text)
    by_format = [int(2**20 * float(n.replace(",", ""))) for n in _row(text, "all")]
    assert sum(by_format) == pytest.approx(78.75 * 2**30, rel=1e-4)


def test_the_released_models_are_planned_by_their_names_on_the_hub_too(plan, tmp_path, monkeypatch):
    two = ("--gpu", "h200x2", "--context", "128K")
    table, text = plan("deepseek-ai/DeepSeek-V4-Flash", *two)
    assert text.startswith("fits h200x2: 1 request(s) of 131,072 tokens; at most 226 would fit\n")
    named, _ = plan("flash", *two)
    assert table == named
    for name, preset in ON_THE_HUB.items():
        assert presets.read_config(name) == presets.PRESETS[preset]()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deepseek-ai" / "DeepSeek-V4-Flash").mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match=r"no config\.json"
    ):  # a directory of that name wins
        presets.read_config("deepseek-ai/DeepSeek-V4-Flash")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["flash", "--data-shards", "1"],
            r"h200x1 \(--data-shards 1 --model-shards 1\): each GPU would hold 148\.6 GiB .*\n"
            r"what would: h200x2 \(--data-shards 1 --model-shards 2\), h200x2 \(--data-shards 2 "
            r"--model-shards 1\)\n",
        ),
        (
            ["pro", "--model-shards", "4"],
            r"h200x4 \(--data-shards 1 --model-shards 4\): each GPU would hold 203\.9 GiB .*\n"
            r"what would: h200x8 \(--data-shards 1 --model-shards 8\), h200x8 .*\n",
        ),
        (
            ["flash", "--gpu", "h200x2", "--weights", "bfloat16"],
            r"h200x2 \(--data-shards .* would hold",
        ),
        (
            ["v41-flash"],
            r"h200x1 \(--data-shards 1 --model-shards 1\): .*\nwhat would: h200x4 \(--data-shards "
            r"1 --model-shards 4\), h200x4 \(--data-shards 2 --model-shards 2\), h200x4 \(.*\)\n",
        ),
        (
            ["flash", "--gpu", "h200x2", "--requests", "1K", "--context", "128K"],
            r"h200x2: 1,024 request\(s\) of 131,072 tokens; at most (\d+) would fit\n"
            r"what would: --requests \1\n",
        ),
    ],
)
def test_a_mesh_that_is_too_small_is_said_first_and_by_the_status(capsys, arguments, told):
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert re.match(f"does not fit {told}", captured.out)
    assert captured.err == ""


def test_a_step_is_timed_at_the_rates_of_the_card(plan):
    """The floor of one request is bytes and latencies; NVIDIA's figures are scaled as an H200's."""
    mesh, floors = ("--data-shards", 4, "--collective-us", 0, "--context", 8192), {}
    for kind in ("h200", "h100", "b200", "b300"):
        _, text = plan("flash", "--gpu", kind + "x4", *mesh)
        (floors[kind],) = re.findall(r"^1 +([\d.]+) ", text, re.M)
        assert f"at the rates of {kind}: " in text
        assert ("not measured" in text) == (kind != "h200")
    times = {kind: float(text) for kind, text in floors.items()}
    assert times["h200"] / times["b200"] == pytest.approx(8 / 4.8, rel=0.01)
    assert times["b300"] == times["b200"]
    assert times["h100"] / times["h200"] == pytest.approx(4.8 / 3.35, rel=0.01)
    _, text = plan("flash", "--gpu-gib", 141, *mesh)
    assert "at the rates of h200: 4.3 TB/s, 450 GB/s" in text


def _row(text, name):
    return next(line.split()[1:] for line in text.splitlines() if line.startswith(name + " "))
