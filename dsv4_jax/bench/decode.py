"""Times decode steps of a model at given contexts and batches, whole and in parts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.bench import floor
from dsv4_jax.bench.fill import filled_cache
from dsv4_jax.bench.parts import (
    cache_part,
    layers_of_kind,
    one_token_each,
    random_inputs,
)
from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.bench.timing import Timing, time_calls
from dsv4_jax.cache.model_cache import ModelCache, cache_shapes, tree_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.engine.decode import jit_decode_step
from dsv4_jax.layer_schedule import layer_schedule
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.transformer import embed

MARGIN_BYTES = 2 * 2**30
"""What a step may take beside weights and one cache."""
PARTS = ("step", "cache", "layers")
_MAX_CALLS = 48  # of one measurement; lengths begin that many tokens below the context
_LAYERS_OF_A_KIND = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the benchmark.

    Attributes:
      batch: B, requests decoded at once.
      context: tokens of each request.
      bucket_context: longest context that the cache is made for; the shapes follow from it.
      cache_format: name of the storage format.
      parts: what is timed, of `PARTS`.
      recompile: whether the step is compiled twice, to time the persistent cache.
      limit_s: seconds for the measurements of one part; compiling does not count.
    """

    batch: int
    context: int
    bucket_context: int
    cache_format: str
    parts: tuple[str, ...] = PARTS
    recompile: bool = True
    limit_s: float = 20.0


