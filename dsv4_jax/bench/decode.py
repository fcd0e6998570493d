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
from dsv4_jax.bench.parts import cache_part, layers_of_kind, one_token_each, random_inputs
from dsv4_jax.bench.profile import profile_launches
from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.timing import Timing, time_calls
from dsv4_jax.cache.model_cache import ModelCache, cache_shapes, tree_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.model.block import embed
from dsv4_jax.model.params import DSV4Params, layer_of
from dsv4_jax.step.decode import jit_decode_step

MARGIN_BYTES = 2 * 2**30
"""What a step may take beside weights and one cache."""
PARTS = ("step", "cache", "layers")
_MAX_CALLS = 48  # of one measurement; lengths begin that many tokens below the context
_LAYERS_OF_A_KIND = 4
_PROFILED_CALLS = 4


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
      profile: whether step and cache part are profiled too, launch by launch.
      compile_only: nothing is allocated or run; what is compiled stays in the persistent cache.
      limit_s: seconds for the measurements of one part; compiling does not count.
    """

    batch: int
    context: int
    bucket_context: int
    cache_format: str
    parts: tuple[str, ...] = PARTS
    recompile: bool = True
    profile: bool = False
    compile_only: bool = False
    limit_s: float = 20.0


def bench_case(
    config: DSV4Config, params: DSV4Params | None, case: Case, *, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Runs one case and yields its row, once after each part, so that little is ever lost.

    Each part fills a cache of its own: what one leaves behind, or breaks, is not the next one's.

    Args:
      config: the model.
      params: of the model, or their shapes; None leaves the cache part alone.
      case: what is measured.
      bandwidth: bytes per second of a copy on this device, for shares.

    Yields:
      The row so far: times in ms, bytes, launches, shares; `skipped` says why there are none, and
      `failed` which parts ended in which error.
    """
    setup = _Setup(config, case)
    weight_bytes = 0 if params is None else tree_bytes(params)
    row: dict[str, Any] = {
        "batch": case.batch,
        "context": case.context,
        "bucket_context": case.bucket_context,
        "cache_format": case.cache_format,
        "weight_bytes": weight_bytes,
        "cache_bytes": setup.cache_bytes,
        "cache_bytes_moved": sum(w.num_bytes for w in setup.work.values()),
    }
    planned = weight_bytes + setup.cache_bytes
    if (limit := memory_limit()) and planned + MARGIN_BYTES > limit:
        needed = (planned + MARGIN_BYTES) / 2**30
        yield row | {"skipped": f"needs {needed:.1f} GiB of {limit / 2**30:.1f} GiB"}
        return
    for part in PARTS:
        if part not in case.parts or (params is None and part != "cache"):
            continue
        if part == "layers" and case.compile_only:
            continue
        try:
            if part == "cache" or params is None:
                found = _cache_rows(setup)
            else:
                found = {"step": _step_rows, "layers": _layer_rows}[part](setup, params)
            for more in found:
                row |= more
                if "step_ms" in row:
                    row["planned_peak_bytes"] = planned + row["temp_bytes"]
                    row["copy_share"] = row["bytes_moved"] / row["step_ms"] * 1e3 / bandwidth
                yield dict(row)
        except Exception as error:
            row.setdefault("failed", {})[part] = first_line(error)
            yield dict(row)


