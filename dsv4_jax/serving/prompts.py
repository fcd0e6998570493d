"""What a caller asks for, checked before anything is queued."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.allocator.pool_plan import PoolPlan
from dsv4_jax.config import DSV4Config
from dsv4_jax.step.sampling import SamplingParams


def encode_prompt(
    prompt: str | Sequence[int], config: DSV4Config, tokenizer: Tokenizer | None, *, name: str
) -> np.ndarray:
    """A prompt's token ids, i32[n].

    Raises:
      ValueError: it is empty, no text and no ids, or holds an unknown id; `name` is in the message.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"{name} is text and the engine has no tokenizer; "
                "pass token ids, or a checkpoint with a tokenizer.json"
            )
        ids = np.asarray(tokenizer.encode(prompt).ids, np.int64)
    else:
        ids = np.asarray(prompt)
        if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"{name} must be text or a list of token ids, got {prompt!r}")
    if not ids.size:
        raise ValueError(f"{name} is empty; it needs at least one token")
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"{name} holds token id {int(wrong[0])}, outside 0..{config.vocab_size - 1} "
            "(vocab_size)"
        )
    return ids.astype(np.int32)


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
      ValueError: a stop token is outside the vocabulary, or stop texts come without a tokenizer.
    """
    if sampling.stop_texts and tokenizer is None:
        raise ValueError("stop_texts need an engine with a tokenizer; use stop_token_ids")
    if sampling.stop_token_ids is None:
        return dataclasses.replace(sampling, stop_token_ids=config.eos_token_ids)
    wrong = [token for token in sampling.stop_token_ids if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(
            f"stop_token_ids must be in 0..{config.vocab_size - 1} (vocab_size), got {wrong[0]}; "
            "pass () for none"
        )
    return sampling
