"""Masks of a step's draws: llguidance follows each answer, and says which tokens may come next."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsv4_jax.serving.requests.compile_grammar import problem_of
from dsv4_jax.serving.requests.grammars import Grammars
from dsv4_jax.serving.requests.request import DrawError, Request
from dsv4_jax.serving.schedule.scheduler import RowPlan
from dsv4_jax.step.draws import TokenMasks
from dsv4_jax.step.settings_size import mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarKeeper:
    """Follows the answers of requests with grammars, a token at a time.

    What a request may draw follows from its grammar and what it has drawn, so that one that is
    computed again, or forked, is followed again from its tokens.
    """

    def __init__(self, grammars: Grammars, *, num_slots: int, width: int) -> None:
        """Follows nothing yet.

        Args:
          grammars: where requests' grammars are compiled.
          num_slots: B, slots of all data shards.
          width: n, the most tokens that a step draws of a row.
        """
        self._grammars = grammars
        self._num_slots = num_slots
        self._width = width
        self._followed: weakref.WeakKeyDictionary[Request, _Followed] = weakref.WeakKeyDictionary()

    def masks_of(
        self, rows: Iterable[RowPlan], requests: Mapping[int, Request]
    ) -> TokenMasks | None:
        """Masks of a step's draws, in NumPy; None if no row that draws has a grammar.

        Args:
          rows: what the step runs.
          requests: by slot.

        Raises:
          DrawError: a grammar failed; it names the request.
        """
        masked = [row for row in rows if row.draws and requests[row.slot].sampling.grammar]
        if not masked:
            return None
        masks = self.no_masks()
        for row in masked:
            request = requests[row.slot]
            try:
                bits = self._bits(self._follow(request), request.drafts[: row.num_drafts])
                masks.bits[row.slot, : len(bits)] = bits  # type: ignore[index]
            except Exception as error:
                assert request.sampling.grammar is not None
                self._grammars.forget(request.sampling.grammar)
                raise DrawError(request, error) from error
            masks.is_masked[row.slot] = True  # type: ignore[index]
        return masks

    def no_masks(self) -> TokenMasks:
        """Of the same size, for nobody."""
        words = mask_words(self._grammars.vocab_size)
        return TokenMasks(
            is_masked=np.zeros(self._num_slots, bool),  # type: ignore[arg-type]
            bits=np.zeros((self._num_slots, self._width, words), np.uint32),  # type: ignore[arg-type]
        )

    def _follow(self, request: Request) -> LLMatcher:
        """What has seen all that the request has drawn."""
        followed = self._followed.get(request)
        if followed is None or followed.num_seen > request.num_drawn:
            assert request.sampling.grammar is not None
            followed = _Followed(self._grammars.start(request.sampling.grammar))
            self._followed[request] = followed
        new = request.known[request.prompt_tokens + followed.num_seen :].tolist()
        if new and not followed.matcher.consume_tokens(new):
            raise ValueError(f"the grammar cannot go on: {problem_of(followed.matcher)}")
        followed.num_seen += len(new)
        return followed.matcher

    def _bits(self, matcher: LLMatcher, drafts: Sequence[int]) -> np.ndarray:
        """u32[m, W]: a mask for the next token, and one after each draft that may be drawn.

        After a draft that must not be drawn nothing counts: its place draws another token.
        """
        masks = []
        ahead = matcher.deep_copy() if drafts else matcher  # `rollback` forgets tokens named by id
        for draft in [*drafts, None]:
            masks.append(self._mask_of(ahead))
            if ahead.is_error() or not masks[-1].any():
                raise ValueError(f"the grammar allows no token: {problem_of(ahead)}")
            if draft is None or not ahead.try_consume_tokens([draft]):
                break
        bits = np.full((len(drafts) + 1, masks[0].size), 2**32 - 1, np.uint32)
        bits[: len(masks)] = masks
        return bits

    def _mask_of(self, matcher: LLMatcher) -> np.ndarray:
        """u32[W]: a bit for each token of the model's vocabulary, and words for no more.

        Where llguidance fails it has the end token alone, as where an answer is whole.
        """
        words = mask_words(self._grammars.vocab_size)
        return np.frombuffer(matcher.compute_bitmask(), np.uint32)[:words]


class _Followed:
    """What one request has drawn so far, as far as its grammar has seen it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_seen = 0
