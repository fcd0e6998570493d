"""Steps on meshes of eight CPU devices against the same steps on one device.

    python -m tools.mesh_check 2x4 1x2            prefill in chunks, then decoding; two layers
    python -m tools.mesh_check 2x4 --all          every kind of step, of scanned layers
    python -m tools.mesh_check 2x4 --dealt        rows dealt over `model` between sublayers
    python -m tools.mesh_check 8x1 --rows         rows gathered in E4M3 against BF16's
    python -m tools.mesh_check 1x4 --sums         sums over devices against those in their order

Prints, as JSON, for each mesh the largest difference of logits, and whose tokens differ. `run` runs
it in a process of its own, for the number of devices is set before JAX starts.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import dsv4_jax as ds
from dsv4_jax import collectives
from dsv4_jax.cache.snapshots import SnapshotPlan, init_snapshot_store
from dsv4_jax.mesh import BY_DEVICE, shardings_of
from dsv4_jax.model import moe, trunk
from dsv4_jax.peers import make_peer_buffers
from dsv4_jax.step.draws import draw
from dsv4_jax.step.serve_step import ServeInput, jit_plain_decode_step, jit_serve_step
from helpers.configs import scanned

DEVICES = 8
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} "
    "--xla_backend_optimization_level=0",  # compiles in half the time
}
TESTS = pathlib.Path(__file__).parents[1] / "tests"
ROWS, CONTEXT, DRAFTS = 8, 160, 2
PROMPT_TOKENS = (5, 37, 18, 1, 40, 29, 33, 12)
"""Tokens of each request; some close windows of both compressors."""

jit_prefill = jax.jit(ds.prefill, static_argnames=("config", "all_logits"))
jit_stage = jax.jit(ds.stage_step, static_argnames=("config",))
jit_commit = jax.jit(ds.commit)


def divisible(**changes):
    """A tiny model whose sizes divide by eight, of scanned layers."""
    return scanned(num_attention_heads=8, o_groups=8, **changes)


def smallest():
    """The same with two layers and few iterations, which compiles quickly."""
    types = ds.AttentionType.CSA, ds.AttentionType.HCA
    routers = ds.RouterType.HASH, ds.RouterType.LEARNED
    fields = {"layer_types": types, "router_types": routers}
    return divisible(**fields, hc_sinkhorn_iters=1, num_mtp_layers=0)


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
                step=self.pack(tokens)[0],
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


def prompts(config):
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size, n).tolist() for n in PROMPT_TOKENS]


def drawn_on(mesh):
    """i32[ROWS, 2], simple draws of random logits, the vocabulary in parts on the devices."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (ROWS, 2, 48)).astype(np.float32)
    logits[::3, :, [5, 17, 44]] = 9.0  # equal, on several devices
    rows = [
        ds.SamplingParams(temperature=[0.0, 0.7, 1.5][i % 3], min_p=[0.0, 0.1][i % 2], seed=i)
        for i in range(ROWS)
    ]
    settings, positions = (
        ds.make_sampling(ROWS, rows),
        jnp.arange(2 * ROWS, dtype=jnp.int32).reshape(ROWS, 2),
    )

    def local(logits):
        return draw(logits, settings, positions, None, jnp.zeros((ROWS, 1), jnp.int32))[0]

    if mesh is not None:
        parts, whole = P(None, None, "model"), P()
        local = jax.shard_map(local, mesh=mesh, in_specs=parts, out_specs=whole, check_vma=False)
    return np.asarray(jax.jit(local)(logits))


