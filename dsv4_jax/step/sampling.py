"""Logits to tokens: greedy, temperature, top-k, top-p, one seed per request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks

MAX_STOP_TOKENS = 1024
MAX_STOP_TEXTS = 64
MAX_STOP_CHARS = 1024
"""The longest stop text: every drawn token looks that far back."""

_MAX_ROWS = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request draws its tokens, and what ends it.

    Numbers may be NumPy scalars, lists any iterables; what is kept are plain numbers and tuples.

    Attributes:
      max_new_tokens: most tokens to draw, 1 to 2**31 - 1.
      temperature: a finite f32; 0 takes the most likely token.
      top_k: draws among that many most likely tokens, 0 to 2**31 - 1; 0 is no limit.
      top_p: draws among the most likely tokens that together have that probability.
      seed: seed of the noise, any integer; kept modulo 2**32.
      stop_token_ids: tokens that end the answer, at most 1,024; None is the config's, () is none at
        all.
      stop_texts: texts that end the answer, at most 64 of up to 1,024 characters; they need a
        tokenizer.

    Raises:
      ValueError: a setting is of another type (a bool is no number, an array neither) or out of
        range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: Sequence[int] | None = None
    stop_texts: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Every setting becomes a checked, plain, immutable value."""
        temperature = checks.number("temperature", self.temperature, 0, rule="0 (greedy) or more")
        if 0 < temperature < checks.FLOAT32_TINY:
            rule = f"0 (greedy) or at least {checks.FLOAT32_TINY:.4g} (float32)"
            checks.refuse("temperature", rule, self.temperature)
        plain = {
            "max_new_tokens": checks.integer("max_new_tokens", self.max_new_tokens, 1),
            "temperature": temperature,
            "top_k": checks.integer("top_k", self.top_k, 0, rule="0 (no limit) or more"),
            "top_p": checks.number(
                "top_p", self.top_p, 0, 1, above=True, rule="above 0 and at most 1"
            ),
            "seed": checks.integer("seed", self.seed, high=None) % 2**32,
            "stop_texts": _stop_texts(self.stop_texts),
        }
        if self.stop_token_ids is not None:
            plain["stop_token_ids"] = tuple(
                checks.integer("stop_token_ids", token, 0)
                for token in checks.sequence(
                    "stop_token_ids", self.stop_token_ids, of="token ids", limit=MAX_STOP_TOKENS
                )
            )
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def _stop_texts(texts: Any) -> tuple[str, ...]:
    rule = "a list of texts, none empty"
    if isinstance(texts, str):
        checks.refuse("stop_texts", rule, texts)
    items = checks.sequence("stop_texts", texts, of="texts", limit=MAX_STOP_TEXTS)
    if not all(isinstance(item, str) and item for item in items):
        checks.refuse("stop_texts", rule, items)
    return tuple(checks.text("stop_texts", item, max_chars=MAX_STOP_CHARS) for item in items)


class DrawFields(TypedDict, total=False):
    """Keyword arguments that stand for fields of `SamplingParams`; `seed` may be one per row."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | Sequence[int]
    stop_token_ids: Sequence[int] | None


class SamplingFields(DrawFields, total=False):
    """The same, with what only the host can obey."""

    max_new_tokens: int
    stop_texts: Sequence[str]


def sampling_of_rows(
    num_rows: int,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    row_name: str = "row",
    **fields: Unpack[SamplingFields],
) -> list[SamplingParams]:
    """Settings of each row.

    Args:
      num_rows: rows, or prompts.
      sampling: settings of all rows or of each; None is the defaults.
      row_name: what a row is called in an error.
      **fields: fields that replace those of `sampling`; `seed` may be one per row.

    Raises:
      ValueError: a setting is out of range, or there are not `num_rows` of them.
      TypeError: there is no such field.
    """
    rows = _rows_of(num_rows, sampling, row_name)
    seeds: list[Any] = []
    seed = fields.get("seed")
    if isinstance(seed, Iterable) and not isinstance(seed, str) and getattr(seed, "ndim", 1):
        del fields["seed"]
        seeds = list(checks.sequence("seed", seed, of="seeds", limit=_MAX_ROWS))
        if len(seeds) != num_rows:
            raise ValueError(
                f"seed must be one, or one per {row_name} ({num_rows}), got {len(seeds)}: "
                f"{checks.shown(seeds)}"
            )
    checked = SamplingParams(**fields)  # type: ignore[arg-type]
    changes = [{name: getattr(checked, name) for name in fields} for _ in rows]
    for change, one in zip(changes, seeds, strict=False):
        change["seed"] = one
    return [dataclasses.replace(row, **change) for row, change in zip(rows, changes, strict=True)]


def _rows_of(num_rows: int, sampling: Any, row_name: str) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * num_rows
    rows = checks.sequence("sampling", sampling, of="SamplingParams", limit=_MAX_ROWS)
    if len(rows) != num_rows:
        raise ValueError(
            f"sampling must be one, or one per {row_name} ({num_rows}), got {len(rows)}: "
            f"{checks.shown(sampling)}"
        )
    return [checks.instance("sampling", row, SamplingParams) for row in rows]


@flax.struct.dataclass(kw_only=True)
class Sampling:
    """The `SamplingParams` of a call's rows, as a step takes them.

    Attributes:
      temperature: f32[B]; 0 takes the most likely token.
      top_k: i32[B], draws among that many most likely tokens; 0 is no limit.
      top_p: f32[B], draws among the most likely tokens that together have that probability.
      seed: u32[B]; the noise of a draw follows from it and the drawn token's position alone.
      stop_token_ids: i32[B, n], padded with -1.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    stop_token_ids: jax.Array


