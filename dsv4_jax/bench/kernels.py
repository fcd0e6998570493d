"""Times single ops at a model's shapes on a filled cache, beside their rooflines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench import roofline
from dsv4_jax.bench.fill import filled_cache
from dsv4_jax.bench.parts import AttentionInputs, append, one_token_each, random_inputs
from dsv4_jax.bench.program import compile_program
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, layer_schedule
from dsv4_jax.config.layer_types import AttentionType

_ROUNDS = 16  # calls of an op in one program, on different layers where there are several

Op = Callable[[LayerCacheHandle, AttentionInputs, jax.Array | None, DSV4Config], Any]
"""op(handle, inputs, rounded index queries, config) -> (handle, other results)."""


def bench_kernels(
    config: DSV4Config,
    *,
    batch: int,
    context: int,
    cache_format: str,
    bandwidth: float,
    limit_s: float = 10.0,
) -> Iterator[dict[str, Any]]:
    """Times each op of each attention type of the model.

    One program runs an op on many layers in turn, so that its launches are nodes of a CUDA graph
    and no layer's data is still in L2. The time includes the launches that XLA adds to the op.

    Args:
      config: the model.
      batch: B, number of requests.
      context: tokens of each request.
      cache_format: name of the storage format.
      bandwidth: bytes per second of a copy on this device.
      limit_s: seconds for each op's measurements.

    Yields:
      A row for each op: microseconds, launches, roofline and the share of it that was reached;
      `failed` gives the error of an op that failed.
    """
    lengths = np.full(batch, context - 1)

    def fill() -> ModelCache:
        return filled_cache(
            config, length_tokens=lengths, max_context_tokens=context, cache_format=cache_format
        )

    cache = fill()
    step_input = one_token_each(config, batch)
    inputs = random_inputs(config, batch)
    for attn in dict.fromkeys(spec.attn for spec in layer_schedule(config)):
        specs = [spec for spec in layer_schedule(config) if spec.attn == attn]
        work = {
            w.name: w
            for w in roofline.cache_work(
                config, specs[0], batch=batch, context=context, cache_format=cache_format
            )
        }
        for name, op in _OPS[attn].items():
            row = {"op": f"{attn} {name}", "batch": batch, "context": context}
            try:
                program = compile_program(
                    _jit_repeat, cache, inputs, step_input, op=op, specs=tuple(specs), config=config
                )
                timing, (cache, inputs) = time_calls(
                    lambda state, run=program.run: run(*state, step_input)[:2],
                    (cache, inputs),
                    limit_s=limit_s,
                    least_s=0.05,
                )
            except Exception as error:
                yield row | {"failed": first_line(error)}
                cache = inputs = None  # donated and gone; drop them before making new ones
                cache, inputs = fill(), random_inputs(config, batch)
                continue
            row |= {
                "us": timing.median_s / _ROUNDS * 1e6,
                "us_least": timing.least_s / _ROUNDS * 1e6,
                "us_most": timing.most_s / _ROUNDS * 1e6,
                "launches": program.launches.total / _ROUNDS,
                "ours": program.launches.ours / _ROUNDS,
            }
            if name in work:
                roofline_us = work[name].roofline_s * 1e6
                row |= {
                    "roofline_us": roofline_us,
                    "bytes": work[name].num_bytes,
                    "flops": work[name].flops,
                    "roofline_share": roofline_us / row["us"],
                    "copy_share": work[name].num_bytes / (row["us"] * 1e-6) / bandwidth,
                }
            yield row


def _repeat(
    cache: ModelCache,
    inputs: AttentionInputs,
    step_input: StepInput,
    *,
    op: Op,
    specs: tuple[LayerSpec, ...],
    config: DSV4Config,
) -> tuple[ModelCache, AttentionInputs, list[Any]]:
    """Runs the op on one layer after the other; lengths do not change."""
    call = cache.index(step_input, max_row_tokens=1)
    _, appended = append(cache.layer(specs[0].attn, 0, call), inputs, config)
    outs = []  # returned, so that XLA does not remove their computation
    for i in range(_ROUNDS):
        spec = specs[i % len(specs)]
        handle = cache.layer(spec.attn, spec.family_idx, call, in_place=True)
        handle = dataclasses.replace(handle, window=appended.window)
        handle, inputs = jax.lax.optimization_barrier((handle, inputs))
        handle = dataclasses.replace(handle, call=call)  # computed once, as in a step
        handle, out = op(handle, inputs, appended.index_queries, config)
        # The next round waits for this one.
        handle, inputs, out = jax.lax.optimization_barrier((handle, inputs, out))
        cache = cache.with_layer(handle)
        outs.append(out)
    return cache, inputs, outs


_jit_repeat = jax.jit(
    _repeat, static_argnames=("op", "specs", "config"), donate_argnames=("cache", "inputs")
)


def _append(
    handle: LayerCacheHandle, inputs: AttentionInputs, _: jax.Array | None, config: DSV4Config
) -> Any:
    handle, appended = append(handle, inputs, config)
    return handle, (appended.queries, appended.index_queries)


def _index(
    handle: LayerCacheHandle, inputs: AttentionInputs, rounded: jax.Array | None, config: DSV4Config
) -> Any:
    assert rounded is not None
    return handle, handle.select(rounded, inputs.index_weights)


def _attention(
    handle: LayerCacheHandle, inputs: AttentionInputs, _: jax.Array | None, config: DSV4Config
) -> Any:
    """Attends; CSA layers to entries spread over the whole context."""
    selected = None
    if handle.schema.attn_type == AttentionType.HCA:
        selected = handle.all_visible()
    elif handle.schema.attn_type == AttentionType.CSA:
        entry = jnp.arange(config.indexer_top_k, dtype=jnp.int32)[None]
        visible = handle.visible_entries[:, None]
        spread = entry * (visible // config.indexer_top_k)
        selected = jnp.where(visible >= config.indexer_top_k, spread, entry)
        selected = jnp.where(selected < visible, selected, -1)
    return handle, handle.attend(inputs.queries, inputs.sink, selected)


_COMMON: dict[str, Op] = {"append": _append, "attention": _attention}
_OPS: dict[AttentionType, dict[str, Op]] = {
    AttentionType.SWA: _COMMON,
    AttentionType.CSA: _COMMON | {"index": _index},
    AttentionType.HCA: _COMMON,
}