class _Setup:
    """What all parts of a case begin with."""

    def __init__(self, config: DSV4Config, case: Case) -> None:
        self.config, self.case = config, case
        self.sizes = {"max_context_tokens": case.bucket_context, "cache_format": case.cache_format}
        self.shapes = cache_shapes(config, max_requests=case.batch, **self.sizes)
        self.cache_bytes = tree_bytes(self.shapes)
        self.calls = max(1, min(_MAX_CALLS, case.context // 4))
        self.lengths = (case.context - self.calls - np.arange(case.batch) % 4).clip(0)
        self.step_input = one_token_each(config, case.batch)
        self.work = floor.step_cache_work(
            config, batch=case.batch, context=case.context, cache_format=case.cache_format
        )

    def fill(self) -> ModelCache:
        """A cache that leaves room for `calls` tokens below the context, or its shapes."""
        if self.case.compile_only:
            return self.shapes
        cache = filled_cache(self.config, length_tokens=self.lengths, **self.sizes)
        return jax.block_until_ready(cache)

    def measure(self, call: Callable[[Any], Any], state: Any) -> tuple[Timing, Any]:
        """Times `state = call(state)`, whose first part is a cache; the last state too."""
        limit_s = self.case.limit_s
        return time_calls(call, state, rewind=self.rewind, max_calls=self.calls, limit_s=limit_s)

    def rewind(self, state: tuple[ModelCache, Any]) -> tuple[ModelCache, Any]:
        """Lengths as they were, so that no measurement leaves the context."""
        cache, rest = state
        lengths = jnp.asarray(self.lengths, jnp.int32)
        return dataclasses.replace(cache, length_tokens=lengths), rest

    def profile(
        self, compiled: Any, call: Callable[[Any], Any], state: Any
    ) -> list[dict[str, Any]]:
        """What a call launches, in which time; the state is used up."""
        calls, state = min(_PROFILED_CALLS, self.calls), self.rewind(state)

        def run() -> None:
            left = state
            for _ in range(calls):
                left = call(left)
            jax.block_until_ready(left)

        return profile_launches(compiled, run, calls=calls)


def _step_rows(setup: _Setup, params: DSV4Params) -> Iterator[dict[str, Any]]:
    """The whole step: how it compiles, then how fast it is."""
    config, case, step_input = setup.config, setup.case, setup.step_input
    start = time.perf_counter()
    cache = setup.fill()
    row: dict[str, Any] = {"fill_s": time.perf_counter() - start}
    program = compile_program(jit_decode_step, params, cache, step_input, config=config)
    yield row | _compile_row("", program)
    if case.compile_only:
        return
    if case.recompile:
        jax.clear_caches()
        again = compile_program(jit_decode_step, params, cache, step_input, config=config)
        yield {
            "again_trace_s": again.trace_s,
            "again_compile_s": again.compile_s,
            "again_from_cache": again.from_cache,
        }
    step = program.run

    def call(state: Any) -> Any:
        return step(params, state[0], step_input)

    timing, state = setup.measure(call, (cache, None))
    moved = sum(w.num_bytes for w in setup.work.values())
    yield _timing_row("step", timing) | {
        "tokens_per_s": case.batch / timing.median_s,
        "bytes_moved": moved + floor.step_weight_bytes(config, batch=case.batch),
        "peak_bytes": peak_bytes(),
        "finite": bool(jnp.isfinite(state[1]).all()),
    }
    if case.profile:
        yield {"profile": setup.profile(step, call, state)}


def _cache_rows(setup: _Setup) -> Iterator[dict[str, Any]]:
    """Append to attention of all layers, without weights."""
    config, case, step_input = setup.config, setup.case, setup.step_input
    cache, inputs = setup.fill(), random_inputs(config, case.batch)
    program = compile_program(_jit_cache_part, cache, inputs, step_input, config=config)
    yield _compile_row("cache_part_", program)
    if case.compile_only:
        return
    part = program.run

    def call(state: Any) -> Any:
        return part(*state, step_input)

    timing, state = setup.measure(call, (cache, inputs))
    yield _timing_row("cache_part", timing) | _floor_row(setup, program, timing)
    yield {"cache_part_finite": bool(jnp.isfinite(state[1].queries).all())}
    if case.profile:
        yield {"cache_part_profile": setup.profile(part, call, state)}


def _layer_rows(setup: _Setup, params: DSV4Params) -> Iterator[dict[str, Any]]:
    """Layers of each kind, a few in a row."""
    config, step_input = setup.config, setup.step_input
    row: dict[str, Any] = {"layer_ms": {}, "layer_launches": {}}
    cache = setup.fill()
    for kind in dict.fromkeys(spec.kind for spec in layer_schedule(config)):
        specs = [spec for spec in layer_schedule(config) if spec.kind == kind]
        layers = [
            layer_of(params.layers[kind], spec.kind_idx) for spec in specs[:_LAYERS_OF_A_KIND]
        ]
        streams = embed(params, step_input.token_ids, config)
        static = {"kind": kind, "config": config}
        program = compile_program(_jit_layers, layers, cache, streams, step_input, **static)
        number, run = len(layers), program.run
        timing, (cache, _) = setup.measure(
            lambda state, run=run, layers=layers: run(layers, *state, step_input), (cache, streams)
        )
        row["layer_ms"][kind] = timing.median_s / number * 1e3
        row["layer_launches"][kind] = {
            name: count / number for name, count in dataclasses.asdict(program.launches).items()
        }
        yield dict(row)


def memory_limit() -> int | None:
    """Bytes that the device's allocator may take; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def peak_bytes() -> int | None:
    """The most bytes that were in use on the device so far; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


_jit_cache_part = jax.jit(cache_part, static_argnames="config", donate_argnames=("cache", "inputs"))
_jit_layers = jax.jit(
    layers_of_kind,
    static_argnames=("config", "kind"),
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


def _floor_row(setup: _Setup, program: Program, timing: Timing) -> dict[str, Any]:
    """The floor of the cache part, and how near the time came to twice it and the launches."""
    case = setup.case
    floor_s = floor.step_cache_floor_s(
        setup.config, batch=case.batch, context=case.context, cache_format=case.cache_format
    )
    allowed = 2 * floor_s + floor.LAUNCH_S * program.launches.ours
    return {
        "cache_part_floor_ms": floor_s * 1e3,
        "cache_part_floor_us_by_op": {name: w.floor_s * 1e6 for name, w in setup.work.items()},
        "cache_part_target_ms": allowed * 1e3,
        "cache_part_of_target": timing.median_s / allowed,
        "cache_part_tokens_per_s": case.batch / timing.median_s,
    }
