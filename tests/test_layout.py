"""Imports run in one direction, and kernels know only arrays."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = ["config", "cache", "attention", "model", "engine", "bench", "cli"]
FIRST = {"config", "config_json", "layer_schedule", "runtime"}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


def room_of(module):
    """The place of `dsv4_jax.<room>...` in the order; training stands beside the engine."""
    name = module.split(".")[1]
    name = "config" if name in FIRST else name
    return ROOMS.index("engine" if name == "training" else name)


def test_a_room_imports_only_what_stands_to_its_left():
    for path in ROOT.glob("dsv4_jax/*/**/*.py"):
        own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imported_modules(path):
            if module.startswith("dsv4_jax."):
                assert room_of(module) <= own, f"{path} imports {module}"


def test_kernels_know_neither_the_model_nor_flax():
    for path in ROOT.glob("pallas_kernels/**/*.py"):
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & {"dsv4_jax", "flax"}, path


def test_torch_is_no_dependency():
    for path in [*ROOT.glob("dsv4_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & {"torch", "transformers"}, path
