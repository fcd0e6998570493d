"""One point of the benchmark of drafts: its sizes, its caches, and what its programs are given.

A round is a step that checks the drafts of each request and guesses the next ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dsv4_jax.bench.fill import filled_cache
from dsv4_jax.cache.empty_cache import cache_shapes
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.snapshots import SnapshotPlan, SnapshotStore, init_snapshot_store
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.sampling import make_sampling
from dsv4_jax.step.serve_values import FIRST_DRAFT, LAST_DRAWN, ServeInput, ServeOutput

_MAX_ROUNDS = 24  # in a row; lengths start that many rounds below the context
_STAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCase:
    """One point of the benchmark, on one device; `MeshRoundCase` is on several.

    Attributes:
      batch: B, requests of a step.
      context: tokens of each request.
      draft_tokens: k, drafts that a round checks of each request.
      cache_format: name of the storage format.
      activations: what multiplies quantised weights.
      limit_s: seconds for the measurements of one part, without compiling.
      routing: the law by which tokens pick experts, of `routing_laws.LAWS`.
    """

    batch: int
    context: int
    draft_tokens: int
    cache_format: str
    activations: str = DEFAULT_ACTIVATIONS
    limit_s: float = 20.0
    routing: str = "uniform"

    @property
    def mesh_sizes(self) -> tuple[int, int]:
        """Data shards, and devices of each."""
        return 1, 1

    @property
    def local_devices(self) -> int:
        """Devices of this process that run it."""
        return 1

    @property
    def rows(self) -> np.ndarray:
        """i32[B], number of each request on its data shard; it is row and slot."""
        shard = self.batch // self.mesh_sizes[0]
        return np.arange(self.batch, dtype=np.int32) % shard

    def sizes(self) -> dict[str, Any]:
        """What a row tells of the point."""
        names = [field.name for field in dataclasses.fields(RoundCase) if field.name != "limit_s"]
        sizes = {name: getattr(self, name) for name in names}
        data, model = self.mesh_sizes
        return sizes if data * model == 1 else sizes | {"data": data, "model": model}

    def placed[T](self, tree: T) -> T:
        """Arrays of all requests, where the programs want them."""
        return tree

    def device_params(self, params: DSV4Params) -> DSV4Params:
        """The shapes of what a device holds of parameters, or of their shapes."""
        return params

    @property
    def row_tokens(self) -> int:
        """Tokens of a request in a round: the last drawn one and its drafts."""
        return self.draft_tokens + 1

    @property
    def rounds(self) -> int:
        """The most rounds in a row, which may keep all of their tokens."""
        return max(1, min(_MAX_ROUNDS, self.context // (4 * self.row_tokens)))

    @property
    def lengths(self) -> np.ndarray:
        """i32[B], tokens of each request before the first round."""
        room = self.rounds * self.row_tokens
        return (self.context - room - self.rows % 4).clip(0).astype(np.int32)

    def cache_shapes(self, config: DSV4Config) -> ModelCache:
        """What `fill` makes, as shapes."""
        return cache_shapes(
            config,
            max_requests=self.batch,
            max_context_tokens=self.context,
            cache_format=self.cache_format,
        )

    def fill(self, config: DSV4Config) -> ModelCache:
        """A cache of that model, with or without its draft, full up to `lengths`."""
        cache = filled_cache(
            config,
            length_tokens=self.lengths,
            max_context_tokens=self.context,
            cache_format=self.cache_format,
        )
        return jax.block_until_ready(cache)

    def store(self, cache: ModelCache) -> SnapshotStore:
        """A store that a round is given, and keeps nothing in."""
        return init_snapshot_store(cache, self.mesh_sizes[0])

    def store_shapes(self, cache: ModelCache) -> SnapshotStore:
        """What `store` makes, as shapes, of those of a cache."""
        return jax.eval_shape(self.store, cache)

    def rewind(self, cache: ModelCache) -> ModelCache:
        """Restores the lengths, so that no measurement exceeds the context."""
        lengths = self.placed(jnp.asarray(self.lengths))
        return dataclasses.replace(cache, length_tokens=lengths)

    def step_input(self, tokens: np.ndarray) -> ServeInput:
        """The input of a step that runs i32[B, n] and draws after each token, greedily."""
        batch, count = tokens.shape
        rows = jnp.asarray(self.rows)
        given = ServeInput(
            step_input=StepInput(
                token_ids=jnp.asarray(tokens.reshape(-1), jnp.int32),
                request_ids=jnp.repeat(rows, count),
                request_slots=rows,
            ),
            num_checked=jnp.full(batch, count, jnp.int32),
            next_token_ids=jnp.full(batch, -1, jnp.int32),
            sampling=make_sampling(batch, temperature=0.0),
            snapshots=SnapshotPlan(
                rows=rows, ends=jnp.zeros_like(rows), places=jnp.full(batch, -1, jnp.int32)
            ),
            least_survival=jnp.zeros(batch) if count > 1 else None,  # all drafts are checked
        )
        return self.placed(given)

    def random_input(self, config: DSV4Config, count: int) -> ServeInput:
        """Of a step of so many random tokens of each request, which pick experts at random."""
        rng = np.random.default_rng(self.batch)
        return self.step_input(rng.integers(0, config.vocab_size, (self.batch, count)))

    def plain_input(self) -> ServeInput:
        """Of a plain decode step: the token that the step before drew."""
        return self.step_input(np.full((self.batch, 1), LAST_DRAWN))

    def round_input(self) -> ServeInput:
        """Of a round: what the round before drew and guessed."""
        drafts = FIRST_DRAFT - np.arange(self.draft_tokens)
        row = np.concatenate([[LAST_DRAWN], drafts])
        return self.step_input(np.tile(row, (self.batch, 1)))

    def alone_input(self) -> ServeInput:
        """Of a round without drafts: what the round before drew, and padding in their places."""
        given = self.round_input()
        order = jnp.arange(self.batch * self.row_tokens) % self.row_tokens
        step = dataclasses.replace(
            given.step_input, request_ids=jnp.where(order > 0, -1, given.step_input.request_ids)
        )
        ones = jnp.ones(self.batch, jnp.int32)
        return self.placed(dataclasses.replace(given, step_input=step, num_checked=ones))

    def first_tokens(self, config: DSV4Config) -> np.ndarray:
        """i32[B], random."""
        rng = np.random.default_rng(self.batch)
        return rng.integers(0, config.vocab_size, self.batch).astype(np.int32)

    def output(self, config: DSV4Config, draft_tokens: int) -> ServeOutput:
        """What the first step is given as that of the step before: random tokens were drawn."""
        empty = ServeOutput.empty(
            self.batch, draft_tokens, config.vocab_size, has_confidence=draft_tokens > 0
        )
        rng = np.random.default_rng(self.batch + 1)
        drafts = rng.integers(0, config.vocab_size, (self.batch, draft_tokens))
        drawn = jnp.asarray(self.first_tokens(config))[:, None]
        given = ServeOutput.of(
            jnp.pad(drawn, ((0, 0), (0, draft_tokens)), constant_values=-1),
            jnp.ones(self.batch, jnp.int32),
            jnp.asarray(drafts, jnp.int32),
            empty.logprobs,
            confidence=empty.confidence,
        )
        return self.placed(given)


def usual_stages(config: DSV4Config) -> DSparkConfig:
    """Stages like those of the releases, for a trunk that has none: its last layers are seen."""
    return DSparkConfig(
        block_size=5,
        markov_rank=min(256, config.hidden_size),
        noise_token_id=config.vocab_size - 1,
        target_layers=tuple(range(max(0, config.num_layers - _STAGES), config.num_layers)),
        num_stages=_STAGES,
    )


def taught_inputs(
    case: RoundCase, tokens: np.ndarray, kept: int, vocab_size: int
) -> list[ServeInput]:
    """Inputs of rounds that keep so many drafts each, one after the other.

    Args:
      case: the point.
      tokens: i32[B, n], what each request says from its first token of the first round on.
      kept: drafts that are right; those after them are not.
      vocab_size: V.
    """
    inputs = []
    for round_idx in range(case.rounds):
        start = round_idx * (kept + 1)
        row = tokens[:, start : start + case.row_tokens].copy()
        row[:, kept + 1 :] = (row[:, kept + 1 :] + 1) % vocab_size
        inputs.append(case.step_input(row))
    return inputs


def tokens_needed(case: RoundCase) -> int:
    """Tokens of each request that `taught_inputs` takes."""
    return case.rounds * case.row_tokens


def shapes_of[T](tree: T) -> T:
    """The shapes and dtypes of a tree of arrays, and where on a mesh they lie."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        where = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(shape, tree)


@functools.partial(jax.jit)
def copied[T](tree: T) -> T:
    """The same in arrays of its own."""
    return jax.tree.map(jnp.copy, tree)


def mean_kept(kept: Sequence[np.ndarray]) -> float:
    """Tokens that a round keeps of a request, over rounds and requests."""
    return float(np.mean(np.stack(kept)))
