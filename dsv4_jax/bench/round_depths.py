"""Times rounds of every depth beside rounds whose drafts are cut by their confidences.

Times are measured: drafts are random tokens, whose rows read the experts that a model of random
weights picks for them, fewer than independent picks would. Tokens are counted by a law: confidences
tell how likely a draft is to be kept, and it is taken to be kept as often. What a round keeps
changes its time little (`rounds.py` teaches it to).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.round_case import RoundCase, shapes_of
from dsv4_jax.bench.round_programs import Model
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.draft_worth import KEPT_TOGETHER, StepCost, least_survival
from dsv4_jax.step.serve_step import jit_plain_decode_step, jit_serve_step
from dsv4_jax.step.serve_values import ServeOutput

LAWS = {"alike": None, "apart": 2.0}
"""How confidences differ: not at all, or as Beta laws do of so many observations.

A Beta law of two observations has many drafts that are nearly sure, and some that are hopeless.
"""
_OTHER_CUTS = (0.1, 0.2, 0.3, 0.4)
"""Chances below which drafts are cut, to be seen beside the one that an engine takes."""
_SEEDS = 24
"""Rounds with drafts and confidences of their own, one after the other."""


def draft_chances(case: RoundCase, law: str) -> np.ndarray:
    """f64[rounds, B, k], the chance that each draft is kept if those before it are."""
    together = np.array(KEPT_TOGETHER[: case.draft_tokens])
    means = together / np.concatenate([[1.0], together[:-1]])
    shape = (_SEEDS, case.batch, case.draft_tokens)
    observations = LAWS[law]
    if observations is None:
        return np.broadcast_to(means, shape).copy()
    rng = np.random.default_rng(case.batch)
    chances = rng.beta(means * observations, (1 - means) * observations, shape)
    return chances.clip(1e-6, 1 - 1e-6)


def tokens_a_round(chances: np.ndarray, depth: int, least: float = 0.0) -> tuple[float, float]:
    """What rounds of that depth keep of a request by the law, and drafts that they check.

    Args:
      chances: f64[rounds, B, k].
      depth: drafts that a round can check.
      least: the least chance of all together at which one is checked.
    """
    together = np.cumprod(chances[..., :depth], axis=-1)
    checked = together >= least
    kept = np.where(checked, together, 0.0).sum(axis=-1)
    return 1 + float(kept.mean()), float(checked.sum(axis=-1).mean())


class DepthPrograms:
    """A round of each depth, and a plain step, compiled side by side."""

    def __init__(self, model: Model, case: RoundCase, threads: int) -> None:
        """Begins to compile.

        Args:
          model: with shapes in the place of parameters.
          case: the point; its draft tokens are the deepest round.
          threads: how many compile.
        """
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        common: dict[str, Any] = {"activations": case.activations}
        trunk = model.trunk_config

        def plain() -> Program:
            given = shapes_of((case.plain_input(), case.output(trunk, 0)))
            pools = model.trunk_params, case.cache_shapes(trunk)
            return compile_program(jit_plain_decode_step, *pools, *given, config=trunk, **common)

        def of_depth(depth: int) -> Program:
            one = dataclasses.replace(case, draft_tokens=depth)
            cache = one.cache_shapes(model.config)
            given = shapes_of((one.round_input(), one.output(model.config, depth)))
            store = jax.eval_shape(one.store, cache)
            return compile_program(
                jit_serve_step, model.params, cache, store, *given, config=model.config,
                draft_tokens=depth, options=decode_options(), **common,
            )  # fmt: skip

        self._made = {0: self._pool.submit(plain)} | {
            depth: self._pool.submit(of_depth, depth) for depth in range(1, case.draft_tokens + 1)
        }

    def wait(self) -> dict[Any, Any]:
        """{depth: `Program`, or the error that it has met}; 0 is a plain step."""
        made = {d: future.exception() or future.result() for d, future in self._made.items()}
        self._pool.shutdown()
        return made


def bench_depths(
    model: Model, case: RoundCase, programs: dict[Any, Any]
) -> Iterator[list[dict[str, Any]]]:
    """Rows of each depth and of the cut by each law, again after each time that is measured.

    Args:
      model: with its parameters.
      case: the point; its draft tokens are the deepest round.
      programs: of `DepthPrograms`.

    Yields:
      The rows so far, with `law`, `depth` or what cuts, `ms`, `checked`, `tokens_a_round`,
      `tokens_per_s`, and `of_best`: tokens a second beside those of the best depth by the same law.
      A program that failed has `failed`.
    """
    least = least_survival(StepCost.of(model.config, model.params), case.batch, case.draft_tokens)
    rows: list[dict[str, Any]] = []
    times: dict[int, dict[str, float]] = {}
    for depth, program in programs.items():
        try:
            if not isinstance(program, Program):
                raise program
            one = dataclasses.replace(case, draft_tokens=depth)
            chances = draft_chances(case, "alike")[..., :depth]
            times[depth] = _timed(model, one, program, chances, 0.0)
        except Exception as error:
            rows.append({"depth": depth, "law": "-", "failed": first_line(error)})
        else:
            rows.append({"depth": depth, "law": "any"} | times[depth])
        yield rows
    rows = [row for row in rows if "failed" in row]
    deepest = programs[case.draft_tokens]
    for law in LAWS:
        chances, best = draft_chances(case, law), 0.0
        for depth, timing in times.items():
            rows.append(_row(case, chances, depth, law, timing, 0.0))
            best = max(best, rows[-1]["tokens_per_s"])
        for row in rows[len(rows) - len(times) :]:
            row["of_best"] = row["tokens_per_s"] / best
        if case.draft_tokens not in times:
            continue
        others = {f"cut at {at}": at for at in _OTHER_CUTS} if law == "apart" else {}
        for name, at in {"cut": least, **others}.items():
            timing = _timed(model, case, deepest, chances, at)
            row = _row(case, chances, case.draft_tokens, law, timing, at)
            rows.append(row | {"depth": name, "of_best": row["tokens_per_s"] / best})
            yield rows


def _row(
    case: RoundCase,
    chances: np.ndarray,
    depth: int,
    law: str,
    timing: dict[str, float],
    least: float,
) -> dict[str, Any]:
    kept, checked = tokens_a_round(chances, depth, least)
    row = {"law": law, "depth": depth, "least": least, **timing, "checked": checked}
    return row | {"tokens_a_round": kept, "tokens_per_s": case.batch * kept / timing["ms"] * 1e3}


def _timed(
    model: Model, case: RoundCase, program: Program, chances: np.ndarray, least: float
) -> dict[str, float]:
    """Milliseconds of rounds with random drafts of these chances; of depth 0, of plain steps."""
    if not case.draft_tokens:
        config, params, given = model.trunk_config, model.trunk_params, case.plain_input()
    else:
        config, params, given = model.config, model.params, case.round_input()
        given = dataclasses.replace(given, least_survival=jnp.full(case.batch, least, jnp.float32))
    cache = case.fill(config)
    pools = (cache, case.store(cache)) if case.draft_tokens else (cache,)
    drawn = [_random_output(case, config.vocab_size, each, i) for i, each in enumerate(chances)]
    drawn = jax.block_until_ready(drawn)

    def call(state: Any) -> Any:
        pools, output, number = state
        output = _placed(output, *drawn[number % len(drawn)])
        *pools, output = program.run(params, *pools, given, output)
        return pools, output, number + 1

    def rewind(state: Any) -> Any:
        (cache, *store), output, _ = state
        return (case.rewind(cache), *store), output, 0

    timing, state = time_calls(
        call,
        (pools, case.output(config, case.draft_tokens), 0),
        rewind=rewind,
        max_calls=case.rounds,
        limit_s=case.limit_s,
    )
    found = timing.fields()
    if case.draft_tokens:  # the device cut what the law says
        state = call(rewind(state))
        found["first_checked"] = float(np.asarray(state[1].num_drafts).mean())
        found["first_expected"] = tokens_a_round(chances[:1], case.draft_tokens, least)[1]
    return found


def _random_output(
    case: RoundCase, vocab_size: int, chances: np.ndarray, number: int
) -> tuple[jax.Array, jax.Array | None]:
    """Columns and confidences of a step that drew and guessed random tokens."""
    rng = np.random.default_rng((case.batch, case.draft_tokens, number))
    tokens = rng.integers(0, vocab_size, (case.batch, 1 + case.draft_tokens), np.int32)
    output = ServeOutput.of(
        jnp.pad(tokens[:, :1], ((0, 0), (0, case.draft_tokens)), constant_values=-1),
        jnp.ones(case.batch, jnp.int32),
        jnp.asarray(tokens[:, 1:]),
        None,
    )
    if not case.draft_tokens:
        return output.columns, None
    return output.columns, jnp.asarray(np.log(chances / (1 - chances)), jnp.float32)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _placed(output: ServeOutput, columns: jax.Array, confidence: jax.Array | None) -> ServeOutput:
    """Another output in the memory of this one, which graphs know."""
    return dataclasses.replace(output, columns=columns, confidence=confidence)


def depth_columns() -> dict[str, Any]:
    """Columns of a table of rows."""
    return {
        "requests": lambda r: f"{r['batch']}",
        "confidences": lambda r: r["law"],
        "drafts": lambda r: f"{r['depth']}",
        "checked": lambda r: f"{r['checked']:.2f}",
        "tokens a round": lambda r: f"{r['tokens_a_round']:.2f}",
        "ms": lambda r: f"{r['ms']:.3f}",
        "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
        "of the best depth": lambda r: f"{r['of_best']:.3f}",
        "failed": lambda r: r["failed"],
    }
