"""BodyReader: what a body of one of the protocols asks for, found without an engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.config import DSV4Config
from dsv4_jax.serve.answer import Renderer
from dsv4_jax.serve.completions import CompletionRenderer, CompletionRequest, read_completion
from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.conversations import AskedConversation, Conversations
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES, check_dialect
from dsv4_jax.serve.errors import ApiError, ContextLengthError, refuse
from dsv4_jax.serve.fields import Rule, check_fields, read_flag
from dsv4_jax.serve.fields_openai import COMPLETIONS as COMPLETION_FIELDS
from dsv4_jax.serve.fields_openai import DETOKENIZE as DETOKENIZE_FIELDS
from dsv4_jax.serve.fields_openai import TOKENIZE as TOKENIZE_FIELDS
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serve.turns.packed_turns import PackedTurns
from dsv4_jax.serving.requests.prompts import encode_prompt
from dsv4_jax.serving.requests.text import encode_text
from dsv4_jax.step.grammar import Grammar
from dsv4_jax.step.sampling import SamplingParams

COMPLETIONS = "/v1/completions"
DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
"""Conversations by path."""

PATHS = (COMPLETIONS, *DIALECTS)
"""Where text is drawn."""

COUNT_TOKENS, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
"""Where the answer is in the body alone."""

type Prompt = tuple[np.ndarray, SamplingParams]


class Asked(NamedTuple):
    """What a body asks for.

    Attributes:
      path: one of `PATHS`.
      prompts: token ids of each, i32[n], and how its answers are drawn.
      n: answers to each.
      told: what the protocol's answer is made by, besides its tokens; of a conversation the turns
        are packed where another process has read it.
      form_field: asks for the form of the answers; errors of their grammar name it.
    """

    path: str
    prompts: list[Prompt]
    n: int
    told: CompletionRequest | AskedConversation
    form_field: str = ""

    @property
    def grammars(self) -> list[Grammar]:
        """Those of the answers."""
        return [sampling.grammar for _, sampling in self.prompts if sampling.grammar is not None]

    def with_seed(self, seed: int) -> Asked:
        """The same, its answers drawn by this seed."""
        prompts = [(ids, sampling.with_seed(seed)) for ids, sampling in self.prompts]
        return self._replace(prompts=prompts)

    def pack(self) -> Asked:
        """The same without objects of libraries, for another process."""
        told = self.told
        if isinstance(told, AskedConversation):
            told = told._replace(turns=told.turns.pack(), echo=None)
        return self._replace(told=told)


class ReaderPlan(NamedTuple):
    """What a reader is made of; it pickles.

    Attributes:
      settings: what is allowed.
      config: the model.
      tokenizer_json: contents of `tokenizer.json`; None if there is none.
      max_context_tokens: longest prompt and answer together.
    """

    settings: ServeSettings
    config: DSV4Config
    tokenizer_json: str | None
    max_context_tokens: int


class BodyReader:
    """Reads bodies that have been parsed.

    Attributes:
      plan: what it is made of.
      tokenizer: for text, or None.
      conversations: what renders and parses them.
    """

    def __init__(self, plan: ReaderPlan, tokenizer: Tokenizer | None = None) -> None:
        """Of a plan; a tokenizer that is given is that of the plan, and is not loaded once more."""
        self.plan = plan
        if tokenizer is None and plan.tokenizer_json is not None:
            tokenizer = Tokenizer.from_str(plan.tokenizer_json)
        self.tokenizer = tokenizer
        self.conversations = Conversations(
            plan.settings,
            plan.tokenizer_json,
            plan.max_context_tokens,
            is_v41=plan.config.sources is not None,
        )
        self._answers: dict[str, Callable[[Mapping[str, Any], list[str]], bytes]] = {
            COUNT_TOKENS: self._count_tokens,
            TOKENIZE: self._tokenize,
            DETOKENIZE: self._detokenize,
        }

    def read(self, path: str, body: Mapping[str, Any], left_out: list[str]) -> Asked | bytes:
        """What a body asks for, or where the answer is in the body alone, that answer as JSON.

        Args:
          path: one of `PATHS`, or of the others that take a body.
          body: not checked.
          left_out: is added the names of what the model is asked without.

        Raises:
          ApiError: the body cannot be served, and why.
        """
        answer = self._answers.get(path)
        return self.ask(path, body, left_out) if answer is None else answer(body, left_out)

    def ask(self, path: str, body: Mapping[str, Any], left_out: list[str] | None = None) -> Asked:
        """What a body of one of `PATHS` asks for; arguments and errors are those of `read`."""
        settings = self.plan.settings
        if path == COMPLETIONS:
            given = check_fields(body, COMPLETION_FIELDS, left_out)
            self.check_model(given.get("model", settings.model_name))
            text = read_completion(given, max_choices=settings.max_choices)
            prompts = [self._fit(one, text.sampling) for one in text.prompts]
            told = text if text.echoes else text._replace(prompts=[])
            return Asked(path, prompts, text.n, told)
        self.check_model(body.get("model"))
        asked = self.conversations.read(body, DIALECTS[path], left_out)
        ids, sampling = self._fit(asked.prompt_ids, asked.sampling)
        asked = asked._replace(prompt_ids=ids)
        return Asked(path, [(ids, sampling)], asked.n, asked, asked.form_field)

    def renderer_of(self, asked: Asked) -> Renderer:
        """What makes the protocol's answer of the tokens."""
        told, name = asked.told, self.plan.settings.model_name
        if isinstance(told, CompletionRequest):
            return CompletionRenderer(told, name, self.tokenizer)
        dialect, tokenizer = DIALECTS[asked.path], self.conversations.tokenizer
        assert tokenizer is not None
        if isinstance(told.turns, PackedTurns):
            turns, echo = self.conversations.unpack(told.turns, dialect)
            told = told._replace(turns=turns, echo=echo)
        return ConversationRenderer(told, dialect, name, tokenizer)

    def check_model(self, name: object) -> None:
        """Refuses other models than the one that is here, with an `ApiError`."""
        ours = self.plan.settings.model_name
        if not isinstance(name, str):
            refuse("model", "must be a text")
        if name != ours:
            raise ApiError(
                404,
                f"there is no model {json.dumps(name[:100])} here, but {json.dumps(ours)}",
                param="model",
                code="model_not_found",
            )

    def _count_tokens(self, body: Mapping[str, Any], left_out: list[str]) -> bytes:
        body = {"max_tokens": 1} | body  # type: ignore[operator]
        self.check_model(body.get("model"))
        most = self.plan.settings.max_tools
        given = check_dialect(body, MESSAGES, max_tools=most, left_out=left_out)
        turns, _ = self.conversations.convert(given, MESSAGES)
        return json.dumps({"input_tokens": len(self.conversations.encode(turns))}).encode()

    def _tokenize(self, body: Mapping[str, Any], left_out: list[str]) -> bytes:
        given = self._check(body, TOKENIZE_FIELDS)
        prompt = given.get("prompt")
        if not isinstance(prompt, str):
            refuse("prompt", "must be a text")
        has_special = read_flag({"add_special_tokens": True} | given, "add_special_tokens")
        tokenizer = self._need_tokenizer()
        try:
            ids = encode_text(tokenizer, prompt, add_special_tokens=has_special).ids
        except ValueError as error:
            refuse("prompt", f"must be another text: {error}")
        told = json.dumps({"count": len(ids), "max_model_len": self.plan.max_context_tokens})
        return f'{{"tokens": [{_in_parts(ids)}], {told[1:]}'.encode()

    def _detokenize(self, body: Mapping[str, Any], left_out: list[str]) -> bytes:
        tokens = self._check(body, DETOKENIZE_FIELDS).get("tokens")
        size = self.plan.config.vocab_size
        if not isinstance(tokens, list) or not all(
            type(token) is int and 0 <= token < size for token in tokens
        ):
            refuse("tokens", f"must be a list of token ids from 0 to {size - 1}")
        (text,) = self._need_tokenizer().decode_batch([tokens], skip_special_tokens=False)
        return json.dumps({"prompt": text}, ensure_ascii=False).encode()

    def _check(self, body: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
        """Fields that were checked, of a body that names this model or none."""
        given = check_fields(body, rules)
        self.check_model(given.get("model", self.plan.settings.model_name))
        return given

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, "the checkpoint has no tokenizer")
        return self.tokenizer

    def _fit(self, prompt: str | list[int], sampling: SamplingParams) -> Prompt:
        """A prompt's token ids, and settings by which it draws what the context leaves at most."""
        if not isinstance(prompt, str):
            self._check_size(len(prompt))
        try:
            ids = encode_prompt(
                prompt,
                self.plan.config,
                self.tokenizer,
                name="prompt",
                check_size=self._check_size,
            )
        except ValueError as error:
            raise refusal_of(str(error), "") from None
        room = self.plan.max_context_tokens - len(ids)
        if sampling.max_new_tokens <= room:
            return ids, sampling
        return ids, sampling.with_plain(max_new_tokens=room)

    def _check_size(self, size: int) -> None:
        most = self.plan.max_context_tokens
        if size >= most:
            raise ContextLengthError(size, most, "prompt")


def refusal_of(told: str, form_field: str) -> ApiError:
    """What a client is told of a request that the engine refuses.

    Args:
      told: what the engine says.
      form_field: asks for the form of the answer, whose grammar the client has not written.
    """
    if not told.startswith("grammar must be a "):
        name = told.split()[0]
        return ApiError(400, told, param=name if name in COMPLETION_FIELDS else "prompt")
    reason = told.partition(": ")[2].partition("\n")[0]
    return ApiError(400, f"{form_field}: cannot be held: {reason}", param=form_field)


def _in_parts(ids: list[int]) -> str:
    """Ids as JSON, with commas between; of all at once other threads would have to wait."""
    size = 2**12
    return ", ".join(json.dumps(part)[1:-1] for part in itertools.batched(ids, size))
