"""Pages that two processes keep on the host, each the part of its own devices."""

import collections
import concurrent.futures
import json

import numpy as np

import dsv4_jax as ds
from helpers import serving
from tools.meshes.harness import mesh_of, start_processes

TIMEOUT_S, SEEDS = 10.0, 4
LINE = "found "


def be_one(arguments):
    """One of the processes: prints what it found as its last line."""
    number, count, port = arguments.process
    if count > 1:
        ds.hosts.join_hosts(f"127.0.0.1:{port}", count, number, timeout_s=TIMEOUT_S)
    look = serve if arguments.engine else move
    found = {name: look(name, arguments, number) for name in arguments.mesh}
    print(LINE + json.dumps(found), flush=True)


def move(name, arguments, number):
    """What happened to pages of random bytes; see `Moved`."""
    from tools.meshes import moved_pages

    mesh, _, split = name.partition("/")
    return moved_pages.look(mesh_of(mesh), number, is_split=bool(split), lost=arguments.lost)


def serve(name, arguments, number):
    """What requests got of an engine all of whose prefixes go to the host again and again."""
    from tools.meshes import engine as engines

    engines.use_small_model()
    mesh, _, split = name.partition("/")
    tier = {} if arguments.plain else {"host_cache_bytes": arguments.bytes}
    engine = engines.engine_on(mesh_of(mesh), split_cache=bool(split), **tier)
    if number:
        engine.follow()
        return {}
    life = Life(engine)
    if arguments.plain:  # each prompt and seed once
        for number in range(len(life.texts) * SEEDS):
            life.ask(*divmod(number, SEEDS))
    else:
        for _ in range(arguments.events):
            life.event()
    found = life.end()
    engine.close()
    return found


class Life:
    """Requests of a few prompts come, run, are cancelled and preempted, and what is unused goes."""

    def __init__(self, engine):
        self.engine, self.rng = engine, np.random.default_rng(0)
        self.texts = [serving.prompt(self.rng, length) for length in (150, 300, 420, 390)]
        self.asked, self.got, self.most = {}, collections.defaultdict(set), [0]

    def event(self):
        rng, engine = self.rng, self.engine
        kind = rng.random()
        running = [one for one in self.asked if engine.requests[one].slot >= 0]
        if kind < 0.45:
            self.ask(int(rng.integers(len(self.texts))), int(rng.integers(SEEDS)))
        elif kind < 0.55 and running:
            engine.preempt(running[int(rng.integers(len(running)))])
        elif kind < 0.6 and self.asked:
            request = list(self.asked)[int(rng.integers(len(self.asked)))]
            engine.cancel(request)
        for _ in range(int(rng.integers(8))):
            engine.step()
        self.take()
        if kind > 0.5:
            self.evict()

    def ask(self, which, seed):
        """One more request, of one of the prompts."""
        options = {"max_new_tokens": 10, "stop_token_ids": (), "temperature": 1.0, "seed": seed}
        self.asked[self.engine.submit(self.texts[which], **options)] = f"{which} {seed}"

    def take(self):
        """Takes what has finished."""
        for request in list(self.asked):
            if self.engine.requests[request].finish_reason is not None:
                done, name = self.engine.completion(request), self.asked.pop(request)
                if done.finish_reason == "length":
                    self.got[name].add(tuple(int(token) for token in done.token_ids))

    def evict(self):
        """All that no request uses leaves the devices, and is on the host after it."""
        host = self.engine.loop.host
        for manager in self.engine.loop.shards.managers:
            manager.evict(manager.num_blocks)
        if host is None:
            return
        host.keep()
        while host.stores.begun:
            concurrent.futures.wait(host.stores.begun)
            host.keep()
        self.most = np.maximum(self.most, host.tier.bytes_at).tolist()
        arrays = self.engine.loop.runner.devices
        if hasattr(arrays, "_parts"):
            assert arrays._parts.num_bytes == host.tier.bytes_at[0]

    def end(self):
        """What was found: for each prompt and seed all answers that there were."""
        while self.engine.num_unfinished:
            self.engine.step()
        self.take()
        self.evict()
        metrics = self.engine.metrics
        return {
            "got": {name: sorted(answers) for name, answers in sorted(self.got.items())},
            "hits": metrics.host_hit_tokens,
            "damaged": metrics.damaged_pages,
            "evicted": metrics.host_evicted_bytes,
            "most": self.most,
            "problems": [str(one) for one in self.engine.verify().problems],
        }


def run(count, *meshes, options=(), devices=2, gpus=False):
    """Of each process its exit status, what it found, and what it wrote to stderr."""
    asked = ["--mesh", *meshes, *options]
    processes = start_processes("pages", count, *asked, devices=devices, gpus=gpus)
    found = []
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        waiting = [threads.submit(one.communicate, timeout=900) for one in processes]
        try:
            for process, its in zip(processes, waiting, strict=True):
                out, err = its.result()
                lines = [line for line in out.splitlines() if line.startswith(LINE)]
                said = json.loads(lines[-1].removeprefix(LINE)) if lines else None
                found.append({"status": process.returncode, "found": said, "err": err})
        finally:
            for process in processes:
                process.kill()
    return found


def add_arguments(parser):
    parser.add_argument("--mesh", nargs="+", default=["1x2"], metavar="DATAxMODEL[/split]")
    parser.add_argument("--lost", action="store_true", help="process 1 is killed in a move")
    parser.add_argument("--engine", action="store_true", help="requests of an engine")
    parser.add_argument("--plain", action="store_true", help="without a tier")
    parser.add_argument("--bytes", type=int, default=10**6, help="of the tier of each process")
    parser.add_argument("--events", type=int, default=40, help="of an engine's life")
    parser.add_argument("--devices", type=int, default=2, help="of all processes")
    parser.add_argument("--gpus", action="store_true", help="GPUs in place of CPU devices")


def check_all(arguments):
    flags = [f"--{name}" for name in ("lost", "engine", "plain") if getattr(arguments, name)]
    flags += ["--bytes", str(arguments.bytes), "--events", str(arguments.events)]
    where = {"devices": arguments.devices, "gpus": arguments.gpus}
    return run(arguments.count, *arguments.mesh, options=flags, **where)
