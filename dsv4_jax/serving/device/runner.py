"""StepRunner: turns what a step should run into the arrays that it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.allocator.pending_changes import idle_changes
from dsv4_jax.cache.model_cache import ModelCache, family_bytes, family_kinds
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.engram import EngramTables
from dsv4_jax.hosts import Hosts
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.serving.device.boundary_rows import snapshot_plan
from dsv4_jax.serving.device.compile_lines import CompileLines, Job
from dsv4_jax.serving.device.drawn_counts import CountKeeper
from dsv4_jax.serving.device.engine_arrays import EngineArrays
from dsv4_jax.serving.device.engram_rows import RowStager
from dsv4_jax.serving.device.grammar_masks import GrammarKeeper
from dsv4_jax.serving.device.hosted_arrays import HostedArrays, page_jobs
from dsv4_jax.serving.device.idle_steps import IdleStep, idle_steps
from dsv4_jax.serving.device.request_rows import copy_jobs
from dsv4_jax.serving.device.step_result import StepResult
from dsv4_jax.serving.device.upper_places import upper_places
from dsv4_jax.serving.metrics.metrics import Metrics, UnitBytes
from dsv4_jax.serving.requests.grammars import Grammars
from dsv4_jax.serving.requests.request import sampling_on_device
from dsv4_jax.serving.schedule.running import Running
from dsv4_jax.serving.schedule.scheduler import RowPlan, StepPlan
from dsv4_jax.serving.schedule.snapshot_policy import Boundary
from dsv4_jax.serving.sizing import EnginePlan
from dsv4_jax.step.sampling import MAX_LOGIT_BIAS, SamplingParams, stack_sampling
from dsv4_jax.step.serve_values import FIRST_DRAFT, LAST_DRAWN
from pallas_kernels.common.weights import is_quantized

_IDLE = SamplingParams()
_NO_LINES = contextlib.nullcontext()


class StepRunner:
    """Turns plans into calls.

    Row r of a call is slot r. On a mesh, an argument is that of every data shard one after the
    other, and what it names, be it a row, a slot or a place, is numbered within the shard.

    Attributes:
      plan: sizes of the pools, of a data shard.
      cache_format: the storage format.
      draft_tokens: k.
      devices: the arrays, and the calls on them.
      unit_bytes: by family, bytes of one block or one slot.
      count_keeper: what rows have drawn; `grammar_keeper`: which tokens they may draw.
    """

    def __init__(
        self,
        params: DSV4Params,
        plan: EnginePlan,
        grammars: Grammars,
        hosts: Hosts | None,
        metrics: Metrics,
    ) -> None:
        """Allocates the pools.

        Args:
          params: model parameters.
          plan: sizes of the engine.
          grammars: where requests' grammars are compiled.
          hosts: the processes of the mesh; None is this one alone.
          metrics: counts what is read of tables.
        """
        self.config = plan.config
        self.plan = plan.pools
        self.cache_format = plan.cache_format
        self.draft_tokens = plan.draft_tokens
        self._engine_plan, self._grammars = plan, grammars
        # Other processes of a mesh gather for themselves, in the step.
        tables = params.engram if hosts is None else None
        tables = tables if isinstance(tables, EngramTables) else None
        self._stager = RowStager(tables, metrics)
        self._shards = plan.data_shards
        self._num_slots = self._shards * plan.pools.max_requests
        self._activations = self._prefill_activations = plan.options.activations
        if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
            self._prefill_activations = plan.prefill_activations
        # Decode steps of a GPU have programs of their own. A CPU would compile more of them.
        self.simplifies = plan.is_on_gpu
        self.devices = (
            EngineArrays(params, plan) if hosts is None else HostedArrays(params, plan, hosts)
        )
        self._num_launched = 0
        self._lines = CompileLines(shown=plan.options.progress)
        self._start_settings()
        per_shard = {True: self.plan.num_blocks, False: self.plan.max_requests}
        kinds = family_kinds(self.cache)
        self.unit_bytes = {
            name: UnitBytes(kinds[name], size // (self._shards * per_shard[kinds[name].is_paged]))
            for name, size in family_bytes(self.cache).items()
            if size
        }

    @property
    def cache(self) -> ModelCache:
        """The cache as it is now; the next call donates it."""
        return self.devices.cache

    def rebuild(self) -> None:
        """Empty pools, in place of those that were there."""
        self.devices.rebuild()
        self._start_settings()

    def fitting(self, running: Running) -> Running:
        """Those that one step can serve together; see `CountKeeper`."""
        if not running.penalises:
            return running
        fitting = self.count_keeper.fitting(running)
        return running if len(fitting) == len(running) else Running(fitting, running.known)

    def makes_several_steps(self, running: Running) -> bool:
        """Whether one call can make several steps of these requests; it has one program."""
        if running.penalises or running.is_constrained or running.wants_logprobs.any():
            return False
        return running.is_simple or not self.simplifies

    def apply(self, shards: DataShards, in_flight: Sequence[int] | np.ndarray = ()) -> None:
        """Brings tables, lengths, copies and loads to the devices.

        Args:
          shards: who holds which slot and blocks.
          in_flight: slots of a step that was not counted; the devices know their lengths.
        """
        changes, moves = shards.take_changes()
        if changes is None:
            return
        if len(in_flight):
            flying = np.zeros(self._num_slots, bool)
            flying[in_flight] = True
            firsts = np.arange(self._num_slots) // self.plan.max_requests * self.plan.max_requests
            stays = flying[firsts + np.maximum(changes.slots, 0)]  # -1 changes nothing anyway
            lengths = np.where(stays, np.int32(-1), changes.length_tokens)
            changes = dataclasses.replace(changes, length_tokens=lengths)
        self.devices.change(changes, moves)

    def run(
        self,
        plan: StepPlan,
        running: Running,
        lengths: np.ndarray,
        boundaries: Sequence[Boundary],
        is_fed: np.ndarray | None = None,
        draws_later: bool = False,
    ) -> Callable[[], StepResult] | None:
        """Launches one step, with the masks that were brought last.

        Args:
          plan: what to run.
          running: requests by slot.
          lengths: i32[NS], tokens of each slot before the step; of slots that are fed, at least.
          boundaries: what to keep; none in a plain step, see `save`.
          is_fed: bool[NS], slots whose tokens are what the step before drew; None is no slot.
          draws_later: leaves the draws of a plain step to `run_draws`.

        Returns:
          What waits for the step's result; None if that is left too.
        """
        launch = self._prepare(plan, running, lengths, boundaries, is_fed)
        lines: contextlib.AbstractContextManager[object] = _NO_LINES
        if not self._lines.knows_all:
            lines = self._lines.of_first(plan, launch.keywords, self._all_steps)
        with lines:
            launch()
        if plan.draws_apart and not draws_later:
            self._launch_draw(running, wants_logprobs=launch.keywords["wants_logprobs"])
        return None if draws_later else self._reader_of_last()

    def run_draws(
        self, plan: StepPlan, running: Running, is_alive: np.ndarray
    ) -> Callable[[], StepResult]:
        """Launches the draws of the step whose trunk was launched last, with masks as they are now.

        Args:
          plan: what that runs.
          running: the same requests.
          is_alive: bool[n], rows whose draws somebody waits for.

        Returns:
          What waits for the step's result.

        Raises:
          DrawError: a request's grammar failed; nothing was changed.
        """
        self.bring_masks(itertools.compress(plan.rows, is_alive), running)
        self._launch_draw(running, wants_logprobs=running.logprobs_are_wanted(plan.rows))
        return self._reader_of_last()

    def _launch_draw(self, running: Running, *, wants_logprobs: bool) -> None:
        """The draws of a plain step, with the masks that were brought last."""
        is_simple = self.simplifies and running.draws_simply
        knows_all = self._lines.knows_all
        with _NO_LINES if knows_all else self._lines.of_draws(is_simple=is_simple):
            self.devices.launch_draw(is_simple=is_simple, wants_logprobs=wants_logprobs)

    def _prepare(
        self,
        plan: StepPlan,
        running: Running,
        lengths: np.ndarray,
        boundaries: Sequence[Boundary] = (),
        is_fed: np.ndarray | None = None,
    ) -> functools.partial[None]:
        """`EngineArrays.launch` of a step, which begins to compile it with `only_compiles`."""
        if self._repeated is not None and plan is self._repeated[0]:
            return functools.partial(self.devices.launch, *self._repeated[1], **self._repeated[2])
        num_slots, rows = self._num_slots, plan.rows
        num_tokens = self._shards * plan.size
        token_ids, request_ids = np.zeros(num_tokens, np.int32), np.full(num_tokens, -1, np.int32)
        slots, checked = np.full(num_slots, -1, np.int32), np.ones(num_slots, np.int32)
        following, num_steps = np.full(num_slots, -1, np.int32), np.zeros(num_slots, np.int32)
        shards, own = np.divmod(rows.slots, self.plan.max_requests)
        counts = rows.num_tokens + rows.num_drafts
        # Each shard's tokens begin at its own part of the call.
        before = np.cumsum(counts) - counts
        numbers = np.arange(self._shards)
        of_shard = np.append(before, 0)[np.searchsorted(shards, numbers)]
        starts = before + (plan.size * numbers - of_shard)[shards]
        order = np.arange(counts.sum()) - np.repeat(before, counts)
        places = np.repeat(starts, counts) + order
        request_ids[places] = np.repeat(own, counts)
        # What the step before drew of a row last, and after it its drafts.
        token_ids[places] = np.where(order, FIRST_DRAFT + 1 - order, LAST_DRAWN)
        slots[rows.slots], checked[rows.slots] = own, 1 + rows.num_drafts
        num_steps[rows.slots] = rows.num_steps
        fed = np.zeros(len(rows), bool) if is_fed is None else is_fed[rows.slots]
        for row in np.flatnonzero(~fed).tolist():
            slot, start = int(rows.slots[row]), int(starts[row])
            request, length = running[slot], int(lengths[slot])
            end, num_drafts = length + int(rows.num_tokens[row]), int(rows.num_drafts[row])
            token_ids[start : start + end - length] = request.token_ids[length:end]
            start += end - length
            token_ids[start : start + num_drafts] = request.drafts[:num_drafts]
            if not rows.draws[row]:
                following[slot] = request.token_ids[end]
        step = StepInput(token_ids=token_ids, request_ids=request_ids, request_slots=slots)  # type: ignore[arg-type]
        step = self._stager.stage(step, plan, running, lengths, starts, fed)
        self._bring_settings(running)
        least = None
        if (survivals := self._engine_plan.least_survival) is not None and not plan.is_plain:
            count = max(1, int(rows.draws.sum()))  # what a draft is worth beside so many that draw
            least = np.full(num_slots, survivals[count - 1], np.float32)
        only_decodes = self.simplifies and self._only_decodes(plan)
        kept = {"shards": self._shards, "slots": self.plan.max_requests}
        launch = functools.partial(
            self.devices.launch,
            step,
            snapshot_plan(boundaries, self._max_boundaries(plan.size * plan.num_steps), **kept),
            checked,
            following,
            num_steps if plan.num_steps > 1 else None,
            least,
            upper_places(plan, places, self._shards),
            is_plain=plan.is_plain,
            only_decodes=only_decodes,
            is_simple=only_decodes and running.is_simple and not plan.draws_apart,
            activations=self._prefill_activations if plan.holds_prompts else self._activations,
            wants_logprobs=running.logprobs_are_wanted(plan.rows),
        )
        if plan.is_plain and len(rows) and fed.all() and not running.penalises:
            self._repeated = plan, launch.args, launch.keywords
        return launch

    def bring_masks(self, rows: Iterable[RowPlan], running: Running) -> None:
        """Brings what rows may draw, where grammars say so; `run` takes it from there.

        Raises:
          DrawError: a request's grammar failed; nothing was changed.
        """
        if not self._engine_plan.grammars:
            return
        masks = self.grammar_keeper.masks_of(rows, running) if running.is_constrained else None
        if masks is not None or self._has_masks is not False:
            self.devices.set_masks(masks or self.grammar_keeper.no_masks())
            self._has_masks = masks is not None

    def save(self, boundaries: Sequence[Boundary]) -> None:
        """Keeps boundaries that requests stand at, between steps."""
        slots = np.tile(np.arange(self.plan.max_requests, dtype=np.int32), self._shards)
        step = StepInput(token_ids=slots, request_ids=slots, request_slots=slots)  # type: ignore[arg-type]
        slots = self.plan.max_requests
        plan = snapshot_plan(boundaries, slots, shards=self._shards, slots=slots)
        self.devices.save(step, plan)

    def warmup(self) -> list[tuple[str, float]]:
        """Compiles every program, steps side by side, and runs it idle.

        Returns:
          Names and seconds of each, from when it was begun; those of steps overlap.
        """
        blocks = self._shards * self.plan.num_blocks if self._engine_plan.options.debug else None
        width = self.cache.block_table.shape[1]
        changes = idle_changes(self._num_slots, width, num_blocks=blocks)
        steps = self._all_steps()
        jobs: list[Job] = [
            ("tables", lambda: self.devices.change(changes, False)),
            ("copies and snapshot loads", lambda: self.devices.change(changes, True)),
            ("snapshots between steps", lambda: self.save([])),
        ]
        jobs += [(step.name, functools.partial(self.run_idle, step)) for step in steps]
        jobs.append(("verification", self.devices.scan))
        if self._engine_plan.host_cache_bytes and self.plan.num_snapshots:
            devices = self.devices
            several = isinstance(devices, HostedArrays)
            jobs += page_jobs(devices) if several else copy_jobs(devices)
        if self._engine_plan.grammars:
            jobs.append(("tokenizer of grammars", self._grammars.prepare))
        return self._lines.run_all(self, steps, jobs)

    def _all_steps(self) -> list[IdleStep]:
        has_both = self._activations != self._prefill_activations
        return idle_steps(self._engine_plan, has_both_forms=has_both, simplifies=self.simplifies)

    def _only_decodes(self, plan: StepPlan) -> bool:
        """Whether a step has programs of its own, which no prompt takes."""
        return plan.is_plain or (
            not self._engine_plan.step_sizes.is_plain and not plan.holds_prompts
        )

    def run_idle(self, step: IdleStep, *, only_compiles: bool = False) -> None:
        """Runs a step in which nobody takes part, or compiles its program."""
        nobody, lengths = step.nobody(), np.zeros(self._num_slots, np.int32)
        self.bring_masks(step.plan.rows, nobody)
        launch = self._prepare(step.plan, nobody, lengths)
        if only_compiles:
            launch(only_compiles=True)
            return
        # A program of all draws, and where there is one that of simple draws.
        for is_simple in (False, True)[: 1 + (step.plan.draws_apart and self.simplifies)]:
            launch()
            if step.plan.draws_apart:
                self.devices.launch_draw(is_simple=is_simple, wants_logprobs=not is_simple)
            self._reader_of_last()()

    def _start_settings(self) -> None:
        """The devices have neither settings, counts nor masks."""
        self._repeated: tuple[StepPlan, tuple[Any, ...], dict[str, Any]] | None = None
        self.count_keeper = CountKeeper(
            self._engine_plan.count_entries, slots=self.plan.max_requests, shards=self._shards
        )
        self._has_counts: bool | None = None
        self.grammar_keeper = GrammarKeeper(
            self._grammars, num_slots=self._num_slots, width=self.draft_tokens + 1
        )
        self._has_masks: bool | None = None
        self._known_running: Callable[[], Running | None] = lambda: None
        self._known_sampling: list[SamplingParams] | None = None

    def _bring_settings(self, running: Running) -> None:
        """Settings of all slots, and what was drawn where penalties ask; if they are others."""
        if running is not self._known_running():
            slots = range(self._num_slots)
            rows = [
                sampling_on_device(running[slot]) if slot in running else _IDLE for slot in slots
            ]
            if rows != self._known_sampling:
                # Stop tokens are the host's.
                stacked = stack_sampling(rows, with_stops=False, bias_width=MAX_LOGIT_BIAS)
                self.devices.set_sampling(stacked)
                self._known_sampling = rows
            self._known_running = weakref.ref(running)  # who has ended is not kept by it
        counts = self.count_keeper.counts_of(running) if running.penalises else None
        if counts is not None or self._has_counts is not False:
            self.devices.set_counts(counts or self.count_keeper.no_entries())
            self._has_counts = counts is not None

    def _reader_of_last(self) -> Callable[[], StepResult]:
        """What waits for the result of the step that has just been launched."""
        self._num_launched += 1
        number = self._num_launched

        def read() -> StepResult:
            return StepResult.of(self.devices.read(self._num_launched - number))

        return read

    def _max_boundaries(self, num_tokens: int) -> int:
        """No call of that many tokens can come to more, on a data shard.

        Beside its own it keeps those that the call in flight, and the one before that, might still
        reach with their drafts.
        """
        unread = 2 * self.plan.max_requests * self.draft_tokens * self._engine_plan.steps_per_call
        return self.plan.max_requests + (num_tokens + unread) // self.plan.block_tokens
