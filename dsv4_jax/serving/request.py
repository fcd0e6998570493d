"""A request on its way through the engine, and what its caller sees of it."""

from __future__ import annotations

import dataclasses

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.serving.text import TextStream
from dsv4_jax.step.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a prompt got.

    Attributes:
      token_ids: the new tokens, a stop token included.
      text: text of the new tokens without special ones, up to a stop text; None without a
        tokenizer.
      finish_reason: "stop" (a stop token or text), "length", "cancelled" or "error".
      error: what was raised for this request's sake, as text; else None.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of one request.

    Attributes:
      request_id: what `Engine.submit` gave.
      token_id: the token.
      finish_reason: why the request ended with this token; None if it goes on.
    """

    request_id: int
    token_id: int
    finish_reason: str | None


class Request:
    """The host's state of a request.

    Attributes:
      request_id: what `Engine.submit` gave; a lower one is older.
      sampling: how it draws and what ends it; its stop tokens are known.
      salt: prefixes are shared among requests of one salt only.
      speculate: drafts are checked.
      prompt_tokens: length of the prompt.
      token_ids: i32[prompt + max_new_tokens], the prompt and what was drawn.
      num_known: how many of those are known.
      slot: -1 while it waits.
      drafts: guesses at what follows the known tokens.
      next_boundary: end of the known shared prefix at admission, worth a snapshot; 0 if none.
      snapshot_spacing: blocks between kept boundaries of the prompt.
      finish_reason: None while it is on its way.
      error: what ended it, where that is "error".
      num_given: drawn tokens that a stream has given, or that were there before a fork.
      submitted_s: time of submission, in seconds; `admitted_s` and `last_token_s` are None before
        their time.
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
    ) -> None:
        """A request that waits."""
        self.request_id = request_id
        self.sampling = sampling
        self.salt = salt
        self.speculate = speculate
        self.prompt_tokens = len(prompt)
        self.token_ids = np.zeros(len(prompt) + sampling.max_new_tokens, np.int32)
        self.token_ids[: len(prompt)] = prompt
        self.num_known = len(prompt)
        self.slot = -1
        self.drafts: list[int] = []
        self.next_boundary = 0
        self.snapshot_spacing = 1
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.num_given = 0
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None
        self.last_token_s: float | None = None
        self._text = ""
        self._stream: TextStream | None = None

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

    def branch(self, request_id: int, seed: int, now_s: float) -> Request:
        """A copy that waits, with another seed for what it has yet to draw."""
        new = Request(
            request_id,
            self.token_ids[: self.prompt_tokens],
            dataclasses.replace(self.sampling, seed=seed),
            now_s,
            salt=self.salt,
            speculate=self.speculate,
        )
        new.token_ids[:] = self.token_ids
        new.num_known = self.num_known
        new.num_given = self.num_drawn
        new.next_boundary, new.snapshot_spacing = self.next_boundary, self.snapshot_spacing
        return new

    def add(self, token_id: int, tokenizer: Tokenizer | None) -> None:
        """Appends a drawn token, and sets `finish_reason` if it is the last one.

        If the tokenizer raises, nothing was appended.
        """
        reason = None
        if token_id in (self.sampling.stop_token_ids or ()):
            reason = "stop"
        elif self.sampling.stop_texts and tokenizer is not None:
            # An exception leaves no stream: it may have taken a token that is not known.
            text, stream = self._text, self._stream
            self._text, self._stream = "", None
            if stream is None:
                text, stream = "", TextStream(tokenizer)
                for earlier in self.known[self.prompt_tokens :]:
                    text += stream.add(int(earlier))
            start = max(len(text) - max(map(len, self.sampling.stop_texts)) + 1, 0)
            text += stream.add(token_id)
            if any(text.find(stop, start) >= 0 for stop in self.sampling.stop_texts):
                reason = "stop"
            self._text, self._stream = text, stream
        if reason is None and self.num_wanted == 1:
            reason = "length"
        self.token_ids[self.num_known] = token_id
        self.num_known += 1
        self.finish_reason = reason

    def token(self, number: int) -> Token:
        """A drawn token, as a step or a stream gives it."""
        at = self.prompt_tokens + number
        is_last = at == self.num_known - 1 and self.finish_reason in ("stop", "length")
        return Token(
            self.request_id, int(self.token_ids[at]), self.finish_reason if is_last else None
        )

    def completion(self, tokenizer: Tokenizer | None) -> Completion:
        """What it got so far."""
        ids = self.token_ids[self.prompt_tokens : self.num_known].tolist()
        text, error = None, self.error
        try:
            if tokenizer is not None:
                text = tokenizer.decode(ids, skip_special_tokens=True)
                found = [at for at in map(text.find, self.sampling.stop_texts) if at >= 0]
                text = text[: min(found)] if found else text
        except Exception as raised:  # its tokens are good all the same
            error = error or raised
        return Completion(
            token_ids=ids,
            text=text,
            finish_reason=self.finish_reason or "cancelled",
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