def run_chunks(runner, *, num_tokens=ROWS * 20, decoded=4):
    """Logits of prompts in two chunks, then of greedy tokens; one program for all of it."""
    texts = prompts(runner.config)
    first = runner.prefill([text[:20] for text in texts], num_tokens=num_tokens)
    second = runner.prefill([text[20:] for text in texts], num_tokens=num_tokens)
    logits = [[*a, *b] for a, b in zip(first, second, strict=True)]
    for _ in range(decoded):
        drawn = [[int(np.argmax(rows[-1]))] for rows in logits]
        for rows, new in zip(logits, runner.prefill(drawn, num_tokens=num_tokens), strict=True):
            rows.extend(new)
    tokens = [[int(np.argmax(row)) for row in rows] for rows in logits]
    logits = np.concatenate([np.stack(rows) for rows in logits])
    return {"logits": logits, "tokens": tokens, "drawn": drawn_on(runner.mesh)}


def run_all(runner):
    """Logits and tokens of every kind of step, one after the other on one cache."""
    rng = np.random.default_rng(1)
    found = run_chunks(runner)
    last = [tokens[-1] for tokens in found["tokens"]]
    decoded = runner.decode(last)
    found["decode"] = decoded
    guesses = rng.integers(0, runner.config.vocab_size, (ROWS, 3)).tolist()
    kept = rng.integers(0, 4, ROWS)
    found["stage"] = np.concatenate(runner.stage(guesses, kept))
    found["after commit"] = runner.decode(np.argmax(decoded, axis=-1).tolist())
    warm = [0.0, 1.0, 0.7, 0.0, 1.3, 1.0, 0.0, 0.9]
    limits = [0, 0, 5, 0, 0, 9, 0, 1]
    rows = [
        ds.SamplingParams(temperature=t, top_k=k, top_p=0.9 if i % 3 else 1.0, seed=i)
        for i, (t, k) in enumerate(zip(warm, limits, strict=True))
    ]
    settings = {
        "simple": ds.make_sampling(ROWS, [ds.SamplingParams(temperature=t) for t in warm]),
        "greedy": ds.make_sampling(ROWS).completed(),
        "sampled": ds.make_sampling(ROWS, rows),
    }
    tokens = np.argmax(found["after commit"], axis=-1).tolist()
    for name, sampling in settings.items():
        drawn = runner.loop(tokens, sampling, 3)
        found[f"loop, {name}"] = drawn
        last = drawn[:, -1].tolist()
        drafts = [[]] * ROWS
        for step in range(3):
            call = [[token, *more] for token, more in zip(last, drafts, strict=True)]
            output = runner.serve(call, [len(tokens) for tokens in call], sampling)
            found[f"serve, {name}, {step}"] = output.columns
            last = [int(row[row >= 0][-1]) for row in output.token_ids]
            drafts = output.draft_token_ids.tolist()
        tokens = runner.plain(last, sampling)
        found[f"plain, {name}"] = tokens
        tokens = tokens.tolist()
    return found


def compare(found, expected):
    """The largest difference of logits, and the names of results whose tokens differ."""
    off, wrong = 0.0, []
    for name, value in expected.items():
        value, other = np.asarray(_flat(value)), np.asarray(_flat(found[name]))
        if value.dtype.kind == "f":
            off = max(off, float(np.max(np.abs(value - other))))
        elif not np.array_equal(value, other):
            wrong.append(name)
    return {"logits_off": off, "different": wrong}


def check(meshes, *, everything=False, dealt=False):
    """{mesh: `compare`} of meshes "DATAxMODEL"; if dealt, with the numbers of rows that were.

    Those are pairs of the rows of a data shard and those that a device had between sublayers.
    """
    config = divisible() if everything else smallest()
    params = ds.init_params(config, jax.random.key(0))
    run = run_all if everything else run_chunks
    moe.GATHERED_ROWS = 48  # a prompt's rows come in chunks, the last of them padded
    expected = run(Runner(config, params, None))
    results, rows = {}, set()
    if dealt:
        collectives.DEALT_ROWS = 1
        take = trunk.take_rows
        trunk.take_rows = lambda x, own: rows.add((len(x), own)) or take(x, own)
    for name in meshes:
        data, model = map(int, name.split("x"))
        results[name] = compare(run(Runner(config, params, ds.make_mesh(data, model))), expected)
        if dealt:
            results[name]["dealt"] = sorted(rows)
            rows.clear()
        jax.clear_caches()  # a process may hold 65,530 mappings, and programs of eight devices many
    return results


