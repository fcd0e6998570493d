"""Grammars of requests: llguidance follows each answer, and says which tokens may come next."""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.config import DSV4Config
from dsv4_jax.schemas.json_values import json_value
from dsv4_jax.schemas.read_schema import read_schema
from dsv4_jax.serving.compile_grammar import Compiler, problem_of, read_vocabulary
from dsv4_jax.serving.grammar_trials import GrammarBounds, GrammarTrials
from dsv4_jax.serving.request import DrawError, Request
from dsv4_jax.serving.scheduler import RowPlan
from dsv4_jax.step.draws import TokenMasks
from dsv4_jax.step.grammar import Grammar
from dsv4_jax.step.settings_size import mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MARK = "\uff5cDSML\uff5c"
"""The token that begins the tags of tool calls."""


class Grammars:
    """Compiles grammars for a model and its tokenizer; any thread may."""

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
        self._compiled: dict[int, LLMatcher] = {}

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
        """
        if id(grammar) in self._compiled:
            return
        text = self._text_of(grammar)
        try:
            compiler = self.compiler  # first, since a tokenizer may be what is wrong
            if trials is not None:
                trials.check(text)
            self._compiled[id(grammar)] = compiler.compile(text)
        except ValueError as error:
            raise ValueError(f"grammar must be a {grammar.kind}: {error}") from None
        weakref.finalize(grammar, self._compiled.pop, id(grammar), None).atexit = False

    def start(self, grammar: Grammar) -> LLMatcher:
        """What follows an answer from its first token on; errors are those of `check`."""
        self.check(grammar)
        return self._compiled[id(grammar)].deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """Compiles it anew where it comes again: llguidance has noted all that it may."""
        self._compiled.pop(id(grammar), None)

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
