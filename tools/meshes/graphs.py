"""Whether collectives of a step are in XLA's command buffers (CUDA graphs), and what that is worth.

Compiles and times decode steps on a mesh of all GPUs with XLA's own choice of what its command
buffers hold, with collectives in them, and with none at all. Each setting is a process, since flags
are read once: all compile at the same time, and then each times its steps alone. Prints JSON lines:

    setting, point   ms a step
    setting, thunks  command buffers, launches in them and outside, and where collectives are
    best             of each point, the setting of the fastest step
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import traceback

import jax

import dsv4_jax as ds
from dsv4_jax.bench.decode_case import DecodeCase
from dsv4_jax.bench.mesh_step import MeshSteps
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cli.values import points_of
from tools.meshes.harness import say

SETTINGS = {
    "default": [],
    "collectives": ["--xla_gpu_enable_command_buffer=+COLLECTIVES"],
    "none": ["--xla_gpu_enable_command_buffer="],
}
"""Flags by name of the setting."""
EXPERTS = 16
_COLLECTIVE = re.compile(r"k\w*(AllReduce|AllGather|ReduceScatter|AllToAll|Permute)\w*")
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)")


def read_thunks(folder):
    """What XLA launches in the largest program that it has described in a folder of dumps."""
    files = sorted(folder.glob("*decode_step*thunk_sequence*"), key=lambda f: f.stat().st_size)
    if not files:
        return {"missing": f"XLA described no thunks in {len(list(folder.iterdir()))} files"}
    found = {"graphs": 0, "inside": 0, "outside": 0}
    collectives = {"inside": 0, "outside": 0}
    after = [file for file in files if "after_thunk_passes" in file.name]
    parents = []  # (indent, kind) of what a line stands in
    for line in (after or files)[-1].read_text().splitlines():
        if not (thunk := _THUNK.match(line)):
            continue
        indent, kind = len(thunk[1]), thunk[2]
        parents = [one for one in parents if one[0] < indent]
        where = "inside" if any(of == "kCommandBuffer" for _, of in parents) else "outside"
        parents.append((indent, kind))
        if kind == "kCommandBuffer":
            found["graphs"] += 1
            continue
        if kind not in ("kAsyncStart", "kAsyncDone"):
            found[where] += 1
        if _COLLECTIVE.fullmatch(kind) and not kind.endswith("Done"):
            collectives[where] += 1
    return found | {"collectives": collectives, "passes_ran": bool(after)}


def run_setting(name, arguments):
    """Compiles all points, waits for a line on stdin, and times them."""
    config = ds.DSV4Config.tiny() if arguments.tiny else ds.DSV4Config.flash()
    config = dataclasses.replace(
        config,
        layer_types=config.layer_types[: arguments.layers],
        router_types=config.router_types[: arguments.layers],
        num_mtp_layers=0,
        num_routed_experts=8 if arguments.tiny else EXPERTS,
    )
    weights = "bfloat16" if arguments.tiny else "stored"
    devices = len(jax.devices())
    mesh = ds.make_mesh(1, devices)
    cases = [
        DecodeCase(
            batch=batch, context=context, bucket_context=context, cache_format="fp8_ue8m0",
            parts=("step",), block_parts=devices if split else 1,
        )
        for point in arguments.points
        for batch, context, split in points_of(point)
    ]  # fmt: skip
    steps = MeshSteps(config, mesh, weights=weights)
    steps.compile_ahead(cases, threads=len(cases))
    params = jax.block_until_ready(random_params(config, weights=weights, mesh=mesh))
    steps.wait()
    say(setting=name, thunks=read_thunks(arguments.folder / name))
    say(setting=name, ready=True)
    sys.stdin.readline()
    for point, case in zip(arguments.points, cases, strict=True):
        row = {}
        for found in steps.bench(params, case, bandwidth=None):
            row = found
        kept = ("step_ms", "step_ms_least", "step_ms_most", "floor_ms", "failed", "skipped")
        kept = {key: row[key] for key in kept if key in row}
        say(setting=name, point=point, launches=row.get("launches"), **kept)


def start(name, arguments, folder):
    """A process of a setting."""
    flags = [*SETTINGS[name], f"--xla_dump_to={folder / name}"]
    flags += ["--xla_dump_hlo_module_re=.*decode_step.*"]
    environment = os.environ | {
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]),
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is read from there is not described
    }
    (folder / name).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tools.meshes.on_gpus", "graphs"]
    command += ["--setting", name]
    command += ["--folder", str(folder), "--layers", str(arguments.layers)]
    command += ["--points", *arguments.points, *["--tiny"] * arguments.tiny]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def lines_of(process, *, until_ready=False):
    """What a process prints, passed on, up to its end or until it waits."""
    for line in process.stdout:
        if line.startswith("{"):
            found = json.loads(line)
            if "ready" not in found:
                say(**found)
            yield found
            if until_ready and "ready" in found:
                return


def compare(arguments, folder):
    """All settings, timed one after the other; ms by point and setting."""
    processes = {name: start(name, arguments, folder) for name in arguments.settings}
    timer = threading.Timer(
        arguments.limit_s, lambda: [process.kill() for process in processes.values()]
    )
    timer.start()
    times = {}
    try:
        for process in processes.values():
            list(lines_of(process, until_ready=True))
        for name, process in processes.items():
            if process.poll() is None:
                process.stdin.write("go\n")
                process.stdin.flush()
            for found in lines_of(process):
                if "step_ms" in found:
                    times.setdefault(found["point"], {})[name] = found["step_ms"]
            if process.wait():
                say(setting=name, failed=f"exit {process.returncode}")
    finally:
        timer.cancel()
        for process in processes.values():
            process.kill()
    return times


def add_arguments(parser):
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--points", nargs="+", default=["1@4096", "8@4096"])
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--tiny", action="store_true", help="a small model, for CPUs")
    parser.add_argument("--limit-s", type=float, default=150.0)
    parser.add_argument("--setting", help="that of this process; one starts a process for each")
    parser.add_argument("--folder", type=pathlib.Path, help="where XLA describes its programs")


def check_all(arguments):
    """The exit status."""
    ds.runtime.claim_memory(0.25, at_once=False)
    ds.set_xla_flags()
    if arguments.setting:
        try:
            run_setting(arguments.setting, arguments)
        except Exception as error:
            say(setting=arguments.setting, failed=f"{type(error).__name__}: {error}"[:600])
            traceback.print_exc()
            return 1
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        times = compare(arguments, arguments.folder or pathlib.Path(temporary))
    best = {point: min(found, key=found.get) for point, found in times.items()}
    say(best=best, step_ms=times)
    return int(len(times) < len(arguments.points))
