"""Flags and the compilation cache, each in a process of its own."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax as ds
from programs import aot


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_flags_are_known_to_xla_and_the_users_own_win():
    """XLA ends the process at a flag it does not know."""
    code = "import dsv4_jax as ds; {call}; import jax.numpy as jnp; jnp.zeros(1); "
    code += "import os; print(os.environ['XLA_FLAGS'])"
    added = run(code.format(call="ds.set_xla_flags()"))
    assert added == [f"--{name}={value}" for name, value in ds.runtime.XLA_GPU_FLAGS.items()]
    (name,) = ds.runtime.XLA_GPU_FLAGS
    kept = run(code.format(call="ds.set_xla_flags()"), XLA_FLAGS=f"--{name}=7")
    assert kept == [f"--{name}=7"]
    more = run(code.format(call="ds.set_xla_flags(xla_gpu_graph_min_graph_size='1')"))
    assert "--xla_gpu_graph_min_graph_size=1" in more


def test_flags_are_refused_once_jax_runs():
    jnp.zeros(1).block_until_ready()
    with pytest.raises(RuntimeError, match="call set_xla_flags before the first array"):
        ds.set_xla_flags()


def test_the_second_process_finds_what_the_first_compiled(tmp_path):
    code = (
        "import dsv4_jax as ds; print(ds.use_compilation_cache()); import jax, jax.numpy as jnp; "
        "from dsv4_jax.bench.program import compile_program as c; "
        "print(c(jax.jit(lambda x: x * 3 + 1), jnp.zeros(4)).from_cache)"
    )
    for found in ("False", "True"):
        assert run(code, XDG_CACHE_HOME=str(tmp_path)) == [str(tmp_path / "dsv4-jax/xla"), found]
    told = run(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "told"))
    assert told == [str(tmp_path / "told"), "False"]


@pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
def test_a_kernel_lowered_again_is_the_same_program():
    """To jax 0.11 it has another number, and a cache that knows programs by their text misses."""
    code = (
        "import dsv4_jax as ds; {call}from programs import aot; "
        "[case] = aot.collect('sm_90a', ('select_top_k/top 512 of 64 x 4096',)).values(); "
        "print(len({{aot.lower_case('sm_90a', lambda *x: case[0](*x), *case[1:]).as_text() "
        "for _ in range(2)}}))"
    )
    numbered = "2" if jax.__version_info__ < (0, 12) else "1"
    assert run(code.format(call=""), **aot.environment()) == [numbered]
    assert run(code.format(call="ds.use_compilation_cache(); "), **aot.environment()) == ["1"]


def test_memory_is_claimed_unless_the_user_or_jax_was_first():
    code = "import dsv4_jax as ds; {first}ds.runtime.claim_memory(); import os; "
    code += "print(os.environ.get('XLA_CLIENT_MEM_FRACTION'))"
    assert run(code.format(first="")) == ["0.95"]
    assert run(code.format(first=""), XLA_CLIENT_MEM_FRACTION="0.5") == ["0.5"]
    assert run(code.format(first=""), XLA_PYTHON_CLIENT_MEM_FRACTION="0.5") == ["None"]
    assert run(code.format(first="import jax; jax.devices(); ")) == ["None"]


def test_memory_that_is_taken_as_needed_leaves_room_for_others():
    code = "import dsv4_jax as ds; ds.runtime.claim_memory(at_once=False); import os; "
    code += "print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))"
    assert run(code) == ["false"]
    assert run(code, XLA_PYTHON_CLIENT_PREALLOCATE="true") == ["true"]
