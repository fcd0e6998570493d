"""Agents with long conversations, on a device that cannot hold them all.

    python -m benchmarks.bench_agents --tiers --policies --returns

Each agent begins with a system prompt, which those of a group share, and takes turns: a question or
the result of a tool is added, and an answer is drawn, which the next turn goes on from. Some turns
are tried twice from the same place. Between two turns of an agent all others have theirs, so that
its prefix has left the device if that does not hold all. With `--tiers` it compares places for what
leaves, with `--policies` which snapshots are kept, each with several sizes of the host's memory.
With `--returns` it compares an engine that has a host tier with one that has none from the second
turns on, when agents come back, for a number of seconds each; both serve the same conversations,
whose first turns are those of the engine with the tier. Prompts are random tokens. CONFIG of
`--config` is as for `bench_engine`.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import tempfile
import time

import numpy as np

import dsv4_jax as ds
from benchmarks.bench_engine import start
from dsv4_jax.cli.arguments import add_weights
from dsv4_jax.model.weight_forms import RELEASE_FORMS
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.schedule import snapshot_policy
from dsv4_jax.serving.sizing import plan_engine

BLOCK = 128


@dataclasses.dataclass
class Agent:
    """A conversation: its tokens so far, and what its turns add."""

    token_ids: list[int]
    turns: list[tuple[list[int], int, bool]]
    """Tokens that are added, tokens of the answer, and whether the turn is tried twice."""


def make_agents(args, vocab_size):
    """The same for every engine."""
    rng = np.random.default_rng(args.seed)

    def tokens(low, high):
        return rng.integers(0, vocab_size, int(rng.integers(low, high))).tolist()

    heads = [tokens(2 * BLOCK, 4 * BLOCK) for _ in range(args.groups)]
    agents = []
    for number in range(args.agents):
        turns = [
            (tokens(16, args.turn_tokens), int(rng.integers(8, 48)), bool(rng.random() < 0.2))
            for _ in range(args.turns)
        ]
        agents.append(Agent(heads[number % args.groups] + tokens(*args.own_tokens), turns))
    return agents


def prefix_blocks(args, vocab_size):
    """Blocks of all conversations at their ends, shared ones once for each agent."""
    agents = make_agents(args, vocab_size)
    most = [
        len(agent.token_ids) + sum(len(added) + answer for added, answer, _ in agent.turns)
        for agent in agents
    ]
    return sum(tokens // BLOCK for tokens in most), max(most)


@dataclasses.dataclass
class Served:
    """What was seen of requests: seconds until their first tokens, by id, and how many ended."""

    first_s: dict[int, float] = dataclasses.field(default_factory=dict)
    ended: int = 0
    asked_tokens: int = 0


def serve_turn(engine, agents, turn, args, served, until_s=float("inf")):
    """Serves one turn of all agents; whether all had theirs before that time."""
    waiting, running, submitted = list(range(len(agents))), {}, {}
    while waiting or running:
        while waiting and len(running) < args.concurrent:
            agent = agents[waiting.pop(0)]
            added, answer, is_twice = agent.turns[turn]
            agent.token_ids += added
            for attempt in range(1 + is_twice):
                request = engine.submit(
                    agent.token_ids, max_new_tokens=answer, stop_token_ids=(), seed=attempt,
                    temperature=float(attempt),
                )  # fmt: skip
                running[request], submitted[request] = agent, time.perf_counter()
                served.asked_tokens += len(agent.token_ids)
        for token in engine.step():
            now, request = time.perf_counter(), token.request_id
            served.first_s.setdefault(request, now - submitted[request])
            if token.finish_reason:
                agent, done = running.pop(request), engine.completion(request)
                served.ended += 1
                if request == min([request, *(r for r, a in running.items() if a is agent)]):
                    agent.answer = done.token_ids
        if time.perf_counter() > until_s:
            for request in running:
                engine.cancel(request)
            return False
    for agent in agents:
        agent.token_ids = agent.token_ids + agent.answer
    return True


def run(engine, args, agents=None, turns=None, seconds=float("inf")):
    """Serves the trace, or those turns of it for no more than so many seconds; what was seen."""
    agents = make_agents(args, engine.config.vocab_size) if agents is None else agents
    served, metrics = Served(), engine.metrics
    names = ("hit_tokens", "host_hit_tokens", "disk_hit_tokens")
    moved = ("host_stored_bytes", "host_loaded_bytes", "disk_loaded_bytes")
    before = {name: getattr(metrics, name) for name in (*names, *moved)}
    begun = time.perf_counter()
    for turn in range(args.turns) if turns is None else turns:
        if not serve_turn(engine, agents, turn, args, served, begun + seconds):
            break
    took = time.perf_counter() - begun
    p50, p90 = np.percentile(list(served.first_s.values()), [50, 90])
    since = {name: getattr(metrics, name) - count for name, count in before.items()}
    return {
        "requests_min": 60 * served.ended / took,
        "first_p50_ms": 1e3 * p50,
        "first_p90_ms": 1e3 * p90,
        "asked_tokens": served.asked_tokens,
        **{name: since[name] for name in names},
        "moved_bytes": sum(since[name] for name in moved),
        "requests": served.ended,
        "seconds": took,
    }


def every_boundary(request, manager, slot, boundary):
    """All that a step reaches."""
    prefix = request.known[:boundary]
    return len(prefix) < boundary or not manager.prefixes.is_resumable(slot, prefix)


def ends_alone(request, manager, slot, boundary):
    """The last boundaries of a prompt, where it leaves what is known, and those of the answer."""
    is_end = boundary > request.prompt_tokens - BLOCK - 1 or boundary == request.next_boundary
    return is_end and every_boundary(request, manager, slot, boundary)


def spaced_alone(request, manager, slot, boundary):
    """Evenly spaced ones of a prompt."""
    is_spaced = (boundary // BLOCK) % max(request.snapshot_spacing, 4) == 0
    return is_spaced and every_boundary(request, manager, slot, boundary)


POLICIES = {
    "ends, branches and spaced": snapshot_policy._is_worth_keeping,
    "ends and branches": ends_alone,
    "each boundary": every_boundary,
    "each fourth boundary": spaced_alone,
}


@contextlib.contextmanager
def policy(choose):
    """Engines keep the snapshots that a function says."""
    before, snapshot_policy._is_worth_keeping = snapshot_policy._is_worth_keeping, choose
    try:
        yield
    finally:
        snapshot_policy._is_worth_keeping = before


def sizes_of(args):
    """Of engines."""
    return {
        "max_requests": args.concurrent, "max_context_tokens": args.context, "grammars": False,
        "prefill_tokens": tuple(args.prefill_tokens), "num_blocks": args.blocks,
        "num_snapshots": args.snapshots,
    }  # fmt: skip


def build(config, params, args, **options):
    """An engine that has its programs."""
    engine = ds.Engine(config, params, **(sizes_of(args) | options))
    begun = time.perf_counter()
    engine.warmup()
    print(f"warm-up: {time.perf_counter() - begun:.1f} s", flush=True)
    return engine


def compare_tiers(config, params, args, whole, prefix_bytes):
    """Rows of the table of places."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"disk_cache_dir": folder, "disk_cache_bytes": 2**34}
        cases = {
            "the device alone": {},
            "host": {"host_cache_bytes": 2 * prefix_bytes},
            "disk": disk,
            "disk, started again": disk,
            "the device, room for all": {"num_blocks": whole + args.blocks, "num_snapshots": whole},
        }
        for name, options in cases.items():
            engine = build(config, params, args, **options)
            rows[name] = run(engine, args)
            engine.close()
            print(f"{name:<28}{json.dumps(rows[name])}", flush=True)
    return rows


