"""Engine: the host loop that admits requests, steps, streams and releases."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from dsv4_jax.cache.manager import KVCacheManager
from dsv4_jax.cache.model_cache import ModelCache, init_cache
from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.engine.decode import jit_decode_loop
from dsv4_jax.engine.prefill import prefill
from dsv4_jax.engine.sampling import Sampling, make_sampling, sample
from dsv4_jax.engine.text import load_tokenizer
from dsv4_jax.model.checkpoint import load_checkpoint
from dsv4_jax.model.params import DSV4Params


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a prompt got.

    Attributes:
      token_ids: the new tokens, a stop token included.
      text: of the new tokens without special ones; None without a tokenizer.
      finish_reason: "stop" (a stop token) or "length".
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of one prompt, as `Engine.stream` gives them.

    Attributes:
      prompt_idx: which prompt, from 0.
      token_id: the token.
      finish_reason: "stop" or "length" on a prompt's last token, else None.
    """

    prompt_idx: int
    token_id: int
    finish_reason: str | None


@dataclasses.dataclass
class _Request:
    """A prompt on its way: what is left to prefill, and what it has drawn."""

    prompt_idx: int
    prompt: np.ndarray
    seed: int
    prefilled: int = 0
    drawn: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.prompt)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill_and_sample(
    params: DSV4Params,
    cache: ModelCache,
    step_input: StepInput,
    sampling: Sampling,
    *,
    config: DSV4Config,
) -> tuple[ModelCache, jax.Array]:
    """A prefill call and, for every row in it, the token that follows: i32[B]."""
    cache, logits = prefill(params, cache, step_input, config=config)
    slots = jnp.maximum(step_input.request_slots, 0)
    return cache, sample(logits, sampling, cache.length_tokens[slots])


