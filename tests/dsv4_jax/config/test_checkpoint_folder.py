"""Which links among the files of a checkpoint are followed: those that stay in a hub's cache."""

import os

import pytest

from dsv4_jax.config.checkpoint_folder import find_file

NAME = "model.safetensors"
ETAG, XET = "e7" * 32, "3e" * 32


@pytest.fixture
def cache(tmp_path):
    """A cache of two models, without links, and a file outside of it."""
    made = tmp_path / "hub"
    for folder in ("models--owner--a/snapshots/0123abcd/original", "models--owner--a/blobs",
                   "models--owner--b/blobs", "blobs/3e"):  # fmt: skip
        (made / folder).mkdir(parents=True)
    (made / "blobs" / "3e" / XET).write_text("shared")
    (made / "models--owner--a" / "blobs" / "own").write_text("own")
    (made / "models--owner--b" / "blobs" / "other").write_text("other")
    (tmp_path / "outside").write_text("outside")
    return made


def snapshot_of(cache):
    return cache / "models--owner--a" / "snapshots" / "0123abcd"


def link(path, target, kind="relative"):
    """Makes a link as a hub does, relative, or as an absolute one."""
    path.symlink_to(target if kind == "absolute" else os.path.relpath(target, path.parent))


def read(folder, name=NAME):
    return find_file(folder, name).read_text()


@pytest.mark.parametrize("kind", ["relative", "absolute"])
@pytest.mark.parametrize("name", [NAME, f"original/{NAME}"])
def test_a_file_of_xet_storage_is_two_links_away(cache, kind, name):
    model, snapshot = cache / "models--owner--a", snapshot_of(cache)
    link(model / "blobs" / ETAG, cache / "blobs" / "3e" / XET, kind)
    link(snapshot / name, model / "blobs" / ETAG, kind)
    assert read(snapshot, name) == "shared"
    if "/" in name:
        assert read(snapshot / "original") == "shared"


@pytest.mark.parametrize("target", ["blobs/3e/" + XET, "models--owner--a/blobs/own"])
def test_one_link_into_blobs_is_followed(cache, target):
    link(snapshot_of(cache) / NAME, cache / target)
    assert read(snapshot_of(cache)) == (cache / target).read_text()


def test_a_cache_is_known_by_any_path_that_leads_to_it(cache, tmp_path, monkeypatch):
    """HF_HOME may be a link; the hub then writes absolute paths through it, or real ones."""
    (tmp_path / "home").symlink_to(cache.parent)
    through = tmp_path / "home" / "hub"
    link(through / "models--owner--a" / "blobs" / ETAG, through / "blobs" / "3e" / XET, "absolute")
    (snapshot_of(through) / NAME).symlink_to(f"../../blobs/{ETAG}")
    (tmp_path / "chosen").symlink_to(snapshot_of(through))
    monkeypatch.chdir(cache)
    for path in (snapshot_of(cache), snapshot_of(through), tmp_path / "chosen"):
        assert read(path) == "shared"
    assert read(snapshot_of(cache).relative_to(cache)) == "shared"


def test_copies_of_a_system_without_links_are_files_of_the_directory(cache):
    (snapshot_of(cache) / NAME).write_text("copied")
    assert read(snapshot_of(cache)) == "copied"


def test_a_link_to_a_blob_that_is_gone_is_a_file_that_is_not_there(cache):
    link(cache / "models--owner--a" / "blobs" / ETAG, cache / "blobs" / "aa" / "gone")
    link(snapshot_of(cache) / NAME, cache / "models--owner--a" / "blobs" / ETAG)
    assert not find_file(snapshot_of(cache), NAME).is_file()


@pytest.mark.parametrize(
    "chain",
    [
        ["outside"],
        ["hub/models--owner--a/blobs/0", "outside"],
        ["hub/blobs/3e/0", "outside"],
        ["hub/models--owner--a/blobs/0", "hub/blobs/3e/0", "outside"],
        ["back", "hub/models--owner--a/blobs/own"],  # out of the cache, and in again
        ["hub/models--owner--a/blobs/0", "back", "hub/blobs/3e/" + XET],
        ["hub/models--owner--b/blobs/other"],
        ["hub/models--owner--a/blobs/0", "hub/models--owner--b/blobs/other"],
        ["hub/models--owner--a/refs"],
        ["hub/blobs-of-mine"],
    ],
)
@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_a_link_that_leaves_the_blobs_is_refused(cache, tmp_path, chain, kind):
    (cache / "models--owner--a" / "refs").write_text("0123abcd")
    (cache / "blobs-of-mine").write_text("mine")
    places = [tmp_path / place for place in chain]
    for path, target in zip([snapshot_of(cache) / NAME, *places[:-1]], places, strict=True):
        link(path, target, kind)
    with pytest.raises(ValueError, match=r"outside of the checkpoint directory and of the blobs"):
        find_file(snapshot_of(cache), NAME)
    assert find_file(snapshot_of(cache), NAME, follow_links=True).exists()


@pytest.mark.parametrize(
    "target", ["../../blobs/../refs", "../../../blobs/..", "original/../../.."]
)
def test_steps_upwards_are_taken_before_a_place_is_judged(cache, target):
    (snapshot_of(cache) / NAME).symlink_to(target)
    with pytest.raises(ValueError, match="outside of the checkpoint directory"):
        find_file(snapshot_of(cache), NAME)


def test_a_folder_that_is_a_link_is_followed_as_its_files_are(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / NAME).write_text("elsewhere")
    link(snapshot_of(cache) / "more", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="follow_links=True"):
        find_file(snapshot_of(cache), f"more/{NAME}")
    link(snapshot_of(cache) / "again", snapshot_of(cache) / "original")
    (snapshot_of(cache) / "original" / NAME).write_text("inside")
    assert read(snapshot_of(cache), f"again/{NAME}") == "inside"


@pytest.mark.parametrize("folder", ["models--owner--a", "a/snapshots", "a/snapshots/0123abcd"])
def test_blobs_that_models_share_belong_to_a_cache_alone(tmp_path, folder):
    """Elsewhere a folder of that name is anyone's."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / XET).write_text("mine")
    link(tmp_path / folder / NAME, tmp_path / "blobs" / XET)
    with pytest.raises(ValueError, match="follow_links=True"):
        find_file(tmp_path / folder, NAME)


def test_links_in_a_circle_and_links_without_end_are_refused(cache):
    blobs, snapshot = cache / "models--owner--a" / "blobs", snapshot_of(cache)
    link(blobs / "0", blobs / "1")
    link(blobs / "1", blobs / "0")
    link(snapshot / NAME, blobs / "0")
    with pytest.raises(ValueError, match="cannot be followed to a file"):
        find_file(snapshot, NAME)
    for number in range(2, 50):
        link(blobs / str(number), blobs / ("own" if number == 49 else str(number + 1)))
    link(snapshot / "long", blobs / "2")
    with pytest.raises(ValueError, match="cannot be followed to a file"):
        find_file(snapshot, "long")


@pytest.mark.parametrize("follow_links", [False, True])
def test_a_clone_without_its_large_files_is_told_as_such(tmp_path, follow_links):
    """What `git clone` leaves where Git LFS is not installed."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{ETAG}\nsize 5368709120\n"
    (tmp_path / NAME).write_text(pointer)
    with pytest.raises(ValueError, match=rf"{NAME} is a pointer of Git LFS .*`git lfs pull`"):
        find_file(tmp_path, NAME, follow_links=follow_links)
    (tmp_path / NAME).write_text(pointer[8:])
    assert find_file(tmp_path, NAME, follow_links=follow_links) == tmp_path / NAME
