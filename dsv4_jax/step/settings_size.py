"""Bytes on a device of what requests ask of their draws: settings, counts and masks."""

from __future__ import annotations

import functools

import jax

from dsv4_jax.step.sampling import MAX_LOGIT_BIAS, SamplingParams, stack_sampling

_COUNT_BYTES = 12
"""Of an entry of `DrawnCounts`."""

_COUNTS_PER_REQUEST = 1024


def mask_words(vocab_size: int) -> int:
    """W, u32 words of a mask: a bit for each token and one to spare, as llguidance counts them."""
    return vocab_size // 32 + 1


def count_entries(vocab_size: int, max_requests: int, max_context_tokens: int) -> int:
    """Counts of tokens that requests with penalties have drawn, on each data shard.

    There are enough for one request that draws every token, and for a thousand of each slot.
    """
    each = min(vocab_size, max_context_tokens)
    return max(each, max_requests * min(each, _COUNTS_PER_REQUEST))


def settings_bytes(
    vocab_size: int,
    *,
    max_requests: int,
    max_context_tokens: int,
    draft_tokens: int = 0,
    grammars: bool = True,
) -> int:
    """Bytes of all of it on a device; twice, since new ones are brought beside those in use.

    Args:
      vocab_size: V.
      max_requests: slots of a data shard.
      max_context_tokens: longest prompt and answer together.
      draft_tokens: k; each of k + 1 draws of a row has a mask.
      grammars: requests may have grammars; else there are no masks.
    """
    row = _sampling_bytes()
    if grammars:
        row += 1 + 4 * (draft_tokens + 1) * mask_words(vocab_size)
    counts = _COUNT_BYTES * count_entries(vocab_size, max_requests, max_context_tokens)
    return 2 * (max_requests * row + counts)


@functools.cache
def _sampling_bytes() -> int:
    """Of one row, as an engine stacks them."""
    stacked = stack_sampling([SamplingParams()], with_stops=False, bias_width=MAX_LOGIT_BIAS)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(stacked))
