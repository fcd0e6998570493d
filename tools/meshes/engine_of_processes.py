"""An engine on a mesh of four devices that lie in one, two or four processes.

Of each process the exit status, what it wrote to stderr, the seconds that it lived on after one was
lost, and what process 0 printed.
"""

import json
import math
import os
import signal
import threading
import time

import pytest

from helpers import serving
from tools.meshes.harness import mesh_of, start_processes

DEVICES, TIMEOUT_S, LOST_AT_STEP = 4, 10.0, 3


def be_one(arguments):
    """One of the processes."""
    number, count, port = arguments.process
    import dsv4_jax as ds

    if count > 1:
        ds.hosts.join_hosts(f"127.0.0.1:{port}", count, number, timeout_s=TIMEOUT_S)
    from tools.meshes import engine as engines
    from tools.meshes.models import model

    if arguments.gpus:
        serving.CONFIG, params = model("v4", tiny=False)
        serving.params = lambda: params
    else:
        engines.use_small_model()
    engines.OPTIONS["split_cache"] = arguments.split
    if arguments.steps:
        several = {"steps_per_call": arguments.steps, "decode_tokens": None, "draft_tokens": 0}
        engines.OPTIONS |= several
    mesh = mesh_of(arguments.mesh)
    engine = engines.engine_on(mesh)
    if number == arguments.lost:
        lose_at_step(engine, arguments.how)
    if number:
        with pytest.raises(RuntimeError, match=f"0 takes requests, and this is process {number}"):
            engine.submit([1])
        engine.follow()
        return
    if arguments.lost < 0:
        engine.warmup()
    tokens = engines.greedy(engine)
    problems = [str(one) for one in engine.verify().problems]
    engine.close()
    print(json.dumps({"tokens": tokens, "problems": problems}), flush=True)


def lose_at_step(engine, how):
    """The process is killed, is stopped, or hangs, in a step."""
    arrays, steps = engine.loop.runner.devices, iter(range(10**9))
    bring = arrays._bring_input  # of a step, before it waits for the other processes

    def lose(*call):
        if next(steps) == LOST_AT_STEP:
            print("lost", flush=True)
            if how == "hang":
                time.sleep(10**6)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return bring(*call)

    arrays._bring_input = lose


def run(count, mesh, lost=-1, how="kill", *, split=False, gpus=False, steps=0):
    """What the processes did: see above."""
    asked = ["--mesh", mesh, "--lost", str(lost), "--how", how, "--steps", str(steps)]
    asked += [*["--split"] * split, *["--gpus"] * gpus]
    devices = math.prod(map(int, mesh.split("x"))) if gpus else DEVICES
    processes = start_processes("engine", count, *asked, devices=devices, gpus=gpus)
    found = [{} for _ in processes]
    lost_at = []

    def watch(number):
        process, mine = processes[number], found[number]
        if number == lost:
            while process.stdout.readline() not in ("lost\n", ""):
                continue  # what Gloo says
            lost_at.append(time.monotonic())
        else:
            mine["out"], mine["err"] = process.communicate()
            mine["status"] = process.returncode
            mine["ended"] = time.monotonic()

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for process in processes:
        process.kill()
        process.communicate()  # which closes its pipes
    for mine in found:
        ended = mine.pop("ended", None)
        mine["seconds"] = ended - lost_at[0] if lost_at and ended else None
    return found


def result(processes):
    """What process 0 printed."""
    return json.loads(processes[0]["out"].splitlines()[-1])


def add_arguments(parser):
    parser.add_argument("--mesh", default="2x2", metavar="DATAxMODEL")
    parser.add_argument("--lost", type=int, default=-1, help="which one is lost")
    parser.add_argument("--how", choices=("kill", "stop", "hang"), default="kill")
    parser.add_argument("--split", action="store_true", help="deal blocks over model")
    parser.add_argument("--gpus", action="store_true", help="GPUs in place of CPU devices")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="of a call of the program that only decodes; 0 has none",
    )


def check_all(arguments):
    asked = arguments.count, arguments.mesh, arguments.lost, arguments.how
    named = {"split": arguments.split, "gpus": arguments.gpus, "steps": arguments.steps}
    return run(*asked, **named)
