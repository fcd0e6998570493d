"""What `import dsv4_jax` gives, and what it leaves for later."""

import ast
import importlib
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import dsv4_jax as ds

ORIGINAL = [
    "AttentionType",
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "ClassicalView",
    "DSV4Config",
    "IndexerView",
    "KVCacheManager",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "PagedKVPool",
    "SWAView",
    "StateCachePool",
    "build_schema",
    "compute_block_budget",
    "maybe_flush_csa",
    "maybe_flush_hca",
]
"""Classes and functions of the original cache (`docs/design/original_cache.md`)."""

PACKAGES = ("allocator", "attention", "cache", "checkpoint", "model", "research", "serving")


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_public_names_are_few_and_there():
    assert len(ds.__all__) <= 32
    for name in ds.__all__:
        assert getattr(ds, name) is not None
    assert set(ds.__all__) <= set(dir(ds))


@pytest.mark.parametrize("name", ORIGINAL)
def test_names_of_the_original_cache_are_importable(name):
    namespace = {}
    exec(f"from dsv4_jax import {name}", namespace)
    assert namespace[name] is getattr(ds, name)


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_export_what_they_say(name):
    package = importlib.import_module(f"dsv4_jax.{name}")
    assert getattr(ds, name) is package
    for public in package.__all__:
        assert not inspect.ismodule(getattr(package, public)), f"{public} is a module's name"


def test_what_type_checkers_see_is_what_there_is():
    """The imports under TYPE_CHECKING and the table of lazy names say the same."""
    tree = ast.parse(pathlib.Path(ds.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        for alias in node.names:
            is_public = alias.name in ds.__all__
            assert is_public or alias.asname == alias.name, f"{alias.name} is not re-exported"
            seen[alias.name] = node.module.removeprefix("dsv4_jax").removeprefix(".")
    assert {name for name, module in seen.items() if not module} == set(ds._PACKAGES)
    assert {name: module for name, module in seen.items() if module} == ds._MODULES
    assert set(ds.__all__) <= set(ds._MODULES)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dsv4_jax' has no attribute 'no_such_name'"):
        ds.no_such_name  # noqa: B018


def test_the_import_is_quick_and_starts_nothing():
    """Nothing of JAX either: `import dsv4_jax` takes milliseconds."""
    heavy = ["prometheus_client", "tokenizers", "safetensors", "tqdm", "jax", "flax"]
    code = f"import sys, dsv4_jax; print(*[name for name in {heavy} if name in sys.modules])"
    assert run(code) == []


@pytest.mark.slow
def test_a_loop_of_ones_own_imports_no_server_and_listens_to_nothing():
    """Steps need neither metrics, text nor files; compiles are counted once an engine is built."""
    used = "ds.init_cache, ds.StepInput, ds.jit_prefill, ds.jit_decode_loop, ds.forward, ds.sample"
    code = (
        f"import sys, dsv4_jax as ds; {used}; heavy = "
        "['prometheus_client', 'tokenizers', 'safetensors', 'tqdm']; "
        "print(*[name for name in heavy if name in sys.modules]); "
        "from jax._src import monitoring; before = len(monitoring._event_duration_secs_listeners); "
        "ds.Engine, ds.serving; "
        "print(len(monitoring._event_duration_secs_listeners) - before)"
    )
    assert run(code) == ["0"]
