"""What checks of meshes share: how programs and their processes start, and a runner of steps.

Three programs, `on_cpus`, `on_gpus` and `processes`, have parts, each a module: `add_arguments`
adds its options, and `check_all` does what they ask for.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.cache.snapshots import SnapshotPlan, init_snapshot_store
from dsv4_jax.mesh import shardings_of
from dsv4_jax.peers import make_peer_buffers
from dsv4_jax.step.serve_step import jit_plain_decode_step, jit_serve_step
from dsv4_jax.step.serve_values import ServeInput
from helpers import gpu_processes
from helpers.configs import scanned

DEVICES = 8
TESTS = pathlib.Path(__file__).parents[2] / "tests"
ROWS, CONTEXT, DRAFTS = 8, 160, 2

jit_prefill = jax.jit(ds.prefill, static_argnames=("config", "all_logits"))
jit_stage = jax.jit(ds.stage_step, static_argnames=("config",))
jit_commit = jax.jit(ds.commit)


def environment_of(num_devices=DEVICES):
    """Variables of a process that has so many CPU devices; JAX reads them as it starts."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    quickly = "--xla_backend_optimization_level=0"  # compiles in half the time
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {quickly}"} | paths()


def paths():
    """`PYTHONPATH` of a process that finds the packages, the tools and what tests import."""
    found = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(found)}


