"""Steps and engines on every mesh that the devices allow, against the same on one of them.

A place is one device, or a mesh such as 1x2, maybe with a split cache ("1x2 split"), maybe with
rows dealt over `model` however few they are ("1x2 dealt"). Each has three processes of its own, for
steps, engines, and engines that launch several steps at once, so that programs compile side by side
and none ends with another. Prints JSON lines as they come:

    place, part      what a part of the checks found there, or `failed` with the reason
    fallbacks        ops that took their reference on a GPU, and why
    against          logits, best tokens and selections of a place beside those of one device
    ok               whether every part ran and is as promised
"""

import concurrent.futures
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

import jax
import numpy as np

import dsv4_jax as ds
from dsv4_jax import collectives
from dsv4_jax.config.upper_layers import upper_layers
from dsv4_jax.mesh import BY_ROW, on_mesh
from helpers import serving
from helpers.engine_life import Life
from pallas_kernels.common.backend import FallbackWarning
from tools.meshes import engine as engines
from tools.meshes.harness import ROWS, Runner, jit_prefill, jit_stage, mesh_of, say
from tools.meshes.models import PER_ROW, RELEASED, TINY, model
from tools.meshes.results import against, complaints, differing_rows

OF_STEPS = ("logits", "again", "cuts", "alone", "rows", "drafts", "selected")
OF_ENGINES = ("engine", "damage", "rest")
OF_LAUNCHES = ("launches",)
GROUPS = (OF_STEPS, OF_ENGINES, OF_LAUNCHES)
PARTS = sum(GROUPS, ())
STAGED = 3
DECODED = 4


