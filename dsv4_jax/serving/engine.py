"""Engine: requests come, share, speculate, are preempted and end; one step serves them all."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from dsv4_jax.allocator.pool_plan import device_memory_bytes, plan_pools
from dsv4_jax.allocator.verify import Report
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.schema import DEFAULT_CACHE_FORMAT
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params, unstack_layers
from dsv4_jax.serving.loop import ServingLoop
from dsv4_jax.serving.metrics import Metrics, count_compiles
from dsv4_jax.serving.prompts import check_length, encode_prompt, make_options
from dsv4_jax.serving.request import Completion, Request, Token
from dsv4_jax.serving.runner import StepRunner
from dsv4_jax.serving.scheduler import step_sizes
from dsv4_jax.serving.text import load_tokenizer


class Engine:
    """Generates text for prompts of any lengths; they may come and go at any time.

    `submit` queues a request, `step` serves all of them once, `stream` and `completion` give
    results, `cancel` ends one early, and `generate` does all of that for a list of prompts. One
    thread at a time.

    A request is admitted when a slot and blocks for its prompt are free, oldest first; it gets
    further blocks before the steps that need them, and the youngest gives its own back if there
    are none. What it had drawn is computed again later, from the longest prefix still cached.

    Attributes:
      config: the model.
      params: of the model, as the steps take them.
      tokenizer: for text, or None.
      metrics: counters, and what holds now.
    """

    def __init__(
        self,
        config: DSV4Config,
        params: DSV4Params,
        *,
        max_requests: int = 8,
        max_context_tokens: int = 4096,
        cache_format: str = DEFAULT_CACHE_FORMAT,
        prefill_tokens: Sequence[int] | None = None,
        decode_tokens: int | None = None,
        draft_tokens: int = 0,
        num_blocks: int | None = None,
        num_snapshots: int | None = None,
        memory_bytes: int | None = None,
        gpu_memory_fraction: float | None = None,
        unroll: bool | None = None,
        debug: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Allocates the cache.

        Args:
          config: the model.
          params: of the model.
          max_requests: requests that run at once; more wait for a slot.
          max_context_tokens: longest prompt and answer together.
          cache_format: name of the storage format.
          prefill_tokens: sizes of a step that holds prompt tokens, ascending; each is a program.
            The largest must hold a token of every request. None is 64 and 256, and
            `max_requests` if that is more.
          decode_tokens: size of a step in which every request only decodes. None is one of
            `max_requests * (draft_tokens + 1)` tokens; without drafts it is a leaner program. A
            size of `prefill_tokens` makes one program of both, whose results are then bit for bit
            the same whatever runs beside a request.
          draft_tokens: k, tokens that the draft block guesses per step, 0 to 8; 0 is no
            speculation.
          num_blocks: physical blocks; None is full contexts in all slots, or what the budget holds.
          num_snapshots: prefixes that can be resumed at; None is 8 for every slot, or a tenth of
            the budget; 0 shares no prefixes.
          memory_bytes: budget of the cache.
          gpu_memory_fraction: likewise, as a share of the device's memory beside what it holds now.
          unroll: gives every layer arrays of its own (`unstack_layers`), which is what a step on a
            GPU wants; None is just there. Who keeps stacked `params` has them in memory twice.
          debug: poisons freed storage and verifies the whole cache after every step; slow.
          tokenizer: for prompts that are text, and for the text of completions.

        Raises:
          ValueError: an argument is out of range, or there is no such format.
        """
        if not 0 <= draft_tokens <= 8:
            raise ValueError(f"draft_tokens must be 0..8, got {draft_tokens}")
        if draft_tokens and params.mtp is None:
            raise ValueError(
                f"draft_tokens={draft_tokens} needs a draft (MTP) block, and params.mtp is None"
            )
        if memory_bytes is not None and gpu_memory_fraction is not None:
            raise ValueError("give memory_bytes or gpu_memory_fraction, not both")
        if gpu_memory_fraction is not None:
            memory_bytes = device_memory_bytes(gpu_memory_fraction)
        if num_snapshots is None and memory_bytes is None:
            num_snapshots = 8 * max(max_requests, 0)
        if _unrolls(unroll):
            params = unstack_layers(params)
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        cached = dataclasses.replace(config, num_mtp_layers=int(draft_tokens > 0))
        self._plan = plan_pools(
            cached,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            cache_format=cache_format,
            num_blocks=num_blocks,
            num_snapshots=num_snapshots,
            memory_bytes=memory_bytes,
        )
        self._sizes, self._plain_size = step_sizes(
            prefill_tokens, decode_tokens, max_requests=max_requests, draft_tokens=draft_tokens
        )
        self._debug = debug
        self._compiles_before = count_compiles()
        self._runner = StepRunner(
            cached, params, self._plan, cache_format=cache_format, draft_tokens=draft_tokens
        )
        self._loop = ServingLoop(
            self._runner,
            sizes=self._sizes,
            plain_size=self._plain_size,
            tokenizer=tokenizer,
            metrics=self.metrics,
            debug=debug,
        )
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: DTypeLike = jnp.bfloat16,
        progress: bool = False,
        unroll: bool | None = None,
        **options,
    ) -> Engine:
        """An engine for a checkpoint directory, with its tokenizer if it brings one.

        Args:
          path: the directory.
          dtype: of activations.
          progress: shows a bar while loading.
          unroll: of `Engine`; nothing is in memory twice.
          **options: of `Engine`.
        """
        config, params = load_checkpoint(path, dtype=dtype, progress=progress)
        if _unrolls(unroll):
            params = unstack_layers(params, donate=True)
        return cls(config, params, tokenizer=load_tokenizer(path), unroll=unroll, **options)

    @property
    def cache(self) -> ModelCache:
        """The cache as it is now, to look into; the next step donates it."""
        return self._runner.cache

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._loop.running) + len(self._loop.waiting)

    def warmup(self) -> list[tuple[str, float]]:
        """Compiles every program that serving can need.

        Returns:
          What was compiled, and seconds for each; 0.0 or so for one that was there already.

        Raises:
          RuntimeError: requests are running.
        """
        if self._loop.running:
            raise RuntimeError(f"warmup before requests run; {len(self._loop.running)} do")
        times = self._runner.warmup(self._sizes, self._plain_size, debug=self._debug)
        self.metrics.compiles = count_compiles() - self._compiles_before
        return times

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_token_ids: Sequence[int] | None = None,
        stop_texts: Sequence[str] = (),
        salt: str = "",
        speculate: bool = True,
    ) -> int:
        """Queues a request; `step`, or a `stream` of any request, serves it.

        Args:
          prompt: token ids, or text if the engine has a tokenizer.
          max_new_tokens: most tokens to draw.
          temperature: 0 takes the most likely token.
          top_k: draws among that many most likely tokens; 0 is no limit.
          top_p: draws among the most likely tokens that together have that probability.
          seed: of the draws.
          stop_token_ids: tokens that end the answer; None is the config's, () is none at all.
          stop_texts: texts that end it; needs a tokenizer.
          salt: prefixes are shared among requests of one salt only.
          speculate: checks drafts, if the engine makes any; it changes speed, never tokens.

        Returns:
          The request's id. The engine keeps what the request got until `completion` takes it.

        Raises:
          ValueError: the prompt is empty, holds an unknown token or can never fit, or a setting is
            out of range; nothing was queued.
        """
        ids = encode_prompt(prompt, self.config, self.tokenizer, name="prompt")
        check_length(len(ids), max_new_tokens, self._plan, name="prompt")
        options = make_options(
            self.config,
            self.tokenizer,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
            stop_texts=stop_texts,
            salt=salt,
            speculate=speculate,
        )
        request = Request(self._next_id, ids, options, time.perf_counter())
        self._register(request)
        self.metrics.prompt_tokens += len(ids)
        self._loop.enqueue(request)
        return request.request_id

    def fork(self, request_id: int, *, seed: int) -> int:
        """A second request that goes on from what the first has drawn so far.

        A running one shares its full blocks; if there is no room, the new one waits its turn.

        Args:
          request_id: an unfinished request.
          seed: of what the new one draws from here on.

        Returns:
          Id of the new request; what was drawn before is part of its completion.

        Raises:
          ValueError: there is no such unfinished request.
        """
        request = self._find(request_id)
        if request is None or request.finish_reason is not None:
            raise ValueError(f"request_id must be of an unfinished request, got {request_id}")
        new = request.branch(self._next_id, seed % 2**32, time.perf_counter())
        self._register(new)
        self._loop.fork(request, new)
        return new.request_id

    def cancel(self, request_id: int) -> bool:
        """Ends a request early; its stream ends, its completion has what was drawn so far.

        Returns:
          Whether it was unfinished.

        Raises:
          ValueError: no request ever had that id.
        """
        request = self._find(request_id)
        if request is None or request.finish_reason is not None:
            return False
        request.finish_reason = "cancelled"
        self._loop.end(request)
        return True

    def preempt(self, request_id: int) -> bool:
        """Makes a running request give its slot and blocks back and wait; whether it was running.

        Raises:
          ValueError: no request ever had that id.
        """
        request = self._find(request_id)
        if request is None or request.slot < 0:
            return False
        self._loop.preempt(request)
        return True

    def step(self) -> list[Token]:
        """Serves every running request once, and admits waiting ones.

        Returns:
          The tokens drawn; none if there is nothing to do.

        Raises:
          CacheError: in debug mode, the cache is not what it should be.
          Exception: what the device or the tokenizer raised. Requests it did not concern go on
            with the next call; if the cache was lost, all are computed again.
        """
        try:
            return self._loop.step()
        finally:
            self.metrics.compiles = count_compiles() - self._compiles_before

    def stream(self, *request_ids: int) -> Iterator[Token]:
        """Tokens of submitted requests as they are drawn, until all have ended.

        It steps the engine, and so serves all requests. Closing it cancels those that have not
        ended. `completion` takes the results.

        Raises:
          ValueError: there is no such request.
        """
        requests = []
        for request_id in request_ids:
            request = self._find(request_id)
            if request is None:
                raise ValueError(f"request {request_id} has been taken already")
            requests.append(request)
        return self._stream(requests)

    def completion(self, request_id: int) -> Completion:
        """What a finished request got; it is forgotten.

        Raises:
          ValueError: there is no such request, or it has not finished.
        """
        request = self._find(request_id)
        if request is None or request.finish_reason is None:
            raise ValueError(f"request {request_id} has not finished, or has been taken already")
        del self._requests[request_id]
        return request.completion(self.tokenizer)

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
        stop_texts: Sequence[str] = (),
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
          stop_texts: texts that end an answer; needs a tokenizer.

        Returns:
          One completion per prompt, in order.

        Raises:
          ValueError: a prompt is empty, too long, or holds an unknown token, or a setting is out
            of range; nothing was started.
        """
        encoded = []
        for idx, prompt in enumerate(prompts):
            name = f"prompts[{idx}]"
            encoded.append(encode_prompt(prompt, self.config, self.tokenizer, name=name))
            check_length(len(encoded[-1]), max_new_tokens, self._plan, name=name)
        seeds = [seed] * len(encoded) if isinstance(seed, int | np.integer) else list(seed)
        if len(seeds) != len(encoded):
            raise ValueError(
                f"seed must be one, or one per prompt, got {len(seeds)} for {len(encoded)} prompts"
            )
        ids = [
            self.submit(
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=one,
                stop_token_ids=stop_token_ids,
                stop_texts=stop_texts,
            )
            for prompt, one in zip(encoded, seeds, strict=True)
        ]
        requests = [self._requests[request_id] for request_id in ids]
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
            return [request.completion(self.tokenizer) for request in requests]
        finally:
            for request in requests:
                self.cancel(request.request_id)
                self._requests.pop(request.request_id, None)

    def verify(self) -> Report:
        """Checks the whole cache now; see `verify_cache`."""
        return self._loop.verify()

    def _stream(self, requests: list[Request]) -> Iterator[Token]:
        try:
            while any(request.finish_reason is None for request in requests) or any(
                request.events for request in requests
            ):
                for request in requests:
                    while request.events:
                        yield request.events.popleft()
                if any(request.finish_reason is None for request in requests):
                    self.step()
        finally:
            for request in requests:
                self.cancel(request.request_id)

    def _register(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._next_id = request.request_id + 1
        self.metrics.submitted += 1

    def _find(self, request_id: int) -> Request | None:
        """The request, or None if it was taken already."""
        if not 0 <= request_id < self._next_id:
            raise ValueError(f"request_id must be one that submit gave, got {request_id}")
        return self._requests.get(request_id)


def _unrolls(wanted: bool | None) -> bool:
    return jax.default_backend() == "gpu" if wanted is None else wanted
