#!/bin/sh
# triton 3.8.0 and jaxlib 0.12.0.1: Triton's IR of a kernel whose load has an eviction policy is read by the Triton
# of jaxlib 0.11.2, and refused by the newer one.
#
# jaxlib brings a copy of Triton's dialect, that of the compiler in its XLA. Text that the newest package `triton`
# prints is a way from one to the other, and jaxlib is the newer of both here. The package writes the policy of a load
# as words after its operands, `evictionPolicy = evict_first`. In jaxlib 0.12 the policy has become an attribute of its
# own, and its parser expects ':' where those words begin. A load without a policy is written alike by all.
#
# Seen on 2026-11-30 with Python 3.12, triton 3.8.0, jax and jaxlib 0.11.2 and 0.12.0.1, without a GPU:
#     0.11.2 plain read
#     0.11.2 policy read
#     0.12.0.1 plain read
#     0.12.0.1 policy refused: expected ':'
# This script fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/triton"
"$folder/triton/bin/pip" install --quiet --disable-pip-version-check --no-deps triton==3.8.0
cat > "$folder/copies.py" <<'PYTHON'
import pathlib
import sys

import triton
import triton.language as tl
from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler


@triton.jit
def plain(source, target):
    at = tl.arange(0, 64)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def policy(source, target):
    at = tl.arange(0, 64)
    tl.store(target + at, tl.load(source + at, eviction_policy="evict_first"))


goal = GPUTarget("cuda", 90, 32)
backend = compiler.make_backend(goal)
options = backend.parse_options({})
for kernel in (plain, policy):
    read = compiler.ASTSource(kernel, {"source": "*fp32", "target": "*fp32"})
    context = libtriton.ir.context()
    libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = read.make_ir(goal, options, functions, modules, context)
    text = module.str_nodebug()
    pathlib.Path(sys.argv[1], kernel.__name__).write_text(text)
PYTHON
"$folder/triton/bin/python" "$folder/copies.py" "$folder"
cat > "$folder/reads.py" <<'PYTHON'
import pathlib
import sys

import jaxlib
from jaxlib.mlir import ir
from jaxlib.triton import dialect

for name in ("plain", "policy"):
    with ir.Context() as context:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        try:
            ir.Module.parse(pathlib.Path(sys.argv[1], name).read_text())
            said = "read"
        except ir.MLIRError as error:
            said = "refused: " + error.error_diagnostics[0].message
    print(jaxlib.__version__, name, said)
PYTHON
for version in 0.11.2 0.12.0.1; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check jax==$version jaxlib==$version
    "$folder/$version/bin/python" "$folder/reads.py" "$folder"
done | tee "$folder/seen"
printf '%s\n' "0.11.2 plain read" "0.11.2 policy read" "0.12.0.1 plain read" "0.12.0.1 policy refused: expected ':'" > "$folder/wanted"
diff "$folder/wanted" "$folder/seen"
