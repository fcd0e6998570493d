#!/bin/sh
# jax 0.12.0.1, and 0.11.2: on a CPU `jax.experimental.serialize_executable.serialize` of a program that jax's
# compilation cache gave writes a program without machine code. It loads, and fails where it is called.
#
# A compiled program can be serialized, and loaded by another process, which does not trace it then. That works for
# a program that this process has compiled. If the compilation cache had it, `compile()` returns the same type, which
# runs, and `serialize` raises nothing. What it writes is smaller and holds no ELF object; `deserialize_and_load` takes
# it; the first call says "NOT_FOUND: Function ... not found". So whoever keeps programs that way has to look whether
# the cache gave them, or works in the first process and fails in the third.
#
# Seen on 2026-11-30 with Python 3.12 on x86-64 Linux:
#     compiled: with machine code, loaded it gives [0.0, 3.0, 6.0, 9.0]
#     from the cache: without machine code, loaded it says NOT_FOUND
# This script fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1
cat > "$folder/seen.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jnp.arange(4.0)
compiled = jax.jit(lambda a, b: (a * 2 + b, jnp.sin(a))).lower(x, x).compile()
assert compiled(x, x)[0].tolist() == [0.0, 3.0, 6.0, 9.0]
written, arguments, results = serialize_executable.serialize(compiled)
has_code = "with" if b"\x7fELF" in written else "without"
loaded = serialize_executable.deserialize_and_load(written, arguments, results)
try:
    said = f"gives {loaded(x, x)[0].tolist()}"
except jax.errors.JaxRuntimeError as error:
    said = f"says {str(error).partition(':')[0]}"
print(f"{sys.argv[2]}: {has_code} machine code, loaded it {said}")
PYTHON
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/seen.py" "$folder/cache" compiled | tee "$folder/seen"
"$folder/venv/bin/python" "$folder/seen.py" "$folder/cache" "from the cache" | tee -a "$folder/seen"
cat > "$folder/wanted" <<'WANTED'
compiled: with machine code, loaded it gives [0.0, 3.0, 6.0, 9.0]
from the cache: without machine code, loaded it says NOT_FOUND
WANTED
diff "$folder/wanted" "$folder/seen"
