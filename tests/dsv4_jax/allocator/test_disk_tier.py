"""Pages in files: what is read is what was written, or nothing."""

import contextlib
import errno
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dsv4_jax.allocator import disk_tier
from dsv4_jax.allocator.block_contents import BlockContent, contents_of
from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.page_files import HEADER_BYTES, DamagedFileError, disk_bytes
from dsv4_jax.cache.row_sums import as_number

SHAPE = {"model": "a"}
SIZE = 5000


def data_of(number):
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def prefix(count, salt=b""):
    """(content, parent) of each of the blocks of a sequence, of four tokens each."""
    return list(contents_of(np.arange(4 * count, dtype=np.int32), salt, 4))


def put(tier, count, *, of="blocks", stamp=0, salt=b""):
    for number, (content, parent) in enumerate(prefix(count, salt)):
        assert tier.write(of, content, parent, data_of(number), number, stamp - number)


def found(tier, count, *, of="blocks", salt=b""):
    """Numbers of the blocks that are there, all of which hold what they should."""
    numbers = []
    for number, (content, parent) in enumerate(prefix(count, salt)):
        if page := tier.find(of, content, parent):
            with contextlib.suppress(OSError, DamagedFileError):
                data, sums = np.empty(SIZE, np.uint8), np.empty(2, np.uint32)
                tier.read(page, data, sums)
                np.testing.assert_array_equal(data, data_of(number))
                assert as_number(sums) == number
                numbers.append(number)
    return numbers


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_tier(folder):
    """Opens tiers, which are closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_one(max_bytes=10**6, shape=SHAPE):
            tier = DiskTier(str(folder), max_bytes, shape)
            stack.callback(tier.close)
            return tier

        yield open_one


def test_what_is_written_outlives_the_tier_for_the_same_shape_and_the_owner_alone(
    open_tier, folder
):
    first = open_tier()
    put(first, 3)
    put(first, 1, of="snapshots")
    first.close()
    second = open_tier()
    assert (found(second, 4), found(second, 4, of="snapshots")) == ([0, 1, 2], [0])
    assert (second.num_pages, second.num_bytes) == (4, 4 * disk_bytes(SIZE))
    assert found(second, 4, salt=b"other") == []
    second.close()
    other = open_tier(shape={"model": "b"})
    assert (other.num_pages, other.num_bytes) == (0, 4 * disk_bytes(SIZE))
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_what_comes_before_the_blocks_that_were_used_last_is_known(open_tier, monkeypatch):
    monkeypatch.setattr(disk_tier, "MOST_SHOWN", 3)
    first = open_tier()
    put(first, 5, stamp=time.time_ns())
    put(first, 1, of="snapshots")
    first.close()
    second = open_tier()
    contents, none = prefix(5), bytes(16)
    wanted = [(content.key, parent or none) for content, parent in contents]
    assert [(page.key, page.parent) for page in second.latest()] == wanted[2::-1]
    second.use([second.find("blocks", *contents[number]) for number in (3, 4)])
    second._thread.submit(lambda: None).result()
    assert [(page.key, page.parent) for page in second.latest()] == [
        wanted[0], wanted[4], wanted[3]
    ]  # fmt: skip
    second.drop(second.find("blocks", *contents[4]))
    second._thread.submit(lambda: None).result()
    assert [page.key for page in second.latest()] == [wanted[0][0], wanted[3][0]]


def test_a_page_of_other_tokens_is_a_miss(open_tier):
    tier = open_tier()
    put(tier, 1)
    (content, parent), *_ = prefix(1)
    assert tier.find("blocks", content, parent)
    assert tier.find("blocks", BlockContent(content.key, b"others"), parent) is None
    assert tier.find("blocks", content, b"another parent") is None


def test_files_never_take_more_than_was_asked_and_the_end_of_what_is_oldest_goes_first(open_tier):
    tier = open_tier(6 * disk_bytes(SIZE))
    put(tier, 3, stamp=10**9)
    put(tier, 3, stamp=2 * 10**9, salt=b"s")
    assert tier.num_bytes == tier.max_bytes
    put(tier, 1, of="snapshots", stamp=3 * 10**9)
    assert tier.num_bytes <= tier.max_bytes
    assert (found(tier, 3), found(tier, 3, salt=b"s")) == ([0, 1], [0, 1, 2])
    tier.use([tier.find("blocks", *prefix(1)[0])])
    tier.close()
    again = open_tier(3 * disk_bytes(SIZE))  # what was used stays, in another process too
    put(again, 1, of="snapshots", salt=b"new", stamp=time.time_ns())
    assert again.num_bytes <= again.max_bytes
    assert (found(again, 3), found(again, 3, salt=b"s")) == ([0], [])


def test_pages_of_other_shapes_count_and_give_way(open_tier, folder):
    put(one := open_tier(3 * disk_bytes(SIZE)), 3)
    one.close()
    other = open_tier(3 * disk_bytes(SIZE), {"model": "b"})
    put(other, 2, stamp=time.time_ns())
    assert other.num_bytes == sum(
        disk_bytes(path.stat().st_size - HEADER_BYTES) for path in folder.glob("*/??/*")
    )
    assert other.num_bytes <= other.max_bytes
    assert found(other, 2) == [0, 1]


def flip(place):
    def change(path, other):
        content = bytearray(path.read_bytes())
        content[place] ^= 4
        path.write_bytes(content)

    return change


def cut(length):
    return lambda path, other: path.write_bytes(path.read_bytes()[:length])


def replaced_by_a_link(path, other):
    path.unlink()
    path.symlink_to(other)


def replaced_by_a_pipe(path, other):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    **{f"bit of byte {place}": flip(place) for place in (0, 8, 13, 20, 40, 60, 70, 90, 100, -1)},
    **{f"{length} bytes": cut(length) for length in (0, 7, HEADER_BYTES, HEADER_BYTES + SIZE - 1)},
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + b"0"),
    "another page": lambda path, other: shutil.copy(other, path),
    "a link": replaced_by_a_link,
    "a pipe": replaced_by_a_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_a_miss_and_one_warning(open_tier, damage, caplog):
    tier = open_tier()
    put(tier, 3)
    pages = [tier.find("blocks", *one) for one in prefix(3)]
    damage(pages[1].path, pages[0].path)
    assert len(tier.damaged_files({"blocks": SIZE})) == 1
    assert found(tier, 3) == [0, 2]
    assert found(tier, 3) == [0, 2]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_file_of_another_model_is_a_miss(open_tier, caplog):
    put(one := open_tier(), 1)
    path = one.find("blocks", *prefix(1)[0]).path
    one.close()
    other = open_tier(shape={"model": "b"})
    there = path.parents[2] / other.shape.hex() / path.parent.name
    there.mkdir(mode=0o700)
    shutil.copy(path, there)
    other.close()
    again = open_tier(shape={"model": "b"})
    assert (again.num_pages, found(again, 1)) == (1, [])
    assert "another model" in caplog.text


def test_a_file_that_has_gone_is_a_miss_without_a_warning(open_tier, caplog):
    tier = open_tier()
    put(tier, 2)
    tier.find("blocks", *prefix(2)[0]).path.unlink()
    assert found(tier, 2) == [1]
    assert not caplog.records


WRITER = """
import sys
import numpy as np
sys.path[:0] = sys.argv[2:]
from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.block_contents import contents_of
tier = DiskTier(sys.argv[1], 10**9, {"model": "a"})
for number, one in enumerate(contents_of(np.arange(40_000, dtype=np.int32), b"", 4)):
    data = np.random.default_rng(number).integers(0, 256, 5000, np.uint8)
    tier.write("blocks", *one, data, number, number)
    print(number, flush=True)
