"""What Triton made of a kernel is found again, and nothing else is taken for it."""

import importlib.metadata

import jax
import pytest

from pallas_kernels.gpu.triton_language import disk_cache


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
    assert [disk_cache.kept(key, make) for _ in range(3)] == [{"ptx": ".entry 1"}] * 3
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


@pytest.mark.parametrize("text", ["", '{"ptx": ".ent', "null"])
def test_a_file_that_is_not_whole_is_made_again(folder, make, text):
    folder.mkdir(parents=True)
    (folder / "key.json").write_text(text)
    assert [disk_cache.kept("key", make) for _ in range(2)] == [{"ptx": ".entry 1"}] * 2


def test_a_folder_that_takes_nothing_is_said(folder, make):
    folder.parent.mkdir()
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="compile this kernel again in the next process"):
        assert disk_cache.kept("key", make) == {"ptx": ".entry 1"}


@pytest.mark.parametrize("chosen", [None, "gs://bucket/xla"])
def test_without_a_folder_nothing_is_kept(folder, make, chosen):
    jax.config.update("jax_compilation_cache_dir", chosen)
    assert [disk_cache.kept("key", make)["ptx"] for _ in range(2)] == [".entry 1", ".entry 2"]


def test_without_triton_it_is_said_what_to_install(monkeypatch):
    def lacks(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", lacks)
    with pytest.raises(ModuleNotFoundError, match=r"need the package triton.*dsv4-jax\[cuda13\]"):
        disk_cache.key_of("ptx", "def kernel(): ...")
