"""How requests draw their tokens: settings of one, checked, and of a call's rows, as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypedDict, Unpack, get_type_hints

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import checks
from dsv4_jax.rules import (
    Instance,
    ListOf,
    NumberByToken,
    Real,
    Ruled,
    Share,
    Texts,
    Whole,
    check_fields,
    rules_of,
)
from dsv4_jax.step.grammar import Grammar

MAX_LOGPROBS = 20
"""The most tokens whose log-probabilities a draw brings, besides the drawn one's."""

MAX_TOKENS = 2**24
"""Of a prompt or an answer; no context is that long."""

MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 300
"""Tokens with a bias of their own."""

MAX_STOP_TEXTS = 64
MAX_STOP_CHARS = 1024
"""The longest stop text: every drawn token looks that far back."""

_MAX_ROWS = 2**16
_BIAS = NumberByToken(MAX_LOGIT_BIAS, -100, 100)
_SEED = Whole(-(2**63), 2**63 - 1)
_PENALTY = Real(-2, 2, "-2 to 2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request draws its tokens, and what ends it.

    Numbers may be NumPy scalars, lists any iterables; what is kept are plain numbers and tuples.

    Attributes:
      max_new_tokens: most tokens to draw, 1 to 2**31 - 1.
      temperature: a finite f32; 0 takes the most likely token.
      top_k: draws among that many most likely tokens, 0 to 2**31 - 1; 0 is no limit.
      top_p: draws among the most likely tokens that together have that probability.
      min_p: draws among tokens at least that fraction as likely as the likeliest, 0 to 1, after the
        temperature; 0 is no limit.
      seed: seed of the noise, any integer; kept modulo 2**32.
      logit_bias: what is added to logits of tokens before everything else, {token id: -100 to 100},
        of at most 300 tokens; kept as pairs, by id.
      presence_penalty: subtracted from the logit of each token that the request has drawn, -2 to 2.
      frequency_penalty: subtracted once for each time that it has, -2 to 2; tokens of the prompt
        count for neither.
      logprobs: 0 to 20 brings each drawn token's log-probability and those of that many most
        likely tokens; None brings none. They are of the logits as the model gave them, before
        bias, penalties and temperature.
      stop_token_ids: tokens that end the answer, at most 1,024; None is the config's, () is none at
        all.
      stop_texts: texts that end the answer, at most 64 of up to 1,024 characters; they need a
        tokenizer.
      grammar: what the answer has to be; None is anything. It needs a tokenizer and llguidance,
        and one of the model's end tokens among the stop tokens.

    Raises:
      ValueError: a setting is of another type (a bool is no number, an array neither) or out of
        range.
    """

    max_new_tokens: Annotated[
        int, Ruled(Whole(1), http=Whole(1, MAX_TOKENS), help="most tokens of an answer")
    ] = 64
    temperature: Annotated[
        float,
        Ruled(
            Real(0, told="0 (greedy) or more"),
            http=Real(0, 2),
            flag=Real(0, 1e30),
            help="0 is greedy",
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        Ruled(
            Whole(0, told="0 (no limit) or more"),
            http=Whole(-1),
            flag=Whole(0),
            help="draw among that many most likely tokens; 0 is no limit",
        ),
    ] = 0
    top_p: Annotated[
        float,
        Ruled(
            Share(),
            http=Real(0, 1),
            flag=Real(0, 1),
            help="draw among the most likely tokens that together have that probability",
        ),
    ] = 1.0
    min_p: Annotated[float, Ruled(Real(0, 1, "0 (no limit) to 1"), http=Real(0, 1))] = 0.0
    seed: Annotated[
        int, Ruled(Whole(None, None), http=_SEED, flag=_SEED, help="seed of the draws")
    ] = 0
    logit_bias: Annotated[
        Mapping[int, float] | Sequence[tuple[int, float]], Ruled(_BIAS, http=_BIAS)
    ] = ()
    presence_penalty: Annotated[float, Ruled(_PENALTY, http=_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Ruled(_PENALTY, http=_PENALTY)] = 0.0
    logprobs: Annotated[
        int | None,
        Ruled(Whole(0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None"), http=Whole(0, MAX_LOGPROBS)),
    ] = None
    stop_token_ids: Annotated[
        Sequence[int] | None, Ruled(ListOf(Whole(0), MAX_STOP_TOKENS, "token ids"))
    ] = None
    stop_texts: Annotated[
        Sequence[str],
        Ruled(Texts(MAX_STOP_TEXTS, MAX_STOP_CHARS), http=Texts(16, MAX_STOP_CHARS)),
    ] = ()
    grammar: Annotated[Grammar | None, Ruled(Instance(Grammar))] = None

    def __post_init__(self) -> None:
        """Every setting becomes a checked, plain, immutable value."""
        check_fields(self)
        if 0 < self.temperature < checks.FLOAT32_TINY:
            rule = f"0 (greedy) or at least {checks.FLOAT32_TINY:.4g} (float32)"
            checks.refuse("temperature", rule, self.temperature)
        object.__setattr__(self, "seed", self.seed % 2**32)

    def with_plain(self, **fields: Any) -> SamplingParams:
        """The same with other values of some fields, which are checked and plain already."""
        new = object.__new__(SamplingParams)
        vars(new).update(vars(self) | fields)
        return new

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with another seed, any integer."""
        return self.with_plain(seed=seed % 2**32)

    @property
    def penalises(self) -> bool:
        """What was drawn before changes logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_simple(self) -> bool:
        """Nothing is asked for but what a `Sampling` says."""
        return all(getattr(self, name) == getattr(SamplingParams, name) for name in _NOT_SIMPLE)


_NOT_SIMPLE = tuple(
    name
    for name in rules_of(SamplingParams)
    if name
    not in ("max_new_tokens", "temperature", "min_p", "seed", "stop_token_ids", "stop_texts")
)
"""Settings that a simple draw does not know: every one but these."""


class DrawFields(TypedDict, total=False):
    """Keyword arguments that stand for fields of `SamplingParams`; `seed` may be one per row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | Sequence[int]
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    stop_token_ids: Sequence[int] | None


class SamplingFields(DrawFields, total=False):
    """The same, with what needs an engine."""

    max_new_tokens: int
    presence_penalty: float
    frequency_penalty: float
    logprobs: int | None
    stop_texts: Sequence[str]
    grammar: Grammar | None


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
    if sampling is None:
        rows = [SamplingParams(**fields)] * num_rows  # type: ignore[arg-type]
    else:
        rows = _rows_of(num_rows, sampling, row_name)
        if fields:
            checked = SamplingParams(**fields)  # type: ignore[arg-type]
            plain = {name: getattr(checked, name) for name in fields}
            rows = [row.with_plain(**plain) for row in rows]
    if seeds:
        rule = rules_of(SamplingParams)["seed"].rule
        seeds = [rule.check("seed", one) for one in seeds]
        rows = [row.with_seed(one) for row, one in zip(rows, seeds, strict=True)]
    return rows


def _rows_of(num_rows: int, sampling: Any, row_name: str) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_rows
    rows = checks.sequence("sampling", sampling, of="SamplingParams", limit=_MAX_ROWS)
    if len(rows) != num_rows:
        raise ValueError(
            f"sampling must be one, or one per {row_name} ({num_rows}), got {len(rows)}: "
            f"{checks.shown(sampling)}"
        )
    return [checks.instance("sampling", row, SamplingParams) for row in rows]


@flax.struct.dataclass(kw_only=True)
class Sampling:
    """The `SamplingParams` of a call's rows, as a step takes them, where they are simple.

    Draws of these compute less, and on a mesh gather no logits. Rows that ask for more have a
    `FullSampling`.

    Attributes:
      temperature: f32[B]; 0 takes the most likely token.
      min_p: f32[B], draws among tokens at least that fraction as likely as the likeliest.
      seed: u32[B]; the noise of a draw follows from it and the drawn token's position alone.
      stop_token_ids: i32[B, n], padded with -1.
    """

    temperature: Annotated[jax.Array, np.float32]
    min_p: Annotated[jax.Array, np.float32]
    seed: Annotated[jax.Array, np.uint32]
    stop_token_ids: jax.Array

    def simplified(self) -> Sampling:
        """These fields alone, of rows whose `SamplingParams.is_simple` is true."""
        names = [field.name for field in dataclasses.fields(Sampling)]
        return Sampling(**{name: getattr(self, name) for name in names})

    def completed(self) -> FullSampling:
        """With arrays that ask for nothing more."""
        if isinstance(self, FullSampling):
            return self
        num_rows = self.temperature.shape[0]
        fields: dict[str, Any] = {
            name: jnp.full(num_rows, getattr(SamplingParams, name), dtype)
            for name, dtype in _SCALARS.items()
        }
        return FullSampling(
            **fields | vars(self),
            bias_token_ids=jnp.full((num_rows, 0), -1, jnp.int32),
            bias=jnp.zeros((num_rows, 0), jnp.float32),
            wants_logprobs=jnp.zeros(num_rows, bool),
        )


@flax.struct.dataclass(kw_only=True)
class FullSampling(Sampling):
    """All that rows may ask for.

    Attributes:
      top_k: i32[B], draws among that many most likely tokens; 0 is no limit.
      top_p: f32[B], draws among the most likely tokens that together have that probability.
      bias_token_ids: i32[B, m], tokens with a bias, no token twice, then -1.
      bias: f32[B, m], what is added to their logits.
      presence_penalty: f32[B], subtracted from logits of tokens that were drawn.
      frequency_penalty: f32[B], subtracted for each time.
      wants_logprobs: bool[B], log-probabilities are looked at.
    """

    top_k: Annotated[jax.Array, np.int32]
    top_p: Annotated[jax.Array, np.float32]
    bias_token_ids: jax.Array
    bias: jax.Array
    presence_penalty: Annotated[jax.Array, np.float32]
    frequency_penalty: Annotated[jax.Array, np.float32]
    wants_logprobs: jax.Array


_SCALARS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(FullSampling, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
"""Fields that have one number of a row's `SamplingParams` under the same name, and its dtype."""


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
    for name, way_out in _NEED_ENGINE.items():
        for row in rows:
            if getattr(row, name) != getattr(SamplingParams, name):
                raise ValueError(
                    f"{name} must be left out here, since it needs an Engine, got "
                    f"{checks.shown(getattr(row, name))}; {way_out}"
                )
    stacked = stack_sampling(rows)
    # One field that is asked for takes all of them.
    is_simple = all(row.is_simple for row in rows)
    return jax.device_put(stacked.simplified() if is_simple else stacked)


_NEED_ENGINE = {
    "stop_texts": "a step knows tokens and no text, so use stop_token_ids",
    "presence_penalty": "a step does not know what was drawn before",
    "frequency_penalty": "a step does not know what was drawn before",
    "logprobs": "take jax.nn.log_softmax of the logits",
    "grammar": "a step does not follow an answer",
}


def stack_sampling(
    rows: Sequence[SamplingParams], *, with_stops: bool = True, bias_width: int | None = None
) -> FullSampling:
    """Settings of each row, as NumPy arrays.

    Args:
      rows: B of them.
      with_stops: takes their stop tokens; without, that array's width does not vary.
      bias_width: m; None is the most tokens of a row.
    """
    stops = [row.stop_token_ids or () if with_stops else () for row in rows]
    biases = [dict(row.logit_bias) for row in rows]
    if bias_width is None:
        bias_width = max(map(len, biases), default=0)
    fields: dict[str, Any] = {
        name: np.array([getattr(row, name) for row in rows], dtype)
        for name, dtype in _SCALARS.items()
    }
    return FullSampling(
        **fields,
        bias_token_ids=_padded(biases, bias_width, -1, np.int32),
        bias=_padded([list(bias.values()) for bias in biases], bias_width, 0, np.float32),
        wants_logprobs=np.array([row.logprobs is not None for row in rows], bool),  # type: ignore[arg-type]
        stop_token_ids=_padded(stops, max([1, *map(len, stops)]), -1, np.int32),
    )


def _padded(rows: Sequence[Iterable[Any]], width: int, filler: int, dtype: Any) -> Any:
    """[B, width]: rows of any lengths up to it."""
    array = np.full((len(rows), width), filler, dtype)
    for number, row in enumerate(rows):
        values = list(row)
        array[number, : len(values)] = values
    return array