def make_sampling(
    num_rows: int,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    **fields: Unpack[DrawFields],
) -> Sampling:
    """Settings of a call's rows, for a loop of one's own.

    Args:
      num_rows: B, 1 to 65,536.
      sampling: settings of all rows or of each; None is the defaults. `max_new_tokens` is up to
        the loop, and there is no config here: `stop_token_ids` of None is no stop token.
      **fields: fields that replace those of `sampling`; `seed` may be one per row.

    Raises:
      ValueError: a setting is out of range, or a step cannot obey it.
    """
    num_rows = checks.integer("num_rows", num_rows, 1, _MAX_ROWS)
    rows = sampling_of_rows(num_rows, sampling, **fields)
    if any(row.stop_texts for row in rows):
        raise ValueError(
            "stop_texts need an Engine, since a step knows tokens and no text, got "
            f"{checks.shown(rows[0].stop_texts)}; use stop_token_ids"
        )
    return jax.tree.map(jnp.asarray, stack_sampling(rows))


def stack_sampling(rows: Sequence[SamplingParams], *, with_stops: bool = True) -> Sampling:
    """Settings of each row, as NumPy arrays; without stops, their width does not vary."""
    stops = [list(row.stop_token_ids or ()) if with_stops else [] for row in rows]
    width = max([1, *map(len, stops)])
    return Sampling(
        temperature=np.array([row.temperature for row in rows], np.float32),  # type: ignore[arg-type]
        top_k=np.array([row.top_k for row in rows], np.int32),  # type: ignore[arg-type]
        top_p=np.array([row.top_p for row in rows], np.float32),  # type: ignore[arg-type]
        seed=np.array([row.seed for row in rows], np.uint32),  # type: ignore[arg-type]
        stop_token_ids=np.array(  # type: ignore[arg-type]
            [stop + [-1] * (width - len(stop)) for stop in stops], np.int32
        ).reshape(len(rows), width),
    )


def sample(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Draws one token per row.

    Args:
      logits: f32[B, V].
      sampling: settings of each row.
      positions: i32[B], position that each drawn token will have.

    Returns:
      i32[B]. A row's result depends on its own logits, settings and position, not on other rows.

    Raises:
      ValueError: an argument has another type, shape or dtype.
    """
    checks.array("logits", logits, (None, None), "f")
    checks.instance("sampling", sampling, Sampling)
    num_rows = logits.shape[0]
    checks.array("positions", positions, (num_rows,))
    checks.array("sampling.temperature", sampling.temperature, (num_rows,), "f")
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = sampling.temperature > 0

    def draw() -> jax.Array:
        # Below the largest first, so that a small temperature cannot overflow.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(warm, sampling.temperature, 1.0)[:, None]
        allowed = _allowed(scaled, sampling)
        noisy = scaled + jax.vmap(_noise, in_axes=(0, 0, None))(
            sampling.seed, positions, logits.shape[-1]
        )
        drawn = jnp.argmax(jnp.where(allowed, noisy, -jnp.inf), axis=-1)
        return jnp.where(warm, drawn.astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(warm), draw, lambda: greedy)


def _noise(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """f32[V] Gumbel noise: the largest of logits plus noise is a draw from their softmax."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab_size,))


def _allowed(scaled: jax.Array, sampling: Sampling) -> jax.Array:
    """bool[B, V]: tokens that top-k and top-p leave; of equal logits the lower id comes first."""
    vocab_size = scaled.shape[-1]
    order = jnp.argsort(scaled, axis=-1, stable=True, descending=True)
    ranked = jnp.take_along_axis(jax.nn.softmax(scaled, axis=-1), order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    limit = jnp.where(sampling.top_k > 0, sampling.top_k, vocab_size)
    kept = (jnp.arange(vocab_size)[None] < limit[:, None]) & (before < sampling.top_p[:, None])
    kept = kept.at[:, 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(kept, rank, axis=-1)