class Checks:
    """The parts, one after the other, on one place."""

    def __init__(self, place, name_of_model, *, tiny):
        self.place = place
        self.sizes = sizes = (TINY if tiny else RELEASED)[name_of_model]
        name, *ways = place.split()
        self.mesh = None if name == "one" else mesh_of(name)
        self.config, params = model(name_of_model, tiny=tiny)
        self.runner = Runner(
            self.config, params, self.mesh, cache_format=sizes.cache_format,
            context=sizes.context, split="split" in ways,
        )  # fmt: skip
        serving.CONFIG, serving.params = self.config, lambda: self.runner.params
        engines.OPTIONS["split_cache"] = "split" in ways
        if self.config.sources is not None:  # whose entries have formats of their own
            serving.SIZES["cache_format"] = sizes.cache_format
        if "dealt" in ways:
            collectives.DEALT_ROWS = 1
        rng = np.random.default_rng(0)
        self.prompts = [self._draw(rng, length) for length in sizes.lengths]
        self.decoded = [self._draw(rng, ROWS) for _ in range(DECODED)]
        self.guesses = [self._draw(rng, STAGED) for _ in range(ROWS)]
        self.kept = rng.integers(0, STAGED + 1, ROWS)
        self.first = {}
        self.saved = {}

    def _draw(self, rng, count):
        return rng.integers(0, self.config.vocab_size, count).tolist()

    def _prompts(self, *, rng=None, rows=range(ROWS), only=range(ROWS)):
        """Logits of every prompt, [n, V] each, on a new cache; all calls are one program.

        Args:
          rng: draws how many tokens of a prompt a call has; None is as many as it takes.
          rows: rows[r] is the prompt of row r.
          only: the prompts that are there.
        """
        self.runner.reset()
        left = [list(self.prompts[one]) if one in only else [] for one in rows]
        logits = [[] for _ in range(ROWS)]
        while any(left):
            most = np.full(ROWS, PER_ROW) if rng is None else rng.integers(0, PER_ROW + 1, ROWS)
            call = [tokens[:count] for tokens, count in zip(left, most, strict=True)]
            left = [tokens[count:] for tokens, count in zip(left, most, strict=True)]
            found = self.runner.prefill(call, num_tokens=ROWS * PER_ROW)
            for one, new in zip(rows, found, strict=True):
                logits[one].extend(new)
        return {f"prompt {one}": np.asarray(logits[one]) for one in range(ROWS) if one in only}

    def _rest(self):
        """Decode steps, staged tokens of which some are kept, and a decode step after them."""
        found = {f"decode {n}": self.runner.decode(call) for n, call in enumerate(self.decoded)}
        staged = self.runner.stage(self.guesses, self.kept, num_tokens=ROWS * STAGED)
        found["staged"] = np.concatenate(staged)
        return found | {"after commit": self.runner.decode(self.decoded[0])}

    def logits(self):
        """Of prompts in chunks, decode steps and staged tokens, as other places compute them."""
        start = time.perf_counter()
        self._compile()
        compiled = time.perf_counter() - start
        self.first = self._prompts()
        self.saved |= self.first
        self.saved["selected"] = self._select()
        rest = self._rest()
        self.first |= rest
        self.saved |= rest
        finite = all(bool(np.isfinite(value).all()) for value in self.first.values())
        spread = float(np.std(np.concatenate(list(self.first.values()))))
        return {"finite": finite, "spread": spread, "compile_s": round(compiled, 1)}

    def _compile(self):
        """Compiles the steps side by side; the calls find them."""
        runner = self.runner

        def compile_one(job):
            function, count, static = job
            call, _ = runner.pack([[0] * count] * ROWS)
            arguments = runner.params, runner.cache, call
            function.lower(*arguments, config=self.config, **static).compile()

        prefill = jit_prefill, PER_ROW, {"all_logits": True}
        jobs = [prefill, (jit_stage, STAGED, {}), (ds.jit_decode_step, 1, {})]
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(compile_one, jobs))

    def again(self):
        """The same calls on a new cache."""
        return self._differing(self._prompts() | self._rest())

    def cuts(self):
        """Prompts cut at random."""
        return self._differing(self._prompts(rng=np.random.default_rng(1)))

    def alone(self):
        """The longest prompt and a short one by themselves."""
        found = self._prompts(only=[int(np.argmax(self.sizes.lengths))])
        return self._differing(found | self._prompts(only=[1]))

    def rows(self):
        """Prompts in the opposite rows, half of them on another data shard."""
        return self._differing(self._prompts(rows=list(reversed(range(ROWS)))))

    def drafts(self):
        """Staged tokens of which some are kept, against one token at a time by one program."""
        size, found = ROWS * STAGED, []
        wrong = [[(token + 1) % self.config.vocab_size for token in row] for row in self.guesses]
        for speculates in (True, False):
            self._prompts()
            rows = [[] for _ in range(ROWS)]
            if speculates:  # two are right, and then the third is said again
                calls = [row[:2] + bad[2:] for row, bad in zip(self.guesses, wrong, strict=True)]
                plan = [(calls, 2), ([row[2:] for row in self.guesses], 1)]
            else:
                plan = [([row[n : n + 1] for row in self.guesses], 1) for n in range(STAGED)]
            for tokens, kept in plan:
                logits = self.runner.stage(tokens, np.full(ROWS, kept), num_tokens=size)
                for row, new in zip(rows, logits, strict=True):
                    row.extend(new[:kept])
            found.append({"staged": np.asarray(rows)})
        return differing_rows(*found)

    def selected(self):
        """Selections of random queries twice; `against` has those of other places."""
        self._prompts()
        wanted = self.saved["selected"]
        return {"differ": int(np.sum(self._select() != wanted)), "most": int(_count(wanted).max())}

    def engine(self):
        """A random life with drafts, shared prefixes, forks and preemption; it raises on a fault.

        Each request gets to the bit what the same place gives it alone without drafts.
        """
        plain = serving.limit(engines.engine_on(self.mesh, overlap=False), num_snapshots=0)
        engine = engines.engine_on(self.mesh)
        life, problems = Life(engine, 0, plain), []
        for number in range(self.sizes.events):
            life.event()
            if number % 10 == 9:
                problems += map(str, engine.verify().problems)
        life.finish()
        names = ("hit_tokens", "drafted_tokens", "accepted_tokens", "preempted", "snapshots")
        counts = {name: getattr(engine.metrics, name) for name in names}
        return {"problems": problems} | life.counts | counts

    def damage(self):
        """What `Engine.verify` finds of one bit that is changed."""
        if self.mesh is None:
            return {"left_out": "the planted damage is that of a mesh"}
        return engines.damage(self.mesh)

    def rest(self):
        """Greedy tokens where upper layers rest in some steps, and where none does.

        The two have other programs, which round alike on CPUs alone.
        """
        upper = upper_layers(self.config)
        if upper is None:
            return {"left_out": "all layers of this model read all tokens"}
        prompt, sizes = self._draw(np.random.default_rng(3), 600), {"draft_tokens": 0}
        sizes |= {"prefill_tokens": (64,), "num_snapshots": 0}
        found = []
        for decode_tokens in (None, serving.BUCKET):  # with the second nobody rests
            engine = engines.engine_on(self.mesh, decode_tokens=decode_tokens, **sizes)
            (one,) = engine.generate([prompt], max_new_tokens=12, stop_token_ids=())
            found.append((one.token_ids, engine.metrics.rested_tokens))
            engine.close()
        (tokens, rested), (wanted, of_none) = found
        equal = [a == b for a, b in zip(tokens, wanted, strict=True)]
        return {
            "tokens": len(wanted),
            "equal": equal.index(False) if False in equal else len(equal),
            "rested_tokens": rested,
            "rested_where_none_may": of_none,
        }

    def launches(self):
        """Four decode steps in a launch against one; requests run alone, so that programs match.

        Beside others the two would read a prompt, by another program, at different times.
        """
        tokens = []
        for steps in (1, 4):
            several = {"steps_per_call": steps, "decode_tokens": None, "draft_tokens": 0}
            engine = engines.engine_on(self.mesh, **several)
            tokens.append(engines.greedy(engine, together=False))
            made = engine.metrics.steps - engine.metrics.step_calls
            engine.close()
        unequal = sum(one != other for one, other in zip(*tokens, strict=True))
        return {"rows": len(tokens[0]), "differ": unequal, "steps_without_a_call": made}

    def _differing(self, found):
        return differing_rows(found, self.first)

    def _select(self):
        """i32[ROWS, K]: what random queries select after each request's tokens."""
        config, rng = self.config, np.random.default_rng(2)
        call, _ = self.runner.pack([[0]] * ROWS)
        shape = (ROWS, config.indexer_num_heads, config.indexer_head_dim)
        queries = rng.integers(-4, 5, shape).astype(np.float32)
        weights = rng.normal(size=shape[:2]).astype(np.float32)
        place = self.runner.place
        found = select(self.runner.cache, call, place(queries), place(weights))
        return np.asarray(found)