def check_rows(meshes):
    """Of released weights, {mesh: collectives of the rows of a chunk, and logits that differ}.

    Rows are gathered as E4M3 codes, then in the model's dtype.
    """
    config = smallest()
    params = ds.model.quantize_params(config, ds.init_params(config, jax.random.key(0)))
    results = {}
    for name in meshes:
        mesh = ds.make_mesh(*map(int, name.split("x")))
        logits, dtypes = [], []
        for moe.ROUNDED_ROWS in (1, 10**9):
            jax.clear_caches()
            runner = Runner(config, params, mesh)
            call, _ = runner.pack([[1]] * ROWS)
            arguments = runner.params, runner.cache, call
            text = jit_prefill.lower(*arguments, config=config).as_text()
            dtypes.append(sorted(set(re.findall(r"all_gather.*tensor<\w+x(\w+)>\n", text))))
            logits.append(run_chunks(runner, decoded=1)["logits"])
        differ = int(np.sum(logits[0].view(np.uint32) != logits[1].view(np.uint32)))
        results[name] = {"gathered": dtypes, "differ": differ, "finite": np.isfinite(logits).all()}
    return results


def check_sums(meshes):
    """{mesh: for each number of rows what adds, and how many sums are not in the devices' order}.

    What adds is a collective, whose order is its own, or the device.
    """
    results = {}
    for name in meshes:
        mesh = ds.make_mesh(*map(int, name.split("x")))
        devices, over_model = mesh.size, mesh.shape["model"] > 1
        results[name] = {}
        for rows in (1, 8 * devices, 4096 * devices):
            given = np.random.default_rng(rows).normal(size=(devices, rows, 128)) * 10
            given = jnp.asarray(given, jnp.bfloat16)
            expected = given[0].astype(jnp.float32)
            for part in given[1:]:
                expected = expected + part.astype(jnp.float32)
            if not over_model:  # each shard has numbers for the rows of all
                given = jnp.tile(given, (1, devices, 1))
            add = collectives.sum_over_model if over_model else collectives.sum_own_rows
            add_up = jax.shard_map(
                lambda x, add=add: add(x[0])[None],
                mesh=mesh,
                in_specs=BY_DEVICE,
                out_specs=BY_DEVICE,
                check_vma=False,
            )
            add_up = jax.jit(add_up).lower(given).compile()
            found = add_up(given)
            wrong = int(jnp.sum(found != expected.astype(jnp.bfloat16)[None]))
            by_collective = re.search("all-reduce|reduce-scatter", add_up.as_text())
            results[name][str(rows)] = ["collective" if by_collective else "device", wrong]
    return results


def run(*arguments):
    """What the program prints with these arguments."""
    return run_program("mesh_check", *arguments)


def run_program(name, *arguments):
    """What a program prints, as JSON, where there are eight CPU devices."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", f"tools.{name}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _by_request(logits, places):
    logits = np.asarray(logits)
    return [logits[places[request]] for request in range(ROWS)]


def _flat(value):
    return [one for row in value for one in row] if isinstance(value, list) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("meshes", nargs="+", metavar="DATAxMODEL")
    parser.add_argument("--all", action="store_true", help="every kind of step")
    parser.add_argument("--dealt", action="store_true", help="rows dealt over model, however few")
    parser.add_argument("--rows", action="store_true", help="how released weights get their rows")
    parser.add_argument("--sums", action="store_true", help="sums over devices alone")
    arguments = parser.parse_args()
    if arguments.rows or arguments.sums:
        check_some = check_rows if arguments.rows else check_sums
        print(json.dumps(check_some(arguments.meshes), default=bool))
        return
    chosen = {"everything": arguments.all, "dealt": arguments.dealt}
    print(json.dumps(check(arguments.meshes, **chosen)))


if __name__ == "__main__":
    main()
