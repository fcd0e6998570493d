"""EngineArrays: an engine's cache and snapshots, and the calls on them.

Arguments of a call are NumPy arrays and plain values, and are all that it depends on beside the
arrays that calls before it left on the devices. Where a mesh spans several processes, all of them
make those that are marked `every_process` (`hosted_arrays.py`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv4_jax import compat
from dsv4_jax.allocator.pool_plan import PoolPlan
from dsv4_jax.allocator.verify import scan_cache
from dsv4_jax.cache.empty_cache import init_cache
from dsv4_jax.cache.filled import is_filled_on_host
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.packed_rows import pack_rows, row_bytes, unpack_rows
from dsv4_jax.cache.schema import FormatName
from dsv4_jax.cache.slot_changes import SlotChanges, jit_apply_changes, set_tables
from dsv4_jax.cache.snapshots import SnapshotPlan, SnapshotStore, init_snapshot_store
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.hosts import Hosts
from dsv4_jax.mesh import gather, mesh_sizes, put, read, shardings_of
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.serving.device.host_calls import every_process
from dsv4_jax.serving.device.launcher import Launcher
from dsv4_jax.serving.sizing import EnginePlan
from dsv4_jax.step.decode_steps import jit_plain_decode_steps, jit_serve_rounds
from dsv4_jax.step.draws import DrawnCounts, TokenMasks
from dsv4_jax.step.plain_step import RowLogits, jit_plain_draw, jit_plain_trunk
from dsv4_jax.step.sampling import FullSampling
from dsv4_jax.step.serve_step import jit_save_reached, jit_serve_round, jit_serve_step
from dsv4_jax.step.serve_values import DrawInput, ServeInput, ServeOutput

_COMPILED_AT_ONCE = 4
"""Programs; XLA takes a GB or so of the host's memory for a step of all layers."""


