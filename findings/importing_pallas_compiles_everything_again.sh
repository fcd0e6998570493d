#!/usr/bin/env bash
# jax 0.12.0.1: importing Pallas makes JAX trace and compile every jitted function once more, and
# importing Pallas for TPUs does it again, on a machine without a GPU or TPU.
#
# The keys by which JAX finds what it has traced hold all its settings. These modules add settings
# when they are imported, so that no key from before is found again. No message says so. Who imports
# them late, in a function or behind a condition, pays for each compilation twice. With jax 0.11.2
# only the second import does it.
#
# Seen, of a function that is called twice each time: "traced 1, compiled 1" at first, "traced 2,
# compiled 2" after the first import, "traced 3, compiled 3" after the second; with jax 0.11.2
# "traced 1", "traced 1" and "traced 2".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/late.py" <<'PYTHON'
import importlib

import jax
import jax.numpy as jnp

traced, compiled = [], []


def note(event, seconds, **_):
    if event.endswith("backend_compile_duration"):
        compiled.append(seconds)


@jax.jit
def double(x):
    traced.append(x)
    return 2 * x


def tell():
    before = len(compiled)
    double(x), double(x)
    counts.append(len(compiled) - before)
    print(f"traced {len(traced)}, compiled {sum(counts)}")


x, counts = jax.device_put(jnp.zeros(8)), []
jax.monitoring.register_event_duration_secs_listener(note)
tell()
for name in ("jax.experimental.pallas", "jax.experimental.pallas.tpu"):
    importlib.import_module(name)
    tell()
PYTHON
see() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet "jax==$1"
  JAX_PLATFORMS=cpu "$folder/$1/bin/python" "$folder/late.py" | tee "$folder/seen"
  test "$(cat "$folder/seen")" = "$2"
}
see 0.12.0.1 "traced 1, compiled 1
traced 2, compiled 2
traced 3, compiled 3"
see 0.11.2 "traced 1, compiled 1
traced 1, compiled 1
traced 2, compiled 2"
