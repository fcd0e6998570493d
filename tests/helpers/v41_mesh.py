"""Prefill of a small DeepSeek-V4.1 model on two CPU devices, as a program of its own.

    python -m helpers.v41_mesh data|model

It prints how far logits are from the oracle's at most.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.model import param_shardings
from helpers.v41_cache import model, recorded

SIZE = 16


def run(axis):
    config, params = model()
    wanted, mesh = recorded("tiny"), ds.make_mesh(**{axis: 2})
    params = jax.device_put(params, param_shardings(config, mesh, params))
    cache = ds.init_cache(
        config, max_requests=2, max_context_tokens=128, cache_format="f32", mesh=mesh
    )
    # Of a data shard, each has a slot of its own; else both requests are rows of one call.
    rows = [0, 1] if axis == "model" else [0, 0]
    off = 0.0
    for start in (0, SIZE):
        tokens = wanted["token_ids"][:, start : start + SIZE]
        step_input = ds.StepInput(
            token_ids=jnp.asarray(tokens.reshape(-1), jnp.int32),
            request_ids=jnp.asarray(np.repeat(rows, SIZE), jnp.int32),
            request_slots=jnp.asarray(rows, jnp.int32),
        )
        cache, logits = ds.jit_prefill(params, cache, step_input, config=config, all_logits=True)
        found = np.asarray(logits).reshape(2, SIZE, -1)
        off = max(off, np.abs(found - wanted["logits"][:, start : start + SIZE]).max())
    return off


if __name__ == "__main__":
    print(run(sys.argv[1]))
