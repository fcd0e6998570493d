"""What is taken of JAX's inside does what `compat.py` says, on every version that is allowed."""

import ast
import json
import pathlib
import socket
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jaxlib.mlir import ir

import dsv4_jax
from dsv4_jax import compat

PROCESS = """
import json, sys
import jax
from dsv4_jax import compat
folder, address = sys.argv[1:]
seen = {"not started": compat.has_started(), "no service": compat.find_service()}
jax.distributed.initialize(address, 1, 0)
service, number, count = compat.find_service()
service.key_value_set("a/1", "text")
service.key_value_set("a/1", "other", True)
service.key_value_set_bytes("b", bytes(range(256)))
seen["texts"] = service.key_value_dir_get("a/")
seen["bytes"] = list(service.blocking_key_value_get_bytes("b", 1000))
service.key_value_delete("b")
try:
    service.blocking_key_value_get_bytes("b", 1)
except jax.errors.JaxRuntimeError as error:
    seen["late"] = str(error)
seen["processes"] = number, count
programs = []
def change(canonicalize):
    def keep(module, *options, **more):
        programs.append(str(module))
        return canonicalize(module, *options, **more)
    return keep
compat.replace_canonicalize(change)
jax.config.update("jax_compilation_cache_dir", folder)
jax.jit(lambda x: x * 3)(4)
seen["programs"] = programs
seen["started"] = compat.has_started()
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a fresh process saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-c", PROCESS, str(folder), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_has_started(seen):
    assert (seen["not started"], seen["started"]) == (False, True)


def test_find_service(seen):
    assert seen["no service"] is None
    assert seen["processes"] == [0, 1]
    assert seen["texts"] == [["a/1", "other"]]
    assert seen["bytes"] == list(range(256))
    assert "DEADLINE_EXCEEDED" in seen["late"]


def test_replace_canonicalize(seen):
    """JAX calls the new function for each program whose key it looks for."""
    assert any("stablehlo.multiply" in program for program in seen["programs"])


def test_canonicalize():
    """The same function on another line is the same program, another function is not."""
    first, other = jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)
    again = jax.jit(lambda x: x + 1)
    texts = [
        compat.canonicalize(function.lower(jnp.float32(0)).compiler_ir())
        for function in (first, again, other)
    ]
    assert all(isinstance(text, bytes) for text in texts)
    assert texts[0] == texts[1] != texts[2]


def test_dialects():
    """Kernels are written in them; without the registry a context knows none."""
    text = "func.func @f(%x: f32) -> f32 { %0 = arith.addf %x, %x : f32 return %0 : f32 }"
    with ir.Context() as bare, pytest.raises(ir.MLIRError):
        ir.Module.parse(text, bare)
    with ir.Context() as context:
        context.append_dialect_registry(compat.dialects())
        context.load_all_available_dialects()
        assert "arith.addf" in str(ir.Module.parse(text, context))


def test_is_tracing():
    seen = []
    for call in (jax.eval_shape, lambda function: jax.jit(function)(), lambda function: function()):
        call(lambda: seen.append(compat.is_tracing()))
    assert seen == [True, True, False]


def test_end_traces():
    """What is computed in a trace is a tracer; once traces are ended, it is a value."""
    is_traced = []

    @jax.jit
    def interrupted(x):
        for _ in range(2):
            is_traced.append(isinstance(jnp.zeros(()) + 1, jax.core.Tracer))
            compat.end_traces()
        return x

    interrupted(jnp.zeros(()))
    assert is_traced == [True, False]


def test_program_of():
    """Donated arrays are gone, the others stay, and results are those of a call."""
    compiled = jax.jit(
        lambda unused, x, y: (x + y, {"twice": 2 * y}), donate_argnums=1, keep_unused=False
    ).lower(*[jnp.arange(3.0)] * 3)
    program = compat.program_of(compiled := compiled.compile())
    unused, x, y = jnp.zeros(3), jnp.arange(3.0), jnp.ones(3)
    assert program.used == (1, 2)
    found = program.execute([x, y]).consume_with_handlers(program.handlers)
    assert [one.tolist() for one in found] == [[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]
    assert [one.is_deleted() for one in (unused, x, y)] == [False, True, False]
    wanted = jax.tree.leaves(compiled(unused, jnp.arange(3.0), y))
    for one, other in zip(found, wanted, strict=True):
        assert (one.aval, one.sharding, one.committed) == (
            other.aval,
            other.sharding,
            other.committed,
        )


def test_read_executables_and_serialize(tmp_path):
    """What the cache gave is written as it lay there, and runs; other threads' is not seen."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}

    def compile_anew():
        jax.clear_caches()
        lowered = jax.jit(lambda x: jnp.where(x == 0.25, 7.0, x * 3.0)).lower(jnp.arange(4.0))
        with compat.read_executables() as read:
            return lowered.compile(), read

    try:
        for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        compiled, read = compile_anew()
        assert not read
        compiled, read = compile_anew()
        [executable] = read
        assert b"\x7fELF" in executable
        written, in_tree, out_tree = compat.serialize(compiled, executable)
        assert executable in written
        loaded = serialize_executable.deserialize_and_load(
            written, in_tree, out_tree, execution_devices=jax.devices()[:1]
        )
        np.testing.assert_array_equal(loaded(jnp.arange(4.0)), 3.0 * np.arange(4))
        with compat.read_executables() as mine:
            other = threading.Thread(target=compile_anew)
            other.start()
            other.join()
        assert not mine
        assert executable not in compat.serialize(compiled)[0]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_no_other_module_looks_inside_jax():
    package = pathlib.Path(dsv4_jax.__file__).parent
    for path in [*package.rglob("*.py"), *(package.parent / "pallas_kernels").rglob("*.py")]:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "jax._src" in source else ():
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            inside = [module for module in modules if module.startswith("jax._src")]
            assert not inside or path.name == "compat.py", f"{path} imports {inside}"


def test_an_array_without_a_place_goes_where_others_are():
    """And what is made of it is another program's no more than before."""
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    value = jax.device_put(jnp.arange(3), there)
    loose = compat.uncommitted(value)
    assert (value.committed, loose.committed, (loose + 1).committed) == (True, False, False)
    assert loose.tolist() == [0, 1, 2]
