"""What a shard's header, an index and links may say that is not so, for `hostile_checkpoints`."""

import json
import shutil
import struct

INDEX = "model.safetensors.index.json"


def read_shard(file):
    """(header, the bytes behind it)."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_shard(file, header, body):
    """The header is a dict, or its text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def shards_of(folder):
    return sorted(file for file in folder.glob("*.safetensors") if file.is_file())


def split(file, count):
    """Puts the tensors of a shard into so many in its place, with an index."""
    header, body = read_shard(file)
    names = sorted(name for name in header if name != "__metadata__")
    weight_map = {}
    for number in range(count):
        shard, part, bytes_of_part = f"model-0000{number + 1}-of-0000{count}.safetensors", {}, b""
        for name in names[number::count]:
            first, last = header[name]["data_offsets"]
            ends = [len(bytes_of_part), len(bytes_of_part) + last - first]
            part[name] = header[name] | {"data_offsets": ends}
            bytes_of_part += body[first:last]
            weight_map[name] = shard
        write_shard(file.parent / shard, part, bytes_of_part)
    file.unlink()
    (file.parent / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def pick_tensor(pick, folder):
    """A shard, its header and bytes, and the name of one of its tensors."""
    file = pick.choice(shards_of(folder))
    header, body = read_shard(file)
    return file, header, body, pick.choice([name for name in header if name != "__metadata__"])


def cut_header(pick, folder):
    file = pick.choice(shards_of(folder))
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[: pick.choice([0, 1, 7, 8, 9, end // 2, end - 1, end, end + 1])])


def say_another_header_size(pick, folder):
    file = pick.choice(shards_of(folder))
    data = file.read_bytes()
    size = pick.choice([0, 1, 2**20, 2**31, 2**63, 2**64 - 1, len(data) - 8, len(data)])
    file.write_bytes(size.to_bytes(8, "little") + data[8:])


def let_tensors_overlap(pick, folder):
    file, header, body, name = pick_tensor(pick, folder)
    other = pick.choice([one for one in header if one != name])
    first, last = header[name]["data_offsets"]
    wrong = pick.choice([-4, 0.0, True, None, "0", 2**64])
    header[name] |= pick.choice(
        [
            header[other],
            {"data_offsets": [first + 4, last + 4]},
            {"data_offsets": [last, first]},
            {"data_offsets": [wrong, last]},
        ]
    )
    write_shard(file, header, body)


def say_a_shape_that_overflows(pick, folder):
    file, header, body, name = pick_tensor(pick, folder)
    header[name]["shape"] = pick.choice(
        [[2**32, 2**32], [2**63, 2], [2**64], [-1, -4], [10**400], [1e3], [True, 4], ["4"], [[4]],
         None, [0, 2**63], [2**31, 2**31, 2**31, 0], [1] * 5000]
    )  # fmt: skip
    write_shard(file, header, body)


def repeat_a_tensor(pick, folder):
    """In another shard, with the same values or zeros; or in the header of its own."""
    file, header, body, name = pick_tensor(pick, folder)
    if pick.random() < 0.5:
        again = json.dumps({name: header[name] | pick.choice([{}, {"shape": [1]}])})
        write_shard(file, f"{json.dumps(header)[:-1]}, {again[1:]}", body)
        return
    other = next(one for one in shards_of(folder) if one != file)
    held, bytes_held = read_shard(other)
    first, last = header[name]["data_offsets"]
    values = pick.choice([body[first:last], bytes(last - first)])
    held[name] = header[name] | {"data_offsets": [len(bytes_held), len(bytes_held) + last - first]}
    write_shard(other, held, bytes_held + values)


def give_an_odd_name(pick, folder):
    file, header, body, name = pick_tensor(pick, folder)
    odd = pick.choice(
        ["\x00", "\x1b[31m", "\r\n", "\u202e", "\ud800", "\x7f", "a" * 70000, "../../x", "%s{0}"]
    )
    new = pick.choice([odd, name[:5] + odd + name[5:], "__metadata__"])
    header[new] = header.pop(name)
    write_shard(file, header, body)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][new] = file.name
    (folder / INDEX).write_text(json.dumps(index))


def name_no_shard(pick, folder):
    """Folders, paths that lead back, files of another kind, and what is no path."""
    (folder / "folder.safetensors").mkdir()
    (folder / "below").mkdir()
    shutil.copy(shards_of(folder)[0], folder / "below" / "x.safetensors")
    index = json.loads((folder / INDEX).read_text())
    name = pick.choice(list(index["weight_map"]))
    file = index["weight_map"][name]
    index["weight_map"][name] = pick.choice(
        ["folder.safetensors", ".", "..", "below", "below/x.safetensors", "/", "", f"./{file}",
         f"{file}/", f"below/../{file}", str(folder / file), "config.json", INDEX, "a\x00b",
         "\ud800", "x" * 5000, 3, None, [], {}]
    )  # fmt: skip
    (folder / INDEX).write_text(json.dumps(index))


def link_in_a_loop(pick, folder):
    """Two links to each other, one through its own folder again and again, a chain of sixty."""
    file = pick.choice([one for one in folder.iterdir() if one.is_file()])
    data = file.read_bytes()
    file.unlink()
    kind = pick.choice(["two", "through", "chain", "own folder", "what is open"])
    (folder / "end").write_bytes(data)
    if kind == "two":
        file.symlink_to("other")
        (folder / "other").symlink_to(file.name)
    elif kind == "through":
        (folder / "again").symlink_to(".")
        file.symlink_to("again/" * 20 + "end")
    elif kind == "chain":
        for number in range(60):
            (folder / f"link{number}").symlink_to(f"link{number - 1}" if number else "end")
        file.symlink_to("link59")
    else:
        file.symlink_to(".." if kind == "own folder" else "/proc/self/fd/0")


def write_no_number(pick, folder):
    """NaN, infinity, zero and what is negative, in scales where there are any."""
    file, header, body, name = pick_tensor(pick, folder)
    scales = [one for one in header if one.endswith("scale")]
    first, last = header[pick.choice(scales or [name])]["data_offsets"]
    wrong = pick.choice([b"\xff" * 4, b"\x7f" * 4, bytes(4), struct.pack("<f", -1.0)])
    place = pick.randrange(first, last) // 4 * 4
    write_shard(file, header, body[:place] + wrong + body[place + 4 :])


CHANGES = (
    cut_header,
    say_another_header_size,
    let_tensors_overlap,
    say_a_shape_that_overflows,
    repeat_a_tensor,
    give_an_odd_name,
    name_no_shard,
    link_in_a_loop,
    write_no_number,
)
