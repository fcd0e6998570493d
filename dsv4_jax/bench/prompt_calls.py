"""The calls that read one prompt, and the programs that run them.

A model all of whose layers read all tokens reads it by `prefill`. Of a model whose upper layers a
prompt needs for its last tokens alone (`config/upper_layers.py`) it is the engine's step, in two
programs: one whose upper layers rest, and one that all layers run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.bench.mesh_step import on_every_shard, on_shards
from dsv4_jax.bench.parts import random_rows
from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.cache.empty_cache import init_cache
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.snapshots import SnapshotPlan, SnapshotStore, init_snapshot_store
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.upper_layers import upper_layers, upper_size
from dsv4_jax.mesh import mesh_sizes
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.prefill import jit_prefill
from dsv4_jax.step.sampling import make_sampling
from dsv4_jax.step.serve_step import jit_serve_step
from dsv4_jax.step.serve_values import ServeInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """How many calls read a prompt, and in how many of them upper layers rest.

    Attributes:
      num_layers: of the model.
      first_upper: the first layer that rests, which makes entries of all tokens; `num_layers` of a
        model none of whose layers does.
      num_tokens: of the prompt.
      chunk_tokens: of a call.
      resting: the first so many calls, in which upper layers rest.
      upper_tokens: U, the rows that upper layers run in such a call.
    """

    num_layers: int
    first_upper: int
    num_tokens: int
    chunk_tokens: int
    resting: int
    upper_tokens: int

    @classmethod
    def of(
        cls, config: DSV4Config, *, num_tokens: int, chunk_tokens: int, rests: bool = True
    ) -> PromptPlan:
        """As an engine whose steps are of one size plans a request without a known prefix.

        All layers run from `look_back` tokens before the last block boundary on.

        Args:
          config: the model.
          num_tokens: of the prompt.
          chunk_tokens: of a call; divides `num_tokens`.
          rests: False lets all layers run for all tokens.
        """
        upper, resting, room = upper_layers(config), 0, 0
        if upper is not None and rests and (room := upper_size(chunk_tokens, 1)):
            last = (num_tokens - 1) // config.block_tokens * config.block_tokens
            resting = max(last - upper.look_back, 0) // chunk_tokens
        return cls(
            num_layers=config.num_layers,
            first_upper=config.num_layers if upper is None else upper.first,
            num_tokens=num_tokens,
            chunk_tokens=chunk_tokens,
            resting=resting,
            upper_tokens=room if resting else 0,
        )

    @property
    def awake_tokens(self) -> int:
        """Tokens of the prompt that all layers run."""
        return self.num_tokens - self.resting * self.chunk_tokens

    @property
    def layer_rows(self) -> int:
        """Rows of a call times the layers that run them, of all calls, with U of resting ones."""
        upper = self.num_layers - self.first_upper
        rested = self.resting * self.upper_tokens
        return self.num_tokens * self.first_upper + (self.awake_tokens + rested) * upper

    def row(self) -> dict[str, Any]:
        """What a benchmark reports of it."""
        return {
            "layer_rows": self.layer_rows,
            "all_layer_rows": self.num_tokens * self.num_layers,
            "resting_calls": self.resting,
            "upper_tokens": self.upper_tokens,
        }


type _State = tuple[ModelCache, SnapshotStore | None]
type _Call = tuple[bool, StepInput | ServeInput]  # whether upper layers rest in it, and its input


class PromptCalls:
    """A cache, the inputs of a prompt's calls on one device or a mesh, and their programs."""

    def __init__(
        self, config: DSV4Config, plan: PromptPlan, *, cache_format: str, mesh: Mesh | None
    ) -> None:
        """Makes the cache and the inputs; every data shard of a mesh has a prompt of its own.

        Args:
          config: the model, without a draft.
          plan: the calls.
          cache_format: name of the storage format.
          mesh: the devices; None is one.
        """
        self.config, self.plan, self.mesh = config, plan, mesh
        self.is_engines = plan.first_upper < config.num_layers
        sizes = {"max_context_tokens": plan.num_tokens, "cache_format": cache_format}
        cache = init_cache(config, max_requests=1, **sizes)
        rng = np.random.default_rng(0)
        shards = 1 if mesh is None else mesh_sizes(mesh)[0]
        prompts = rng.integers(0, config.vocab_size, (shards, plan.num_tokens))
        rows = random_rows(config, plan.chunk_tokens, rng)
        shared = None if rows is None else self._placed(rows)  # of all calls, whatever their tokens
        self.inputs = []
        for number in range(plan.num_tokens // plan.chunk_tokens):
            calls = [self._call(tokens, number) for tokens in prompts]
            one = calls[0] if mesh is None else on_shards(calls, mesh)
            if shared is not None:
                whole = one.step_input if isinstance(one, ServeInput) else one
                whole = dataclasses.replace(whole, engram=shared)
                one = (
                    dataclasses.replace(one, step_input=whole)
                    if isinstance(one, ServeInput)
                    else whole
                )
            self.inputs.append(one)
        cache = self._placed(cache)
        store = init_snapshot_store(cache, shards) if self.is_engines else None
        self.state: _State = cache, store
        self._start = cache.length_tokens + 0
        self.programs: dict[bool, Program] = {}

    def _placed[T](self, tree: T) -> T:
        return tree if self.mesh is None else on_every_shard(tree, self.mesh)

    def _call(self, tokens: np.ndarray, number: int) -> StepInput | ServeInput:
        """The input of a call of a prompt, on one device and without rows of Engram tables."""
        size = self.plan.chunk_tokens
        start, ended = number * size, (number + 1) * size
        step = StepInput(
            token_ids=jnp.asarray(tokens[start:ended], jnp.int32),
            request_ids=jnp.zeros(size, jnp.int32),
            request_slots=jnp.zeros(1, jnp.int32),
        )
        follows = int(tokens[ended]) if ended < self.plan.num_tokens else -1
        return self._serve_input(step, number, follows)

    def _serve_input(self, step: StepInput, number: int, follows: int) -> StepInput | ServeInput:
        """The call as its program takes it; -1 follows the last token of the prompt."""
        if not self.is_engines:
            return step
        none = jnp.full(1, -1, jnp.int32)
        upper = None
        if number < self.plan.resting:
            upper = jnp.full(self.plan.upper_tokens, -1, jnp.int32)
        return ServeInput(
            step_input=step,
            num_checked=jnp.ones(1, jnp.int32),
            next_token_ids=jnp.full(1, follows, jnp.int32),
            sampling=make_sampling(1),
            snapshots=SnapshotPlan(rows=none, ends=none, places=none),
            upper=upper,
        )

    def rests(self, number: int) -> bool:
        """Whether upper layers rest in a call."""
        return number < self.plan.resting

    def compile(self, params: DSV4Params, activations: str) -> dict[str, Any]:
        """Compiles the programs side by side, and says what a row tells of them.

        What is of the one in which upper layers rest begins with `rest_`.
        """
        cache, store = self.state
        static: dict[str, Any] = {"config": self.config, "activations": activations}
        if self.is_engines:
            static["draft_tokens"] = 0

        def compiled(one: StepInput | ServeInput) -> Program:
            if self.is_engines:
                return compile_program(jit_serve_step, params, cache, store, one, **static)
            return compile_program(jit_prefill, params, cache, one, **static)

        firsts = {self.rests(number): one for number, one in reversed([*enumerate(self.inputs)])}
        with concurrent.futures.ThreadPoolExecutor(len(firsts)) as pool:
            self.programs = dict(zip(firsts, pool.map(compiled, firsts.values()), strict=True))
        found: dict[str, Any] = {}
        for rests, program in self.programs.items():
            found |= program.row("rest_" if rests else "")
        return found

    def run(self, params: DSV4Params, state: _State) -> _State:
        """Reads the prompt; donates the state."""
        return self._run(params, state, [(self.rests(n), one) for n, one in enumerate(self.inputs)])

    def _run(self, params: DSV4Params, state: _State, calls: Iterable[_Call]) -> _State:
        cache, store = state
        for rests, one in calls:
            program = self.programs[rests].run
            if self.is_engines:
                cache, store, _ = program(params, cache, store, one)
            else:
                cache, _ = program(params, cache, one)
        return cache, store

    def run_firsts(self, params: DSV4Params, state: _State) -> _State:
        """Calls each program twice for its first tokens; donates the state.

        What is slow the first time is then over, and no whole prompt was read for it.
        """
        for rests in self.programs:
            first = next(one for n, one in enumerate(self.inputs) if self.rests(n) == rests)
            for _ in range(2):  # sets up libraries, then graphs of arrays where they stay
                state = self._run(params, self.rewind(state), [(rests, first)])
        return state

    def rewind(self, state: _State) -> _State:
        """Sets the length to 0; the rings and states of the last prompt are then not read."""
        cache, store = state
        return dataclasses.replace(cache, length_tokens=jnp.copy(self._start)), store

    @property
    def longest(self) -> Any:
        """The compiled program of most calls, whose text names a profile's kernels."""
        return self.programs[self.plan.resting * 2 > len(self.inputs)].run
