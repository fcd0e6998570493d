"""Imports run in one direction, and kernels know only arrays."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = {
    "runtime": set(),
    "config": set(),
    "cache": {"config"},
    "allocator": {"config", "cache"},
    "attention": {"config", "cache"},
    "model": {"config", "cache", "attention"},
    "checkpoint": {"config", "model"},
    "step": {"config", "cache", "attention", "model"},
    "training": {"config", "cache", "attention", "model", "checkpoint", "step"},
    "serving": {"config", "cache", "allocator", "model", "checkpoint", "step"},
    "bench": {"runtime", "config", "cache", "allocator", "attention", "model", "step"},
    "cli": {"runtime", "config", "cache", "allocator", "model", "checkpoint", "serving", "bench"},
}
"""What each room of `dsv4_jax` imports besides `pallas_kernels`; no room may import back."""


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module


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


def test_kernels_know_neither_the_model_nor_flax():
    for path in ROOT.glob("pallas_kernels/**/*.py"):
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & {"dsv4_jax", "flax"}, path


def test_torch_is_no_dependency():
    for path in [*ROOT.glob("dsv4_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & {"torch", "transformers"}, path