def bench_case(
    config: DSV4Config, params: DSV4Params | None, case: Case, *, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Runs one case and yields its row, once after each part, so that little is ever lost.

    Args:
      config: the model.
      params: of the model; None leaves the cache part alone.
      case: what is measured.
      bandwidth: bytes per second of a copy on this device, for shares.

    Yields:
      The row so far: times in ms, bytes, launches, shares; `skipped` says why there are none.
    """
    sizes = {"max_context_tokens": case.bucket_context, "cache_format": case.cache_format}
    cache_bytes = tree_bytes(cache_shapes(config, max_requests=case.batch, **sizes))
    weight_bytes = 0 if params is None else tree_bytes(params)
    row: dict[str, Any] = {
        "batch": case.batch,
        "context": case.context,
        "bucket_context": case.bucket_context,
        "cache_format": case.cache_format,
        "weight_bytes": weight_bytes,
        "cache_bytes": cache_bytes,
    }
    if (limit := memory_limit()) and weight_bytes + cache_bytes + MARGIN_BYTES > limit:
        needed = (weight_bytes + cache_bytes + MARGIN_BYTES) / 2**30
        yield row | {"skipped": f"needs {needed:.1f} GiB of {limit / 2**30:.1f} GiB"}
        return
    calls = max(1, min(_MAX_CALLS, case.context // 4))
    lengths = (case.context - calls - np.arange(case.batch) % 4).clip(0)
    start = time.perf_counter()
    cache = jax.block_until_ready(filled_cache(config, length_tokens=lengths, **sizes))
    row["fill_s"] = time.perf_counter() - start
    step_input = one_token_each(config, case.batch)
    work = floor.step_cache_work(
        config, batch=case.batch, context=case.context, cache_format=case.cache_format
    )
    cache_moved = sum(w.num_bytes for w in work.values())
    row["cache_bytes_moved"] = cache_moved

    def rewind(state: tuple[ModelCache, Any]) -> tuple[ModelCache, Any]:
        """Lengths as they were, so that no measurement leaves the context."""
        cache, rest = state
        return dataclasses.replace(cache, length_tokens=jnp.asarray(lengths, jnp.int32)), rest

    def measure(call: Callable[[Any], Any], state: Any) -> tuple[Timing, Any]:
        return time_calls(call, state, rewind=rewind, max_calls=calls, limit_s=case.limit_s)

    if "step" in case.parts and params is not None:
        moved = floor.step_weight_bytes(config, batch=case.batch) + cache_moved
        program = compile_program(jit_decode_step, params, cache, step_input, config=config)
        row |= _compile_row("", program)
        if case.recompile:
            jax.clear_caches()
            again = compile_program(jit_decode_step, params, cache, step_input, config=config)
            row["again_trace_s"], row["again_compile_s"] = again.trace_s, again.compile_s
            row["again_from_cache"] = again.from_cache
        yield row
        step = program.run
        timing, (cache, _) = measure(
            lambda state: step(params, state[0], step_input), (cache, None)
        )
        row |= _timing_row("step", timing)
        row |= {
            "tokens_per_s": case.batch / timing.median_s,
            "bytes_moved": moved,
            "copy_share": moved / timing.median_s / bandwidth,
            "planned_peak_bytes": weight_bytes + cache_bytes + program.temp_bytes,
            "peak_bytes": peak_bytes(),
        }
        yield row
    if "cache" in case.parts:
        inputs = random_inputs(config, case.batch)
        program = compile_program(_jit_cache_part, cache, inputs, step_input, config=config)
        row |= _compile_row("cache_part_", program)
        part = program.run
        timing, (cache, _) = measure(lambda state: part(*state, step_input), (cache, inputs))
        row |= _timing_row("cache_part", timing)
        row |= _floor_row(config, case, program, timing, work)
        yield row
    if "layers" in case.parts and params is not None:
        row["layer_ms"] = {}
        for kind in dict.fromkeys(spec.kind for spec in layer_schedule(config)):
            number = sum(spec.kind == kind for spec in layer_schedule(config))
            number = min(number, _LAYERS_OF_A_KIND)
            streams = embed(params, step_input.token_ids, config)
            static = {"kind": kind, "count": number, "config": config}
            program = compile_program(_jit_layers, params, cache, streams, step_input, **static)
            layers = program.run
            timing, (cache, _) = measure(
                lambda state, run=layers: run(params, *state, step_input), (cache, streams)
            )
            row["layer_ms"][kind] = timing.median_s / number * 1e3
            row.setdefault("layer_launches", {})[kind] = {
                name: count / number for name, count in dataclasses.asdict(program.launches).items()
            }
            yield row
    yield row


def memory_limit() -> int | None:
    """Bytes that the device's allocator may take; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def peak_bytes() -> int | None:
    """The most bytes that were in use on the device so far; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


_jit_cache_part = jax.jit(cache_part, static_argnames="config", donate_argnames=("cache", "inputs"))
_jit_layers = jax.jit(
    layers_of_kind,
    static_argnames=("config", "kind", "count"),
    donate_argnames=("cache", "streams"),
)


def _compile_row(prefix: str, program: Program) -> dict[str, Any]:
    return {
        f"{prefix}trace_s": program.trace_s,
        f"{prefix}compile_s": program.compile_s,
        f"{prefix}from_cache": program.from_cache,
        f"{prefix}launches": dataclasses.asdict(program.launches)
        | {"total": program.launches.total},
        f"{prefix}temp_bytes": program.temp_bytes,
    }


def _timing_row(name: str, timing: Timing) -> dict[str, Any]:
    return {
        f"{name}_ms": timing.median_s * 1e3,
        f"{name}_ms_least": timing.least_s * 1e3,
        f"{name}_ms_most": timing.most_s * 1e3,
        f"{name}_calls": timing.calls,
    }


def _floor_row(
    config: DSV4Config,
    case: Case,
    program: Program,
    timing: Timing,
    work: dict[str, floor.Work],
) -> dict[str, Any]:
    """The floor of the cache part, and how near the time came to twice it and the launches."""
    floor_s = floor.step_cache_floor_s(
        config, batch=case.batch, context=case.context, cache_format=case.cache_format
    )
    allowed = 2 * floor_s + floor.LAUNCH_S * program.launches.ours
    return {
        "cache_part_floor_ms": floor_s * 1e3,
        "cache_part_floor_us_by_op": {name: w.floor_s * 1e6 for name, w in work.items()},
        "cache_part_target_ms": allowed * 1e3,
        "cache_part_of_target": timing.median_s / allowed,
        "cache_part_tokens_per_s": case.batch / timing.median_s,
    }
