#!/bin/sh
# jax-triton 0.4.1: with jax 0.12 no function that calls `triton_call` can be jitted.
#
# pip installs the newest releases of both together, since jax-triton asks for jax 0.11 or newer. `jax.jit` drops
# what a program does not need by a rule of each primitive. jax-triton's rule takes two arguments, and jax 0.12
# hands it three. So tracing and lowering raise a TypeError, on any device and before a kernel is compiled. With
# jax 0.11.2 they go on to ask for a GPU. A `triton_call` that another primitive's lowering traces, by
# `mlir.lower_fun`, is lowered on jax 0.12 too: nothing asks for that rule there.
#
# Seen on 2026-11-29 with Python 3.12, jax 0.12.0.1, jax-triton 0.4.1 and Triton 3.8.0:
#     TypeError _triton_kernel_call_dce_rule() takes 2 positional arguments but 3 were given
# This script fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 jax-triton==0.4.1 triton==3.8.0
cat > "$folder/seen.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def double(x, y):
    i = tl.arange(0, 128)
    tl.store(y + i, 2 * tl.load(x + i))


def call(x):
    return jax_triton.triton_call(
        x, kernel=double, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=1
    )


try:
    jax.jit(call).trace(jnp.zeros(128)).lower(lowering_platforms=("cuda",))
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/seen.py" | tee "$folder/seen"
echo "TypeError _triton_kernel_call_dce_rule() takes 2 positional arguments but 3 were given" > "$folder/wanted"
diff "$folder/wanted" "$folder/seen"
