"""Reads what compilers say of a program: its kernels, launches, copies and memory."""

import contextlib
import ctypes
import functools
import glob
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile

from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir

SHARED_BUDGET_BYTES = 232_448  # of one program, on Hopper and Blackwell alike
TENSOR_CORE = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
_mosaic_figures = {}
"""By the hash of a kernel: one that was compiled before in this process is not compiled again."""


def gather(target, lowered, compiled, folder, output):
    """The figures of one compiled program.

    Args:
      target: "sm_90a" or "sm_100a".
      lowered: the program before the compiler saw it.
      compiled: what came out.
      folder: where XLA left its dumps.
      output: gives what was printed meanwhile, Mosaic's kernels and their reports among it.

    Returns:
      A dict for JSON: `kernels`, by name, of those written by hand (the route, registers and
      spilled bytes of a thread, shared bytes of a program, tensor core instructions, `waits` if
      the assembler says that products that should run do not, and `ignores_setmaxnreg` if it says
      that); `launches`, of XLA's too;
      `largest_copy_bytes` in the optimised program; `temp_bytes`; `alias_bytes`.
    """
    hlo = compiled.as_text()
    memory = compiled.memory_analysis()
    sequence = "".join(p.read_text() for p in folder.glob("*thunk_sequence.txt"))
    return {
        "kernels": _triton_kernels(target, hlo, folder, sequence)
        | _mosaic_kernels(lowered, output()),
        "launches": len(re.findall(r"^\s*\d+: k(?!While|Conditional|Sequential)", sequence, re.M)),
        "largest_copy_bytes": max(_copies(hlo), default=0),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def complaints(figures, recorded):
    """What is worse in these figures than in the recorded ones, in words; [] if nothing is."""
    if "error" in figures:
        return [figures["error"]]
    found = []
    for name, kernel in figures["kernels"].items():
        if kernel["shared_bytes"] > SHARED_BUDGET_BYTES:
            found.append(f"{name} takes {kernel['shared_bytes']} bytes of shared memory")
    for name, was in recorded["kernels"].items():
        kernel = figures["kernels"].get(name)
        if kernel is None:
            found.append(f"there is no kernel {name}, only {list(figures['kernels'])}")
            continue
        if kernel["spill_bytes"] > was["spill_bytes"]:
            found.append(f"{name} spills {kernel['spill_bytes']}, not {was['spill_bytes']} bytes")
        if kernel.get("waits") and not was.get("waits"):
            found.append(f"{name} waits for each product that it begins, says the assembler")
        if kernel.get("ignores_setmaxnreg"):
            found.append(f"{name} keeps its registers: the assembler ignores setmaxnreg")
        if missing := set(was["tensor_core"]) - set(kernel["tensor_core"]):
            found.append(f"{name} has no {missing}")
    if figures["launches"] > recorded["launches"]:
        found.append(f"{figures['launches']} launches, not {recorded['launches']}")
    if figures["alias_bytes"] < recorded["alias_bytes"]:
        found.append(f"{figures['alias_bytes']} bytes in place, not {recorded['alias_bytes']}")
    if figures["alias_bytes"] and figures["largest_copy_bytes"] > 2**20:
        found.append(f"a copy of {figures['largest_copy_bytes']} bytes")
    if figures["temp_bytes"] > recorded["temp_bytes"] + 2**20:
        found.append(f"{figures['temp_bytes']} temporary bytes, not {recorded['temp_bytes']}")
    return found


@contextlib.contextmanager
def captured_output():
    """Yields a function that gives what was written to file descriptor 1 meanwhile."""
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryFile() as file:

        def read():
            libc.fflush(None)
            file.seek(0)
            return file.read().decode(errors="replace")

        libc.fflush(None)
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield read
        finally:
            libc.fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)


@functools.cache
def find_ptxas():
    """The assembler of the installed wheels, else one on the path; None without any."""
    for folder in sys.path:
        if found := glob.glob(f"{folder}/nvidia/cu1*/bin/ptxas"):
            return found[0]
    return shutil.which("ptxas")