"""


def test_of_a_process_that_was_killed_while_it_wrote_nothing_torn_is_found(open_tier, folder):
    root = str(pathlib.Path(disk_tier.__file__).parents[2])
    command = [sys.executable, "-c", WRITER, str(folder), root]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as writer:
        for _ in range(20):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    (next(folder.glob("*/")) / "new-1-1").write_bytes(b"half a page")
    tier = open_tier()
    assert tier.is_writer  # its lock ended with it
    assert not list(folder.rglob("new-*"))
    numbers = found(tier, 10_000)
    assert len(numbers) >= 20
    assert numbers == list(range(len(numbers)))


def test_a_full_disk_loses_pages_and_no_more(open_tier, folder, caplog, monkeypatch):
    tier = open_tier()
    put(tier, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        content = prefix(3)
        assert not tier.write("blocks", *content[1], data_of(1), 1, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(folder.rglob("new-*"))
    assert not tier.write("blocks", *content[2], data_of(2), 2, 0)  # it waits before it tries again
    monkeypatch.setattr(tier, "_resumes_s", 0.0)
    assert tier.write("blocks", *content[1], data_of(1), 1, 0)
    assert found(tier, 3) == [0, 1]
    assert ["cannot be written for now" in one.getMessage() for one in caplog.records] == [True]


def test_a_directory_that_cannot_be_written_is_read(open_tier, caplog, monkeypatch):
    put(one := open_tier(), 2)
    one.close()
    open_file = os.open

    def refuse(path, flags, *more):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return open_file(path, flags, *more)

    monkeypatch.setattr(disk_tier.os, "open", refuse)
    tier = open_tier()
    assert (tier.is_writer, found(tier, 2)) == (False, [0, 1])
    content = prefix(3)[2]
    assert not tier.write("blocks", *content, data_of(2), 2, 0)
    assert len(caplog.records) == 1


def test_of_two_writers_the_second_reads_what_the_first_writes(open_tier, caplog, monkeypatch):
    monkeypatch.setattr(disk_tier, "REFRESH_S", 0.0)
    first, second = open_tier(), open_tier()
    assert (first.is_writer, second.is_writer) == (True, False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    put(first, 2)
    second.refresh()
    second._thread.submit(lambda: None).result()
    assert found(second, 2) == [0, 1]
    page = second.find("blocks", *prefix(2)[1])
    flip(-1)(page.path, None)
    assert found(second, 2) == [0]
    second.refresh()
    second._thread.submit(lambda: None).result()
    assert found(second, 2) == [0]  # it is refused for good
    assert page.path.exists()  # and is not the reader's
    first.close()
    second.close()
    assert open_tier().is_writer


def test_who_asks_for_no_bytes_only_reads(open_tier, caplog):
    put(one := open_tier(), 1)
    assert found(open_tier(0), 1) == [0]
    assert one.is_writer
    assert not caplog.records


def test_a_directory_to_which_others_can_write_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="to which nobody else can write"):
        DiskTier(str(folder), 10**6, SHAPE)
    folder.chmod(0o755)
    DiskTier(str(folder), 10**6, SHAPE).close()
    (folder / "file").write_text("")
    with pytest.raises(ValueError, match="must be a directory"):
        DiskTier(str(folder / "file"), 10**6, SHAPE)
