"""Times decode steps at given contexts and batches, whole and in parts."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.bench import roofline
from dsv4_jax.bench.decode_case import ALL_PARTS, CaseSetup, DecodeCase, decode_call
from dsv4_jax.bench.decode_loop import compile_loop, greedy_rows, time_loop
from dsv4_jax.bench.memory import memory_limit, peak_bytes
from dsv4_jax.bench.parts import cache_part, layers_of_kind, random_inputs
from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.routing import mean_distinct, picks_call
from dsv4_jax.bench.routing_laws import LAWS, expected_experts
from dsv4_jax.bench.timing import Timing
from dsv4_jax.bench.weights import with_routing
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.model.layer_params import layer_of
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import embed
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.decode import jit_decode_step
from pallas_kernels.common.weights import with_activations

MARGIN_BYTES = 2 * 2**30
"""Memory that a step may take beside weights and one cache on a GPU."""
_HOST_MARGIN_BYTES = 2**28
"""The same on a CPU, whose program has been compiled by then or shares what it takes."""
_LAYERS_OF_A_KIND = 4


def bench_case(
    config: DSV4Config, params: DSV4Params | None, case: DecodeCase, *, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Runs one case and yields its row again after each part, so that a crash loses little.

    Each part fills its own cache, so that no part can break the next.

    Args:
      config: the model.
      params: model parameters, of `random_params`, or their shapes; None runs only the cache part.
      case: the point to measure.
      bandwidth: bytes per second of a copy on this device, for `copy_share`.

    Yields:
      The row so far: times in ms, bytes, launches, shares. `by_routing` has those of the step that
      depend on a law by each of the laws, and the row itself those by the first. `skipped` gives
      the reason if the case was not run, and `failed` the error of each part that failed.
    """
    setup = CaseSetup(config, case)
    weight_bytes = 0 if params is None else tree_bytes(params)
    row: dict[str, Any] = {
        "batch": case.batch,
        "context": case.context,
        "bucket_context": case.bucket_context,
        "cache_format": case.cache_format,
        "activations": case.activations,
        "weight_bytes": weight_bytes,
        "cache_bytes": setup.cache_bytes,
        "cache_bytes_moved": sum(w.num_bytes for w in setup.work.values()),
    }
    planned = weight_bytes + setup.cache_bytes
    margin = _HOST_MARGIN_BYTES if jax.default_backend() == "cpu" else MARGIN_BYTES
    if (limit := memory_limit()) and planned + margin > limit:
        needed = (planned + margin) / 2**30
        yield row | {"skipped": f"needs {needed:.1f} GiB of {limit / 2**30:.1f} GiB"}
        return
    for part in ALL_PARTS:
        if part not in case.parts or (params is None and part != "cache"):
            continue
        if part == "layers" and case.compile_only:
            continue
        try:
            if part == "cache" or params is None:
                found = _cache_rows(setup)
            else:
                rows_of = {"step": _step_rows, "layers": _layer_rows, "loop": _loop_rows}
                found = rows_of[part](setup, params)
            for more in found:
                row |= more
                if "step_ms" in row:
                    row["planned_peak_bytes"] = planned + row["temp_bytes"]
                for each in row.get("by_routing", {}).values():
                    each["copy_share"] = each["bytes_moved"] / each["step_ms"] * 1e3 / bandwidth
                row |= next(iter(row.get("by_routing", {}).values()), {})
                yield dict(row)
        except Exception as error:
            row.setdefault("failed", {})[part] = first_line(error)
            yield dict(row)


def _step_rows(setup: CaseSetup, params: DSV4Params) -> Iterator[dict[str, Any]]:
    """Compiles the whole step, and times it by each law of routing."""
    config, case, step_input = setup.config, setup.case, setup.step_input
    start = time.perf_counter()
    cache = setup.fill()
    row: dict[str, Any] = {"fill_s": time.perf_counter() - start}
    static = {"config": config, "activations": case.activations, "options": decode_options()}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        picks = picks_call(config, case.activations)
        counting = pool.submit(compile_program, picks, params, cache, step_input)
        program = compile_program(jit_decode_step, params, cache, step_input, **static)
        counter = counting.result()
    yield row | program.row()
    if case.compile_only:
        return
    if case.recompile:
        jax.clear_caches()
        again = compile_program(jit_decode_step, params, cache, step_input, **static)
        yield {
            "again_trace_s": again.trace_s,
            "again_compile_s": again.compile_s,
            "again_from_cache": again.from_cache,
        }
    by_routing: dict[str, dict[str, Any]] = {}
    for routing in case.routings:
        routed = with_routing(params, config, routing)
        call = decode_call(program.run, routed, step_input)
        timing, state = setup.measure(call, (cache, None))
        cache, logits = program.run(routed, setup.rewind(state)[0], step_input)
        finite = bool(jnp.isfinite(logits).all())
        del logits
        experts = mean_distinct(counter.run(routed, cache, step_input))
        by_routing[routing] = _of_routing(setup, params, routing, experts) | timing.row("step")
        by_routing[routing] |= {"tokens_per_s": case.batch / timing.median_s, "finite": finite}
        yield {"by_routing": by_routing, "peak_bytes": peak_bytes()}
    if case.tables is not None:
        routed = with_routing(params, config, case.routings[0])
        yield setup.time_reads(program.run, routed, cache, step_input, batch=case.batch)
        yield setup.time_pinned(routed, setup.fill(), step_input)
        cache = setup.fill()
    if case.profile:
        call = decode_call(program.run, with_routing(params, config, case.routings[0]), step_input)
        yield {"profile": setup.profile(program.run, call, (cache, None))}


