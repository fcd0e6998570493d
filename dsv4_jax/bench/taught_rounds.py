"""Times rounds that keep as many drafts as they are taught to.

Random weights accept next to nothing. So what a request says is recorded first, and rounds are then
given drafts of which so many are right as they are to keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench.program import Program
from dsv4_jax.bench.round_case import (
    RoundCase,
    copied,
    mean_kept,
    taught_inputs,
    tokens_needed,
)
from dsv4_jax.bench.round_programs import Model
from dsv4_jax.bench.timing import settled, time_calls
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.serve_values import ServeInput, ServeOutput

TOKENS_A_ROUND = (1.0, 2.8, 3.9, 5.0)
"""For which tokens a second are told."""
_REPEATS = 3

Reader = Callable[[ModelCache, ServeInput, ServeOutput], dict[str, float]]
"""What is known of the experts that a round on that cache reads."""


def taught_rounds(
    model: Model,
    case: RoundCase,
    program: Program,
    row: dict[str, Any],
    reads: Reader,
) -> Iterator[int]:
    """Times rounds that keep 0 drafts, 1 and so on, and writes what they took to `row["kept"]`.

    Args:
      model: with its parameters.
      case: the point.
      program: the rounds.
      row: what is known of the case.
      reads: tells which experts they read.

    Yields:
      The number that has been timed.
    """
    config = model.config
    cache = case.fill(config)
    saved, store = copied(cache.state), case.store(cache)

    def restored(cache: ModelCache) -> ModelCache:
        return dataclasses.replace(case.rewind(cache), state=copied(saved))

    cache, tokens = recorded(model, case, program, cache)
    state: Any = restored(cache), store, case.output(config, case.draft_tokens)
    del cache
    row["kept"] = {}
    for kept in range(case.draft_tokens + 1):
        inputs = taught_inputs(case, tokens, kept, config.vocab_size)
        rounds = _Rounds(model.params, program, inputs)

        def rewind(state: Any, rounds: _Rounds = rounds) -> Any:
            rounds.next = 0
            return restored(state[0]), *state[1:]

        timing, state = time_calls(
            rounds, state, rewind=rewind, max_calls=case.rounds, repeats=_REPEATS,
            limit_s=case.limit_s,
        )  # fmt: skip
        found, state = [], rewind(state)
        experts = reads(state[0], inputs[0], state[2])
        for _ in range(case.rounds):
            state = settled(rounds(state))
            found.append(np.asarray(state[2].num_kept))
        row["kept"][kept] = {
            **timing.fields(),
            "tokens_a_round": mean_kept(found),
            "as_taught": float(np.mean(np.stack(found) == kept + 1)),
            **experts,
        }
        yield kept


def tokens_per_s(row: dict[str, Any]) -> list[dict[str, float]]:
    """Tokens a second at each of `TOKENS_A_ROUND`, beside plain steps of the same run.

    A round that keeps a fraction of a token more takes as much of the time between two whole ones.
    What a request says by random weights may repeat itself, so that rounds read fewer experts than
    those of random tokens: `of_plain_at_random` takes the time of these.
    """
    kept = sorted((count, each["ms"]) for count, each in row["kept"].items())
    counts, times = zip(*kept, strict=True)
    plain = row["parts"].get("plain", {}).get("ms")
    table = []
    for tokens in TOKENS_A_ROUND:
        if tokens - 1 > counts[-1]:
            continue
        ms = float(np.interp(tokens - 1, counts, times))
        each = {"tokens_a_round": tokens, "round_ms": ms, "ms_a_token": ms / tokens}
        each["tokens_per_s"] = row["batch"] * tokens / ms * 1e3
        if plain is not None:
            each["of_plain"] = plain * tokens / ms
            random = row["parts"].get(row["taught"], {})
            if (spread := random.get("ms")) is not None:
                each["of_plain_at_random"] = plain * tokens / spread
        table.append(each)
    return table


class _Rounds:
    """`state = rounds(state)`, each with the next of some inputs."""

    def __init__(self, params: DSV4Params, program: Program, inputs: list[ServeInput]) -> None:
        self._params, self._program, self._inputs, self.next = params, program, inputs, 0

    def __call__(self, state: Any) -> Any:
        given, self.next = self._inputs[self.next], self.next + 1
        return self._program.run(self._params, *state[:2], given, state[2])


def recorded(
    model: Model, case: RoundCase, program: Program, cache: ModelCache
) -> tuple[ModelCache, np.ndarray]:
    """The cache after rounds without drafts, and what each request says in them; i32[B, n].

    By the program that is taught: another one rounds otherwise, and draws other tokens where two
    are nearly alike, as those of random weights often are.
    """
    output = case.output(model.config, case.draft_tokens)
    store, given = case.store(cache), case.alone_input()
    said = [jnp.copy(output.columns[:, 0])]
    for _ in range(tokens_needed(case) - 1):
        state = program.run(model.params, cache, store, given, output)
        cache, store, output = settled(state)
        said.append(jnp.copy(output.columns[:, 0]))
    return cache, np.stack([np.asarray(tokens) for tokens in said], axis=1)
