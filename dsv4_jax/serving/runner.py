"""StepRunner: the device's side of the engine: cache, snapshots, and the programs that run them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax._src.core import reset_trace_state  # nothing public ends a trace that was interrupted

from dsv4_jax.allocator.checksums import scan_rows, scan_snapshots
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.pending_changes import idle_changes
from dsv4_jax.cache.model_cache import ModelCache, family_bytes, init_cache
from dsv4_jax.cache.slot_changes import jit_apply_changes, set_tables
from dsv4_jax.cache.snapshots import SnapshotPlan, SnapshotStore, init_snapshot_store
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.serving.metrics import is_paged
from dsv4_jax.serving.request import Request
from dsv4_jax.serving.scheduler import StepPlan
from dsv4_jax.serving.sizing import EnginePlan
from dsv4_jax.serving.snapshot_policy import Boundary
from dsv4_jax.step.sampling import SamplingParams, stack_sampling
from dsv4_jax.step.serve_step import (
    ServeInput,
    jit_plain_decode_step,
    jit_save_reached,
    jit_serve_step,
)
from pallas_kernels.common.weights import is_quantized

_IDLE = SamplingParams()


@functools.partial(
    jax.jit,
    static_argnames=(
        "config",
        "max_requests",
        "max_context_tokens",
        "cache_format",
        "num_blocks",
        "num_snapshots",
    ),
)
def _empty_pools(
    config: DSV4Config,
    *,
    max_requests: int,
    max_context_tokens: int,
    cache_format: str,
    num_blocks: int,
    num_snapshots: int,
) -> tuple[ModelCache, SnapshotStore]:
    """Arguments as those of `init_cache` and `init_snapshot_store`; one program makes all."""
    cache = init_cache(
        config,
        max_requests=max_requests,
        max_context_tokens=max_context_tokens,
        cache_format=cache_format,
        num_blocks=num_blocks,
    )
    return cache, init_snapshot_store(cache, num_snapshots)


class StepResult(NamedTuple):
    """What a step gave, in NumPy; fields as in `ServeOutput`."""

    token_ids: np.ndarray
    num_kept: np.ndarray
    draft_token_ids: np.ndarray


class StepRunner:
    """Owns the arrays, and turns plans into calls. Row r of every call is slot r.

    Attributes:
      plan: sizes of the pools.
      cache_format: name of the storage format.
      draft_tokens: k.
      unit_bytes: by family, bytes of one block or one slot.
      cache: the cache as it is now; the next call donates it.
      store: the snapshots as they are now; the next call may donate them.
    """

    def __init__(self, params: DSV4Params, plan: EnginePlan) -> None:
        """Allocates the pools.

        Args:
          params: model parameters.
          plan: sizes of the engine.
        """
        self.config = plan.config
        self.params = params
        self.plan = plan.pools
        self.cache_format = plan.cache_format
        self.draft_tokens = plan.draft_tokens
        self._engine_plan = plan
        self._activations = self._prefill_activations = plan.activations
        if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
            self._prefill_activations = plan.prefill_activations
        self.cache: ModelCache
        self.store: SnapshotStore
        self._allocate()
        self.unit_bytes = {
            name: size // (self.plan.num_blocks if is_paged(name) else self.plan.max_requests)
            for name, size in family_bytes(self.cache).items()
            if size
        }

    def rebuild(self) -> None:
        """Empty pools, in place of those that were there, whose memory is free first.

        An interrupt in the middle of jax's own Python can leave it in a trace that has ended; that
        is ended here too.
        """
        reset_trace_state()
        for leaf in jax.tree.leaves((self.cache, self.store)):
            if not leaf.is_deleted():
                leaf.delete()
        self._allocate()

    def apply(self, manager: KVCacheManager) -> None:
        """Brings tables, lengths, copies and loads to the device."""
        self.cache = manager.apply(self.cache, self.store)

    def run(
        self,
        plan: StepPlan,
        requests: dict[int, Request],
        lengths: np.ndarray,
        boundaries: Sequence[Boundary],
    ) -> StepResult:
        """One step.

        Args:
          plan: what to run.
          requests: by slot.
          lengths: i32[NS], tokens of each slot before the step.
          boundaries: what to keep; none in a plain step, see `save`.
        """
        num_slots = self.plan.max_requests
        token_ids, request_ids = np.zeros(plan.size, np.int32), np.full(plan.size, -1, np.int32)
        slots, checked = np.full(num_slots, -1, np.int32), np.ones(num_slots, np.int32)
        following = np.full(num_slots, -1, np.int32)
        start = 0
        for row in plan.rows:
            request, length = requests[row.slot], int(lengths[row.slot])
            end = length + row.num_tokens
            ids = [*request.token_ids[length:end], *request.drafts[: row.num_drafts]]
            token_ids[start : start + len(ids)] = ids
            request_ids[start : start + len(ids)] = row.slot
            start += len(ids)
            slots[row.slot], checked[row.slot] = row.slot, 1 + row.num_drafts
            if not row.draws:
                following[row.slot] = request.token_ids[end]
        step = StepInput(token_ids=token_ids, request_ids=request_ids, request_slots=slots)  # type: ignore[arg-type]
        serve_input = ServeInput(
            step=step,
            num_checked=checked,  # type: ignore[arg-type]
            next_token_ids=following,  # type: ignore[arg-type]
            sampling=stack_sampling(
                [requests[s].sampling if s in requests else _IDLE for s in range(num_slots)],
                with_stops=False,  # they are the host's
            ),
            snapshots=self._snapshot_plan(boundaries, self._max_boundaries(plan.size)),
        )
        activations = self._prefill_activations if plan.holds_prompts else self._activations
        return self._call(serve_input, plan.is_plain, activations)

    def save(self, boundaries: Sequence[Boundary]) -> None:
        """Keeps boundaries that requests stand at, between steps."""
        slots = np.arange(self.plan.max_requests, dtype=np.int32)
        step = StepInput(token_ids=slots, request_ids=slots, request_slots=slots)  # type: ignore[arg-type]
        plan = self._snapshot_plan(boundaries, self.plan.max_requests)
        self.store = jit_save_reached(self.store, self.cache, step, plan)

    def warmup(self) -> list[tuple[str, float]]:
        """Compiles every program by running it idle; names and seconds."""
        sizes, plain_size = self._engine_plan.step_sizes, self._engine_plan.plain_size
        debug = self._engine_plan.debug
        num_slots = self.plan.max_requests
        changes = idle_changes(num_slots, self.cache.block_table.shape[1])
        if debug:
            changes = dataclasses.replace(
                changes,
                freed_slots=np.zeros(num_slots, bool),
                freed_blocks=np.zeros(self.plan.num_blocks, bool),
            )

        def apply_all() -> None:
            self.cache = jit_apply_changes(self.cache, self.store, changes)

        def apply_tables() -> None:
            self.cache = set_tables(self.cache, changes)

        jobs: list[tuple[str, Callable[[], object]]] = [
            ("tables", apply_tables),
            ("copies and snapshot loads", apply_all),
            ("snapshots between steps", lambda: self.save([])),
        ]
        for size in sizes:
            idle = StepPlan((), size, False, holds_prompts=True)
            jobs.append((f"step of {size} tokens", lambda idle=idle: self._idle(idle)))
            if plain_size is None and self._activations != self._prefill_activations:
                idle = StepPlan((), size, False)
                name = f"step of {size} tokens without prompts"
                jobs.append((name, lambda idle=idle: self._idle(idle)))
        if plain_size is not None:
            idle = StepPlan((), plain_size, True)
            jobs.append((f"decode step of {plain_size} tokens", lambda: self._idle(idle)))
        jobs.append(("verification", lambda: (scan_rows(self.cache), scan_snapshots(self.store))))
        times = []
        for name, job in jobs:
            started = time.perf_counter()
            job()
            jax.block_until_ready((self.cache, self.store))
            times.append((name, time.perf_counter() - started))
        return times

    def _allocate(self) -> None:
        pools = self._engine_plan.pools
        self.cache, self.store = _empty_pools(
            self.config,
            max_requests=pools.max_requests,
            max_context_tokens=pools.max_context_tokens,
            cache_format=self.cache_format,
            num_blocks=pools.num_blocks,
            num_snapshots=pools.num_snapshots,
        )

    def _idle(self, plan: StepPlan) -> None:
        self.run(plan, {}, np.zeros(self.plan.max_requests, np.int32), [])

    def _call(self, serve_input: ServeInput, is_plain: bool, activations: str) -> StepResult:
        if is_plain:
            cache, output = jit_plain_decode_step(
                self.params,
                self.cache,
                serve_input,
                config=self.config,
                activations=activations,
            )
            store = self.store
        else:
            cache, store, output = jit_serve_step(
                self.params,
                self.cache,
                self.store,
                serve_input,
                config=self.config,
                draft_tokens=self.draft_tokens,
                activations=activations,
            )
        result = jax.device_get(output)  # a failure on the device shows here
        self.cache, self.store = cache, store
        return StepResult(result.token_ids, result.num_kept, result.draft_token_ids)

    def _max_boundaries(self, size: int) -> int:
        """No call of that many tokens can cross more."""
        return self.plan.max_requests + size // self.plan.block_tokens

    def _snapshot_plan(self, boundaries: Sequence[Boundary], count: int) -> SnapshotPlan:
        fields = np.full((3, count), -1, np.int32)
        for i, boundary in enumerate(boundaries):
            fields[:, i] = boundary
        return SnapshotPlan(rows=fields[0], ends=fields[1], places=fields[2])  # type: ignore[arg-type]
