"""What Triton made of a kernel is found again, and nothing else is taken for it."""

import importlib.metadata

import jax
import pytest

from pallas_kernels.gpu.triton_language import disk_cache

NAMES = ("ptx",)


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    yield tmp_path / "xla" / "triton"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(autouse=True)
def version(monkeypatch):
    """Of a Triton that is not there."""
    versions = {"triton": "3.6.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.get)
    return versions


@pytest.fixture
def make():
    """Counts how often it is asked."""

    def give():
        give.count += 1
        return {"ptx": f".entry {give.count}"}

    give.count = 0
    return give


def test_what_was_made_is_found(folder, make):
    key = disk_cache.key_of("ptx", "def kernel(): ...", ("*fp32",), 90)
    assert [disk_cache.kept(key, NAMES, make) for _ in range(3)] == [{"ptx": ".entry 1"}] * 3
    assert [path.name for path in folder.iterdir()] == [f"{key}.json"]


def test_a_key_tells_all_apart(monkeypatch, version):
    given = ("ptx", "def kernel(): ...", ("*fp32",), 90, 4, 3, {"enable_fp_fusion": True})
    others = ("ir", "def kernel():  ...", ("*fp16",), 100, 8, 2, {"enable_fp_fusion": False})
    keys = [disk_cache.key_of(*given)]
    for i, other in enumerate(others):
        keys.append(disk_cache.key_of(*given[:i], other, *given[i + 1 :]))
    version["triton"] = "3.7.0"
    keys.append(disk_cache.key_of(*given))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    keys += [disk_cache.key_of(*given)]
    assert len(set(keys)) == len(keys)
    assert disk_cache.key_of(*given) == keys[-1]


@pytest.mark.parametrize("text", ["", '{"ptx": ".ent', "null", "{}", '{"ir": ""}'])
def test_a_file_that_is_not_whole_is_made_again(folder, make, text):
    folder.mkdir(parents=True)
    (folder / "key.json").write_text(text)
    assert [disk_cache.kept("key", NAMES, make) for _ in range(2)] == [{"ptx": ".entry 1"}] * 2


def test_who_may_read_the_folder_may_read_what_is_kept(folder, make):
    beside = folder.parent / "beside"
    disk_cache.kept("key", NAMES, make)
    beside.write_text("")
    assert (folder / "key.json").stat().st_mode == beside.stat().st_mode


def test_nothing_is_left_of_what_could_not_be_kept(folder, make):
    (folder / "key.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="compile this kernel again in the next process"):
        disk_cache.kept("key", NAMES, make)
    assert [path.name for path in folder.iterdir()] == ["key.json"]


def test_a_key_says_nothing_of_lines_which_are_left_out(monkeypatch):
    key = disk_cache.key_of("ptx", "def kernel(): ...")
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert disk_cache.key_of("ptx", "def kernel(): ...") == key


def test_a_folder_that_takes_nothing_is_said(folder, make):
    folder.parent.mkdir()
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="compile this kernel again in the next process"):
        assert disk_cache.kept("key", NAMES, make) == {"ptx": ".entry 1"}


@pytest.mark.parametrize("chosen", [None, "gs://bucket/xla"])
def test_without_a_folder_nothing_is_kept(folder, make, chosen):
    jax.config.update("jax_compilation_cache_dir", chosen)
    assert [disk_cache.kept("key", NAMES, make)["ptx"] for _ in range(2)] == [
        ".entry 1",
        ".entry 2",
    ]


def test_without_triton_it_is_said_what_to_install(monkeypatch):
    def lacks(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lacks)
    with pytest.raises(
        ModuleNotFoundError, match=r"need the package triton.*pip install .triton>=3\.7,<3\.9."
    ):
        disk_cache.key_of("ptx", "def kernel(): ...")
