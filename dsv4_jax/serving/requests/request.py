"""A request on its way through the engine, and what its caller sees of it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.serving.requests.cached_rows import CachedRows
from dsv4_jax.serving.requests.reading import Reading
from dsv4_jax.serving.requests.text import TextState, find_stop, hold_back
from dsv4_jax.serving.requests.token_texts import TokenTexts
from dsv4_jax.step.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one drawn token: natural, of the logits as the model gave them.

    Attributes:
      logprob: of the token itself.
      top: the most likely tokens, as many as `SamplingParams.logprobs` says, with theirs.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a prompt got.

    Two are equal if the answers are, whatever the cache spared.

    Attributes:
      token_ids: the new tokens, a stop token included; these are the tokens drawn.
      text: text of the new tokens without special ones, up to a stop text; None without a
        tokenizer. A stream's texts together are this one. What a cancelled request held back, half
        a character or what may begin a stop text, is not in it.
      finish_reason: "stop" (a stop token or text), "length", "cancelled" or "error".
      error: what was raised for this request's sake, as text; else None.
      logprobs: one for each token; None if they were not asked for.
      prompt_tokens: tokens of the prompt.
      hit_tokens: those of them that were in the cache when the request was first served, by a
        prefix hit or a fork, and were not computed for it.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_tokens: int = dataclasses.field(default=0, compare=False)
    hit_tokens: int = dataclasses.field(default=0, compare=False)


class Token(NamedTuple):
    """One token of one request.

    Attributes:
      request_id: what `Engine.submit` gave.
      token_id: the token.
      finish_reason: why the request ended with this token; None if it goes on.
      text: what the token adds to the text, perhaps nothing: characters come with their last token,
        and what may begin a stop text comes when it has not become one; None without a tokenizer.
      logprobs: log-probabilities, if the request asked for them.
    """

    request_id: int
    token_id: int
    finish_reason: str | None
    text: str | None = None
    logprobs: TokenLogprobs | None = None


class DrawError(Exception):
    """A request cannot draw, for what it asked for; others can go on without it.

    Attributes:
      request: who.
      cause: what was raised.
    """

    def __init__(self, request: Request, cause: Exception) -> None:
        """Of a request that runs."""
        super().__init__(f"request {request.request_id} cannot draw: {cause}")
        self.request, self.cause = request, cause


class Request:
    """The host's state of a request.

    Attributes:
      request_id: what `Engine.submit` gave; a lower one is older.
      sampling: how it draws and what ends it; its stop tokens are known.
      salt: prefixes are shared among requests of one salt only.
      speculate: drafts are checked.
      siblings: samples of one prompt that were submitted together, itself included; or none.
      prompt_tokens: length of the prompt.
      token_ids: i32[prompt + max_new_tokens], the prompt and what was drawn. In a slot it is a view
        of `KnownTokens`, as `num_known` is.
      slot: -1 while it waits.
      drafts: guesses at what follows the known tokens.
      cached: what its cache holds, as it came with `Engine.restore`, until it first gets a slot.
      next_boundary: end of the known shared prefix at admission, worth a snapshot; 0 if none.
      snapshot_spacing: blocks between kept boundaries of the prompt.
      reading: which tokens all layers read; None is all.
      upper_from: from where on the upper layers have run without a gap, that of the steps in flight
        included; -1 is from the start, or where that was exact.
      finish_reason: None while it is on its way.
      error: what ended it, where that is "error".
      hit_tokens: tokens of the prompt that were there when it first got a slot.
      num_given: drawn tokens that a stream has given, or that a fork leaves out of its own.
      num_returned: drawn tokens that the caller had got, by `Engine.step` or a stream, before the
        first one that no step returned, since a stream or `generate` made that step; None where
        the caller has got all.
      submitted_s: time of submission, in seconds.
      admitted_s: time of its first slot; None before.
      last_token_s: time of its last token, None before any; in a slot, what `KnownTokens` has.
    """

    def __init__(
        self,
        request_id: int,
        prompt: np.ndarray,
        sampling: SamplingParams,
        submitted_s: float,
        *,
        salt: bytes = b"",
        speculate: bool = True,
        texts: TokenTexts | None = None,
    ) -> None:
        """A request that waits; `texts` are those of tokens that it will know without `add`."""
        self.request_id = request_id
        self.sampling = sampling
        self.salt = salt
        self.speculate = speculate
        self.siblings: tuple[Request, ...] = ()
        self.prompt_tokens = len(prompt)
        self.token_ids = np.zeros(len(prompt) + sampling.max_new_tokens, np.int32)
        self.token_ids[: len(prompt)] = prompt
        self._num_known = len(prompt)
        self._num_known_in_slot: np.ndarray | None = None
        self.slot = -1
        self.drafts: list[int] = []
        self.cached: CachedRows | None = None
        self.next_boundary = 0
        self.snapshot_spacing = 1
        self.reading: Reading | None = None
        self.upper_from = -1
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.hit_tokens = 0
        self.num_given = 0
        self.num_returned: int | None = None
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None
        self.last_token_s: float | None = None
        self._token_texts = texts
        self._texts: list[str] = []  # what drawn tokens added that came by `add`, and those before
        self._num_texts = 0  # how many of them count; tokens after them are whole
        self._logprobs: list[TokenLogprobs] = []  # of each drawn token; later ones do not count
        self._decoding = TextState()
        self._held = ""  # it may begin a stop text

    @property
    def num_known(self) -> int:
        """How many of `token_ids` are known."""
        there = self._num_known_in_slot
        return self._num_known if there is None else int(there[0])

    @num_known.setter
    def num_known(self, number: int) -> None:
        if self._num_known_in_slot is None:
            self._num_known = number
        else:
            self._num_known_in_slot[0] = number

    def move(self, token_ids: np.ndarray, num_known: np.ndarray | None) -> None:
        """Its tokens lie elsewhere from now on, and so does their number.

        Args:
          token_ids: i32[prompt + max_new_tokens], equal as far as they are known.
          num_known: i32[1], equal too; None is an attribute of its own.
        """
        self._num_known = self.num_known
        self._num_known_in_slot = num_known
        self.token_ids = token_ids

    @property
    def known(self) -> np.ndarray:
        """i32[n], the prompt and what was drawn."""
        return self.token_ids[: self.num_known]

    @property
    def num_drawn(self) -> int:
        """Tokens drawn so far."""
        return self.num_known - self.prompt_tokens

    @property
    def num_wanted(self) -> int:
        """Tokens still to be drawn."""
        return self.sampling.max_new_tokens - self.num_drawn

    @property
    def leader(self) -> Request | None:
        """The oldest of its siblings that has drawn nothing and may yet: it reads the prompt."""
        return next((o for o in self.siblings if not o.num_drawn and o.finish_reason is None), None)

    @property
    def followers(self) -> list[Request]:
        """If it is the leader, those that wait for it."""
        if self.leader is not self:
            return []
        return [
            sibling
            for sibling in self.siblings
            if sibling is not self
            and sibling.slot < 0
            and not sibling.num_drawn
            and sibling.finish_reason is None
        ]

    def branch(self, request_id: int, seed: int, now_s: float) -> Request:
        """A copy that waits, with another seed for what it has yet to draw.

        Its stream begins with the first token that this one's caller has not got, by `Engine.step`
        or a stream.
        """
        new = Request(
            request_id,
            self.token_ids[: self.prompt_tokens],
            self.sampling.with_seed(seed),
            now_s,
            salt=self.salt,
            speculate=self.speculate,
            texts=self._token_texts,
        )
        new.token_ids[:] = self.token_ids
        new.num_known = self.num_known
        returned = self.num_drawn if self.num_returned is None else self.num_returned
        new.num_given = max(self.num_given, returned)
        if new.num_given < new.num_drawn:
            new.num_returned = new.num_given
        new.next_boundary, new.snapshot_spacing = self.next_boundary, self.snapshot_spacing
        new._texts, new._num_texts = list(self._texts), self._num_texts
        new._decoding, new._held = self._decoding, self._held
        new._logprobs = list(self._logprobs)
        return new

    @property
    def text(self) -> str:
        """What the drawn tokens added, with a tokenizer."""
        return "".join(self._texts[: self._num_texts] + self._whole_texts())

    @property
    def holds_text(self) -> bool:
        """Whether its last tokens have not given all of their text."""
        return bool(self._held) or bool(self._decoding.held and self._num_texts == self.num_drawn)

    def _whole_texts(self) -> list[str]:
        """Of the tokens that are known without `add`."""
        first = self.prompt_tokens + self._num_texts
        if self._token_texts is None or first == self.num_known:
            return []
        return self._token_texts.of(self.token_ids[first : self.num_known])[0].tolist()

    def _text_of(self, number: int) -> str | None:
        """What a drawn token added; None without a tokenizer."""
        if number < self._num_texts:
            return self._texts[number]
        return self._whole_texts()[number - self._num_texts] if self._token_texts else None

    def add(
        self, token_id: int, tokenizer: Tokenizer | None, logprobs: TokenLogprobs | None = None
    ) -> None:
        """Appends a drawn token, and sets `finish_reason` if it is the last one.

        If the tokenizer raises, nothing was appended.
        """
        reason = None
        if token_id in (self.sampling.stop_token_ids or ()):
            reason = "stop"
        elif self.num_wanted == 1:
            reason = "length"
        if tokenizer is not None:
            since = self._whole_texts()
            decoding, piece = (TextState() if since else self._decoding).add(token_id, tokenizer)
            text, held, stops = self._held + piece, "", self.sampling.stop_texts
            if reason is not None:
                text += decoding.rest(tokenizer)
            position = find_stop(text, stops)
            if position >= 0:
                text, reason = text[:position], "stop"
            elif reason is None:
                text, held = hold_back(text, stops)
            self._texts[self._num_texts :] = [*since, text]
            self._num_texts = self.num_drawn + 1
            self._decoding, self._held = decoding, held
        if logprobs is not None:
            self._logprobs[self.num_drawn :] = [logprobs]
        self.token_ids[self.num_known] = token_id
        self.num_known += 1
        self.finish_reason = reason

    def give(self) -> Token:
        """The next token of its stream."""
        self.num_given += 1
        if self.num_given == self.num_drawn:
            self.num_returned = None
        return self.token(self.num_given - 1)

    def token(self, number: int) -> Token:
        """A drawn token, as a step or a stream gives it."""
        at = self.prompt_tokens + number
        is_last = at == self.num_known - 1 and self.finish_reason in ("stop", "length")
        return Token(
            self.request_id,
            int(self.token_ids[at]),
            self.finish_reason if is_last else None,
            self._text_of(number),
            self._logprobs[number] if self._logprobs else None,
        )

    def completion(self, tokenizer: Tokenizer | None) -> Completion:
        """What it got so far; with a tokenizer, its text too."""
        error = self.error
        return Completion(
            token_ids=self.token_ids[self.prompt_tokens : self.num_known].tolist(),
            text=None if tokenizer is None else self.text,
            finish_reason=self.finish_reason or "cancelled",
            error=None if error is None else f"{type(error).__name__}: {error}",
            logprobs=None if self.sampling.logprobs is None else self._logprobs[: self.num_drawn],
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
        )


def sampling_on_device(request: Request) -> SamplingParams:
    """The settings of which the device is told; a grammar is not among them, and may be large."""
    sampling = request.sampling
    return sampling if sampling.grammar is None else dataclasses.replace(sampling, grammar=None)
