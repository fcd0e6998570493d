"""Intake: what a body of one of the protocols asks for, as requests of the engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dsv4_jax.serve.answer import Renderer
from dsv4_jax.serve.completions import CompletionRenderer, read_completion
from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError, ContextLengthError, as_api_error, refuse
from dsv4_jax.serve.fields import check_fields
from dsv4_jax.serve.fields_openai import COMPLETIONS as COMPLETION_FIELDS
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine, AsyncStream
from dsv4_jax.serving.requests.prompts import encode_prompt
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


type Prompt = tuple[np.ndarray, SamplingParams]


class Asked(NamedTuple):
    """What a body asks for.

    Attributes:
      prompts: token ids of each, i32[n], and how its answers are drawn.
      n: answers to each.
      renderer: what makes the protocol's answer of their tokens.
      form_field: asks for the form of the answers; errors of their grammar name it.
    """

    prompts: list[Prompt]
    n: int
    renderer: Renderer
    form_field: str = ""

    @property
    def grammars(self) -> list[Grammar]:
        """Those of the answers."""
        return [sampling.grammar for _, sampling in self.prompts if sampling.grammar is not None]

    def with_seed(self, seed: int) -> Asked:
        """The same, its answers drawn by this seed."""
        prompts = [
            (ids, dataclasses.replace(sampling, seed=seed)) for ids, sampling in self.prompts
        ]
        return self._replace(prompts=prompts)


class Intake:
    """Reads bodies, and submits what they ask for; for a server, and for a file of requests.

    Attributes:
      engine: what serves the requests.
      settings: what is allowed.
      tokenizer: the engine's, or None.
      max_context_tokens: longest prompt and answer together.
      conversations: what renders and parses them.
    """

    def __init__(self, engine: AsyncEngine, settings: ServeSettings) -> None:
        """For one engine."""
        self.engine = engine
        self.settings = settings
        self.tokenizer = engine.engine.tokenizer
        pools = engine.engine._plan.pools
        self.max_context_tokens = min(
            pools.max_context_tokens, pools.num_blocks * pools.block_tokens
        )
        self.conversations = Conversations(
            settings,
            None if self.tokenizer is None else self.tokenizer.to_str(),
            self.max_context_tokens,
        )
        self._salt = secrets.token_bytes(16)
        self._grammars = engine.engine.limits.grammars
        self._trials = self._grammars.trials(settings.grammar_bounds)

    def start(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        key: int = -1,
        seed: int | None = None,
        left_out: list[str] | None = None,
    ) -> tuple[list[AsyncStream], Renderer]:
        """Submits what a body asks for: `read`, `compile` and `submit`; errors are theirs.

        Args:
          path: one of `PATHS`.
          body: not checked.
          key: prefixes are shared among requests of one key only; -1 is none.
          seed: of a body that has none; None draws one.
          left_out: is added the names of what the model is asked without.

        Returns:
          Streams of the answers, and what makes the protocol's answer of their tokens.
        """
        asked = self.read(path, body, left_out)
        if seed is not None and body.get("seed") is None:
            asked = asked.with_seed(seed)
        self.compile(asked)
        return self.submit(asked, key=key), asked.renderer

    def read(self, path: str, body: Mapping[str, Any], left_out: list[str] | None = None) -> Asked:
        """What a body asks for.

        Args:
          path: one of `PATHS`.
          body: not checked.
          left_out: is added the names of what the model is asked without.

        Raises:
          ApiError: the body cannot be served, and why.
        """
        if path == COMPLETIONS:
            given = check_fields(body, COMPLETION_FIELDS, left_out)
            self.check_model(given.get("model", self.settings.model_name))
            text = read_completion(given, max_choices=self.settings.max_choices)
            renderer = CompletionRenderer(text, self.settings.model_name, self.tokenizer)
            return Asked([self._fit(one, text.sampling) for one in text.prompts], text.n, renderer)
        dialect = DIALECTS[path]
        self.check_model(body.get("model"))
        asked = self.conversations.read(body, dialect, left_out)
        assert self.conversations.tokenizer is not None
        renderer = ConversationRenderer(
            asked, dialect, self.settings.model_name, self.conversations.tokenizer
        )
        prompts = [self._fit(asked.prompt_ids, asked.sampling)]
        return Asked(prompts, asked.n, renderer, asked.form_field)

    def compile(self, asked: Asked) -> None:
        """Compiles the grammars of the answers, so that `submit` waits for nothing.

        Raises:
          ApiError: one is none, or takes more than the settings allow, or `close` was called.
        """
        for grammar in asked.grammars:
            try:
                self._grammars.check(grammar, self._trials)
            except ValueError as error:
                raise refusal_of(str(error), asked.form_field) from None
            except Exception as error:
                raise as_api_error(error) from error

    def submit(self, asked: Asked, *, key: int = -1) -> list[AsyncStream]:
        """Submits all requests of a body, or none.

        Args:
          asked: what `read` gave; its grammars have been compiled.
          key: prefixes are shared among requests of one key only; -1 is none.

        Raises:
          ApiError: the engine does not take them, and why.
        """
        salt = hashlib.sha256(self._salt + f"{key}".encode()).hexdigest() if key >= 0 else ""
        streams: list[AsyncStream] = []
        try:
            for prompt, sampling in asked.prompts:
                streams += self.engine.submit_many(
                    prompt,  # type: ignore[arg-type]
                    asked.n,
                    sampling=sampling,
                    salt=salt,
                )
        except Exception as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, ValueError):
                raise refusal_of(str(error), asked.form_field) from None
            raise as_api_error(error) from error
        return streams

    def prepare(self) -> None:
        """Starts a process in which grammars are tried, where there can be any."""
        if self.engine.engine._plan.grammars:
            self._trials.prepare()

    def close(self) -> None:
        """Ends the processes in which grammars are tried; no more are compiled."""
        self._trials.close()

    def check_model(self, name: object) -> None:
        """Refuses other models than the one that is here, with an `ApiError`."""
        if not isinstance(name, str):
            refuse("model", "must be a text")
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"there is no model {json.dumps(name[:100])} here, but "
                f"{json.dumps(self.settings.model_name)}",
                param="model",
                code="model_not_found",
            )

    def _fit(self, prompt: str | list[int], sampling: SamplingParams) -> Prompt:
        """A prompt's token ids, and settings by which it draws what the context leaves at most."""
        engine = self.engine.engine
        if not isinstance(prompt, str):
            self._check_size(len(prompt))
        try:
            ids = encode_prompt(
                prompt, engine.config, self.tokenizer, name="prompt", check_size=self._check_size
            )
        except ValueError as error:
            raise refusal_of(str(error), "") from None
        room = self.max_context_tokens - len(ids)
        if sampling.max_new_tokens <= room:
            return ids, sampling
        return ids, dataclasses.replace(sampling, max_new_tokens=room)

    def _check_size(self, size: int) -> None:
        if size >= self.max_context_tokens:
            raise ContextLengthError(size, self.max_context_tokens, "prompt")


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
