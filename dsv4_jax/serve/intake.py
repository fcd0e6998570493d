"""Intake: what a body of one of the protocols asks for, as requests of the engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4_jax.serve.answer import Renderer
from dsv4_jax.serve.completions import CompletionRenderer, read_completion
from dsv4_jax.serve.conversation_renderer import ConversationRenderer
from dsv4_jax.serve.conversations import Conversations
from dsv4_jax.serve.dialects import CHAT, MESSAGES, RESPONSES
from dsv4_jax.serve.errors import ApiError, ContextLengthError, as_api_error, refuse
from dsv4_jax.serve.fields import check_fields
from dsv4_jax.serve.fields_openai import COMPLETIONS as COMPLETION_FIELDS
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving.async_engine import AsyncEngine, AsyncStream
from dsv4_jax.serving.text import encode_text
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

    def start(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        key: int = -1,
        left_out: list[str] | None = None,
    ) -> tuple[list[AsyncStream], Renderer]:
        """Submits what a body asks for.

        Args:
          path: one of `PATHS`.
          body: not checked.
          key: prefixes are shared among requests of one key only; -1 is none.
          left_out: is added the names of what the model is asked without.

        Returns:
          Streams of the answers, and what makes the protocol's answer of their tokens.

        Raises:
          ApiError: the body cannot be served, and why; nothing was submitted.
        """
        if path == COMPLETIONS:
            given = check_fields(body, COMPLETION_FIELDS, left_out)
            self.check_model(given.get("model", self.settings.model_name))
            text = read_completion(given, max_choices=self.settings.max_choices)
            renderer = CompletionRenderer(text, self.settings.model_name, self.tokenizer)
            return self._submit(text.prompts, text.n, text.sampling, key), renderer
        dialect = DIALECTS[path]
        self.check_model(body.get("model"))
        asked = self.conversations.read(body, dialect, left_out)
        assert self.conversations.tokenizer is not None
        renderer = ConversationRenderer(
            asked, dialect, self.settings.model_name, self.conversations.tokenizer
        )
        prompts, form = [asked.prompt_ids], asked.form_field
        return self._submit(prompts, asked.n, asked.sampling, key, form), renderer

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

    def _submit(
        self,
        prompts: Sequence[str | list[int]],
        n: int,
        sampling: SamplingParams,
        key: int,
        form_field: str = "",
    ) -> list[AsyncStream]:
        """Submits n requests for each prompt, or none; a field asks for the answer's form."""
        salt = hashlib.sha256(self._salt + f"{key}".encode()).hexdigest() if key >= 0 else ""
        streams: list[AsyncStream] = []
        try:
            for prompt in prompts:
                ids, fitting = self._fit(prompt, sampling)
                streams += self.engine.submit_many(ids, n, sampling=fitting, salt=salt)
        except Exception as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, ValueError):
                raise refusal_of(str(error), form_field) from None
            raise as_api_error(error) from error
        return streams

    def _fit(
        self, prompt: str | list[int], sampling: SamplingParams
    ) -> tuple[str | list[int], SamplingParams]:
        """A prompt's token ids, and settings by which it draws what the context leaves at most."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                return prompt, sampling
            prompt = encode_text(self.tokenizer, prompt)
        room = self.max_context_tokens - len(prompt)
        if room < 1:
            raise ContextLengthError(len(prompt), self.max_context_tokens, "prompt")
        if sampling.max_new_tokens <= room:
            return prompt, sampling
        return prompt, dataclasses.replace(sampling, max_new_tokens=room)


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
