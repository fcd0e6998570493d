"""A decode step in two parts: the trunk, up to logits, and the draws.

`plain_decode_step` (`serve_step.py`) is both in one program. In two, the trunk runs while the host
works out which tokens grammars allow, by what the step before drew:

    plain_trunk   reads what the step before drew on the device, appends it, and gives logits
    plain_draw    draws from them, with masks that were brought meanwhile

The second depends on how many rows there are, and not on how many tokens the step has room for.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import BY_ROW, DATA, MODEL, on_mesh, specs_of
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.draws import draw
from dsv4_jax.step.serve_values import DrawInput, ServeOutput, count_last, fed_rows, fill_in
from dsv4_jax.step.step import check_call, run_step, trunk_logits
from pallas_kernels.common.weights import with_activations


@flax.struct.dataclass(kw_only=True)
class RowLogits:
    """What a trunk leaves for the draws of a step of one token per row.

    Attributes:
      logits: f32[B, V], after each row's token.
      positions: i32[B], position that the drawn token of each row will have.
      num_kept: i32[B], tokens of each row that are in the cache now, of this step.
      is_live: bool[B], rows that draw.
      is_fed: bool[B], rows whose token the step before drew.
    """

    logits: jax.Array
    positions: jax.Array
    num_kept: jax.Array
    is_live: jax.Array
    is_fed: jax.Array


_ON_MESH: Any = RowLogits(
    logits=P(DATA, MODEL),  # type: ignore[arg-type]
    positions=BY_ROW,  # type: ignore[arg-type]
    num_kept=BY_ROW,  # type: ignore[arg-type]
    is_live=BY_ROW,  # type: ignore[arg-type]
    is_fed=BY_ROW,  # type: ignore[arg-type]
)
"""The vocabulary is split over `model`, as the head leaves it."""


@specs_of.register
def _row_logits_specs(rows: RowLogits) -> Any:
    del rows
    return _ON_MESH


@on_mesh(("cache", _ON_MESH))
def plain_trunk(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    last: ServeOutput | None = None,
    *,
    config: DSV4Config,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, RowLogits]:
    """`plain_decode_step` as far as the logits.

    Args:
      params: model parameters.
      cache: the cache before the step; its tables hold blocks for all tokens.
      step_input: as `ServeInput.step_input`, one token per row.
      last: as in `serve_step`.
      config: the model.
      activations: as in `decode_step`.

    Returns:
      The cache with the step's tokens, and what `plain_draw` takes.

    Raises:
      ValueError: as in `serve_step`.
    """
    is_fed = fed_rows(step_input)
    step_input = fill_in(step_input, last)
    check_call(params, cache, step_input, config, activations)
    params = with_activations(params, activations)
    cache, call, streams = run_step(params, cache, step_input, config, max_row_tokens=1)
    token = jnp.maximum(call.row_offsets, 0)
    return cache, RowLogits(
        logits=trunk_logits(params, streams[token], config),
        positions=call.row_lengths + 1,
        num_kept=call.row_counts,
        is_live=(call.row_slots >= 0) & (call.row_counts > 0),
        is_fed=is_fed,
    )


jit_plain_trunk = jax.jit(
    plain_trunk,
    static_argnames=("config", "activations"),
    donate_argnames="cache",
    compiler_options=decode_options(),
)
"""`plain_trunk`, jitted; the old cache is gone. `last` stays, whose place the draws' output takes.

Logits have no place of their own: who lets go of them before the next call finds that call's where
these were.
"""


@on_mesh(BY_ROW)
def plain_draw(
    rows: RowLogits,
    draws: DrawInput,
    last: ServeOutput | None = None,
    *,
    config: DSV4Config,
) -> ServeOutput:
    """The draws of `plain_decode_step`.

    Args:
      rows: what `plain_trunk` gave.
      draws: settings, counts and masks.
      last: what was given to that too.
      config: the model.

    Returns:
      What `plain_decode_step` gives.
    """
    counts = count_last(draws.counts, rows.is_fed, last)
    no_drafts = jnp.zeros((rows.positions.shape[0], 0), jnp.int32)
    drawn, logprobs = draw(
        rows.logits[:, None],
        draws.sampling,
        rows.positions[:, None],
        counts,
        no_drafts,
        config.idea.sampler,
        draws.masks,
    )
    token_ids = jnp.where(rows.is_live[:, None], drawn, -1)
    return ServeOutput.of(token_ids, rows.num_kept, no_drafts, logprobs, last=last)


jit_plain_draw = jax.jit(
    plain_draw,
    static_argnames="config",
    donate_argnames="last",
    keep_unused=True,  # of `last`, whose place the output takes
    compiler_options=decode_options(),
)
"""`plain_draw`, jitted; `last` is gone."""
