"""Intake: what a body of one of the protocols asks for, as requests of the engine."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from dsv4_jax.serve.answer import Renderer
from dsv4_jax.serve.errors import as_api_error
from dsv4_jax.serve.reading import Asked, BodyReader, ReaderPlan, refusal_of
from dsv4_jax.serve.settings import ServeSettings
from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine, AsyncStream


class Intake:
    """Reads bodies, and submits what they ask for; for a server, and for a file of requests.

    Attributes:
      engine: what serves the requests.
      reader: what reads bodies.
    """

    def __init__(self, engine: AsyncEngine, settings: ServeSettings) -> None:
        """For one engine."""
        self.engine = engine
        tokenizer, pools = engine.engine.tokenizer, engine.engine.plan.pools
        plan = ReaderPlan(
            dataclasses.replace(settings, api_keys=()),
            engine.engine.config,
            None if tokenizer is None else tokenizer.to_str(),
            min(pools.max_context_tokens, pools.num_blocks * pools.block_tokens),
        )
        self.reader = BodyReader(plan, tokenizer)
        self._salt = secrets.token_bytes(16)
        self._salts = [salt_of(key) for key in settings.api_keys]
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
        """Submits what a body asks for; errors are those of reading, `compile` and `submit`.

        Args:
          path: one of `PATHS`.
          body: not checked.
          key: prefixes are shared among requests of one key only; -1 is none.
          seed: of a body that has none; None draws one.
          left_out: is added the names of what the model is asked without.

        Returns:
          Streams of the answers, and what makes the protocol's answer of their tokens.
        """
        asked = self.reader.ask(path, body, left_out)
        if seed is not None and body.get("seed") is None:
            asked = asked.with_seed(seed)
        self.compile(asked)
        renderer = self.reader.renderer_of(asked)
        return self.submit(asked, key=key), renderer

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
          asked: what was read; its grammars have been compiled.
          key: prefixes are shared among requests of one key only; -1 is none.

        Raises:
          ApiError: the engine does not take them, and why.
        """
        salt = hashlib.sha256(self._salt + f"{key}".encode()).hexdigest() if key >= 0 else ""
        if 0 <= key < len(self._salts):
            salt = self._salts[key]
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
        if self.engine.engine.plan.grammars:
            self._trials.prepare()

    def close(self) -> None:
        """Ends the processes in which grammars are tried; no more are compiled."""
        self._trials.close()


def salt_of(key: str) -> str:
    """What keeps the prefixes of a key apart from others', the same in each process.

    Files of a disk cache are found again by it. It is slow to make, so that a key is not guessed by
    who sees what follows from it.
    """
    return hashlib.pbkdf2_hmac("sha256", key.encode(), b"dsv4-jax prefixes", 100_000).hex()