def compare_policies(config, params, args, prefix_bytes):
    """Rows of the table of policies: name and share of the host's memory that all would take."""
    rows = {}
    for name, choose in POLICIES.items():
        for share in args.shares:
            with policy(choose):
                host = int(share * prefix_bytes)
                engine = build(config, params, args, host_cache_bytes=host)
                rows[f"{name}, {share:g}"] = run(engine, args) | {"host_bytes": host}
            print(f"{name:<28}{share:<6g}{json.dumps(rows[f'{name}, {share:g}'])}", flush=True)
    return rows


def compare_returns(config, params, args, prefix_bytes):
    """Rows of first turns, and of later ones with a host tier and without."""
    rows, agents = {}, make_agents(args, config.vocab_size)
    later = range(1, args.turns)

    def say(name, row):
        rows[name] = row
        print(f"{name:<28}{json.dumps(row)}", flush=True)

    engine = build(config, params, args, host_cache_bytes=int(args.host_share * prefix_bytes))
    say("first turns", run(engine, args, agents, range(1)))
    known = [list(agent.token_ids) for agent in agents]
    say("later, host", run(engine, args, agents, later, args.seconds))
    engine.close()
    del engine
    agents = make_agents(args, config.vocab_size)
    for agent, token_ids in zip(agents, known, strict=True):
        agent.token_ids = token_ids
    engine = build(config, params, args)
    say("later, the device alone", run(engine, args, agents, later, args.seconds))
    engine.close()
    far, near = rows["later, host"], rows["later, the device alone"]
    say(
        "host / the device alone",
        {name: far[name] / near[name] for name in ("requests_min", "first_p50_ms", "first_p90_ms")},
    )
    return rows


