"""StepSizes: the shapes that steps have, each of which is a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsv4_jax.serving.options import EngineOptions

_BATCH_SIZES = (1, 8, 32, 128, 512)
"""Requests, for which decode steps on a GPU have programs of their own if nobody says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Tokens of steps on a data shard, whoever takes part; each in ascending order.

    Attributes:
      prompts: of steps that hold prompt tokens.
      decoding: of steps in which every request only decodes.
      is_plain: the latter run one token of each request, by programs that do nothing else.
      after_warmup: more of the latter, which are used once warm-up has compiled them: a step that
        compiles a smaller program where one is there would take longer than that saves.
    """

    prompts: tuple[int, ...]
    decoding: tuple[int, ...]
    is_plain: bool
    after_warmup: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """Those of either kind, in ascending order."""
        return tuple(sorted({*self.prompts, *self.decoding, *self.after_warmup}))

    def warmed_up(self) -> StepSizes:
        """The same when warm-up has compiled every program."""
        decoding = tuple(sorted({*self.decoding, *self.after_warmup}))
        return dataclasses.replace(self, decoding=decoding, after_warmup=())

    def first(self, count: int) -> StepSizes:
        """The same with the first `count` sizes of steps that hold prompt tokens."""
        return dataclasses.replace(self, prompts=self.prompts[:count])

    def holding(self, num_tokens: int, *, prompts: bool) -> int:
        """The smallest size that holds so many tokens, of steps with prompt tokens or without."""
        sizes = self.prompts if prompts else self.decoding
        return next(size for size in sizes if size >= num_tokens)


def find_sizes(options: EngineOptions, *, max_requests: int, on_gpu: bool) -> StepSizes:
    """The shapes that steps have on a data shard, which serves so many requests.

    Args:
      options: those of the engine.
      max_requests: requests of a data shard.
      on_gpu: decode steps have programs of their own, of several sizes if nobody says otherwise.

    Raises:
      ValueError: the largest does not hold a token of every request, or there are sizes of decode
        steps for more requests than that.
    """
    given = options.prefill_tokens
    if given is None:
        given = (64, 256) if max_requests <= 256 else (64, 256, max_requests)
    prompts, width = set(given), options.draft_tokens + 1
    if options.decode_tokens is not None:
        prompts.add(options.decode_tokens)
    elif options.draft_tokens:
        prompts.add(max_requests * width)
    if max(prompts) < max_requests:
        raise ValueError(
            "the largest of prefill_tokens and decode_tokens must be at least "
            f"max_requests={max_requests}, got {sorted(prompts)}"
        )
    most = max_requests * width
    decoding, more, is_plain = {most}, set[int](), not options.draft_tokens
    if options.decode_tokens is not None:
        decoding, is_plain = prompts, False
    elif options.decode_batch_sizes is not None:
        _check_batch_sizes(options.decode_batch_sizes, max_requests)
        decoding |= {count * width for count in options.decode_batch_sizes}
    elif on_gpu:
        more = {count * width for count in _BATCH_SIZES if count < max_requests}
    elif options.draft_tokens:  # of programs that are there anyway
        decoding |= {size for size in prompts if size < most}
    return StepSizes(
        prompts=tuple(sorted(prompts)),
        decoding=tuple(sorted(decoding)),
        is_plain=is_plain,
        after_warmup=tuple(sorted(more)),
    )


def _check_batch_sizes(given: Sequence[int], max_requests: int) -> None:
    if given[-1] > max_requests:
        raise ValueError(
            f"decode_batch_sizes must be at most {max_requests}, the requests of a data shard "
            f"(max_requests), got {list(given)}; leave the larger ones out"
        )
