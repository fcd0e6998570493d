"""Times the chunked prefill of one prompt."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from dsv4_jax.bench import roofline
from dsv4_jax.bench.memory import peak_bytes
from dsv4_jax.bench.profile import profile_launches
from dsv4_jax.bench.prompt_calls import PromptCalls, PromptPlan
from dsv4_jax.bench.prompt_flops import prefill_flops
from dsv4_jax.bench.routing_laws import LAWS, expected_experts
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.bench.weights import with_routing
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import mesh_sizes
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params


def bench_prefill(
    config: DSV4Config,
    params: DSV4Params,
    *,
    num_tokens: int,
    chunk_tokens: int,
    cache_format: str,
    activations: str = DEFAULT_ACTIVATIONS,
    repeats: int = 3,
    limit_s: float = 60.0,
    profile: bool = False,
    mesh: Mesh | None = None,
    routings: Sequence[str] = ("uniform",),
    rests: bool = True,
) -> Iterator[dict[str, Any]]:
    """Prefills a prompt of random tokens, chunk by chunk.

    Args:
      config: the model.
      params: model parameters, of `random_params`.
      num_tokens: length of the prompt.
      chunk_tokens: tokens per call; must divide `num_tokens`.
      cache_format: name of the storage format.
      activations: what multiplies quantised weights.
      repeats: how often the prompt is prefilled; the median is reported.
      limit_s: no repeat starts later than this after the first.
      profile: whether the prompt is prefilled once more and profiled, launch by launch.
      mesh: the devices; every data shard prefills a prompt. None is one device.
      routings: laws by which tokens pick experts, of `routing_laws.LAWS`.
      rests: upper layers rest where the prompt does not need them, if the model has such layers, as
        in an engine; False lets all layers run for all tokens.

    Yields:
      The row after compiling, and again after timing with each law: `by_routing` has what depends
      on it, and the row itself that of the first. Those are seconds, tokens per second, shares of
      the bf16 and the FP8 matrix rate, and the bytes of weights that all calls must read, by number
      format. Temporary bytes are those of a call, and grow with the prompt only by what each cached
      entry needs. With `profile` the row comes once more, with `profile_launches` of a call on
      average.

    Raises:
      ValueError: `chunk_tokens` does not divide `num_tokens`.
    """
    if chunk_tokens < 1 or num_tokens % chunk_tokens:
        raise ValueError(
            f"chunk_tokens must divide num_tokens, got {chunk_tokens} and {num_tokens}"
        )
    plan = PromptPlan.of(config, num_tokens=num_tokens, chunk_tokens=chunk_tokens, rests=rests)
    calls = PromptCalls(config, plan, cache_format=cache_format, mesh=mesh)
    state, num_calls = calls.state, len(calls.inputs)
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "chunk_tokens": chunk_tokens,
        "activations": activations,
        "cache_bytes": tree_bytes(state[0]),
    }
    row |= plan.row() | calls.compile(params, activations)
    yield row

    num_prompts, devices = 1, 1
    if mesh is not None:
        num_prompts, devices = mesh_sizes(mesh)[0], mesh.size
    step_tokens = num_prompts * chunk_tokens
    flops = num_prompts * prefill_flops(config, num_tokens, plan.awake_tokens)
    by_routing: dict[str, dict[str, Any]] = {}
    for routing in routings:
        routed = with_routing(params, config, routing)
        timing, state = time_calls(
            functools.partial(calls.run, routed), calls.run_firsts(routed, state),
            rewind=calls.rewind, max_calls=1, repeats=repeats, limit_s=limit_s, first_calls=0,
        )  # fmt: skip
        rate = flops / timing.median_s / devices
        experts = expected_experts(config, rows=step_tokens, exponent=LAWS[routing])
        read = roofline.step_weight_bytes(config, params, batch=step_tokens, experts=experts)
        by_routing[routing] = {
            "routing": routing,
            "prefill_s": timing.median_s,
            "prefill_s_least": timing.least_s,
            "prefill_s_most": timing.most_s,
            "tokens_per_s": num_prompts * num_tokens / timing.median_s,
            "matrix_share": rate / roofline.BF16_FLOPS,
            "fp8_share": rate / roofline.FP8_FLOPS,
            "weight_bytes_read": {name: num_calls * n for name, n in read.items()},
            "expected_experts": experts,
        }
        row |= {"flops": flops, "by_routing": by_routing, "peak_bytes": peak_bytes()}
        yield row | by_routing[routings[0]]
    row |= by_routing[routings[0]]
    routed = with_routing(params, config, routings[0])
    if profile:
        state = jax.block_until_ready(calls.rewind(state))
        launches = profile_launches(
            calls.longest,
            lambda: jax.block_until_ready(calls.run(routed, state)),
            calls=num_calls,
            devices=devices,
        )
        yield row | {"profile": launches}