@functools.partial(jax.jit)
@on_mesh(BY_ROW)
def select(cache, step_input, queries, weights):
    """What each token of a call selects in the first CSA layer."""
    handle = cache.layer(ds.AttentionType.CSA, 0, cache.index(step_input))
    return handle.select(queries, weights)


def _count(selected):
    return np.sum(selected >= 0, axis=1)


def run_place(place, arguments):
    """Runs the parts on a place and prints what they find; logits go to a file for `against`."""
    fallbacks = []

    def note(message, category, *_, **__):
        if issubclass(category, FallbackWarning):
            fallbacks.append(str(message))

    warnings.showwarning = note
    warnings.simplefilter("always", FallbackWarning)
    start = time.perf_counter()
    checks = Checks(place, arguments.config, tiny=arguments.tiny)
    say(place=place, part="start", seconds=time.perf_counter() - start)
    for part in arguments.parts:
        start = time.perf_counter()
        try:
            found = getattr(checks, part)()
        except Exception as error:  # what follows still says something
            where = traceback.format_exc().strip().splitlines()[-12:]
            found = {"failed": f"{type(error).__name__}: {error}"[:600], "where": where}
        if part == "logits" and checks.saved:
            np.savez(arguments.folder / f"{place}.npz", **checks.saved)
        say(place=place, part=part, part_s=round(time.perf_counter() - start, 1), **found)
    say(place=place, part="fallbacks", fallbacks=sorted(set(fallbacks)))


