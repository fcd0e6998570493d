"""Imports run in one direction, and kernels know only arrays."""

import ast
import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from dsv4_jax import cache
from dsv4_jax.bench.gpus import GPUS

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = {
    "checks": set(),
    "lines": set(),
    "standard_streams": set(),
    "regular_files": set(),
    "rules": {"checks"},
    "compat": set(),
    "cache_keys": {"compat"},
    "sources": set(),
    "stored_programs": {"sources"},
    "runtime": {"checks", "compat", "cache_keys"},
    "mesh": {"checks"},
    "cuda_driver": set(),
    "peer_memory": {"cuda_driver"},
    "peers": {"mesh", "peer_memory"},
    "collectives": {"mesh", "peers"},
    "hosts": {"checks", "compat", "standard_streams"},
    "linear": set(),
    "progress": {"standard_streams"},
    "signals": set(),
    "schemas": {"checks"},
    "config": {"checks", "rules", "regular_files", "lines"},
    "engram": {"checks", "cuda_driver", "config"},
    "cache": {"checks", "mesh", "collectives", "config", "engram"},
    "allocator": {"checks", "mesh", "config", "cache"},
    "attention": {"checks", "mesh", "collectives", "linear", "config", "cache"},
    "model": {"checks", "rules", "mesh", "peers", "collectives", "linear", "config", "cache"}
    | {"engram", "attention"},
    "checkpoint": {"checks", "regular_files", "progress", "runtime", "config", "engram", "model"},
    "step": {"checks", "rules", "runtime", "mesh", "collectives", "config", "cache", "attention"}
    | {"model"},
    "training": {
        "runtime",
        "regular_files",
        "config",
        "cache",
        "attention",
        "model",
        "checkpoint",
        "step",
    },
    "serving": {
        "checks",
        "rules",
        "compat",
        "stored_programs",
        "regular_files",
        "lines",
        "progress",
        "runtime",
        "mesh",
        "peers",
        "hosts",
        "schemas",
        "config",
        "cache",
    }
    | {"allocator", "engram", "model", "checkpoint", "step"},
    "inspection": {"checks", "mesh", "config", "cache", "attention", "model", "step"},
    "serve": {
        "checks",
        "rules",
        "regular_files",
        "lines",
        "schemas",
        "config",
        "serving",
        "step",
    },
    "bench": {
        "regular_files",
        "lines",
        "runtime",
        "hosts",
        "mesh",
        "peers",
        "config",
        "engram",
        "cache",
        "allocator",
        "attention",
        "model",
        "step",
        "serving",
    },
    "research": {
        "regular_files",
        "checks",
        "lines",
        "progress",
        "config",
        "cache",
        "attention",
        "model",
        "step",
        "training",
        "bench",
    },
    "cli": {
        "sources",
        "rules",
        "regular_files",
        "lines",
        "standard_streams",
        "training",
        "research",
        "runtime",
        "mesh",
        "hosts",
        "progress",
        "signals",
        "config",
        "cache",
        "allocator",
        "model",
        "checkpoint",
        "step",
        "serving",
        "serve",
        "bench",
    },
}
"""What each room of `dsv4_jax` imports besides `pallas_kernels`; no room may import back."""

POOL_ARRAYS = {"entries", "index_keys", "window", "tail", "index_tail", "running", "pending"}
"""Attributes of `PagedKVPool` and `StateCachePool` that are arrays."""

OPEN_POOLS = {
    "cache/paged_cache.py",  # their own modules
    "cache/state_cache.py",
    "cache/handle.py",  # what a layer reads and writes in a step
    "cache/append.py",
    "cache/commit.py",
    "cache/draft_blocks.py",
    "cache/made_entries.py",
    "cache/new_tokens.py",
    "cache/token_ids.py",
    "cache/snapshots.py",
    "cache/views.py",  # what the original interface shows
    "cache/original.py",
    "inspection/inspect.py",  # what a notebook looks at
    "allocator/checksums.py",  # what the verifier reads
    "allocator/live_rows.py",
    "bench/fill.py",  # what a benchmark fills and takes apart
    "bench/kernels.py",
}
"""Who opens a pool's arrays; everyone else passes pools on, or maps over the whole tree."""

NAMESAKES = {"serving": {"running"}, "training": {"entries"}, "inspection": {"entries"}}
"""Attributes of other objects, in rooms that see no pool or open it by other names too."""