def _of_routing(
    setup: CaseSetup, params: DSV4Params, routing: str, experts: float
) -> dict[str, Any]:
    """What a step must read by a law of routing, of which it read so many experts of a layer."""
    read = roofline.step_weight_bytes(setup.config, params, batch=setup.case.batch, experts=experts)
    moved = sum(w.num_bytes for w in setup.work.values()) + sum(read.values())
    exponent = LAWS[routing]
    return {
        "routing": routing,
        "experts_read": experts,
        "expected_experts": expected_experts(
            setup.config, rows=setup.case.batch, exponent=exponent
        ),
        "weight_bytes_read": read,
        "bytes_moved": moved,
        "floor_ms": moved / roofline.BANDWIDTH * 1e3,
    }


def _loop_rows(setup: CaseSetup, params: DSV4Params) -> Iterator[dict[str, Any]]:
    """Compiles and times steps in a loop on the device."""
    cache, rows = setup.fill(), greedy_rows(setup.case.batch)
    program = compile_loop(setup, params, cache, setup.step_input, rows)
    yield program.row("loop_")
    if not setup.case.compile_only:
        yield time_loop(setup, program, (params, setup.step_input, rows), cache)


def _cache_rows(setup: CaseSetup) -> Iterator[dict[str, Any]]:
    """Compiles and times all layers from append to attention, without weights."""
    config, case, step_input = setup.config, setup.case, setup.step_input
    cache, inputs = setup.fill(), random_inputs(config, case.batch)
    program = compile_program(_jit_cache_part, cache, inputs, step_input, config=config)
    yield program.row("cache_part_")
    if case.compile_only:
        return
    part = program.run

    def call(state: Any) -> Any:
        return part(*state, step_input)

    timing, state = setup.measure(call, (cache, inputs))
    yield timing.row("cache_part") | _roofline_row(setup, program, timing)
    yield {"cache_part_finite": bool(jnp.isfinite(state[1].queries).all())}
    if case.profile:
        yield {"cache_part_profile": setup.profile(part, call, state)}


def _layer_rows(setup: CaseSetup, params: DSV4Params) -> Iterator[dict[str, Any]]:
    """Times a few layers of each kind in a row."""
    config, step_input = setup.config, setup.step_input
    row: dict[str, Any] = {"layer_ms": {}, "layer_launches": {}}
    cache = setup.fill()
    for kind in dict.fromkeys(spec.kind for spec in layer_schedule(config)):
        specs = [spec for spec in layer_schedule(config) if spec.kind == kind]
        layers = [
            layer_of(params.layers[kind], spec.kind_idx) for spec in specs[:_LAYERS_OF_A_KIND]
        ]
        layers = with_activations(layers, setup.case.activations)
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


_jit_cache_part = jax.jit(cache_part, static_argnames="config", donate_argnames=("cache", "inputs"))
_jit_layers = jax.jit(
    layers_of_kind,
    static_argnames=("config", "kind"),
    donate_argnames=("cache", "streams"),
)


def _roofline_row(setup: CaseSetup, program: Program, timing: Timing) -> dict[str, Any]:
    """The roofline of the cache part, its target, and the time as a multiple of the target."""
    case = setup.case
    roofline_s = roofline.step_cache_roofline_s(
        setup.config, batch=case.batch, context=case.context, cache_format=case.cache_format
    )
    allowed = 2 * roofline_s + roofline.LAUNCH_S * program.launches.ours
    return {
        "cache_part_roofline_ms": roofline_s * 1e3,
        "cache_part_roofline_us_by_op": {
            name: w.roofline_s * 1e6 for name, w in setup.work.items()
        },
        "cache_part_target_ms": allowed * 1e3,
        "cache_part_of_target": timing.median_s / allowed,
        "cache_part_tokens_per_s": case.batch / timing.median_s,
    }
