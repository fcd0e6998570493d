"""Checkpoints whose files are changed at random, and what may come of each.

    python -m helpers.hostile_checkpoints SEED COUNT FOLDER

makes so many in a folder and looks at each, in a process that may take a gibibyte more than it has
and some seconds for each. It prints how many were refused and how many were loaded.
"""

import contextlib
import copy
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import warnings
from collections import Counter

import numpy as np
import safetensors.numpy

import dsv4_jax as ds
from dsv4_jax.checkpoint.conversion_record import RECORD
from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.checkpoint.files import INDEX
from dsv4_jax.checkpoint.inventory import read_inventory
from dsv4_jax.serving.requests.text import load_tokenizer
from helpers import hostile_shards
from helpers.bad_files import DEEP, ODD, changed, paths_of

SAVED = pathlib.Path(__file__).parents[1] / "data" / "hf_saved_tiny"
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
FILES = (CONFIG, WEIGHTS, TOKENIZER, INDEX)
MAX_SECONDS, MAX_BYTES, MAX_MESSAGE = 30, 2**30, 4000
LONG = 40
"""Rules of a tokenizer in a row, each of which doubles a text."""


def write_good(folder):
    """Two shards with an index, a config and a tokenizer."""
    folder.mkdir()
    tensors = safetensors.numpy.load_file(SAVED / WEIGHTS)
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(SAVED / CONFIG, folder)
    shutil.copy(ds.SHIPPED_CHECKPOINT / TOKENIZER, folder)


def write_released(good, folder):
    """The same model in the release's FP8 and FP4, with scales, in two shards."""
    convert_checkpoint(good, folder, weights="stored", progress=False)
    (folder / RECORD).unlink()
    hostile_shards.split(folder / WEIGHTS, 2)
    shutil.copy(good / TOKENIZER, folder)


def change_bytes(pick, file):
    """Cuts, flips, repeats, puts in or extends; most of it in a header."""
    data = bytearray(file.read_bytes())
    if not data:
        return
    place = pick.randrange(min(len(data), pick.choice([16, 4000, len(data)])))
    count = pick.choice([1, 2, 8, 100])
    kind = pick.randrange(6)
    if kind == 0:
        del data[place:]
    elif kind == 1:
        del data[place : place + count]
    elif kind == 2:
        data[place] ^= 1 << pick.randrange(8)
    elif kind == 3:
        data[place:place] = data[place : place + count]
    elif kind == 4:
        data[place:place] = pick.randbytes(count)
    else:
        data += bytes(count)
    file.write_bytes(data)


def change_kind(pick, file):
    """Puts something else in its place: what is no regular file, too large, or not there."""
    file.unlink()
    kind = pick.choice(["gone", "pipe", "folder", "hole", "empty", "link"])
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind in ("hole", "empty"):
        file.touch()
        os.truncate(file, 2**40 if kind == "hole" else 0)
    elif kind == "link":
        aims = ["/dev/zero", "/proc/self/mem", "/proc/kmsg", "/nowhere", file.name, ".", CONFIG]
        file.symlink_to(pick.choice(aims))


def change_json(pick, file):
    """Changes a value, an index's shards and a config's sizes among them."""
    try:
        document = json.loads(file.read_bytes())
    except ValueError:
        return
    paths = [path for path in paths_of(document) if "vocab" not in path[:-1]]
    if not paths:
        return
    names = [*FILES, "../x", "/etc/passwd", "x" * 300, "no.safetensors", 2**40, DEEP]
    value = pick.choice([*ODD, *names])
    file.write_text(json.dumps(changed(document, pick.choice(paths), copy.deepcopy(value))))


