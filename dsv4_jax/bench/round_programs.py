"""The programs of a round and of its parts, compiled side by side without an array."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.bench import round_parts
from dsv4_jax.bench.loops import Loops
from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.bench.round_case import RoundCase, shapes_of
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import NewTokens, empty_staged
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.sampling import make_sampling
from dsv4_jax.step.serve_step import jit_plain_decode_step, jit_serve_step

PARTS = {
    "plain": "plain step",
    "round": "round",
    "proposal": "proposal",
    "pass": "pass of the proposal",
    "context": "context rows",
    "undrafted": "step without drafts beside stages",
    "free": "round of its own guesses",
    "overlapped": "round, launches of a graph overlap",
}
"""What is timed, and what it is called, the most important first."""

PROGRAM_OF = {"free": "round"}
"""The program of a part, where that is not its own."""

PICKS, BLOCK_PICKS = "picks", "block picks"
"""What tells which experts the rows of a round, and of a pass, pick; it is not timed."""

_CONTEXT_LOOP = 20


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with DSpark stages, of which steps with and without them are measured.

    Attributes:
      config: with `dspark`.
      params: parameters, unstacked, or their shapes.
    """

    config: DSV4Config
    params: DSV4Params

    @property
    def trunk_config(self) -> DSV4Config:
        """Of the same model without a draft."""
        return self.config.without_draft()

    @property
    def trunk_params(self) -> DSV4Params:
        """The parameters of that."""
        return dataclasses.replace(self.params, mtp=None)


class RoundPrograms:
    """The programs of one point."""

    def __init__(self, model: Model, case: RoundCase, parts: Sequence[str], threads: int) -> None:
        """Begins to compile, and waits for nothing.

        Traces hold Python's lock, so that only what follows them runs side by side.

        Args:
          model: with shapes in the place of parameters.
          case: the point.
          parts: of `PARTS`, and `PICKS` and `BLOCK_PICKS`.
          threads: how many compile.
        """
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        makers = _makers(model, case, self._pool)
        gc.disable()  # traces are millions of objects that stay, and each collection visits all
        programs = dict.fromkeys(PROGRAM_OF.get(part, part) for part in parts)
        self._parts = parts
        self._compiling = {name: self._pool.submit(makers[name]) for name in programs}

    def wait(self) -> dict[str, Any]:
        """{part: `Program`, or `Loops` of the context rows, or the error that it has met}."""
        made: dict[str, Any] = {}
        for name, future in self._compiling.items():
            error = future.exception()
            made[name] = future.result() if error is None else error
        self._pool.shutdown()  # loops are compiled in it too
        gc.enable()
        return {part: made[PROGRAM_OF.get(part, part)] for part in self._parts}


def _makers(
    model: Model, case: RoundCase, pool: concurrent.futures.Executor
) -> dict[str, Callable[[], Program | Loops]]:
    """What compiles each part."""
    config, params = model.config, model.params
    common: dict[str, Any] = {"activations": case.activations}
    cache = case.cache_shapes(config)

    def plain(config: DSV4Config, params: DSV4Params, cache: ModelCache) -> Program:
        given = shapes_of((case.plain_input(), case.output(config, 0)))
        return compile_program(
            jit_plain_decode_step, params, cache, *given, config=config, **common
        )

    def whole_round(options: dict[str, str] | None) -> Program:
        given = shapes_of((case.round_input(), case.output(config, case.draft_tokens)))
        store = case.store_shapes(cache)
        return compile_program(
            jit_serve_step, params, cache, store, *given,
            config=config, draft_tokens=case.draft_tokens, options=options, **common,
        )  # fmt: skip

    def proposal(function: Any, *more: Any, named: bool = True) -> Program:
        own = round_parts.proposal_params(params), round_parts.window_cache(cache)
        anchors = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
        static = {"config": config, **common} if named else {}
        return compile_program(function, *own, anchors, *more, **static)

    def context() -> Loops:
        args = context_arguments(model, case, cache)
        return Loops(
            round_parts.context_call(config, case.activations),
            [args, args],
            None,
            rounds=_CONTEXT_LOOP,
            pool=pool,
        )

    def picks() -> Program:
        given = shapes_of((case.round_input(), case.output(config, case.draft_tokens)))
        run = round_parts.picks_call(config, case.activations)
        return compile_program(run, params, cache, *given)

    return {
        "plain": lambda: plain(
            model.trunk_config, model.trunk_params, case.cache_shapes(model.trunk_config)
        ),
        "round": lambda: whole_round(None),
        "proposal": lambda: proposal(round_parts.jit_proposal, greedy(case)),
        "pass": lambda: proposal(round_parts.jit_pass),
        "context": context,
        "undrafted": lambda: plain(config, params, cache),
        "overlapped": lambda: whole_round(decode_options()),
        PICKS: picks,
        BLOCK_PICKS: lambda: proposal(
            round_parts.block_picks_call(config, case.activations), named=False
        ),
    }


def greedy(case: RoundCase) -> Any:
    """Shapes of the settings of rows that take the likeliest token."""
    return shapes_of(make_sampling(case.batch, temperature=0.0))


def context_arguments(
    model: Model, case: RoundCase, cache: ModelCache
) -> tuple[DSV4Params, ModelCache, dict[str, NewTokens], StepInput, jax.ShapeDtypeStruct]:
    """Arguments of `context_part`, but shapes of what is new: staged tokens, call and means."""
    spec = model.config.dspark
    assert spec is not None
    own = round_parts.window_cache(cache)
    num_tokens = case.batch * case.row_tokens
    staged = jax.eval_shape(lambda: empty_staged(own.state, num_tokens))
    shape = (num_tokens, len(spec.target_layers), model.config.hidden_size)
    means = jax.ShapeDtypeStruct(shape, model.params.embed.dtype)
    call = shapes_of(case.round_input().step_input)
    return round_parts.context_params(model.params), own, staged, call, means