def _triton_kernels(target, hlo, folder, sequence):
    """Pallas-Triton kernels share XLA's PTX; the launches say what shared memory they take."""
    names = set(re.findall(r'call_target="__gpu\$xla\.gpu\.triton".*? name = "(\w+)"', hlo, re.S))
    shared = dict(re.findall(r"k\w+ .*\] (\w+) grid: .* shared_memory: (\d+) bytes", sequence))
    kernels = {}
    for path in folder.glob("*.ptx") if names else ():
        command = [find_ptxas(), f"-arch={target}", "-v", str(path), "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for name, figures in assembled(path.read_text(), report).items():
            if name in names:
                kernels[name] = {"route": "triton", **figures, "shared_bytes": int(shared[name])}
    assert kernels.keys() == names, f"no PTX of {names - kernels.keys()}"
    return kernels


def _mosaic_kernels(lowered, output):
    found = assembled(output, output)
    kernels = {}
    for kernel_hash, name, shared_bytes in _mosaic_calls(lowered):
        if kernel_hash not in _mosaic_figures:
            figures = found[f"{name}_mosaic_gpu_kernel"]
            _mosaic_figures[kernel_hash] = {"route": "mosaic", **figures}
        figures = _mosaic_figures[kernel_hash] | {"shared_bytes": shared_bytes}
        kernels[name] = _worse(figures, kernels.get(name, figures))
    return kernels


def _mosaic_calls(lowered):
    """[(hash, name, shared bytes)] of the program's Mosaic kernels."""
    modules = {}

    def find_call(op):
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(
            op.attributes["call_target_name"]
        ):
            config = op.attributes["mhlo.backend_config"]
            modules[ir.StringAttr(config["kernel_hash"]).value_bytes] = ir.StringAttr(
                config["module"]
            ).value_bytes
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(find_call)
    return [(key, *_mosaic_launch(module)) for key, module in modules.items()]


def _mosaic_launch(module):
    """A serialised kernel's name, and the shared memory it is launched with."""
    found = {}

    def find_launch(op):
        if op.name.endswith("gpu.launch"):
            size = op.operands[len(op.operands) - 1].owner
            found["shared_bytes"] = ir.IntegerAttr(size.attributes["value"]).value
        elif op.name.endswith("func.func") and "sym_name" in op.attributes:
            name = ir.StringAttr(op.attributes["sym_name"]).value
            if name.endswith("_mosaic_gpu"):
                found["name"] = name.removesuffix("_mosaic_gpu")
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        mgpu.dialect.register_dialect(context)
        ir.Module.parse(module).operation.walk(find_launch)
    return found["name"], found["shared_bytes"]


def assembled(ptx, report):
    """{entry: figures} from PTX and what `ptxas -v` said of it."""
    bodies = re.split(r"^\s*(?:\.visible )?\.entry (\w+)", ptx, flags=re.M)
    instructions = {}
    for name, body in zip(bodies[1::2], bodies[2::2], strict=True):
        instructions.setdefault(name, set()).update(i for i in TENSOR_CORE if i in body)
    pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    figures = {}
    for name, spilled, registers in re.findall(pattern, report, re.S):
        found = {
            "registers": int(registers),
            "spill_bytes": int(spilled),
            "tensor_core": sorted(instructions.get(name, ())),
        }
        if re.search(rf"instructions are serialized.*'{name}'", report):
            found["waits"] = True
        if "'setmaxnreg' ignored" in report:  # C7504, of a whole unit
            found["ignores_setmaxnreg"] = True
        figures[name] = _worse(found, figures.get(name, found))
    return figures


def _worse(figures, others):
    """Of two kernels of one name: the larger of each number."""
    return {key: max(value, others.get(key, value)) for key, value in (others | figures).items()}


def _copies(hlo):
    """Bytes of each copy, and of each fusion that does nothing else."""
    # At the start of a line only: a kernel's code is one word of a megabyte, further on.
    pattern = r"\s*(?:ROOT )?%?([\w.-]+) = \(?([a-z]\w*)\[([\d,]*)\]\S* (copy|copy-start|fusion)\("
    for name, dtype, shape, kind in _matches(pattern, hlo):
        if kind != "fusion" or "copy" in name:
            bits = re.match(r"[a-z]+(\d+)", dtype)
            size = max(1, int(bits[1]) // 8) if bits else 1
            yield size * math.prod(int(n) for n in shape.split(",") if n)


def _matches(pattern, text):
    found = (re.match(pattern, line) for line in text.splitlines())
    return (match.groups() for match in found if match)
