"""EnginePlan: the sizes that an engine is built with, checked and worked out before anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsv4_jax import checks
from dsv4_jax.allocator.pool_plan import PoolPlan, device_memory_bytes, plan_pools
from dsv4_jax.config import DSV4Config
from pallas_kernels.common.weights import ACTIVATIONS

MAX_DRAFT_TOKENS = 8
MAX_STEP_SIZES = 64
"""Sizes of steps: each is a program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What an engine is built with, besides parameters and a tokenizer.

    Attributes:
      config: the model as the cache sees it: with a draft block only if there are drafts.
      pools: sizes of the pools.
      step_sizes: tokens of a general step, ascending; each is a program.
      plain_size: tokens of the step that only decodes; None if a general step does that.
      cache_format: name of the storage format.
      draft_tokens: k, tokens that the draft block guesses per step.
      activations: what multiplies quantised weights in steps without prompt tokens.
      prefill_activations: the same in steps that hold some.
      debug: poisons freed storage and verifies the cache after every step.
    """

    config: DSV4Config
    pools: PoolPlan
    step_sizes: tuple[int, ...]
    plain_size: int | None
    cache_format: str
    draft_tokens: int
    activations: str
    prefill_activations: str
    debug: bool


def plan_engine(
    config: DSV4Config,
    *,
    has_draft_block: bool,
    max_requests: int,
    max_context_tokens: int,
    cache_format: str,
    prefill_tokens: Sequence[int] | None,
    decode_tokens: int | None,
    draft_tokens: int,
    activations: str,
    prefill_activations: str | None,
    num_blocks: int | None,
    num_snapshots: int | None,
    memory_bytes: int | None,
    gpu_memory_fraction: float | None,
    debug: bool,
) -> EnginePlan:
    """Works an engine's sizes out; arguments as in `Engine`, which has their defaults.

    Raises:
      ValueError: an argument is out of range, or there is no such format or form.
    """
    checks.instance("config", config, DSV4Config)
    activations = checks.choice("activations", activations, ACTIVATIONS)
    if prefill_activations is None:
        prefill_activations = activations
    else:
        name = "prefill_activations"
        prefill_activations = checks.choice(name, prefill_activations, ACTIVATIONS)
    draft_tokens = checks.integer(
        "draft_tokens", draft_tokens, 0, MAX_DRAFT_TOKENS, rule=f"0..{MAX_DRAFT_TOKENS}"
    )
    debug = checks.flag("debug", debug)
    if draft_tokens and not has_draft_block:
        raise ValueError(
            f"draft_tokens={draft_tokens} needs a draft (MTP) block, and params.mtp is None"
        )
    if memory_bytes is not None and gpu_memory_fraction is not None:
        raise ValueError(
            f"give memory_bytes or gpu_memory_fraction, not both, got {checks.shown(memory_bytes)} "
            f"and {checks.shown(gpu_memory_fraction)}"
        )
    if gpu_memory_fraction is not None:
        memory_bytes = device_memory_bytes(gpu_memory_fraction)
    cached = dataclasses.replace(config, num_mtp_layers=int(draft_tokens > 0))
    pools = plan_pools(
        cached,
        max_requests=max_requests,
        max_context_tokens=max_context_tokens,
        cache_format=cache_format,
        num_blocks=num_blocks,
        num_snapshots=num_snapshots,
        memory_bytes=memory_bytes,
    )
    sizes, plain_size = step_sizes(
        prefill_tokens, decode_tokens, max_requests=pools.max_requests, draft_tokens=draft_tokens
    )
    return EnginePlan(
        config=cached,
        pools=pools,
        step_sizes=sizes,
        plain_size=plain_size,
        cache_format=cache_format,
        draft_tokens=draft_tokens,
        activations=activations,
        prefill_activations=prefill_activations,
        debug=debug,
    )


def step_sizes(
    prefill_tokens: Sequence[int] | None,
    decode_tokens: int | None,
    *,
    max_requests: int,
    draft_tokens: int,
) -> tuple[tuple[int, ...], int | None]:
    """The shapes that steps have; arguments as in `Engine`.

    Returns:
      Sizes of the general step, ascending, and that of the step that only decodes, or None.

    Raises:
      ValueError: sizes are not ascending, or the largest does not hold a token of every request.
    """
    if prefill_tokens is None:
        prefill_tokens = (64, 256) if max_requests <= 256 else (64, 256, max_requests)
    given = checks.sequence("prefill_tokens", prefill_tokens, of="sizes", limit=MAX_STEP_SIZES)
    given = [checks.integer("prefill_tokens", size, -checks.INT32_MAX) for size in given]
    if not given or given != sorted(set(given)):
        checks.refuse("prefill_tokens", "ascending sizes", prefill_tokens)
    sizes, plain_size = set(given), None
    if decode_tokens is not None:
        sizes.add(checks.integer("decode_tokens", decode_tokens, -checks.INT32_MAX))
    elif draft_tokens:
        sizes.add(max_requests * (draft_tokens + 1))
    else:
        plain_size = max_requests
    if min(sizes) < 1 or max(sizes) < max_requests:
        raise ValueError(
            f"prefill_tokens and decode_tokens must be at least 1, the largest at least "
            f"max_requests={max_requests}, got {sorted(sizes)}"
        )
    return tuple(sorted(sizes)), plain_size
