"""One point of the decode benchmark: its sizes, and the cache and inputs that its parts share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dsv4_jax.bench import roofline
from dsv4_jax.bench.engram_reads import time_reads
from dsv4_jax.bench.fill import filled_cache
from dsv4_jax.bench.parts import one_token_each
from dsv4_jax.bench.profile import profile_launches
from dsv4_jax.bench.program import compile_program
from dsv4_jax.bench.timing import Timing, dispatch, time_calls
from dsv4_jax.cache.empty_cache import cache_shapes
from dsv4_jax.cache.model_cache import ModelCache, tree_bytes
from dsv4_jax.cache.schema import blocks_of
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.engram import EngramRows, EngramTables, place_tables
from dsv4_jax.engram.placed_tables import PINNED
from dsv4_jax.mesh import find_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.decode import jit_decode_step

PARTS = ("step", "cache", "layers")
"""Those that are timed if nothing else is asked for."""
ALL_PARTS = (*PARTS, "loop")
_MAX_CALLS = 48  # of one measurement; lengths start that many tokens below the context
_PROFILED_CALLS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One point of the benchmark.

    Attributes:
      batch: B, requests decoded at once.
      context: tokens of each request.
      bucket_context: longest context that the cache has room for; it determines the shapes.
      cache_format: name of the storage format.
      activations: what multiplies quantised weights.
      parts: the timed parts, out of `ALL_PARTS`.
      recompile: whether the step is compiled twice, to time the persistent compilation cache.
      profile: whether the step and the cache part are also profiled, launch by launch.
      compile_only: whether programs are only compiled, into the persistent compilation cache.
      limit_s: seconds for the measurements of one part, without compiling.
      routings: laws by which tokens pick experts, of `routing_laws.LAWS`; the step is timed with
        each, and all other parts with the first.
      block_parts: devices that a request's blocks are dealt over; the cache is then that of one.
      tables: Engram tables in host memory; steps are also timed that wait for rows of them, and
        steps that read them by themselves. None times steps alone, with rows on the devices.
    """

    batch: int
    context: int
    bucket_context: int
    cache_format: str
    activations: str = DEFAULT_ACTIVATIONS
    parts: tuple[str, ...] = PARTS
    recompile: bool = True
    profile: bool = False
    compile_only: bool = False
    limit_s: float = 20.0
    routings: tuple[str, ...] = ("uniform",)
    block_parts: int = 1
    tables: EngramTables | None = None


_in_place_of = jax.jit(lambda old, new: new, donate_argnums=0, keep_unused=True)
"""New values in the memory of old ones."""


