"""EnginePlan: the sizes that an engine is built with, checked and worked out before anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from dsv4_jax import checks
from dsv4_jax.allocator.pool_plan import PoolPlan, device_memory_bytes, plan_pools
from dsv4_jax.cache.schema import FormatName, check_selector, choose_cache_format
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import AXES, DATA, check_divides, mesh_sizes
from dsv4_jax.step.settings_size import count_entries
from pallas_kernels.common.weights import ACTIVATIONS

MAX_DRAFT_TOKENS = 8
MAX_STEPS_PER_CALL = 64
MAX_STEP_SIZES = 64
"""Sizes of steps: each is a program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What an engine is built with, besides parameters and a tokenizer.

    Attributes:
      config: the model as the cache sees it: with a draft block only if there are drafts.
      mesh: where arrays lie; None is one device.
      split_cache: blocks are dealt over the devices of a data shard.
      pools: sizes of the pools of a data shard.
      step_sizes: tokens of a general step on a data shard, ascending; each is a program.
      plain_size: those of the step that only decodes; None if a general step does that.
      steps_per_call: n, steps that a call makes where every request only decodes.
      cache_format: the storage format.
      draft_tokens: k, tokens that the draft block guesses per step.
      grammars: requests may have grammars; else no step takes masks.
      activations: what multiplies quantised weights in steps without prompt tokens.
      prefill_activations: the same in steps that hold some.
      overlap: the next step is launched before the last one is read, where it can be.
      debug: poisons freed storage and verifies the cache after every step.
    """

    config: DSV4Config
    mesh: Mesh | None
    split_cache: bool
    pools: PoolPlan
    step_sizes: tuple[int, ...]
    plain_size: int | None
    steps_per_call: int
    cache_format: FormatName
    draft_tokens: int
    grammars: bool
    activations: str
    prefill_activations: str
    overlap: bool
    debug: bool

    @property
    def data_shards(self) -> int:
        """Data shards of the mesh; 1 without one."""
        return 1 if self.mesh is None else mesh_sizes(self.mesh)[0]

    @property
    def count_entries(self) -> int:
        """Counts of tokens that requests with penalties have drawn, on each data shard."""
        pools = self.pools
        return count_entries(self.config.vocab_size, pools.max_requests, pools.max_context_tokens)


def plan_engine(
    config: DSV4Config,
    *,
    mesh: Mesh | None,
    split_cache: bool,
    has_draft_block: bool,
    max_requests: int,
    max_context_tokens: int,
    cache_format: FormatName | None,
    prefill_tokens: Sequence[int] | None,
    decode_tokens: int | None,
    draft_tokens: int,
    steps_per_call: int,
    grammars: bool,
    activations: str,
    prefill_activations: str | None,
    num_blocks: int | None,
    num_snapshots: int | None,
    memory_bytes: int | None,
    gpu_memory_fraction: float | None,
    overlap: bool,
    debug: bool,
) -> EnginePlan:
    """Works an engine's sizes out; arguments as in `Engine`, which has their defaults.

    Raises:
      ValueError: an argument is out of range or does not divide over the mesh, or there is no such
        format or form.
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
    rule = f"1..{MAX_STEPS_PER_CALL}"
    steps_per_call = checks.integer(
        "steps_per_call", steps_per_call, 1, MAX_STEPS_PER_CALL, rule=rule
    )
    if steps_per_call > 1 and (draft_tokens or decode_tokens is not None):
        given = {"draft_tokens": draft_tokens or None, "decode_tokens": decode_tokens}
        shown = " and ".join(f"{name}={one}" for name, one in given.items() if one is not None)
        raise ValueError(
            f"steps_per_call={steps_per_call} needs the program that only decodes, and there is "
            f"none with {shown}; leave one of them out"
        )
    grammars = checks.flag("grammars", grammars)
    overlap, debug = checks.flag("overlap", overlap), checks.flag("debug", debug)
    split_cache = checks.flag("split_cache", split_cache)
    check_selector(config, split_cache=split_cache)
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
        max_requests=_of_shard("max_requests", max_requests, mesh, low=1),
        max_context_tokens=max_context_tokens,
        cache_format=cache_format,
        num_blocks=None
        if num_blocks is None
        else _of_shard("num_blocks", num_blocks, mesh, low=1, split=split_cache),
        num_snapshots=None
        if num_snapshots is None
        else _of_shard("num_snapshots", num_snapshots, mesh, low=0),
        memory_bytes=memory_bytes,
        block_parts=mesh_sizes(mesh)[1] if split_cache and mesh is not None else 1,
    )
    sizes, plain_size = step_sizes(
        prefill_tokens, decode_tokens, max_requests=pools.max_requests, draft_tokens=draft_tokens
    )
    return EnginePlan(
        config=cached,
        mesh=mesh,
        split_cache=split_cache,
        pools=pools,
        step_sizes=sizes,
        plain_size=plain_size,
        steps_per_call=steps_per_call,
        cache_format=choose_cache_format(config, cache_format),
        draft_tokens=draft_tokens,
        grammars=grammars,
        activations=activations,
        prefill_activations=prefill_activations,
        overlap=overlap and not debug,
        debug=debug,
    )


def _of_shard(name: str, count: int, mesh: Mesh | None, *, low: int, split: bool = False) -> int:
    """A data shard's part of so many slots, blocks or snapshots; if split, over its devices too."""
    count = checks.integer(name, count, low)
    if mesh is None:
        return count
    check_divides(mesh, {name: count}, AXES if split else (DATA,))
    return count // mesh_sizes(mesh)[0]


def step_sizes(
    prefill_tokens: Sequence[int] | None,
    decode_tokens: int | None,
    *,
    max_requests: int,
    draft_tokens: int,
) -> tuple[tuple[int, ...], int | None]:
    """The shapes that steps have on a data shard; arguments as in `Engine`, of a shard.

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
