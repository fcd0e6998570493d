"""What an engine takes on a device beside the weights: the one count of `plan` and of `serve`.

`plan` says by it how many requests fit a GPU, and commands that build an engine ask by it whether
theirs fits, so that what `plan` says fits is taken.
"""

from __future__ import annotations

import dataclasses

from dsv4_jax.allocator.pool_plan import PoolPlan, plan_pools
from dsv4_jax.bench.workspace import workspace_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.step_sizes import find_sizes
from dsv4_jax.step.settings_size import settings_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """What an engine takes on a device of a mesh beside the weights.

    Attributes:
      pools: sizes of the cache of its data shard, snapshots of known prefixes among them.
      settings_bytes: settings, counts and masks of its requests.
      workspace_bytes: an estimate of what its largest step takes.
      step_tokens: tokens of that step on a data shard.
    """

    pools: PoolPlan
    settings_bytes: int
    workspace_bytes: int
    step_tokens: int

    @property
    def cache_bytes(self) -> int:
        """Slots, blocks and snapshots."""
        return self.pools.memory_bytes

    @property
    def needs(self) -> dict[str, int]:
        """{what for: bytes}."""
        return {
            "cache": self.cache_bytes,
            "settings": self.settings_bytes,
            "a step": self.workspace_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.needs.values())


def engine_bytes(
    config: DSV4Config, options: EngineOptions, *, data: int = 1, model: int = 1
) -> EngineBytes:
    """Counts what an engine takes on a device beside the weights; nothing is allocated.

    Args:
      config: of what is loaded; its draft has a cache if it has one.
      options: those of the engine; its mesh is not looked at.
      data: data shards, over which the requests are spread.
      model: devices of a data shard.

    Raises:
      ValueError: steps cannot have such sizes, or a cache cannot number so many blocks.
    """
    requests = -(-options.max_requests // data)
    step_tokens = find_sizes(options, max_requests=requests, on_gpu=True).all[-1]
    pools = plan_pools(
        config,
        max_requests=requests,
        max_context_tokens=options.max_context_tokens,
        cache_format=options.cache_format,
        block_parts=model if options.split_cache else 1,
    )
    workspace = workspace_bytes(
        config,
        data=data,
        model=model,
        context=options.max_context_tokens,
        step_tokens=step_tokens,
        logit_rows=requests * (options.draft_tokens + 1),
        split_cache=options.split_cache,
    )
    settings = settings_bytes(
        config.vocab_size,
        max_requests=requests,
        max_context_tokens=options.max_context_tokens,
        draft_tokens=options.draft_tokens,
        grammars=options.grammars,
    )
    return EngineBytes(
        pools=pools,
        settings_bytes=settings,
        workspace_bytes=workspace,
        step_tokens=step_tokens,
    )
