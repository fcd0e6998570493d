"""Engine: the sizes it is built with, streams, and lists of prompts."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence
from typing import Unpack

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from dsv4_jax import checks
from dsv4_jax.cache.schema import FormatName
from dsv4_jax.checkpoint.find import find_checkpoint
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.config import DSV4Config, Idea
from dsv4_jax.hosts import hosts_of
from dsv4_jax.mesh import find_mesh
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.check_params import check_params
from dsv4_jax.model.params import DSV4Params, unstack_layers
from dsv4_jax.model.shardings import param_shardings
from dsv4_jax.peers import make_peer_buffers
from dsv4_jax.serving.engine_core import EngineCore
from dsv4_jax.serving.requests.calls import exclusive_as, refuse_if_busy, refuse_if_held
from dsv4_jax.serving.requests.prompts import CheckedRequest, list_prompts
from dsv4_jax.serving.requests.request import Completion
from dsv4_jax.serving.requests.text import load_tokenizer
from dsv4_jax.serving.requests.token_stream import TokenStream
from dsv4_jax.serving.sizing import plan_engine
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
        *,
        mesh: Mesh | None = None,
        split_cache: bool = False,
        max_requests: int = 8,
        max_context_tokens: int = 4096,
        cache_format: FormatName | None = None,
        idea: Idea | None = None,
        prefill_tokens: Sequence[int] | None = None,
        decode_tokens: int | None = None,
        draft_tokens: int = 0,
        steps_per_call: int = 1,
        grammars: bool = True,
        activations: str = DEFAULT_ACTIVATIONS,
        prefill_activations: str | None = None,
        num_blocks: int | None = None,
        num_snapshots: int | None = None,
        memory_bytes: int | None = None,
        gpu_memory_fraction: float | None = None,
        unroll: bool | None = None,
        overlap: bool = True,
        debug: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Allocates the cache.

        Args:
          config: the model.
          params: model parameters. On a mesh they are put where `param_shardings` says, unless
            they lie there.
          mesh: the devices, as `make_mesh` gives them; None is one. Requests are spread over the
            data shards. `max_requests`, `num_blocks` and `num_snapshots` are those of all data
            shards together and must divide over them; `prefill_tokens` and `decode_tokens` are
            those of each data shard, `memory_bytes` and `gpu_memory_fraction` of each device.
            Where devices lie in several processes, as after `join_hosts`, each builds the same
            engine; process 0 takes requests, and the others `follow`.
          split_cache: on a mesh, deals the blocks of a request over the devices of a data shard, so
            that each holds and reads an n-th of them; for few requests of a very long context.
            `num_blocks` must divide over all devices then. An idea with a selector cannot have it.
          max_requests: requests that run at once; more wait for a slot.
          max_context_tokens: longest prompt and answer together.
          cache_format: name of the storage format, or a `CacheFormat`; None is that of the idea, or
            the default, `fp8_ue8m0`.
          idea: changes to the model, in the place of those that `config` carries; None keeps those.
          prefill_tokens: sizes of a step that holds prompt tokens, ascending; each is a program.
            The largest must hold a token of every request. None is 64 and 256, and
            `max_requests` if that is more.
          decode_tokens: size of a step in which every request only decodes. None is one of
            `max_requests * (draft_tokens + 1)` tokens, with the requests of a data shard; without
            drafts it is a leaner program. A size of `prefill_tokens` makes one program of both,
            whose results are then bit for bit the same whatever runs beside a request.
          draft_tokens: k, tokens that the draft block guesses per step, 0 to 8; 0 is no
            speculation.
          steps_per_call: decode steps that the host launches at once, for hosts that take longer
            for a step than the device: 1 to 64, best a divisor of a block's tokens. They compute
            what single steps do, to the bit, but tokens come in groups, and a new request waits for
            the calls in progress, so that its prompt is read beside other tokens. A request makes
            fewer where it ends, or fills a block that a snapshot may follow. A call makes one step
            while a prompt is read, and while some request has penalties, a grammar or
            log-probabilities, or on a GPU more than a temperature and min-p. Not with
            `decode_tokens` or `draft_tokens`.
          grammars: requests may have grammars, if there is a tokenizer. The device then has a bit
            for every slot, token and draw of a step, 16 KB a draw for V4's vocabulary. Without
            them no step takes masks, and a request with a grammar is refused.
          activations: what multiplies quantised weights: "fp8" rounds rows to E4M3 first, as the
            release does, "bfloat16" takes them as they are. Dense weights ignore it.
          prefill_activations: the same in steps that hold prompt tokens, and for all that runs
            beside them; None is `activations`. With two forms, results depend on which steps a
            token came in: on how a prompt is cut, on what a prefix hit or a preemption left to
            compute, and on the prompts beside a request. Each form of a size is a program.
          num_blocks: physical blocks; None is full contexts in all slots, or what the budget holds.
          num_snapshots: prefixes that can be resumed at; None is `SNAPSHOTS_PER_SLOT` for every
            slot, or a tenth of the budget; 0 shares no prefixes.
          memory_bytes: budget of the cache.
          gpu_memory_fraction: the same as a share of the device's memory, less what is in use.
          unroll: gives every layer arrays of its own (`unstack_layers`), which is what a step on a
            GPU wants; None does so on a GPU alone. If you keep stacked `params`, they are in memory
            twice.
          overlap: launches the next step before the last one's tokens are read, where the host can
            plan it without them. No token depends on it. Without it nothing runs between two calls,
            and a fork of a running request shares its open block and ring too.
          debug: poisons freed storage and verifies the whole cache after every step, without
            overlap; slow.
          tokenizer: for prompts that are text, and for the text of completions.

        Raises:
          ValueError: an argument is of another type or out of range, there is no such format or
            form, `params` are not those of `config`, or a size does not divide over the mesh;
            nothing was allocated.
        """
        checks.instance("config", config, DSV4Config)
        if idea is not None:
            config = checks.instance("idea", idea, Idea).applied_to(config)
        checks.instance("params", params, DSV4Params)
        check_params(config, params)
        if tokenizer is not None:
            checks.instance("tokenizer", tokenizer, Tokenizer)
        unroll = _unrolls(unroll)
        _check_mesh(config, params, mesh)
        if hosts_of(mesh) is not None and gpu_memory_fraction is not None:
            raise ValueError(
                f"gpu_memory_fraction may differ from process to process, got "
                f"{checks.shown(gpu_memory_fraction)} on a mesh of several; give memory_bytes"
            )
        plan = plan_engine(
            config,
            mesh=mesh,
            split_cache=split_cache,
            has_draft_block=params.mtp is not None,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            cache_format=cache_format,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            draft_tokens=draft_tokens,
            steps_per_call=steps_per_call,
            grammars=checks.flag("grammars", grammars) and tokenizer is not None,
            activations=activations,
            prefill_activations=prefill_activations,
            num_blocks=num_blocks,
            num_snapshots=num_snapshots,
            memory_bytes=memory_bytes,
            gpu_memory_fraction=gpu_memory_fraction,
            overlap=overlap,
            debug=debug,
        )
        if unroll:
            params = unstack_layers(params)
        if mesh is not None:
            params = dataclasses.replace(params, peers=None)  # buffers can't be moved
            params = jax.device_put(params, param_shardings(config, mesh, params))
            params = dataclasses.replace(params, peers=make_peer_buffers(mesh))
        super().__init__(config, params, plan, tokenizer)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        mesh: Mesh | None = None,
        tokenizer: Tokenizer | None = None,
        revision: str | None = None,
        weights: str = "stored",
        dtype: DTypeLike | None = None,
        progress: bool = True,
        check_weights: bool | None = None,
        follow_links: bool = False,
        unroll: bool | None = None,
        **options,
    ) -> Engine:
        """An engine for a checkpoint, with its tokenizer if it brings one.

        Args:
          path: a directory, or a model's name on the Hugging Face hub, `owner/model`, which is
            downloaded if it is not in the hub's cache (`find_checkpoint`).
          mesh: as in `Engine`; each device's part of the weights is read straight to its place.
          tokenizer: that of the checkpoint, if it was read already; None reads it.
          revision: branch, tag or commit of a model on the hub; None is its main branch.
          weights: "stored" keeps FP8 and FP4 weights as they are, "bfloat16" and "float32" decode
            them.
          dtype: dtype of activations; None is that of decoded weights, or else bf16.
          progress: shows a bar while downloading and loading, as `load_checkpoint` does.
          check_weights: refuses NaN and infinity, as in `load_checkpoint`.
          follow_links: reads files that are links out of the directory, as in `load_checkpoint`.
          unroll: as in `Engine`, but nothing is in memory twice.
          **options: further arguments of `Engine`.

        Raises:
          ValueError: an argument is out of range, there is no such checkpoint, or it cannot be
            read.
          OSError: the disk has too little space for a download.
          TypeError: `Engine` has no such argument.
        """
        unrolls = _unrolls(unroll)
        follow_links = checks.flag("follow_links", follow_links)
        if check_weights is not None:
            check_weights = checks.flag("check_weights", check_weights)
        if tokenizer is not None:
            checks.instance("tokenizer", tokenizer, Tokenizer)
        # Before minutes of loading.
        options |= {"mesh": mesh, "unroll": unroll}
        inspect.signature(cls).bind(None, None, tokenizer=None, **options)
        path = find_checkpoint(path, revision=revision, progress=checks.flag("progress", progress))
        if tokenizer is None:
            tokenizer = load_tokenizer(path, follow_links=follow_links)
        config, params = load_checkpoint(
            path,
            mesh=mesh,
            weights=weights,
            dtype=dtype,
            progress=progress,
            check_weights=check_weights,
            follow_links=follow_links,
        )
        if unrolls:
            params = unstack_layers(params, donate=True)
        return cls(config, params, tokenizer=tokenizer, **options)

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
        refuse_if_busy(self, "submit_many was called")
        n = checks.integer("n", n, 1, MAX_SAMPLES)
        if sampling is not None:
            checks.instance("sampling", sampling, SamplingParams)
        rows = sampling_of_rows(n, sampling, row_name="sample", **fields)
        asked = self.limits.check_request(prompt, rows[0], salt, speculate, {})
        seeds = [row.seed for row in rows]
        if isinstance(fields.get("seed", 0), int | np.integer):
            seeds = [row.seed + place for place, row in enumerate(rows)]
        samples = [
            asked._replace(sampling=dataclasses.replace(asked.sampling, seed=seed))
            for seed in seeds
        ]
        requests = self._submit_all(samples, are_samples=len(asked.token_ids) > 1)
        return [request.request_id for request in requests]

    def stream(self, *request_ids: int) -> TokenStream:
        """Tokens of submitted requests as they are drawn, until all have ended.

        It steps the engine, and so serves all requests. Closing it cancels those that have not
        ended. `completion` takes the results. See `TokenStream`.

        Raises:
          ValueError: there is no such request.
          RuntimeError: an `AsyncEngine` holds the engine.
        """
        refuse_if_held(self._holder, "stream was called")
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
        refuse_if_busy(self, "generate was called")
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
                self._requests.pop(request.request_id, None)

    @exclusive_as("generate was called")
    def _serve_unread(self) -> None:
        """A step whose tokens only streams and completions have."""
        self._serve(returns=False)


def _unrolls(wanted: bool | None) -> bool:
    if wanted is None:
        return jax.default_backend() == "gpu"
    return checks.flag("unroll", wanted)


def _check_mesh(config: DSV4Config, params: DSV4Params, mesh: Mesh | None) -> None:
    """Refuses what is no mesh, or not one for these parameters."""
    if mesh is not None:
        checks.instance("mesh", mesh, Mesh)
        param_shardings(config, mesh, params)  # which refuses what does not divide
    elif find_mesh(params) is not None:
        raise ValueError(f"params lie on the mesh {find_mesh(params)}; pass it as mesh")