class EngineArrays:
    """Owns the arrays.

    Attributes:
      params: model parameters; `launcher`: launches the programs that take them.
      cache: the cache as it is now; the next call donates it.
      store: the snapshots as they are now; the next call may donate them.
      unread: what the last two steps gave, on its way to the host.
      last: what the last step gave, on the devices.
      when_compiled: is called when the program is compiled that is begun next.
      undrawn: logits of a trunk whose draws have not been launched; None if they have.
    """

    def __init__(self, params: DSV4Params, plan: EnginePlan, hosts: Hosts | None = None) -> None:
        """Allocates the pools.

        Args:
          params: model parameters.
          plan: sizes of the engine.
          hosts: the processes of the mesh; None is this one alone.
        """
        self.params = params
        self.launcher = Launcher(params, config=plan.config)
        self._plan = plan
        self._hosts = hosts
        self._programs = concurrent.futures.ThreadPoolExecutor(_COMPILED_AT_ONCE)
        self.when_compiled: Callable[[], object] = lambda: None
        self._begun: list[concurrent.futures.Future[float]] = []
        self._row_bytes: dict[str, int] = {}
        # On CPUs two programs may run side by side, and wait in each other's collectives for ever.
        devices = [] if plan.mesh is None else list(plan.mesh.devices.flat)
        self._waits = len(devices) > 1 and devices[0].platform == "cpu"
        self._sampling: FullSampling
        self._counts: DrawnCounts
        self._masks: TokenMasks | None = None
        self.last: ServeOutput
        self.undrawn: RowLogits | None
        self._input: tuple[list[bytes], Any]
        self._placed: dict[tuple[Any, ...], Any]
        self.unread: collections.deque[ServeOutput]
        self.cache: ModelCache
        self.store: SnapshotStore
        self._allocate()

    @every_process
    def rebuild(self) -> None:
        """Empty pools, in place of those that were there, whose memory is free first.

        An interrupt in the middle of jax's own Python can leave it in a trace that has ended; that
        is ended here too. Settings, counts and masks have to be set again.
        """
        compat.end_traces()
        for leaf in jax.tree.leaves((self.cache, self.store)):
            if not leaf.is_deleted():
                leaf.delete()
        self._allocate()

    @every_process
    def change(self, changes: SlotChanges, moves: bool) -> None:
        """`apply_changes`; only tables and lengths are changed unless it `moves` arrays."""
        changes = put(changes, self._plan.mesh)
        if moves:
            self.cache = jit_apply_changes(self.cache, self.store, changes)
        else:
            self.cache = set_tables(self.cache, changes, in_place=True)

    @every_process
    def set_sampling(self, sampling: FullSampling) -> None:
        """Settings of each row, of every step from now on."""
        self._sampling = self._bring("sampling", sampling)

    @every_process
    def set_counts(self, counts: DrawnCounts) -> None:
        """What rows have drawn, in every step from now on."""
        self._counts = self._bring("counts", counts)

    @every_process
    def set_masks(self, masks: TokenMasks) -> None:
        """Which tokens rows may draw, in every step from now on."""
        self._masks = self._bring("masks", masks)

    @every_process
    def launch(
        self,
        step_input: StepInput,
        snapshots: SnapshotPlan,
        num_checked: np.ndarray,
        next_token_ids: np.ndarray,
        num_steps: np.ndarray | None = None,
        least_survival: np.ndarray | None = None,
        upper: np.ndarray | None = None,
        *,
        is_plain: bool,
        only_decodes: bool,
        is_simple: bool,
        activations: str,
        wants_logprobs: bool,
        only_compiles: bool = False,
    ) -> None:
        """Launches a step, or several; `read` waits for what they give.

        A plain step is launched as far as its draws, which `launch_draw` does, whatever its size.
        No other launch may come between, nor other settings and counts.

        Args:
          step_input: as in `ServeInput`; `LAST_DRAWN` and so on are what the step before gave.
          snapshots: as in `ServeInput`.
          num_checked: the same.
          next_token_ids: the same.
          num_steps: the same, of a call of several steps; None is one step.
          least_survival: as in `ServeInput`.
          upper: the same.
          is_plain: takes `plain_trunk`, or `plain_decode_steps`; else `serve_step`, or
            `serve_rounds`.
          only_decodes: no row reads its prompt; takes `jit_serve_round` for `jit_serve_step`.
          is_simple: no row asks for more than `Sampling` says.
          activations: as in `decode_step`.
          wants_logprobs: brings log-probabilities from the device; else they are None.
          only_compiles: launches nothing, but begins to compile the program, beside those that were
            begun before; see `finish_compiling`.
        """
        fields: dict[str, Any] = {"num_checked": num_checked, "next_token_ids": next_token_ids}
        fields |= {"step_input": step_input, "snapshots": snapshots, "num_steps": num_steps}
        fields |= {"least_survival": least_survival, "upper": upper}
        brought = self._bring_input(fields)
        static: dict[str, Any] = {"activations": activations}
        is_trunk = is_plain and num_steps is None
        if is_trunk:
            program, arguments = jit_plain_trunk, (self.cache, brought["step_input"], self.last)
        else:
            masks = None if is_simple else self._masks
            serve_input = ServeInput(masks=masks, **self._settings(is_simple), **brought)
            pools, program = (self.cache,), jit_plain_decode_steps
            if not is_plain:
                pools, program = (self.cache, self.store), jit_serve_rounds
                static["draft_tokens"] = self._plan.draft_tokens
            if num_steps is None:
                program = jit_serve_round if only_decodes else jit_serve_step
            else:
                static["num_steps"] = self._plan.steps_per_call
            arguments = *pools, serve_input, self.last
        if only_compiles:
            self._begin_compiling(program, arguments, static)
            return
        if self._hosts is not None:
            self._hosts.waits()
        if is_trunk:
            self.cache, self.undrawn = self.launcher(program, *arguments, **static)
            if self._waits:
                jax.block_until_ready((self.cache, self.undrawn))
            return
        *pools, output = self.launcher(program, *arguments, **static)
        self.cache, self.store = pools if len(pools) == 2 else (*pools, self.store)
        self._show(output, wants_logprobs=wants_logprobs)

    @every_process
    def launch_draw(self, *, is_simple: bool, wants_logprobs: bool) -> None:
        """Launches `plain_draw` of what the trunk gave, with the masks that were set last.

        Args:
          is_simple: as in `launch`, of what masks allow.
          wants_logprobs: as in `launch`.
        """
        if self._hosts is not None:
            self._hosts.waits()
        # Who kept the logits would have the next ones lie elsewhere.
        rows, self.undrawn = self.undrawn, None
        assert rows is not None, "a trunk comes first"
        draws = DrawInput(masks=self._masks, **self._settings(is_simple))
        output = jit_plain_draw(rows, draws, self.last, config=self._plan.config)
        self._show(output, wants_logprobs=wants_logprobs)

    def _settings(self, is_simple: bool) -> dict[str, Any]:
        """Of all draws, or of simple ones."""
        if is_simple:
            return {"sampling": self._sampling.simplified()}
        return {"sampling": self._sampling, "counts": self._counts}

    def _show(self, output: ServeOutput, *, wants_logprobs: bool) -> None:
        """Keeps what a step gave for the next one, and begins to bring a copy to the host."""
        self.last = output
        # The next step writes its own output in the place of this one's.
        shown = _copied(dataclasses.replace(output, logprobs=None, confidence=None))
        if wants_logprobs:
            shown = dataclasses.replace(shown, logprobs=_copied(output.logprobs))
        self.unread.append(gather(shown))
        if self._waits:
            jax.block_until_ready((self.cache, self.unread[-1]))

    @every_process
    def finish_compiling(self) -> list[float]:
        """Waits for the programs that were begun: seconds for each, in order."""
        begun, self._begun = self._begun, []
        return [one.result() for one in begun]

    @every_process
    def read(self, back: int) -> ServeOutput:
        """What a step gave, in NumPy; a failure on the device shows here.

        Args:
          back: 0 is the step that was launched last, 1 the one before it.
        """
        if self._hosts is not None:
            self._hosts.waits()
        return read(self.unread[-1 - back])

    def is_ready(self, back: int) -> bool:
        """Whether `read` would not wait."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(self.unread[-1 - back]))

    @every_process
    def save(self, step_input: StepInput, plan: SnapshotPlan) -> None:
        """`save_reached`."""
        step_input, plan = put(step_input, self._plan.mesh), put(plan, self._plan.mesh)
        self.store = jit_save_reached(self.store, self.cache, step_input, plan)

    def bytes_of_row(self, of: str) -> int:
        """Bytes of a row of "slots", "blocks" or "snapshots"; see `pack_rows`."""
        if of not in self._row_bytes:
            self._row_bytes[of] = row_bytes(self._pools(of))
        return self._row_bytes[of]

    def take_rows(self, of: str, rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """`pack_rows` of "slots", "blocks" or "snapshots", of one process's devices.

        Rows are numbered through all data shards.
        """
        packed, sums = pack_rows(self._pools(of), rows)
        if self._waits:
            jax.block_until_ready((packed, sums))
        return packed, sums

    def put_rows(self, of: str, rows: np.ndarray, packed: np.ndarray | jax.Array) -> None:
        """`unpack_rows`, of the same."""
        self._set_pools(of, unpack_rows(self._pools(of), rows, packed))

    def _set_pools(self, of: str, pools: Any) -> None:
        if of == "snapshots":
            self.store = pools
        else:
            name = "state" if of == "slots" else "paged"
            self.cache = dataclasses.replace(self.cache, **{name: pools})
        if self._waits:
            jax.block_until_ready(pools)

    def _pools(self, of: str) -> Any:
        pools = {"slots": self.cache.state, "blocks": self.cache.paged, "snapshots": self.store}
        return pools[of]

    @every_process
    def scan(self) -> dict[str, Any]:
        """`scan_cache`."""
        return scan_cache(self.cache, self.store)

    def _allocate(self) -> None:
        plan = self._plan
        self.cache, self.store, self.last = _empty_pools(
            plan.config,
            plan.pools,
            plan.cache_format,
            plan.draft_tokens,
            plan.steps_per_call,
            plan.mesh,
            plan.options.split_cache,
        )()
        self.unread, self._input, self._placed = collections.deque(maxlen=2), ([], None), {}
        self.undrawn = None

    def _begin_compiling(
        self, program: Any, arguments: tuple[Any, ...], static: Mapping[str, Any]
    ) -> None:
        start = time.perf_counter()
        finish = self.launcher.begin(program, *arguments, **static)
        tell = self.when_compiled

        def compile_it() -> float:
            finish()
            tell()
            return time.perf_counter() - start

        self._begun.append(self._programs.submit(compile_it))

    def _bring_input[T](self, value: T) -> T:
        """A step's own input, which is that of the step before while all rows decode.

        Then it is on the devices already. Bringing it anew takes the host as long as planning.
        """
        contents = [leaf.tobytes() for leaf in jax.tree.leaves(value)]  # i32[n] each
        if contents != self._input[0]:
            self._input = contents, self._bring("input", value)
        return self._input[1]

    def _bring[T](self, name: str, value: T) -> T:
        """An argument of steps on the devices, where the last one of its name and sizes was.

        XLA makes a CUDA graph of a step, and rewrites it where an array is elsewhere than it was.
        """
        value = put(value, self._plan.mesh)
        key = name, *(leaf.shape for leaf in jax.tree.leaves(value))
        old = self._placed.pop(key, None) or _copied(value)
        value = self._placed[key] = _in_place_of(old, value)
        return value


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

_in_place_of = jax.jit(lambda old, new: new, donate_argnums=0, keep_unused=True)
"""New values in the memory of old ones."""


@functools.lru_cache(maxsize=64)
def _empty_pools(
    config: DSV4Config,
    pools: PoolPlan,
    cache_format: FormatName,
    draft_tokens: int,
    steps_per_call: int,
    mesh: Mesh | None,
    split_cache: bool,
) -> Callable[[], tuple[ModelCache, SnapshotStore, ServeOutput]]:
    """What makes pools of these sizes on all data shards: one program, or NumPy for one CPU."""
    shards = 1 if mesh is None else mesh_sizes(mesh)[0]

    def build() -> tuple[ModelCache, SnapshotStore, ServeOutput]:
        cache = init_cache(
            config,
            max_requests=pools.max_requests * shards,
            max_context_tokens=pools.max_context_tokens,
            cache_format=cache_format,
            num_blocks=pools.num_blocks * shards,
            split_cache=split_cache,
        )
        rows = pools.max_requests * shards
        last = ServeOutput.empty(
            rows,
            draft_tokens,
            config.vocab_size,
            num_steps=steps_per_call,
            has_confidence=config.dspark is not None,
        )
        return cache, init_snapshot_store(cache, pools.num_snapshots * shards), last

    if mesh is None:
        return build if is_filled_on_host() else jax.jit(build)
    where = tuple(shardings_of(value, mesh) for value in jax.eval_shape(build))
    return jax.jit(build, out_shardings=where)
