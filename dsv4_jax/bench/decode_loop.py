"""Times `decode_loop`, whose tokens stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.bench.decode_case import CaseSetup
from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.decode import jit_decode_loop
from dsv4_jax.step.sampling import Sampling

_MOST_STEPS = 16


def greedy_rows(num_rows: int) -> Sampling:
    """Settings of rows that take the most likely token and never stop."""
    zeros = jnp.zeros(num_rows, jnp.float32)
    return Sampling(
        temperature=zeros,
        min_p=zeros,
        seed=jnp.zeros(num_rows, jnp.uint32),
        stop_token_ids=jnp.full((num_rows, 1), -1, jnp.int32),
    )


def compile_loop(setup: CaseSetup, params: Any, cache: Any, step_input: Any, rows: Any) -> Program:
    """Compiles a loop of a case's steps.

    Args:
      setup: the case.
      params: model parameters, or their shapes.
      cache: the cache.
      step_input: what every row begins with.
      rows: `greedy_rows`.
    """
    return compile_program(
        jit_decode_loop, params, cache, step_input, rows,
        config=setup.config, num_steps=_num_steps(setup), activations=setup.case.activations,
        options=decode_options(),
    )  # fmt: skip


def time_loop(
    setup: CaseSetup,
    program: Program,
    arguments: tuple[Any, Any, Any],
    cache: Any,
    *,
    rewind: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Times the loop; ms of one token of each row.

    Args:
      setup: the case.
      program: from `compile_loop`.
      arguments: parameters, step input and rows.
      cache: full up to `setup.calls` tokens; it is donated.
      rewind: as of `CaseSetup.measure`.
    """
    (params, step_input, rows), steps = arguments, _num_steps(setup)

    def call(state: tuple[Any, None]) -> tuple[Any, None]:
        return program.run(params, state[0], step_input, rows)[0], None

    timing, state = time_calls(
        call,
        (cache, None),
        rewind=rewind or setup.rewind,
        max_calls=setup.calls // steps,
        limit_s=setup.case.limit_s,
    )
    jax.block_until_ready(state)
    return {"loop_steps": steps} | timing.row("loop", per_call=steps)


def _num_steps(setup: CaseSetup) -> int:
    """As many as two calls of a measurement have room for."""
    return max(1, min(_MOST_STEPS, setup.calls // 2))