class CaseSetup:
    """The shapes, inputs and bytes of a case, for all of its parts."""

    def __init__(self, config: DSV4Config, case: DecodeCase) -> None:
        """Computes sizes; no cache is allocated before `fill`."""
        self.config, self.case = config, case
        self.sizes = {"max_context_tokens": case.bucket_context, "cache_format": case.cache_format}
        self.shapes = self._shapes()
        self.cache_bytes = tree_bytes(self.shapes)
        self.calls = max(1, min(_MAX_CALLS, case.context // 4))
        self.lengths = (case.context - self.calls - np.arange(case.batch) % 4).clip(0)
        self.step_input = one_token_each(config, case.batch)
        self.work = roofline.step_cache_work(
            config, batch=case.batch, context=case.context, cache_format=case.cache_format
        )

    def _shapes(self) -> ModelCache:
        """What `fill` makes, as shapes."""
        case, config = self.case, self.config
        width, parts = blocks_of(config, case.bucket_context), case.block_parts
        shapes = cache_shapes(
            config,
            max_requests=case.batch,
            max_context_tokens=-(-width // parts) * config.block_tokens,
            cache_format=case.cache_format,
        )
        table = jax.ShapeDtypeStruct((case.batch, width), jnp.int32)
        return dataclasses.replace(shapes, block_table=table, split_cache=parts > 1)

    def fill(self) -> ModelCache:
        """Makes a cache that is `calls` tokens short of the context, or only its shapes."""
        if self.case.compile_only:
            return self.shapes
        parts = self.case.block_parts
        cache = filled_cache(
            self.config, length_tokens=self.lengths, block_parts=parts, **self.sizes
        )
        return jax.block_until_ready(cache)

    def measure(
        self,
        call: Callable[[Any], Any],
        state: Any,
        *,
        rewind: Callable[[Any], Any] | None = None,
    ) -> tuple[Timing, Any]:
        """Times `state = call(state)`, where a state is (cache, rest); returns the last one too.

        `rewind` restores the lengths of the cache; None is the method.
        """
        rewind, limit_s = rewind or self.rewind, self.case.limit_s
        return time_calls(call, state, rewind=rewind, max_calls=self.calls, limit_s=limit_s)

    def rewind(self, state: tuple[ModelCache, Any]) -> tuple[ModelCache, Any]:
        """Restores the lengths of the cache, so that no measurement exceeds the context."""
        cache, rest = state
        lengths = jnp.asarray(self.lengths, jnp.int32)
        return dataclasses.replace(cache, length_tokens=lengths), rest

    def time_reads(
        self,
        step: Callable[..., tuple[ModelCache, jax.Array]],
        params: Any,
        cache: ModelCache,
        step_input: StepInput,
        *,
        batch: int,
        rewind: Callable[[Any], Any] | None = None,
    ) -> dict[str, Any]:
        """`engram_reads.time_reads` of a compiled step; donates the cache.

        Args:
          step: the program.
          params: parameters.
          cache: a cache of `fill`, on the devices of the step.
          step_input: the step's input, whose rows say where those of a table belong.
          batch: requests of all data shards.
          rewind: as of `measure`.
        """
        rewind, tables, sample = rewind or self.rewind, self.case.tables, step_input.engram
        assert tables is not None
        assert sample is not None
        placed = jax.tree.map(jnp.copy, sample)
        step_input = dataclasses.replace(step_input, engram=None)

        def put(rows: EngramRows) -> EngramRows:
            # XLA rewrites a step's graph where an array is elsewhere than it was; an engine brings
            # rows to where the last ones were, too.
            nonlocal placed
            new = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), rows, placed)
            placed = _in_place_of(placed, new)
            return placed

        def run(state: Any, rows: EngramRows) -> Any:
            found, _ = step(params, state[0], dataclasses.replace(step_input, engram=rows))
            return found, None

        sizes = {"batch": batch, "calls": self.calls, "limit_s": self.case.limit_s}
        return time_reads(tables, (cache, None), put=put, step=run, rewind=rewind, **sizes)[0]

    def time_pinned(
        self,
        params: Any,
        cache: ModelCache,
        step_input: StepInput,
        *,
        rewind: Callable[[Any], Any] | None = None,
    ) -> dict[str, Any]:
        """Compiles and times a step that reads rows of pinned tables itself; donates the cache.

        Args:
          params: parameters, on the devices of the step.
          cache: as of `time_reads`.
          step_input: the step's input, whose rows are left out.
          rewind: as of `measure`.
        """
        assert self.case.tables is not None
        tables = place_tables(self.case.tables, PINNED)
        if (mesh := find_mesh(params)) is not None:
            tables = jax.device_put(tables, NamedSharding(mesh, PartitionSpec()))
        params = dataclasses.replace(params, engram=tables)
        step_input = dataclasses.replace(step_input, engram=None)
        static = {"config": self.config, "activations": self.case.activations}
        static["options"] = decode_options()
        program = compile_program(jit_decode_step, params, cache, step_input, **static)
        call = decode_call(program.run, params, step_input)
        return self.measure(call, (cache, None), rewind=rewind)[0].row("engram_pinned")

    def profile(
        self,
        compiled: Any,
        call: Callable[[Any], Any],
        state: Any,
        *,
        rewind: Callable[[Any], Any] | None = None,
        devices: int = 1,
    ) -> list[dict[str, Any]]:
        """Lists the launches of a call and their times; donates the state."""
        calls, state = min(_PROFILED_CALLS, self.calls), (rewind or self.rewind)(state)
        return profile_launches(
            compiled, lambda: dispatch(call, state, calls), calls=calls, devices=devices
        )


def decode_call(
    step: Callable[..., tuple[ModelCache, jax.Array]], params: Any, step_input: StepInput
) -> Callable[[Any], Any]:
    """`state = call(state)` of a compiled decode step; a state is (cache, None).

    It lets go of a step's logits before the next one, as a loop does that keeps tokens. Where they
    are still held, the next ones lie elsewhere, and XLA writes all of its CUDA graphs anew.
    """

    def call(state: tuple[ModelCache, None]) -> tuple[ModelCache, None]:
        cache, _ = step(params, state[0], step_input)
        return cache, None

    return call