class Engine:
    """Generates text for prompts of any lengths, in one batch."""

    def __init__(
        self,
        config: DSV4Config,
        params: DSV4Params,
        *,
        max_requests: int = 8,
        max_context_tokens: int = 4096,
        cache_format: str = DEFAULT_CACHE_FORMAT,
        prefill_tokens: Sequence[int] = (64, 256),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Allocates the cache.

        Args:
          config: the model.
          params: of the model.
          max_requests: prompts that run at once; more wait for a slot.
          max_context_tokens: longest prompt and answer together.
          cache_format: name of the storage format.
          prefill_tokens: sizes of a prefill call, ascending; each compiles once, when first used.
          tokenizer: for prompts that are text, and for the text of completions.

        Raises:
          ValueError: an argument is out of range, or there is no such format.
        """
        if not prefill_tokens or list(prefill_tokens) != sorted(set(prefill_tokens)):
            raise ValueError(f"prefill_tokens must be ascending sizes, got {prefill_tokens}")
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self._prefill_tokens = tuple(prefill_tokens)
        self._max_context_tokens = max_context_tokens
        self._cache = init_cache(
            config,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            cache_format=cache_format,
        )
        self._manager = KVCacheManager(
            config, max_requests=max_requests, max_context_tokens=max_context_tokens
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: DTypeLike = jnp.bfloat16,
        progress: bool = False,
        **options,
    ) -> Engine:
        """An engine for a checkpoint directory, with its tokenizer if it brings one.

        Args:
          path: the directory.
          dtype: of activations.
          progress: shows a bar while loading.
          **options: of `Engine`.
        """
        config, params = load_checkpoint(path, dtype=dtype, progress=progress)
        return cls(config, params, tokenizer=load_tokenizer(path), **options)

    @property
    def cache(self) -> ModelCache:
        """The cache as it is now, to look into; the next step donates it."""
        return self._cache

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Completes prompts; a prompt's result does not depend on the others.

        Args:
          prompts: token ids, or text if the engine has a tokenizer; any lengths.
          max_new_tokens: most tokens to draw for each.
          temperature: 0 takes the most likely token.
          top_k: draws among that many most likely tokens; 0 is no limit.
          top_p: draws among the most likely tokens that together have that probability.
          seed: of the draws: one, or one per prompt.
          stop_token_ids: tokens that end an answer; None is the config's, () is none at all.

        Returns:
          One completion per prompt, in order.

        Raises:
          ValueError: a prompt is empty, too long, or holds an unknown token, or a setting is out
            of range; nothing was started.
        """
        drawn: list[list[int]] = [[] for _ in prompts]
        reasons = [""] * len(prompts)
        for token in self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
        ):
            drawn[token.prompt_idx].append(token.token_id)
            reasons[token.prompt_idx] = token.finish_reason or ""
        return [
            Completion(token_ids=ids, text=self._decode(ids), finish_reason=reason)
            for ids, reason in zip(drawn, reasons, strict=True)
        ]

    def stream(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Iterator[Token]:
        """As `generate`, token by token as they are drawn."""
        encoded = [self._encode(idx, prompt) for idx, prompt in enumerate(prompts)]
        self._check_lengths(encoded, max_new_tokens)
        stops = self.config.eos_token_ids if stop_token_ids is None else tuple(stop_token_ids)
        seeds = [seed] * len(encoded) if isinstance(seed, int | np.integer) else list(seed)
        if len(seeds) != len(encoded):
            raise ValueError(
                f"seed must be one, or one per prompt, got {len(seeds)} for {len(encoded)} prompts"
            )
        waiting = collections.deque(
            _Request(prompt_idx=idx, prompt=prompt, seed=int(seeds[idx]) % 2**32)
            for idx, prompt in enumerate(encoded)
        )
        settings = functools.partial(
            make_sampling,
            self._cache.max_requests,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token_ids=stops,
        )
        settings()  # Raises here, before anything is started.
        return self._run(waiting, max_new_tokens, stops, settings)

    def _run(
        self,
        waiting: collections.deque[_Request],
        max_new_tokens: int,
        stops: tuple[int, ...],
        settings: functools.partial[Sampling],
    ) -> Iterator[Token]:
        running: dict[int, _Request] = {}
        sampling = settings()
        try:
            while waiting or running:
                if self._admit(waiting, running, max_new_tokens):
                    seeds = [running[s].seed if s in running else 0 for s in self._slots]
                    sampling = settings(seed=seeds)
                self._cache = self._manager.apply(self._cache)
                if any(not request.is_prefilled for request in running.values()):
                    drawn = self._prefill(running, sampling)
                else:
                    drawn = self._decode_step(running, sampling)
                for slot, token_id in drawn.items():
                    request = running[slot]
                    request.drawn.append(token_id)
                    reason = None
                    if token_id in stops:
                        reason = "stop"
                    elif len(request.drawn) == max_new_tokens:
                        reason = "length"
                    if reason:
                        self._manager.release(slot)
                        del running[slot]
                    yield Token(request.prompt_idx, token_id, reason)
        finally:
            for slot in running:
                self._manager.release(slot)

    @property
    def _slots(self) -> range:
        return range(self._cache.max_requests)

    def _admit(
        self,
        waiting: collections.deque[_Request],
        running: dict[int, _Request],
        max_new_tokens: int,
    ) -> bool:
        """Moves waiting requests to free slots, in order; whether any moved."""
        moved = False
        while waiting:
            needed = len(waiting[0].prompt) + max_new_tokens
            if not self._manager.can_admit(needed):
                break
            running[self._manager.admit(needed)] = waiting.popleft()
            moved = True
        return moved

    def _prefill(self, running: dict[int, _Request], sampling: Sampling) -> dict[int, int]:
        """One prefill call over open prompts; the first token of each that it completes."""
        budget = self._prefill_tokens[-1]
        chunks: dict[int, int] = {}
        for slot, request in running.items():
            chunk = min(len(request.prompt) - request.prefilled, budget)
            if chunk:
                chunks[slot] = chunk
                budget -= chunk
        total = sum(chunks.values())
        size = next(size for size in self._prefill_tokens if size >= total)
        token_ids, request_ids = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        start = 0
        for slot, chunk in chunks.items():
            request = running[slot]
            piece = request.prompt[request.prefilled : request.prefilled + chunk]
            token_ids[start : start + chunk], request_ids[start : start + chunk] = piece, slot
            request.prefilled += chunk
            self._manager.advance(slot, chunk)
            start += chunk
        step_input = self._step_input(token_ids, request_ids, chunks)
        self._cache, drawn = _prefill_and_sample(
            self.params, self._cache, step_input, sampling, config=self.config
        )
        values = np.asarray(drawn)
        return {slot: int(values[slot]) for slot in chunks if running[slot].is_prefilled}

    def _decode_step(self, running: dict[int, _Request], sampling: Sampling) -> dict[int, int]:
        """One decode step of every running request; the token that each drew."""
        token_ids = np.zeros(len(self._slots), np.int32)
        request_ids = np.full(len(self._slots), -1, np.int32)
        for slot, request in running.items():
            token_ids[slot], request_ids[slot] = request.drawn[-1], slot
            self._manager.advance(slot, 1)
        step_input = self._step_input(token_ids, request_ids, running)
        self._cache, drawn = jit_decode_loop(
            self.params, self._cache, step_input, sampling, num_steps=1, config=self.config
        )
        values = np.asarray(drawn)
        return {slot: int(values[slot, 0]) for slot in running}

    def _step_input(
        self, token_ids: np.ndarray, request_ids: np.ndarray, active: dict[int, int] | dict
    ) -> StepInput:
        """Row r is slot r, idle unless it is active."""
        slots = np.array([slot if slot in active else -1 for slot in self._slots], np.int32)
        return StepInput(
            token_ids=jnp.asarray(token_ids),
            request_ids=jnp.asarray(request_ids),
            request_slots=jnp.asarray(slots),
        )

    def _encode(self, prompt_idx: int, prompt: str | Sequence[int]) -> np.ndarray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"prompts[{prompt_idx}] is text and the engine has no tokenizer; "
                    "pass token ids, or a checkpoint with a tokenizer.json"
                )
            ids = np.asarray(self.tokenizer.encode(prompt).ids, np.int64)
        else:
            ids = np.asarray(prompt)
            if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer)):
                raise ValueError(
                    f"prompts[{prompt_idx}] must be text or a list of token ids, got {prompt!r}"
                )
        if not ids.size:
            raise ValueError(f"prompts[{prompt_idx}] is empty; it needs at least one token")
        wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if wrong.size:
            raise ValueError(
                f"prompts[{prompt_idx}] holds token id {int(wrong[0])}, outside "
                f"0..{self.config.vocab_size - 1} (vocab_size)"
            )
        return ids.astype(np.int32)

    def _check_lengths(self, encoded: list[np.ndarray], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        for idx, ids in enumerate(encoded):
            if len(ids) + max_new_tokens > self._max_context_tokens:
                raise ValueError(
                    f"prompts[{idx}] has {len(ids)} tokens, and with max_new_tokens="
                    f"{max_new_tokens} that is {len(ids) + max_new_tokens}, more than "
                    f"max_context_tokens={self._max_context_tokens}; shorten one, or build the "
                    "engine with a longer context"
                )

    def _decode(self, token_ids: list[int]) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
