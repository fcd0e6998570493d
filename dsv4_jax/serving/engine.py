"""Engine: the sizes it is built with, streams, and lists of prompts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from dsv4_jax import checks
from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.engram import EngramTables
from dsv4_jax.engram.placed_tables import DEVICE
from dsv4_jax.mesh import find_mesh
from dsv4_jax.model.check_params import check_params
from dsv4_jax.model.params import DSV4Params, unstack_layers
from dsv4_jax.model.shardings import param_shardings
from dsv4_jax.model.weight_forms import STORED
from dsv4_jax.peers import make_peer_buffers
from dsv4_jax.serving.device.engram_place import with_placed_tables
from dsv4_jax.serving.device.request_rows import check_rows, engine_shape
from dsv4_jax.serving.engine_core import EngineCore
from dsv4_jax.serving.hand_over import bring_back, take_cached
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.requests.cached_request import CachedRequest
from dsv4_jax.serving.requests.calls import exclusive_as
from dsv4_jax.serving.requests.prompts import CheckedRequest, list_prompts
from dsv4_jax.serving.requests.request import Completion
from dsv4_jax.serving.requests.text import load_tokenizer
from dsv4_jax.serving.requests.token_stream import TokenStream
from dsv4_jax.serving.sizing import check_processes, plan_engine
from dsv4_jax.step.sampling import SamplingFields, SamplingParams, sampling_of_rows

MAX_SAMPLES = 128
"""Samples of one prompt in one call."""


class Engine(EngineCore):
    """Generates text for prompts of any lengths; they may come and go at any time.

    `submit` queues a request, `submit_many` several of one prompt, `step` serves all of them once,
    `stream` and `completion` give results, `cancel` ends one early, and `generate` does all of that
    for a list of prompts.
    `EngineCore` says when a request is admitted and when it gives way, that there is one call at a
    time, and what holds after one that raised.

    Attributes:
      config: the model.
      params: model parameters, as the steps take them.
      tokenizer: for text, or None.
      metrics: counters, and what holds now.
    """

    def __init__(
        self,
        config: DSV4Config,
        params: DSV4Params,
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        **fields: Any,
    ) -> None:
        """Allocates the cache.

        Args:
          config: the model.
          params: model parameters. On a mesh they are put where `param_shardings` says, unless
            they lie there.
          options: what it is built with; None is the defaults.
          tokenizer: for prompts that are text, and for the text of completions.
          **fields: fields of `EngineOptions`, such as `max_requests=32` or `mesh=mesh`, that
            replace those of `options`.

        Raises:
          ValueError: an argument is of another type or out of range, there is no such format or
            form, `params` are not those of `config`, or a size does not divide over the mesh;
            nothing was allocated.
          MemoryError: the host has less memory than `host_cache_bytes` says.
          PinError: `engram_tables` asks for pinned tables, and the driver refuses.
          TypeError: `EngineOptions` has no such field.
        """
        options = _options_of(options, fields)
        checks.instance("config", config, DSV4Config)
        if options.idea is not None:
            config = options.idea.applied_to(config)
        checks.instance("params", params, DSV4Params)
        check_params(config, params)
        if tokenizer is not None:
            checks.instance("tokenizer", tokenizer, Tokenizer)
        mesh = options.mesh
        _check_mesh(config, params, mesh)
        check_processes(options)
        if options.engram_tables == DEVICE:  # they take memory that the plan divides
            params = with_placed_tables(config, params, options)
        plan = plan_engine(config, options, params=params, has_tokenizer=tokenizer is not None)
        params = with_placed_tables(config, params, options)
        if isinstance(params.engram, EngramTables):
            # The host gathers rows by the ids of a step's tokens, which it has to read first.
            plan = dataclasses.replace(plan, overlap=False)
        if _unrolls(options):
            params = unstack_layers(params)
        if mesh is not None:
            params = dataclasses.replace(params, peers=None)  # buffers can't be moved
            params = jax.device_put(params, param_shardings(config, mesh, params))
            params = dataclasses.replace(params, peers=make_peer_buffers(mesh))
        super().__init__(config, params, plan, tokenizer)

    # Programs of others that watch or replace a step reach these by the names that they once had.
    _requests = property(lambda self: self.requests)
    _runner = property(lambda self: self.loop.runner)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        revision: str | None = None,
        weights: str = STORED,
        dtype: DTypeLike | None = None,
        progress: bool = True,
        check_weights: bool | None = None,
        follow_links: bool = False,
        **fields: Any,
    ) -> Engine:
        """An engine for a checkpoint, with its tokenizer if it brings one.

        Each device's part of the weights is read straight to its place, and with `unroll` nothing
        is in memory twice. A draft is loaded where `draft_tokens` asks for it.

        Args:
          path: a directory, or a model's name on the Hugging Face hub, `owner/model`, which is
            downloaded if it is not in the hub's cache (`find_checkpoint`).
          options: as in `Engine`.
          tokenizer: that of the checkpoint, if it was read already; None reads it.
          revision: branch, tag or commit of a model on the hub; None is its main branch.
          weights: "stored" keeps FP8 and FP4 weights as they are, "bfloat16" and "float32" decode
            them.
          dtype: dtype of activations; None is that of decoded weights, or else bf16.
          progress: shows a bar while downloading and loading, as `load_checkpoint` does, and sets
            the option of that name, by which the engine says on stderr what it compiles.
          check_weights: refuses NaN and infinity, as in `load_checkpoint`.
          follow_links: reads files that are links out of the directory, as in `load_checkpoint`.
          **fields: fields of `EngineOptions`, as in `Engine`.

        Raises:
          ValueError: an argument is out of range, there is no such checkpoint, or it cannot be
            read.
          OSError: the disk has too little space for a download.
          TypeError: `EngineOptions` has no such field.
        """
        options = _options_of(options, fields)  # before minutes of loading
        follow_links = checks.flag("follow_links", follow_links)
        if check_weights is not None:
            check_weights = checks.flag("check_weights", check_weights)
        if tokenizer is not None:
            checks.instance("tokenizer", tokenizer, Tokenizer)
        path = find_checkpoint(path, revision=revision, progress=checks.flag("progress", progress))
        if tokenizer is None:
            tokenizer = load_tokenizer(path, follow_links=follow_links)
        config, params = load_checkpoint(
            path,
            mesh=options.mesh,
            weights=weights,
            dtype=dtype,
            progress=progress,
            check_weights=check_weights,
            follow_links=follow_links,
            drafts=options.draft_tokens > 0,
        )
        if _unrolls(options):
            params = unstack_layers(params, donate=True)
        return cls(config, params, options.changed(progress=progress), tokenizer=tokenizer)

    def submit_many(
        self,
        prompt: str | Sequence[int],
        n: int,
        *,
        sampling: SamplingParams | None = None,
        salt: str = "",
        speculate: bool = True,
        **fields: Unpack[SamplingFields],
    ) -> list[int]:
        """Queues n samples of one prompt; each gets what `submit` with its seed gives.

        The first reads the prompt but for its last token, and the others fork from it there. Those
        that find no slot or blocks then come later, from what is cached.

        Args:
          prompt: as in `submit`.
          n: samples, 1 to 128.
          sampling: how they draw and what ends them; None is the defaults.
          salt: as in `submit`.
          speculate: as in `submit`.
          **fields: fields that replace those of `sampling`. `seed` may be one per sample; of one
            seed s the samples have s, s + 1 and so on.

        Returns:
          n ids.

        Raises:
          ValueError: as in `submit`, or `n` is out of range; nothing was queued.
        """
        self.call_lock.refuse_if_busy("submit_many was called")
        n = checks.integer("n", n, 1, MAX_SAMPLES)
        if sampling is not None:
            checks.instance("sampling", sampling, SamplingParams)
        rows = sampling_of_rows(n, sampling, row_name="sample", **fields)
        asked = self.limits.check_request(prompt, rows[0], salt, speculate, {})
        seeds = [row.seed for row in rows]
        if isinstance(fields.get("seed", 0), int | np.integer):
            seeds = [seed + number for number, seed in enumerate(seeds)]
        return self.submit_checked(asked, seeds)

    def submit_checked(self, asked: CheckedRequest, seeds: Sequence[int]) -> list[int]:
        """The same for what `limits.check_request` gave, which is not checked again.

        Args:
          asked: the request.
          seeds: any integers, one for each sample.
        """
        self.call_lock.refuse_if_busy("submit_checked was called")
        samples = [asked._replace(sampling=asked.sampling.with_seed(seed)) for seed in seeds]
        requests = self._submit_all(samples, are_samples=len(asked.token_ids) > 1)
        return [request.request_id for request in requests]

    @exclusive_as("snapshot was called")
    def snapshot(self, request_id: int) -> CachedRequest:
        """An unfinished request and its cache, as a value that `restore` goes on from.

        The request itself goes on here too; `cancel` it if it shall not. Of a running one the call
        waits for the step in flight, whose tokens are part of the value and still come with the
        next `step`, and for the copy to the host. Of one that waits the value has tokens alone,
        which are computed again.

        Args:
          request_id: an unfinished request.

        Raises:
          ValueError: there is no such unfinished request.
          NotImplementedError: the mesh spans several processes.
        """
        request = self._find(request_id)
        if request is None or request.finish_reason is not None:
            raise ValueError(f"request_id must be of an unfinished request, got {request_id}")
        self._check_one_process("snapshot")
        with self.undo:
            return take_cached(self.loop, request, engine_shape(self.plan))

    @exclusive_as("restore was called")
    def restore(self, cached: CachedRequest) -> int:
        """Queues a request that `snapshot` gave, here or in another engine of the same shape.

        It gets a slot in its turn, with what it holds, and nothing is computed again. Its answer is
        to the bit what it had been where it came from, if the engines have the same weights and
        sizes of steps. `stream` and `completion` give it as those of a fork: what the first one's
        caller had got, and what this one's stream gives, make up the completion. A value can be
        restored more than once.

        Args:
          cached: the request.

        Returns:
          Its id here.

        Raises:
          ValueError: it is of an engine with another config, cache format, mesh or form of
            activations, or does not fit this one; nothing was queued.
          NotImplementedError: the mesh spans several processes.
        """
        checks.instance("cached", cached, CachedRequest)
        self._check_one_process("restore")
        cached.check_engine(engine_shape(self.plan))
        if cached.rows is not None:
            check_rows(self.loop.runner.devices, cached.rows, self.plan.pools.block_tokens)
        settings = cached.sampling, cached.salt, cached.speculate
        asked = self.limits.check_request(cached.prompt, *settings, {})
        for name, ids in (("token_ids", cached.drawn), ("drafts", np.array(cached.drafts, int))):
            checks.in_range(name, ids, 0, self.config.vocab_size)
        request = bring_back(cached, asked, self.next_id, self.loop.clock(), self.loop.texts)
        request.drafts = request.drafts[: self.plan.draft_tokens]
        with self.undo:
            self._register(request)
            self.metrics.prompt_tokens += request.prompt_tokens
            if request.finish_reason is None:
                self.loop.enqueue(request)
            else:
                self.loop.end(request)
            return request.request_id

    def stream(self, *request_ids: int) -> TokenStream:
        """Tokens of submitted requests as they are drawn, until all have ended.

        It steps the engine, and so serves all requests. Closing it cancels those that have not
        ended. `completion` takes the results. See `TokenStream`.

        Raises:
          ValueError: there is no such request.
          RuntimeError: an `AsyncEngine` holds the engine.
        """
        self.call_lock.refuse_if_held("stream was called")
        requests = []
        for request_id in request_ids:
            request = self._find(request_id)
            if request is None:
                raise ValueError(
                    "request_id must be of a request whose completion has not been taken, "
                    f"got {checks.shown(request_id)}"
                )
            requests.append(request)
        return TokenStream(
            requests, next_token=self._next_token, cancel=self.cancel, drop=self._drop
        )

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Completes prompts; a prompt's result does not depend on the others.

        Args:
          prompts: a list, each item token ids or, if the engine has a tokenizer, text; any
            lengths. One text is no list.
          sampling: how they draw and what ends them: one, or one per prompt; None is the defaults.
          **fields: fields of `SamplingParams`, such as `max_new_tokens=64` or `temperature=0.7`,
            that replace those of `sampling`; `seed` may be one per prompt.

        Returns:
          One completion per prompt, in order.

        Raises:
          ValueError: a prompt is empty, too long, or holds an unknown token, or a setting is out
            of range; nothing was started.
        """
        self.call_lock.refuse_if_busy("generate was called")
        prompts = list_prompts(prompts)
        rows = sampling_of_rows(len(prompts), sampling, row_name="prompt", **fields)
        checked = [
            self.limits.check_prompt(prompt, row, name=f"prompts[{idx}]")
            for idx, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        requests = self._submit_all([CheckedRequest(*one, b"", True) for one in checked])
        try:
            while any(request.finish_reason is None for request in requests):
                self._serve_unread()
            return [request.completion(self.tokenizer) for request in requests]
        finally:
            for request in requests:
                self.cancel(request.request_id)
                self.requests.pop(request.request_id, None)

    def _check_one_process(self, name: str) -> None:
        if self._hosts is not None:
            raise NotImplementedError(
                f"{name} needs all devices of the mesh in one process, got {self._hosts.count}; "
                "submit the request's tokens anew instead"
            )

    @exclusive_as("generate was called")
    def _serve_unread(self) -> None:
        """A step whose tokens only streams and completions have."""
        self._serve(returns=False)


def _options_of(options: EngineOptions | None, fields: dict[str, Any]) -> EngineOptions:
    """Options with other values of some fields."""
    if options is None:
        return EngineOptions(**fields)
    return checks.instance("options", options, EngineOptions).changed(**fields)


def _unrolls(options: EngineOptions) -> bool:
    return jax.default_backend() == "gpu" if options.unroll is None else options.unroll


def _check_mesh(config: DSV4Config, params: DSV4Params, mesh: Mesh | None) -> None:
    """Refuses a mesh that is not one for these parameters."""
    if mesh is not None:
        param_shardings(config, mesh, params)  # which refuses what does not divide
    elif find_mesh(params) is not None:
        raise ValueError(f"params lie on the mesh {find_mesh(params)}; pass it as mesh")
