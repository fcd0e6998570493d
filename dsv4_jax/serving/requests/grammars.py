"""Grammars of requests, compiled for the engine's tokenizer by llguidance."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import weakref
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from dsv4_jax.config import DSV4Config
from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.read_schema import read_schema
from dsv4_jax.serving.requests.compile_grammar import Compiler, read_vocabulary
from dsv4_jax.serving.requests.grammar_trials import (
    GrammarBounds,
    GrammarsFullError,
    GrammarTrials,
)
from dsv4_jax.step.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MARK = "\uff5cDSML\uff5c"
"""The token that begins the tags of tool calls."""


class Grammars:
    """Compiles grammars for a model and its tokenizer; any thread may.

    Attributes:
      vocab_size: V.
      compiled: by the `id` of a grammar, its matcher at the beginning.
      held_bytes: by grammars that were tried.
    """

    def __init__(
        self, config: DSV4Config, tokenizer: Tokenizer | None, *, is_allowed: bool = True
    ) -> None:
        """Compiles nothing yet.

        Args:
          config: the model, whose end tokens end answers.
          tokenizer: its tokenizer; None refuses all grammars.
          is_allowed: steps take masks; else all grammars are refused.
        """
        self._is_allowed = is_allowed
        self.vocab_size = config.vocab_size
        self._end_tokens = list(config.eos_token_ids)
        self._tokenizer = tokenizer
        self.compiled: dict[int, LLMatcher] = {}
        self._lock = threading.RLock()  # a grammar may be dropped at any time, by any thread
        self.held_bytes = 0

    def prepare(self) -> None:
        """Lets llguidance read the tokenizer, a second for V4's, before the first grammar comes.

        Where it cannot, the error is that of the first grammar.
        """
        with contextlib.suppress(Exception):
            _ = self._vocabulary

    def trials(self, bounds: GrammarBounds) -> GrammarTrials:
        """Where grammars of others are tried before they are compiled here."""
        text = "" if self._tokenizer is None else _with_mark(self._tokenizer.to_str())
        return GrammarTrials(text, self.vocab_size, self._end_tokens, bounds)

    def check(self, grammar: Grammar, trials: GrammarTrials | None = None) -> None:
        """Compiles a grammar, so that a request can have it at once.

        It stays compiled as long as this object of it lives. Requests of one object share what
        llguidance notes while it follows their answers, and with it the limit of that; others, of
        the same text, do not.

        Args:
          grammar: of one request, or of samples of one prompt.
          trials: where it is tried first; None is nowhere.

        Raises:
          ValueError: it is no grammar, or too complex, or llguidance or a tokenizer is missing.
          GrammarsFullError: it was tried, and others hold so much that it has no room.
        """
        if id(grammar) in self.compiled:
            return
        text = self._text_of(grammar)
        try:
            compiler = self.compiler  # first, since a tokenizer may be what is wrong
            if trials is not None:
                self._hold(grammar, trials.check(text), trials.bounds.held_bytes)
            self.compiled[id(grammar)] = compiler.compile(text)
        except ValueError as error:
            raise ValueError(f"grammar must be a {grammar.kind}: {error}") from None
        weakref.finalize(grammar, self.compiled.pop, id(grammar), None).atexit = False

    def _hold(self, grammar: Grammar, num_bytes: int, most_bytes: int) -> None:
        """Counts what a grammar holds as long as it lives."""
        with self._lock:
            held = self.held_bytes
            if held and held + num_bytes > most_bytes:
                raise GrammarsFullError(
                    f"the forms of other answers hold {held} bytes, and {most_bytes} may be held "
                    "together; try again later"
                )
            self.held_bytes += num_bytes
        weakref.finalize(grammar, self._release, num_bytes).atexit = False

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self.held_bytes -= num_bytes

    def start(self, grammar: Grammar) -> LLMatcher:
        """What follows an answer from its first token on; errors are those of `check`."""
        self.check(grammar)
        return self.compiled[id(grammar)].deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """Compiles it anew where it comes again: llguidance has noted all that it may."""
        self.compiled.pop(id(grammar), None)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        assert self._tokenizer is not None
        text = _with_mark(self._tokenizer.to_str())
        return read_vocabulary(text, self.vocab_size, self._end_tokens)

    @functools.cached_property
    def compiler(self) -> Compiler:
        """For this vocabulary; errors are llguidance's own, of a tokenizer that it cannot read."""
        return Compiler(self._vocabulary)

    def _text_of(self, grammar: Grammar) -> str:
        """A grammar as llguidance has it."""
        if self._tokenizer is not None and not self._is_allowed:
            raise ValueError(
                "grammar must be left out where the engine was built with grammars=False"
            )
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ValueError(
                "grammar must be left out where llguidance is not installed; it comes with the "
                "extra serve: pip install 'dsv4-jax[serve]'"
            ) from None
        if self._tokenizer is None:
            raise ValueError(
                "grammar must be left out where the engine has no tokenizer; take a checkpoint "
                "with a tokenizer.json"
            )
        try:
            if grammar.kind == "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            return _lark_of(grammar.text) if grammar.kind == "json_schema" else grammar.text
        except ValueError as error:
            raise ValueError(f"grammar must be a {grammar.kind}: {error}") from None


def _lark_of(text: str) -> str:
    """The grammar of a schema as JSON."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("a schema must be nested less deep") from None
    return f"start: {json_value(read_schema(schema))}"


def _with_mark(tokenizer_json: str) -> str:
    """A tokenizer of which the mark stands for no text, as the tokens in angle brackets do.

    A parser of calls goes by the token, and takes the same characters of other tokens for text.
    """
    made = json.loads(tokenizer_json)
    for one in made.get("added_tokens") or ():
        one["special"] = one["special"] or one["content"] == MARK
    return json.dumps(made)