def read_args(command=None):
    """Those of the command line, or of a list."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="shipped")
    parser.add_argument("--experts", type=int, help="routed experts of a preset")
    add_weights(parser, RELEASE_FORMS, "bfloat16", "of a preset")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4, help="of agents with one system prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--own-tokens", type=int, nargs=2, default=[8, BLOCK], help="least and most, at the start"
    )
    parser.add_argument("--turn-tokens", type=int, default=300, help="at most, added by a turn")
    parser.add_argument("--concurrent", type=int, default=4)
    parser.add_argument("--room", type=float, default=0.25, help="of all prefixes, on the device")
    parser.add_argument("--snapshots", type=int, default=32)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--host-share", type=float, default=4.0, help="as of --shares, of returns")
    parser.add_argument("--seconds", type=float, default=60.0, help="of later turns, of returns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--policies", action="store_true")
    parser.add_argument("--returns", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="file of all rows")
    args = parser.parse_args(command)
    if args.returns and args.turns < 2:
        parser.error("--returns needs two turns or more")
    return args


def main():
    args = read_args()
    compare(*start(args), args)


def compare(config, params, args):
    """Prints what was asked for, and writes it down; all rows by name."""
    whole, longest = prefix_blocks(args, config.vocab_size)
    args.context = -(-longest // BLOCK) * BLOCK + BLOCK
    args.blocks = max(int(args.room * whole), args.context // BLOCK * 2)
    options = EngineOptions(**sizes_of(args))
    pools = plan_engine(config, options, params=params, has_tokenizer=False).pools
    prefix_bytes = whole * pools.bytes_per_block
    print(
        f"{args.agents} agents, {whole} blocks of {pools.bytes_per_block:,} bytes, {args.blocks} "
        f"of them on the device; a snapshot takes {pools.bytes_per_snapshot:,}",
        flush=True,
    )
    rows = {}
    if args.tiers:
        rows |= compare_tiers(config, params, args, whole, prefix_bytes)
    if args.policies:
        rows |= compare_policies(config, params, args, prefix_bytes)
    if args.returns:
        rows |= compare_returns(config, params, args, prefix_bytes)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