def change_header(pick, file):
    """Changes what a header says of a tensor, or adds thousands of tensors."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        return
    name = pick.choice([name for name in header if name != "__metadata__"])
    kind = pick.randrange(5)
    if kind == 0:
        header[name]["shape"] = [pick.choice([0, 1, -1, 2**31, 2**63]) for _ in range(3)]
    elif kind == 1:
        header[name]["dtype"] = pick.choice(["F64", "BF16", "I64", "F8_E4M3", "X", 3])
    elif kind == 2:
        header[name]["data_offsets"] = [pick.choice([0, 1, 64, 2**63]) for _ in range(2)]
    elif kind == 3:
        header[pick.choice(["x" * 5000, "a\nb", "", "mtp.7.x", "layers.0.attn"])] = header.pop(name)
    else:
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header |= {f"layers.{i}.x{i}": empty for i in range(pick.choice([100, 20_000]))}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def change_tokenizer(pick, file):
    """Asks for more than there is."""
    try:
        document = json.loads(file.read_bytes())
    except ValueError:
        return
    if not isinstance(document, dict):
        return
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}]
    both = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {"<bos>": {"id": "<bos>", "ids": [256] * 10**5, "tokens": ["<bos>"] * 10**5}}
    document |= pick.choice(
        [
            {"normalizer": {"type": "Sequence", "normalizers": [double] * LONG}},
            {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
            {"decoder": {"type": "Sequence", "decoders": [double] * LONG}},
            {"padding": {"strategy": {"Fixed": pick.choice([10**9, 2**40])}, "direction": "Left",
                         "pad_to_multiple_of": pick.choice([None, 2**40]), "pad_id": 0,
                         "pad_type_id": 0, "pad_token": "a"}},
            {"truncation": {"direction": "Right", "max_length": 2**60, "stride": 2**59,
                            "strategy": "LongestFirst"}},
            {"post_processor": {"type": "TemplateProcessing", "single": pieces * 10**5,
                                "pair": both, "special_tokens": {}}},
            {"post_processor": {"type": "TemplateProcessing", "special_tokens": special,
                                "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}] * 9999
                                + pieces, "pair": both}},
        ]
    )  # fmt: skip
    file.write_text(json.dumps(document))


def spoil(pick, folder):
    """Changes one to three things in files, or what a shard, the index or a link says."""
    if pick.random() < 0.5:
        pick.choice(hostile_shards.CHANGES)(pick, folder)
        return
    for _ in range(pick.choice([1, 1, 2, 3])):
        shards = sorted(folder.glob("*.safetensors"))
        files = [folder / name for name in (CONFIG, TOKENIZER, INDEX)] + shards
        files = [file for file in files if file.is_file() and not file.is_symlink()]
        if not files:
            return
        file = pick.choice(files)
        if file.stat().st_size > MAX_BYTES:
            continue  # a hole
        changes = [change_bytes, change_kind]
        if file.suffix == ".json":
            changes += [change_json, change_json]
        if file.suffix == ".safetensors":
            changes += [change_header, change_header]
        if file.name == TOKENIZER:
            changes += [change_tokenizer, change_tokenizer]
        pick.choice(changes)(pick, file)


def refusal(read):
    """(what was read, None), or (None, why it was refused), checked to be short."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read(), None
    except (ValueError, OSError) as error:
        message = str(error)
        assert message
        assert len(message) < MAX_MESSAGE, message[:1000]
        assert message.replace("\n", "").isprintable(), repr(message)[:1000]
        return None, message


def try_one(folder, *, follow_links, is_plain=True):
    """Refused, or loaded as its files say; "" or the reason of each reader."""
    loaded, told = refusal(
        lambda: ds.load_checkpoint(
            folder, dtype="float32", progress=False, follow_links=follow_links
        )
    )
    if loaded is not None and is_plain:
        check_load(folder, *loaded)
    refusal(lambda: read_inventory(folder, follow_links=follow_links))
    tokenizer, _ = refusal(lambda: load_tokenizer(folder, follow_links=follow_links))
    if tokenizer is not None:
        assert len(tokenizer.encode("banana " * 100).ids) < 10**5
    out = folder.with_name("converted")
    shutil.rmtree(out, ignore_errors=True)
    _, refused = refusal(
        lambda: convert_checkpoint(
            folder, out, weights="bfloat16", progress=False, follow_links=follow_links
        )
    )
    assert not (refused and (out / CONFIG).exists()), "it has no config until it is whole"
    return told or ""


def check_load(folder, config, params):
    """What was loaded is saved again as the tensors that another library finds in the files."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(file)
    again = folder.with_name("again")
    shutil.rmtree(again, ignore_errors=True)
    ds.save_checkpoint(config, params, again)
    for name, array in safetensors.numpy.load_file(again / WEIGHTS).items():
        np.testing.assert_array_equal(array, found[name].astype(array.dtype), err_msg=name)


@contextlib.contextmanager
def bounds():
    """The process ends where a case takes longer, and meets `MemoryError` where it takes more."""
    text = pathlib.Path("/proc/self/statm").read_text()
    most = int(text.split()[0]) * resource.getpagesize() + MAX_BYTES
    before = resource.getrlimit(resource.RLIMIT_AS)
    signal.alarm(MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)


def main(seed, count, where):
    """Looks at so many, beginning with one that is as it should be."""
    counts = Counter()
    good = where / "good"
    write_good(good)
    assert not try_one(good, follow_links=False)
    released = where / "released"
    write_released(good, released)
    assert not try_one(released, follow_links=False, is_plain=False)
    for number in range(seed, seed + count):
        pick = random.Random(number)
        folder = where / f"{number}"
        is_plain = pick.random() < 0.5
        shutil.copytree(good if is_plain else released, folder)
        spoil(pick, folder)
        print(f"{number}", end=" ", flush=True)  # the last one is the one that ended the process
        with bounds():
            told = try_one(folder, follow_links=pick.random() < 0.5, is_plain=is_plain)
        counts["refused" if told else "loaded"] += 1
        shutil.rmtree(folder)
    print("\n" + json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
