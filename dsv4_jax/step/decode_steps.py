"""Several decode steps of the engine in one call, of which the host launches one program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import BY_ROW, on_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.serve_step import plain_decode_step
from dsv4_jax.step.serve_values import ServeInput, ServeOutput, fill_in
from dsv4_jax.step.step import check_call


@on_mesh(("cache", BY_ROW))
def plain_decode_steps(
    params: DSV4Params,
    cache: ModelCache,
    serve_input: ServeInput,
    last: ServeOutput | None = None,
    *,
    config: DSV4Config,
    num_steps: int,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[ModelCache, ServeOutput]:
    """`plain_decode_step` several times, each of which takes what the one before it drew.

    Where settings need the host between two tokens, as penalties, grammars and log-probabilities
    do, it is not for them. Stop tokens are the host's: what a row draws after one is to be thrown
    away.

    Args:
      params: model parameters.
      cache: the cache before the call; its tables hold blocks for all tokens.
      serve_input: what to run. A row makes the first `ServeInput.num_steps` steps and is idle in
        the others.
      last: as in `serve_step`.
      config: the model.
      num_steps: n, static.
      activations: as in `decode_step`.

    Returns:
      The cache, and the drawn tokens, n columns of them.

    Raises:
      ValueError: as in `serve_step`.
    """
    step_input = fill_in(serve_input.step, last)
    check_call(params, cache, step_input, config, activations, num_steps=num_steps)
    assert serve_input.num_steps is not None
    row = jnp.maximum(step_input.request_ids, 0)
    steps_of_token = serve_input.num_steps[row]

    def step(
        carry: tuple[ModelCache, jax.Array], number: jax.Array
    ) -> tuple[tuple[ModelCache, jax.Array], tuple[jax.Array, jax.Array]]:
        cache, token_ids = carry
        request_ids = jnp.where(number < steps_of_token, step_input.request_ids, -1)
        now = dataclasses.replace(step_input, token_ids=token_ids, request_ids=request_ids)
        cache, output = plain_decode_step(
            params,
            cache,
            dataclasses.replace(serve_input, step=now, num_steps=None),
            config=config,
            activations=activations,
        )
        drawn = output.token_ids[:, 0]
        return (cache, jnp.maximum(drawn, 0)[row]), (drawn, output.num_kept)

    numbers = jnp.arange(num_steps, dtype=jnp.int32)
    (cache, _), (drawn, num_kept) = jax.lax.scan(step, (cache, step_input.token_ids), numbers)
    no_drafts = jnp.zeros((drawn.shape[1], num_steps - 1), jnp.int32)
    logprobs = None if last is None else last.logprobs
    return cache, ServeOutput.of(drawn.T, jnp.sum(num_kept, axis=0), no_drafts, logprobs)


jit_plain_decode_steps = jax.jit(
    plain_decode_steps,
    static_argnames=("config", "num_steps", "activations"),
    donate_argnames=("cache", "last"),
    keep_unused=True,
    compiler_options=decode_options(),
)
"""`plain_decode_steps`, jitted; the old cache is gone, and so is `last`."""
