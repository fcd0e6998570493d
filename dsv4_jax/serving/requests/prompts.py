"""What a caller asks for, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from dsv4_jax import checks
from dsv4_jax.allocator.pool_plan import PoolPlan
from dsv4_jax.config import DSV4Config
from dsv4_jax.serving.requests.grammars import Grammars
from dsv4_jax.serving.requests.text import encode_text
from dsv4_jax.step.sampling import MAX_TOKENS, SamplingFields, SamplingParams, sampling_of_rows

MAX_PROMPTS = 2**16
"""Prompts of one call."""

MAX_SALT_CHARS = 1024


class CheckedRequest(NamedTuple):
    """A request that can be served.

    Attributes:
      token_ids: i32[n], the prompt.
      sampling: how it draws and what ends it; its stop tokens are known.
      salt: prefixes are shared among requests of one salt only.
      speculate: drafts are checked.
    """

    token_ids: np.ndarray
    sampling: SamplingParams
    salt: bytes
    speculate: bool


class Limits(NamedTuple):
    """What an engine can serve.

    Attributes:
      config: the model.
      plan: sizes of the pools, of a data shard.
      tokenizer: for text, or None.
      grammars: where grammars are compiled.
    """

    config: DSV4Config
    plan: PoolPlan
    tokenizer: Tokenizer | None
    grammars: Grammars

    def check_request(
        self,
        prompt: Any,
        sampling: SamplingParams | None,
        salt: str,
        speculate: bool,
        fields: SamplingFields,
    ) -> CheckedRequest:
        """What `Engine.submit` was asked for, if it can be served; arguments as there."""
        if sampling is not None:
            checks.instance("sampling", sampling, SamplingParams)
        if not isinstance(fields.get("seed", 0), int | np.integer):
            checks.refuse("seed", "an integer", fields.get("seed"))
        salt = checks.text("salt", salt, max_chars=MAX_SALT_CHARS)
        speculate = checks.flag("speculate", speculate)
        (row,) = sampling_of_rows(1, sampling, row_name="prompt", **fields)
        ids, row = self.check_prompt(prompt, row, name="prompt")
        return CheckedRequest(ids, row, salt.encode(), speculate)

    def check_prompt(
        self, prompt: Any, row: SamplingParams, *, name: str
    ) -> tuple[np.ndarray, SamplingParams]:
        """A prompt's ids, and its settings with known stop tokens, if they can be served.

        Args:
          prompt: token ids or text.
          row: how it draws and what ends it.
          name: what errors call the prompt.

        Raises:
          ValueError: the prompt is empty, holds an unknown token or can never fit, or a setting
            cannot be obeyed.
        """
        ids = encode_prompt(prompt, self.config, self.tokenizer, name=name)
        check_length(len(ids), row.max_new_tokens, self.plan, name=name)
        row = resolve_sampling(row, self.config, self.tokenizer)
        if row.grammar is not None:
            self.grammars.check(row.grammar)
        return ids, row


def list_prompts(prompts: Any) -> tuple[Any, ...]:
    """The prompts of a call, each still to be encoded; an iterator is consumed once.

    Raises:
      ValueError: it is one text, or no list.
    """
    if isinstance(prompts, str | bytes):
        checks.refuse("prompts", "a list of prompts", prompts, "pass [prompt] for one")
    return checks.sequence("prompts", prompts, of="prompts", limit=MAX_PROMPTS)


def encode_prompt(
    prompt: Any,
    config: DSV4Config,
    tokenizer: Tokenizer | None,
    *,
    name: str,
    check_size: Callable[[int], None] = lambda size: None,
) -> np.ndarray:
    """A prompt's token ids, i32[n].

    Args:
      prompt: token ids or text.
      config: the model.
      tokenizer: for text, or None.
      name: what errors call the prompt.
      check_size: is told how many tokens a text has before they are listed, which takes 0.1 s for
        a million, and may raise.

    Raises:
      ValueError: it is empty, no text and no ids, or holds an unknown id; `name` is in the message.
    """
    if isinstance(prompt, str):
        encoding = _encode_text(checks.text(name, prompt), tokenizer, name)
        check_size(len(encoding))
        ids = np.asarray(encoding.ids, np.int64)
    elif getattr(prompt, "ndim", 0):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            checks.refuse(name, "text or a list of token ids", prompt)
    else:
        ids = _list_ids(prompt, name)
    if not ids.size:
        raise ValueError(
            f"{name} is empty; it needs at least one token, got {checks.shown(prompt)}"
        )
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"{name} holds token id {int(wrong[0])}, outside 0..{config.vocab_size - 1} "
            "(vocab_size)"
        )
    return ids.astype(np.int32)


def _encode_text(prompt: str, tokenizer: Tokenizer | None, name: str) -> Encoding:
    if tokenizer is None:
        raise ValueError(
            f"{name} is text and the engine has no tokenizer, got {checks.shown(prompt)}; "
            "pass token ids, or a checkpoint with a tokenizer.json"
        )
    try:
        return encode_text(tokenizer, prompt)
    except Exception as error:  # a tokenizer of the user's own may raise any
        raise ValueError(
            f"{name} must be a text that the tokenizer can encode, got {checks.shown(prompt)}: "
            f"{error}; pass token ids"
        ) from error


def _list_ids(prompt: Any, name: str) -> np.ndarray:
    """Ids of a list, of ints and NumPy integers alone."""
    try:
        items = checks.sequence(name, prompt, of="token ids", limit=MAX_TOKENS)
    except ValueError:
        checks.refuse(name, "text or a list of token ids", prompt)
    for kind in set(map(type, items)):
        if kind is bool or not issubclass(kind, int | np.integer):
            checks.refuse(name, "text or a list of token ids", prompt)
    try:
        return np.fromiter(items, np.int64, len(items))
    except OverflowError:
        wrong = next(item for item in items if not 0 <= item <= checks.INT32_MAX)
        raise ValueError(
            f"{name} holds token id {checks.shown(wrong)}, which no vocabulary has"
        ) from None


def check_length(prompt_tokens: int, max_new_tokens: int, plan: PoolPlan, *, name: str) -> None:
    """Refuses what can never fit.

    Raises:
      ValueError: with the arithmetic, and `name`, in the message.
    """
    total = prompt_tokens + max_new_tokens
    asked = f"{name} has {prompt_tokens} tokens, and with max_new_tokens={max_new_tokens} that is"
    if total > plan.max_context_tokens:
        raise ValueError(
            f"{asked} {total}, more than max_context_tokens={plan.max_context_tokens}; shorten "
            "one, or build the engine with a longer context"
        )
    needed = -(-total // plan.block_tokens)
    if needed > plan.num_blocks:
        raise ValueError(
            f"{asked} {total}, or {needed} blocks of {plan.block_tokens} tokens, and the cache "
            f"has {plan.num_blocks} in all; shorten one, or build the engine with more blocks"
        )


def resolve_sampling(
    sampling: SamplingParams, config: DSV4Config, tokenizer: Tokenizer | None
) -> SamplingParams:
    """Settings that this model can obey, its own stop tokens where none are given.

    Raises:
      ValueError: a stop token or one with a bias is outside the vocabulary, stop texts come
        without a tokenizer, or an answer with a grammar could not end.
    """
    if sampling.stop_texts and tokenizer is None:
        raise ValueError(
            "stop_texts need an engine with a tokenizer, got "
            f"{checks.shown(sampling.stop_texts)}; use stop_token_ids"
        )
    unknown = [token for token in dict(sampling.logit_bias) if token >= config.vocab_size]
    if unknown:
        raise ValueError(
            f"logit_bias must name token ids in 0..{config.vocab_size - 1} (vocab_size), got "
            f"{unknown[0]}; leave it out"
        )
    ends = sampling.stop_token_ids
    if sampling.grammar is not None and not set(config.eos_token_ids) & set(
        config.eos_token_ids if ends is None else ends
    ):
        raise ValueError(
            "stop_token_ids must hold an end token of the model where there is a grammar, one of "
            f"{config.eos_token_ids}, got {checks.shown(ends)}; leave them out"
        )
    if sampling.stop_token_ids is None:
        return sampling.with_plain(stop_token_ids=config.eos_token_ids)
    wrong = [token for token in sampling.stop_token_ids if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(
            f"stop_token_ids must be in 0..{config.vocab_size - 1} (vocab_size), got {wrong[0]}; "
            "pass () for none"
        )
    return sampling
