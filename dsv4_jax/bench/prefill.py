"""Times the chunked prefill of one prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.bench import roofline
from dsv4_jax.bench.memory import peak_bytes
from dsv4_jax.bench.mesh_step import on_every_shard
from dsv4_jax.bench.profile import profile_launches
from dsv4_jax.bench.program import compile_program
from dsv4_jax.bench.routing_laws import LAWS, expected_experts
from dsv4_jax.bench.timing import time_calls
from dsv4_jax.bench.weights import with_routing
from dsv4_jax.cache.empty_cache import init_cache
from dsv4_jax.cache.model_cache import ModelCache, tree_bytes
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.mesh import mesh_sizes
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.prefill import jit_prefill


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
    cache = init_cache(
        config, max_requests=1, max_context_tokens=num_tokens, cache_format=cache_format
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, num_tokens)
    zeros = jnp.zeros(chunk_tokens, jnp.int32)
    chunks = [
        StepInput(
            token_ids=jnp.asarray(some, jnp.int32),
            request_ids=zeros,
            request_slots=jnp.zeros(1, jnp.int32),
        )
        for some in tokens.reshape(-1, chunk_tokens)
    ]
    num_prompts = 1
    if mesh is not None:
        num_prompts = mesh_sizes(mesh)[0]
        cache = on_every_shard(cache, mesh)
        chunks = [on_every_shard(chunk, mesh) for chunk in chunks]
    start = cache.length_tokens + 0
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "chunk_tokens": chunk_tokens,
        "activations": activations,
        "cache_bytes": tree_bytes(cache),
    }
    program = compile_program(
        jit_prefill, params, cache, chunks[0], config=config, activations=activations
    )
    row |= program.row()
    yield row

    routed = params

    def prefill_all(cache: ModelCache) -> ModelCache:
        for chunk in chunks:
            cache, _ = program.run(routed, cache, chunk)
        return cache

    def rewind(cache: ModelCache) -> ModelCache:
        """Sets the length to 0; the rings and states of the last prompt are then not read."""
        return dataclasses.replace(cache, length_tokens=jnp.copy(start))

    step_tokens, devices = num_prompts * chunk_tokens, 1 if mesh is None else mesh.size
    flops = num_prompts * prefill_flops(config, num_tokens)
    by_routing: dict[str, dict[str, Any]] = {}
    for routing in routings:
        routed = with_routing(params, config, routing)
        timing, cache = time_calls(
            prefill_all, cache, rewind=rewind, max_calls=1, repeats=repeats, limit_s=limit_s
        )
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
            "weight_bytes_read": {name: len(chunks) * n for name, n in read.items()},
            "expected_experts": experts,
        }
        row |= {"flops": flops, "by_routing": by_routing, "peak_bytes": peak_bytes()}
        yield row | by_routing[routings[0]]
    row |= by_routing[routings[0]]
    routed = with_routing(params, config, routings[0])
    if profile:
        cache = jax.block_until_ready(rewind(cache))
        launches = profile_launches(
            program.run,
            lambda: jax.block_until_ready(prefill_all(cache)),
            calls=len(chunks),
            devices=devices,
        )
        yield row | {"profile": launches}


def prefill_flops(config: DSV4Config, num_tokens: int) -> float:
    """Operations needed to prefill a prompt from the start: deepseek_v4.md section 7.4.

    Counts only the experts that a token picks, and the head of the last token only.
    """
    d, c, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    ql, latent = config.q_lora_rank, config.o_groups * config.o_lora_rank
    index_heads, index_dim = config.indexer_num_heads, config.indexer_head_dim
    positions = np.arange(1, num_tokens + 1, dtype=np.float64)
    window = np.minimum(positions, config.sliding_window)
    projections = 2 * (
        d * ql + ql * heads * c + d * c + heads * c * config.o_lora_rank + latent * d
    )
    experts = config.num_experts_per_token + 1
    moe = experts * 6 * d * config.moe_intermediate_size + 2 * d * config.num_routed_experts
    hyper_connections = 2 * 2 * (2 + config.hc_mult) * config.hc_mult * config.hc_mult * d
    total = 2.0 * config.vocab_size * d
    for spec in layer_schedule(config):
        entries = positions // config.compression_ratio(spec.attn)
        per_token = projections + moe + hyper_connections
        if spec.attn == AttentionType.CSA:
            selected = np.minimum(entries, config.indexer_top_k)
            per_token += 2 * d * 4 * c + 2 * (
                ql * index_heads * index_dim + d * index_heads + d * 4 * index_dim
            )
            total += float(np.sum(entries)) * (2 * index_heads * index_dim + 3 * index_heads)
        elif spec.attn == AttentionType.HCA:
            selected = entries
            per_token += 2 * d * 2 * c
        else:
            selected = np.zeros_like(entries)
        total += num_tokens * per_token + 4 * heads * c * float(np.sum(window + selected))
    return total
