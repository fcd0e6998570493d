"""Lowers every kernel for a GPU that is not there, by any lowering that kernels for Triton have.

    python -m tools.lower_all sm_90a                            by Pallas's Triton backend
    python -m tools.lower_all sm_90a --lowering ptx             by Triton's language, to PTX
    python -m tools.lower_all sm_90a --lowering ptx --once      one case of each kernel
    python -m tools.lower_all sm_90a --lowering ptx --no-code   to Triton's language and no further

The cases are those of `tools.aot`. Each is a line of JSON, and the exit status is 1 where a case
has an error. By any lowering but `pallas`, that backend's modules cannot be imported, as if jax had
dropped them, and cases without a kernel for Triton are left out. By `ptx`, `kernels` are those that
the package `triton` compiled: registers and spilled bytes of a thread as `ptxas` has them, shared
bytes of a program, bytes of PTX, and the seconds that Triton took. By `ir`, XLA compiles each case
too: its Triton, which is of another version than the package's, has to read what that wrote.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from tools import aot, aot_figures, no_triton_backend

LOWERINGS = ("pallas", "ptx", "ir", "jax_triton")


def on_triton(kernels):
    """Names of a recorded case's kernels that go through Triton."""
    return {name for name, figures in kernels.items() if figures["route"] == "triton"}


def choose(cases, recorded, *, once=False):
    """Those of the cases that have a kernel for Triton, or that nothing is recorded of.

    `once`: only those that have a kernel which no case before them has.
    """
    chosen, seen = [], set()
    for case in cases:
        names = on_triton(recorded[case]["kernels"]) if case in recorded else {case}
        if names - seen if once else names:
            chosen.append(case)
            seen |= names
    return chosen


def assemble(kernel, target):
    """The figures of a kernel in PTX; see `triton_language.lowering.Compiled`."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.ptx)
        file.flush()
        command = [aot_figures.find_ptxas(), f"-arch={target}", "-v", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {kernel.name}: {done.stderr[:500]}")
    figures = aot_figures.assembled(kernel.ptx, done.stderr)[kernel.name]
    return figures | {"shared_bytes": kernel.shared_bytes, "ptx_bytes": len(kernel.ptx)}


def watch(target, found, *, once, code):
    """`found` gets the figures of each kernel that the package `triton` compiles."""
    from pallas_kernels.gpu.triton_language import lowering

    compile_source, seen = lowering.compile_source, set()

    def compile_and_note(source, *arguments):
        if not code or (once and source.name in seen):
            return lowering.Compiled("", source.name, 0, 32)
        seen.add(source.name)
        began = time.perf_counter()
        kernel = compile_source(source, *arguments)
        seconds = round(time.perf_counter() - began, 2)
        found[kernel.name] = assemble(kernel, target) | {"seconds": seconds}
        return kernel

    lowering.compile_source = compile_and_note


def lower_cases(target, lowering, names, *, once=False, code=True):
    """Yields (case, what is to be said of it)."""
    from pallas_kernels.gpu import triton_lowering

    found = {}
    if lowering == "ptx":
        watch(target, found, once=once, code=code)
    cases = {
        name: case
        for name, case in aot.collect(target, names).items()
        if not name.startswith(aot.BROKEN)
    }
    chosen = list(cases)
    if lowering != "pallas" or once:
        chosen = choose(cases, aot.read_recorded().get(target, {}), once=once)
    for name in chosen:
        found.clear()
        try:
            with triton_lowering.use_lowering(lowering):
                lowered = aot.lower_case(target, *cases[name])
            if lowering == "ir" and code:
                lowered.compile()
        except Exception as error:
            yield name, {"error": f"{type(error).__name__}: {error}"[:2000]}
        else:
            yield name, {"kernels": dict(found)} if lowering == "ptx" and code else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=aot.TARGETS)
    parser.add_argument("--lowering", choices=LOWERINGS, default="pallas")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--no-code", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    if reason := aot.unavailable():
        parser.error(reason)
    os.environ.update(aot.WITHOUT_A_GPU)
    for name in arguments.only:
        if not aot.collect(arguments.target, (name,)):
            parser.error(f"argument --only: no case begins with {name!r}")
    if arguments.lowering != "pallas":
        no_triton_backend.take_away()
    failed = False
    for name, said in lower_cases(
        arguments.target,
        arguments.lowering,
        tuple(arguments.only),
        once=arguments.once,
        code=not arguments.no_code,
    ):
        failed |= "error" in said
        print(json.dumps({"case": name} | said), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