def run_module(name, *arguments):
    """What a module of `tools.meshes` prints, as JSON, where there are eight CPU devices."""
    command = [sys.executable, "-m", f"tools.meshes.{name}", *arguments]
    environment = os.environ | environment_of()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def with_cpu_devices(name):
    """Starts the program again with eight CPU devices if nothing says how many there are."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        command = [sys.executable, "-m", f"tools.meshes.{name}", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | environment_of())


def add_parts(parser, parts):
    """{name: parser} of the parts of a program, which are modules by name."""
    commands = parser.add_subparsers(required=True, metavar="PART")
    added = {}
    for name, part in parts.items():
        added[name] = commands.add_parser(
            name, help=" ".join(part.__doc__.split("\n\n")[0].split())
        )
        added[name].set_defaults(part=part)
        if hasattr(part, "add_arguments"):
            part.add_arguments(added[name])
    return added


def start_processes(part, count, *arguments, devices, gpus=False):
    """Starts processes that are those of a part of `processes`, each with its share of the devices.

    Args:
      part: its name.
      count: how many processes.
      arguments: of each.
      devices: of all of them together.
      gpus: whether devices are GPUs, in place of those of CPUs.
    """
    environment = os.environ | (paths() if gpus else environment_of(devices // count))
    command = [sys.executable, "-m", "tools.meshes.processes", part, str(count), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return gpu_processes.start(
        [*command, "--process"], count, gpus=devices if gpus else 0, env=environment, **pipes
    )


def say(**fields):
    """Prints a JSON line."""
    print(json.dumps(fields, default=float), flush=True)


def mesh_of(name):
    """The mesh "DATAxMODEL"."""
    return ds.make_mesh(*map(int, name.split("x")))


def divisible(**changes):
    """A tiny model whose sizes divide by eight, of scanned layers."""
    return scanned(num_attention_heads=8, o_groups=8, **changes)


def smallest():
    """The same with two layers and few iterations, which compiles quickly."""
    types = ds.AttentionType.CSA, ds.AttentionType.HCA
    routers = ds.RouterType.HASH, ds.RouterType.LEARNED
    fields = {"layer_types": types, "router_types": routers}
    return divisible(**fields, hc_sinkhorn_iters=1, num_mtp_layers=0)


def one_layer():
    """The same with one layer, of the type with most parts, which takes half the time."""
    fields = {"layer_types": (ds.AttentionType.CSA,), "router_types": (ds.RouterType.LEARNED,)}
    return dataclasses.replace(smallest(), **fields)


class Runner:
    """One model and one cache, on a mesh or on one device; rows are requests, all in slots."""

    def __init__(self, config, params, mesh, *, cache_format="f32", context=CONTEXT, split=False):
        self.config, self.mesh = config, mesh
        self.shards = 1 if mesh is None else mesh.shape["data"]
        self.params = params
        if mesh is not None:
            params = jax.device_put(params, ds.param_shardings(config, mesh, params))
            self.params = dataclasses.replace(params, peers=make_peer_buffers(mesh))
        sizes = {"max_requests": ROWS, "max_context_tokens": context, "split_cache": split}
        self._sizes = sizes | {"cache_format": cache_format}
        self.reset()

    def reset(self):
        """Takes a new, empty cache."""
        self.cache = None  # so that there is room for it
        self.cache = ds.init_cache(self.config, **self._sizes, mesh=self.mesh)

    def place(self, value):
        """An argument of a step, on the mesh."""
        value = jax.tree.map(jnp.asarray, value)
        return value if self.mesh is None else jax.device_put(value, shardings_of(value, self.mesh))

    def pack(self, tokens, *, num_tokens=None):
        """Tokens of all requests, each data shard's own with padding after them, and their places.

        Args:
          tokens: token ids of each request, maybe none.
          num_tokens: of all shards; None is as many as are needed.
        """
        rows = ROWS // self.shards
        groups = [range(i * rows, (i + 1) * rows) for i in range(self.shards)]
        size = max(sum(len(tokens[r]) for r in group) for group in groups)
        size = size if num_tokens is None else num_tokens // self.shards
        ids, owners, places = [], [], {}
        for group in groups:
            start = len(ids)
            for row, request in enumerate(group):
                places[request] = len(ids) + np.arange(len(tokens[request]))
                ids += list(tokens[request])
                owners += [row] * len(tokens[request])
            spare = start + size - len(ids)
            ids, owners = ids + [0] * spare, owners + [-1] * spare
        call = ds.StepInput(
            token_ids=np.asarray(ids, np.int32),
            request_ids=np.asarray(owners, np.int32),
            request_slots=np.tile(np.arange(rows, dtype=np.int32), self.shards),
        )
        return self.place(call), places

    def prefill(self, tokens, *, num_tokens=None):
        """Logits of all tokens of each request."""
        call, places = self.pack(tokens, num_tokens=num_tokens)
        self.cache, logits = jit_prefill(
            self.params, self.cache, call, config=self.config, all_logits=True
        )
        return _by_request(logits, places)

    def decode(self, tokens):
        """Logits after one token of each request."""
        call, _ = self.pack([[token] for token in tokens])
        self.cache, logits = ds.jit_decode_step(self.params, self.cache, call, config=self.config)
        return np.asarray(logits)

    def stage(self, tokens, kept, *, num_tokens=None):
        """Logits of all tokens of each request, of which the first few are kept."""
        call, places = self.pack(tokens, num_tokens=num_tokens)
        cache, staged, logits = jit_stage(self.params, self.cache, call, config=self.config)
        self.cache = jit_commit(cache, staged, self.place(np.asarray(kept, np.int32)))
        return _by_request(logits, places)

    def loop(self, tokens, sampling, num_steps):
        """Tokens drawn on the device, i32[B, n]."""
        call, _ = self.pack([[token] for token in tokens])
        arguments = self.params, self.cache, call, self.place(sampling)
        self.cache, drawn = ds.jit_decode_loop(*arguments, num_steps=num_steps, config=self.config)
        return np.asarray(drawn)

    def serve_input(self, tokens, num_checked, sampling):
        """These tokens of each request, without snapshots."""
        none = np.full(ROWS, -1, np.int32)
        return self.place(
            ServeInput(
                step_input=self.pack(tokens)[0],
                num_checked=np.asarray(num_checked, np.int32),
                next_token_ids=none,
                sampling=sampling,
                snapshots=SnapshotPlan(rows=none, ends=none, places=none),
            )
        )

    def serve(self, tokens, num_checked, sampling):
        """The engine's step with drafts: what it gives to the host, i32 each."""
        store = self.place(init_snapshot_store(self.cache, self.shards))
        serve_input = self.serve_input(tokens, num_checked, sampling)
        static = {"config": self.config, "draft_tokens": DRAFTS}
        self.cache, _, output = jit_serve_step(
            self.params, self.cache, store, serve_input, **static
        )
        return jax.tree.map(np.asarray, output)

    def plain(self, tokens, sampling):
        """The engine's step of one token per row: i32[B]."""
        serve_input = self.serve_input([[token] for token in tokens], [1] * ROWS, sampling)
        self.cache, output = jit_plain_decode_step(
            self.params, self.cache, serve_input, config=self.config
        )
        return np.asarray(output.token_ids)[:, 0]


def _by_request(logits, places):
    logits = np.asarray(logits)
    return [logits[places[request]] for request in range(ROWS)]
