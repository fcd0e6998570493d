"""Steps on meshes against the same steps on one device: the largest difference of logits, and whose
tokens differ, for each mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import dsv4_jax as ds
from dsv4_jax import collectives
from dsv4_jax.mesh import BY_DEVICE
from dsv4_jax.model import moe, trunk
from dsv4_jax.step.draws import draw
from tools.meshes.harness import ROWS, Runner, divisible, jit_prefill, mesh_of, one_layer, smallest

PROMPT_TOKENS = (5, 37, 18, 1, 40, 29, 33, 12)
"""Tokens of each request; some close windows of both compressors."""


def add_arguments(parser):
    """Without any: prefill in chunks, then decoding, of one layer."""
    parser.add_argument("--all", action="store_true", help="every kind of step, scanned layers")
    parser.add_argument("--dealt", action="store_true", help="rows dealt over model, however few")
    parser.add_argument("--rows", action="store_true", help="rows gathered in E4M3 against BF16's")
    parser.add_argument("--sums", action="store_true", help="sums over devices, by their order")


def check_all(arguments):
    if arguments.rows:
        return check_rows(arguments.meshes)
    if arguments.sums:
        return check_sums(arguments.meshes)
    return check(arguments.meshes, everything=arguments.all, dealt=arguments.dealt)


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
    config = divisible() if everything else smallest() if dealt else one_layer()
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
        results[name] = compare(run(Runner(config, params, mesh_of(name))), expected)
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
        mesh = mesh_of(name)
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
        mesh = mesh_of(name)
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


def _flat(value):
    return [one for row in value for one in row] if isinstance(value, list) else value