@functools.cache
def imported_modules(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.append(node.module)
    return tuple(found)


def test_the_order_of_rooms_has_no_circle():
    seen = set()
    for room, imported in ROOMS.items():
        assert imported <= seen, f"{room} imports rooms that come after it: {imported - seen}"
        seen.add(room)


def test_a_room_imports_only_what_it_is_allowed_to():
    for path in ROOT.glob("dsv4_jax/*/**/*.py"):
        own = path.relative_to(ROOT).parts[1]
        for module in imported_modules(path):
            if module.startswith("dsv4_jax."):
                room = module.split(".")[1]
                assert room == own or room in ROOMS[own], f"{path} imports {module}"


SERVING_ROOMS = {
    "metrics": set(),
    "options": set(),
    "least_memory": set(),
    "step_sizes": {"options"},
    "sizing": {"options", "least_memory", "step_sizes"},
    "requests": set(),
    "request": {"requests"},
    "grammars": {"requests"},
    "schedule": {"metrics", "step_sizes", "sizing", "requests"},
    "device": {"metrics", "options", "sizing", "requests", "schedule"},
    "loop": {"metrics", "sizing", "requests", "schedule", "device"},
    "engine_core": {"metrics", "sizing", "requests", "schedule", "device", "loop"},
    "engine_state": {"device", "metrics", "requests", "engine_core"},
    "hand_over": {"requests", "device", "loop"},
    "engine": {"options", "sizing", "requests", "device", "engine_core", "hand_over"},
    "asynchronous": {"metrics", "requests", "engine_core", "engine_state", "engine"},
}
"""Rooms and files of `serving`, and what each imports of the others."""


def test_the_rooms_of_serving_import_in_one_direction():
    seen, found = set(), {}
    for room, imported in SERVING_ROOMS.items():
        assert imported <= seen, f"{room} imports rooms that come after it: {imported - seen}"
        seen.add(room)
    for path in ROOT.glob("dsv4_jax/serving/**/*.py"):
        own = path.relative_to(ROOT).with_suffix("").parts[2]
        if own != "__init__":
            modules = [one.split(".") for one in imported_modules(path)]
            others = {one[2] for one in modules if one[:2] == ["dsv4_jax", "serving"]}
            found[own] = found.get(own, set()) | (others - {own})
    assert found == SERVING_ROOMS


NAMED_TUPLES = {"_replace", "_asdict", "_fields"}


def own_privates(tree):
    """Private names that a module gives to attributes and methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            for target in targets:
                for one in ast.walk(target):
                    yield getattr(one, "attr", getattr(one, "id", ""))


NOT_OURS = {"os._exit", "compiled._executable"} | {
    f"parser.{name}" for name in ("_actions", "_subparsers")
}
"""Private names, of the standard library and one of JAX in `compat.py`, without public ones."""
REACH = re.compile(r"(?<!self)(?<!cls)\._(?!_)[a-z]")


def test_what_is_private_is_read_in_its_own_file():
    for path in [*ROOT.glob("dsv4_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        if not REACH.search(text := path.read_text()):
            continue  # to parse a file takes some milliseconds
        tree = ast.parse(text)
        own = NAMED_TUPLES | set(own_privates(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                is_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                is_known = node.attr in own or node.attr.startswith("__") or is_ours
                is_known |= any(ast.unparse(node).startswith(name) for name in NOT_OURS)
                assert is_known, f"{path}:{node.lineno} reads {ast.unparse(node)}"


PARTS_OF_AN_ENGINE = "engine|loop|runner|devices|queue|host|tier|disk|grammars"
INSIDE = re.compile(rf"\b(?:{PARTS_OF_AN_ENGINE})(?:\.\w+)*\._(?!replace\b|_)\w+")


def test_what_runs_an_engine_reads_none_of_its_privates():
    """Tests, tools and benchmarks: what they need of its inside has a name that may be read."""
    assert INSIDE.findall("engine.loop._seals") == ["engine.loop._seals"]
    for path in [
        p for room in ("tests", "tools", "benchmarks") for p in ROOT.glob(f"{room}/**/*.py")
    ]:
        if path != pathlib.Path(__file__):
            assert not INSIDE.findall(path.read_text()), path


def test_meshes_are_driven_by_three_programs():
    """What else is in `tools/meshes` are their parts."""
    paths = ROOT.glob("tools/meshes/*.py")
    programs = {path.stem for path in paths if '__name__ == "__main__"' in path.read_text()}
    assert programs == {"on_cpus", "on_gpus", "processes"}


SERVER_LIBRARIES = {"starlette", "uvicorn", "httptools", "uvloop", "deepseek_recipe"}


def test_the_servers_libraries_are_needed_by_the_server_alone():
    """The extra `serve` brings them; the command imports the room when it runs."""
    for path in ROOT.glob("dsv4_jax/**/*.py"):
        if path.relative_to(ROOT).parts[1] != "serve":
            roots = {module.split(".")[0] for module in imported_modules(path)}
            assert not roots & SERVER_LIBRARIES, path
    for path in ROOT.glob("dsv4_jax/cli/*.py"):
        inner = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)
        ]
        modules = {node.module for node in inner if node.module.startswith("dsv4_jax.serve.")}
        assert modules <= {"dsv4_jax.serve.settings"}, path  # which needs none of them
        assert "dsv4_jax.serve" not in {node.module for node in inner}, path


def test_kernels_know_neither_the_model_nor_flax():
    for path in ROOT.glob("pallas_kernels/**/*.py"):
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & {"dsv4_jax", "flax"}, path


KERNEL_ROOMS = {"common": set(), "gpu": {"common"}, "product": {"common", "gpu"}}
"""Rooms beneath the ops of `pallas_kernels`, and what each imports."""


def test_the_memory_and_the_rates_of_gpus_stand_in_one_table():
    tables = set()
    for path in ROOT.glob("dsv4_jax/**/*.py"):
        if any(f'"{name}":' in (text := path.read_text()) for name in GPUS):
            keys = (node.keys for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict))
            names = {getattr(key, "value", None) for found in keys for key in found}
            tables |= {path.relative_to(ROOT).as_posix()} if names & GPUS.keys() else set()
    assert tables == {"dsv4_jax/bench/gpus.py"}


def waits_by_the_clock(source):
    """Functions that read the clock and wait for a device."""
    if not {"perf_counter", "block_until_ready"} <= set(re.findall(r"\w+", source)):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            names = {getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node)}
            found += [node.name] if {"perf_counter", "block_until_ready"} <= names else []
    return found


def test_benchmarks_time_what_a_device_does_by_one_function():
    """`timing.dispatch`, on which `time_calls` and `loops` stand."""
    paths = [*ROOT.glob("dsv4_jax/bench/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    timed = {path.name: waits_by_the_clock(path.read_text()) for path in paths}
    assert {name: names for name, names in timed.items() if names} == {"timing.py": ["dispatch"]}


def test_what_ops_share_knows_none_of_them():
    for room, imported in KERNEL_ROOMS.items():
        for path in ROOT.glob(f"pallas_kernels/{room}/**/*.py"):
            for module in imported_modules(path):
                if module.startswith("pallas_kernels."):
                    other = module.split(".")[1]
                    assert other == room or other in imported, f"{path} imports {module}"


def test_ops_import_the_face_of_the_product_alone():
    """Its modules may change; what `product/__init__.py` names is what others build on."""
    for path in [*ROOT.glob("pallas_kernels/**/*.py"), *ROOT.glob("dsv4_jax/**/*.py")]:
        if path.parent.name != "product":
            for module in imported_modules(path):
                assert not module.startswith("pallas_kernels.product."), f"{path} imports {module}"


def test_quotients_are_rounded_up_in_one_way():
    """`pl.cdiv` where kernels are, which count traced numbers too, and -(-a // b) on the host."""
    negated = (ast.UnaryOp, ast.BinOp, ast.UnaryOp)
    for path in [*ROOT.glob("dsv4_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        source = path.read_text()
        if "//" not in source and "cdiv" not in source:
            continue  # to parse a file takes some milliseconds
        nodes = list(ast.walk(ast.parse(source)))
        if "pallas_kernels" in path.relative_to(ROOT).parts:
            for node in nodes:
                operand = getattr(node, "operand", None)
                kinds = type(node), type(operand), type(getattr(operand, "left", None))
                assert kinds != negated or not isinstance(operand.op, ast.FloorDiv), path
        else:
            assert not {"cdiv"} & {getattr(node, "attr", None) for node in nodes}, path


def test_torch_is_no_dependency():
    for path in [*ROOT.glob("dsv4_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & {"torch", "transformers"}, path


def pool_arrays(source):
    """Attributes in a source text that are called as a pool's arrays are."""
    if not any(f".{name}" in source for name in POOL_ARRAYS):
        return set()
    nodes = ast.walk(ast.parse(source))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} & POOL_ARRAYS


def test_few_modules_open_the_arrays_of_a_pool():
    opening = set()
    for path in ROOT.glob("dsv4_jax/*/**/*.py"):
        name = path.relative_to(ROOT / "dsv4_jax").as_posix()
        if pool_arrays(path.read_text()) - NAMESAKES.get(name.split("/")[0], set()):
            opening.add(name)
    assert opening == OPEN_POOLS


def test_the_arrays_of_pools_have_these_names():
    pools = (cache.PagedKVPool, cache.StateCachePool)
    names = {field.name for pool in pools for field in dataclasses.fields(pool)}
    assert names - {"schema"} == POOL_ARRAYS
    assert pool_arrays("def read(pool): return pool.window, pool.schema") == {"window"}


def toured(path):
    """Files and folders that the docstring of an `__init__.py` names: in a column, or by `.py`."""
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    columns = re.findall(r"^    (\w+(?:, \w+)*) {2,}", told, re.MULTILINE)
    names = {name for column in columns for name in column.split(", ")}
    return names | set(re.findall(r"`((?:\w+/)*\w+)\.py`", told))


def test_the_tour_of_a_room_names_what_is_there():
    rooms = set()
    for path in [*ROOT.glob("dsv4_jax/**/__init__.py"), ROOT / "pallas_kernels/common/__init__.py"]:
        folder, names = path.parent, toured(path)
        for name in names:
            files = (folder / f"{name}.py", folder / name, ROOT / f"{name}.py")
            assert any(file.exists() for file in files), f"{path} names {name}"
        if names:
            rooms.add(folder.name)
    assert rooms >= {"config", "cache", "attention", "model", "checkpoint", "step", "allocator"}
    assert rooms >= {"serving", "serve", "bench", "common"}


def test_the_tour_of_the_kernels_names_every_op():
    package = ROOT / "pallas_kernels"
    told = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert {path.parent.name for path in package.glob("*/op.py")} <= set(re.findall(r"\w+", told))


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_what_is_started_by_hand_finds_the_helpers_of_tests(folder):
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", f"import {folder}, helpers"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
