"""Flags and the compilation cache, each in a process of its own."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax as ds
from tools import aot

FORKED = """
import json, os, sys, traceback
import jax, jax.numpy, dsv4_jax, dsv4_jax.runtime
for code, environment in json.loads(sys.argv[1]):
    print("--", flush=True)
    if not os.fork():
        try:
            os.environ.update(environment)
            exec(code, {})
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if status := os.wait()[1]:
        sys.exit(f"{code} ended with {status}")
"""
"""Importing JAX takes two seconds; a fork before it has started its backends has that done."""


def run(code, **environment):
    """What a fresh process prints, as words."""
    return _words([sys.executable, "-c", code], environment)


def run_each(*cases):
    """The same of (code, environment) in turn, each in a process that has imported JAX, no more."""
    words = _words([sys.executable, "-W", "ignore", "-c", FORKED, json.dumps(cases)], {})
    printed = []
    for word in words:
        if word == "--":
            printed.append([])
        else:
            printed[-1].append(word)
    return printed


def _words(command, environment):
    own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        command,
        env=own | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_flags_are_known_to_xla_and_the_users_own_win():
    """XLA ends the process at a flag it does not know."""
    code = "import dsv4_jax as ds; {call}; import jax.numpy as jnp; jnp.zeros(1); "
    code += "import os; print(os.environ['XLA_FLAGS'])"
    name, *others = ds.runtime.XLA_GPU_FLAGS
    added, kept, more = run_each(
        (code.format(call="ds.set_xla_flags()"), {}),
        (code.format(call="ds.set_xla_flags()"), {"XLA_FLAGS": f"--{name}=7"}),
        (code.format(call="ds.set_xla_flags(xla_gpu_graph_min_graph_size='1')"), {}),
    )
    assert added == [f"--{name}={value}" for name, value in ds.runtime.XLA_GPU_FLAGS.items()]
    assert kept[0] == f"--{name}=7"
    assert [word.split("=")[0] for word in kept[1:]] == [f"--{other}" for other in others]
    assert "--xla_gpu_graph_min_graph_size=1" in more


@pytest.mark.slow
def test_flags_in_a_file_are_taken_from_it(tmp_path):
    """XLA takes a variable that begins otherwise for the name of a file, what is added included."""
    name, *others = ds.runtime.XLA_GPU_FLAGS
    file = tmp_path / "flags"
    file.write_text(f"--{name}=7\n  --xla_cpu_multi_thread_eigen=false\n")
    code = "import dsv4_jax as ds; ds.set_xla_flags(); import jax.numpy as jnp; jnp.zeros(1); "
    code += "import os; print(os.environ['XLA_FLAGS'])"
    (kept,) = run_each((code, {"XLA_FLAGS": f" {file} "}))
    assert kept[:2] == [f"--{name}=7", "--xla_cpu_multi_thread_eigen=false"]
    assert [word.split("=")[0] for word in kept[2:]] == [f"--{other}" for other in others]


def test_flags_that_are_neither_flags_nor_a_file_are_refused(monkeypatch):
    monkeypatch.setattr(ds.runtime.compat, "has_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "no such file")
    with pytest.raises(ValueError, match="must be flags that begin with --, or a file of them"):
        ds.set_xla_flags()


def test_a_user_without_a_home_is_asked_for_a_folder(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(ds.runtime.pathlib.Path, "home", homeless)
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.raises(ValueError, match="or JAX_COMPILATION_CACHE_DIR, XDG_CACHE_HOME or HOM"):
            ds.use_compilation_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)


@pytest.mark.slow
def test_launches_of_an_engine_s_decode_step_overlap_unless_the_user_has_them_wait():
    mode = "xla_gpu_command_buffer_scheduling_mode"
    code = """
import jax
jit, options = jax.jit, {}
def watched(function, **how):
    options[function.__name__] = how.get("compiler_options")
    return jit(function, **how)
