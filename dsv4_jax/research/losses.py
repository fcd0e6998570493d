"""The loss of every row and position of a text, under an idea or none."""

from __future__ import annotations

import functools

import jax
import numpy as np

from dsv4_jax import checks
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params, param_shapes
from dsv4_jax.progress import Progress
from dsv4_jax.training.losses import held_out_loss


def losses_by_row(
    params: DSV4Params,
    rows: np.ndarray,
    *,
    config: DSV4Config,
    activations: str = DEFAULT_ACTIVATIONS,
    doing: str = "loss",
    progress: bool = True,
) -> np.ndarray:
    """Nats per token of each row and position, over whole sequences, without a cache.

    Args:
      params: model parameters.
      rows: i32[n, T + 1], run one by one.
      config: the model, with an idea or without. Entries and index keys are rounded as the idea's
        cache format does, or not at all.
      activations: as in `forward`.
      doing: what the bar calls this.
      progress: shows a bar on stderr, or where that is no terminal a line now and then.

    Returns:
      f32[n, T].

    Raises:
      ValueError: `rows` has another shape or dtype, or as of `forward`.
    """
    checks.array("rows", rows, (None, None), "iu")
    losses = []
    with Progress(len(rows), unit="row", doing=doing, shown=progress, compiles=True) as bar:
        for row in np.asarray(rows, np.int32):
            loss = _loss(params, row[None], config=config, activations=activations)
            losses.append(np.asarray(loss))
            bar.add()
    return np.stack(losses)


def trace_loss(config: DSV4Config, length: int) -> None:
    """Traces the loss of a row and computes nothing, so that an idea is tried before weights are.

    Args:
      config: the model, with the idea.
      length: tokens of a row.

    Raises:
      ValueError: as of `forward`; and whatever the idea's functions raise.
    """
    row = jax.ShapeDtypeStruct((1, length + 1), np.int32)
    jax.eval_shape(functools.partial(held_out_loss, config=config), param_shapes(config), row)


_loss = jax.jit(held_out_loss, static_argnames=("config", "activations"))