def places(count, meshes=None, *, splits=True):
    """One device, and the meshes of all devices: "DATAxMODEL", maybe "split" or "dealt".

    `splits` is False of a model that refuses a split cache.
    """
    if meshes:
        return ["one", *meshes]
    found = [f"1x{count}", f"{count}x1", f"1x{count} split", f"1x{count} dealt"]
    found = [name for name in found if splits or "split" not in name]
    return ["one", *found, *([f"2x{count // 2}"] if count >= 4 else [])]


def run_all(names, arguments, folder):
    """Every place in processes of its own, a few at once; the lines that they printed."""
    groups = [[part for part in group if part in arguments.parts] for group in GROUPS]
    waiting = [(name, parts) for parts in groups for name in names if parts]
    running, lines, begun = {}, [], time.perf_counter()
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            name, parts = waiting.pop(0)
            command = [sys.executable, "-m", "tools.meshes.on_gpus", "places"]
            command += ["--place", name]
            command += ["--folder", str(folder), "--parts", *parts, *["--tiny"] * arguments.tiny]
            command += ["--config", arguments.config]
            log = (folder / f"{name} {parts[0]}.log").open("w+")
            running[name, parts[0]] = subprocess.Popen(command, stdout=log), log, 0
        for key, (process, log, read) in list(running.items()):
            ended = process.poll() is not None
            if time.perf_counter() - begun > arguments.limit_s and not ended:
                process.kill()
                process.wait()
                ended = True
            new = pathlib.Path(log.name).read_text()[read:]
            whole = new if ended else new[: new.rfind("\n") + 1]
            for line in whole.splitlines():
                print(line, flush=True)
                lines += [json.loads(line)] if line.startswith("{") else []
            running[key] = process, log, read + len(whole)
            if ended:
                log.close()
                del running[key]
                if process.returncode:
                    failed = {
                        "place": key[0],
                        "part": "end",
                        "failed": f"exit {process.returncode}",
                    }
                    say(**failed)
                    lines.append(failed)
        time.sleep(0.2)
    return lines


def add_arguments(parser):
    parser.add_argument("--tiny", action="store_true", help="a small model, for CPUs")
    parser.add_argument(
        "--config",
        choices=RELEASED,
        default="v4",
        help="whose layers run: DeepSeek-V4's, or V4.1's",
    )
    parser.add_argument("--meshes", nargs="+", help='such as 1x2 "1x2 split"; all if not given')
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is checked")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--limit-s", type=float, default=230.0, help="of all places together")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="for logits; if not given, none is kept"
    )
    parser.add_argument("--place", help="that of this process; one starts a process for each")


def check_all(arguments):
    """What `on_gpus` does without a name of a part; the exit status."""
    if not {*OF_STEPS}.isdisjoint(arguments.parts):
        arguments.parts = ["logits", *(one for one in arguments.parts if one != "logits")]
    ds.runtime.claim_memory(0.2, at_once=False)
    ds.set_xla_flags()
    ds.use_compilation_cache()
    if arguments.place:
        run_place(arguments.place, arguments)
        return 0
    devices = jax.devices()
    say(device=devices[0].device_kind, devices=len(devices), jax=jax.__version__)
    if len(devices) < 2:
        say(ok=False, failed="a mesh needs two devices or more")
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or pathlib.Path(temporary)
        names = places(len(devices), arguments.meshes, splits=arguments.config == "v4")
        lines = run_all(names, arguments, folder)
        for found in against(names, folder) if "logits" in arguments.parts else ():
            say(**found)
            lines.append(found)
    wrong = complaints(lines, names, arguments.parts)
    say(ok=not wrong, wrong=wrong)
    return int(bool(wrong))