jax.jit = watched
import dsv4_jax.step.serve_step
print(options["plain_decode_step"])
"""
    by_default, as_told = run_each((code, {}), (code, {"XLA_FLAGS": f"--{mode}=LHS"}))
    assert " ".join(by_default) == str({mode: "CONCURRENT"})
    assert " ".join(as_told) == "{}"


def test_a_cpu_takes_the_options_of_a_decode_step():
    compiled = jax.jit(jnp.sin).lower(jnp.float32(1)).compile(ds.runtime.decode_options())
    assert compiled(jnp.float32(0)) == 0


def test_a_start_on_a_gpu_with_a_slow_jax_is_warned_of_once():
    code = (
        "import warnings, jax, dsv4_jax as ds; from dsv4_jax import runtime; "
        "jax.__version_info__, runtime._cuda_plugins = {version}, lambda: ['xla_cuda13']; "
        "runtime._finds_driver = lambda: {has_driver}; "
        "seen = warnings.catch_warnings(record=True).__enter__(); warnings.simplefilter('always'); "
        "ds.set_xla_flags(); ds.set_xla_flags(); "
        "print(len(seen), *(one.category.__name__ for one in seen)); "
        "print(*('cuda13]<0.12' in str(one.message) for one in seen))"
    )
    cases = [((0, 12, 0), True), ((0, 12, 0), False), ((0, 11, 2), True)]
    told = [(code.format(version=version, has_driver=there), {}) for version, there in cases]
    assert run_each(*told) == [["1", "SlowJaxWarning", "True"], ["0"], ["0"]]


def test_flags_are_refused_once_jax_runs():
    jnp.zeros(1).block_until_ready()
    with pytest.raises(RuntimeError, match="call set_xla_flags before the first array"):
        ds.set_xla_flags()


@pytest.mark.slow
def test_the_second_process_finds_what_the_first_compiled(tmp_path):
    code = (
        "import dsv4_jax as ds; print(ds.use_compilation_cache()); import jax, jax.numpy as jnp; "
        "from dsv4_jax.bench.program import compile_program as c; "
        "print(c(jax.jit(lambda x: x * 3 + 1), jnp.zeros(4)).from_cache)"
    )
    here, folder = {"XDG_CACHE_HOME": str(tmp_path)}, str(tmp_path / "dsv4-jax/xla")
    assert run_each((code, here), (code, here)) == [[folder, "False"], [folder, "True"]]
    told = run(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "told"))
    assert told == [str(tmp_path / "told"), "False"]


@pytest.mark.slow
@pytest.mark.compiled
def test_a_kernel_lowered_again_is_the_same_program():
    """To jax 0.11 it has another number, and a cache that knows programs by their text misses."""
    code = (
        "import dsv4_jax as ds; from tools import aot; from dsv4_jax import compat; "
        "[case] = aot.collect('sm_90a', ('select_top_k/top 512 of 64 x 4096',)).values(); "
        "lower = lambda: aot.lower_case('sm_90a', lambda *x: case[0](*x), *case[1:]); "
        "key = lambda: compat.canonicalize(lower()._lowering.stablehlo()); "
        "print(len({key() for _ in range(2)})); "
        "ds.use_compilation_cache(); "
        "print(len({key() for _ in range(2)}))"
    )
    numbered = "2" if jax.__version_info__ < (0, 12) else "1"
    assert run(code, **aot.environment()) == [numbered, "1"]


def test_memory_is_claimed_unless_the_user_or_jax_was_first():
    code = "import dsv4_jax as ds; {first}ds.runtime.claim_memory(); import os; "
    code += "print(os.environ.get('XLA_CLIENT_MEM_FRACTION'))"
    plain = code.format(first="")
    assert run_each(
        (plain, {}),
        (plain, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        (plain, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}),
        (code.format(first="import jax; jax.devices(); "), {}),
    ) == [["0.95"], ["0.5"], ["None"], ["None"]]


@pytest.mark.slow
def test_memory_that_is_taken_as_needed_leaves_room_for_others():
    code = "import dsv4_jax as ds; ds.runtime.claim_memory(at_once=False); import os; "
    code += "print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))"
    given = (code, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})
    assert run_each((code, {}), given) == [["false"], ["true"]]
