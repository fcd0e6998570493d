"""EngineOptions: what an engine is built with, besides a model and a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from jax.sharding import Mesh

from dsv4_jax import checks
from dsv4_jax.cache.schema import FormatName, check_format
from dsv4_jax.config import Idea
from dsv4_jax.engram.placed_tables import PLACES
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.rules import (
    By,
    Bytes,
    Flag,
    Folder,
    Instance,
    ListOf,
    Real,
    Ruled,
    Share,
    Whole,
    Word,
    check_fields,
)
from pallas_kernels.common.formats import CACHE_FORMATS
from pallas_kernels.common.weights import ACTIVATIONS

MAX_REQUESTS = 2**16
"""Of a command line."""
MAX_DRAFT_TOKENS = 16
MAX_STEPS_PER_CALL = 64
MAX_STEP_SIZES = 64
"""Sizes of steps: each is a program."""
DEFAULT_MAX_STEP_MS = 120.0
"""On a GPU, at least: five decode steps of 32 requests of V4-Flash on an H200."""
NO_STEP_BOUND_MS = 600_000.0
"""No step takes so long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine is built with: sizes in tokens, requests, blocks or bytes, forms, switches.

    `Engine(config, params, **options)` takes the same by name. Each field says here what it may be;
    the command line makes an option of each that has a help.

    Attributes:
      mesh: the devices, as `make_mesh` gives them; None is one. Requests are spread over the data
        shards. `max_requests`, `num_blocks` and `num_snapshots` are those of all data shards
        together and must divide over them; `prefill_tokens`, `decode_tokens` and
        `decode_batch_sizes` are those of each data shard, `memory_bytes` and `gpu_memory_fraction`
        of each device. Where devices lie in several processes, as after `join_hosts`, each builds
        the same engine; process 0 takes requests, and the others `follow`.
      split_cache: on a mesh, deals the blocks of a request over the devices of a data shard, so
        that each holds and reads an n-th of them; for few requests of a very long context.
        `num_blocks` must divide over all devices then. An idea with a selector cannot have it.
      max_requests: requests that run at once, at least 1; more wait for a slot.
      max_context_tokens: longest prompt and answer together, at least 1.
      cache_format: name of the storage format, or a `CacheFormat`; None is that of the idea, or the
        model's own: `fp8_ue8m0` of V4, `fp4_e4m3` of V4.1.
      idea: changes to the model, in the place of those that `config` carries; None keeps those.
      prefill_tokens: sizes of a step that holds prompt tokens, ascending, at most 64; each is a
        program. The largest must hold a token of every request. None is 64 and 256, and
        `max_requests` if that is more. Where the largest is too long for `max_step_ms` by
        arithmetic and none comes near it, one that does is added, but not beside `decode_tokens`.
      decode_tokens: size of a step in which every request only decodes, at least 1. None is one of
        `max_requests * (draft_tokens + 1)` tokens, with the requests of a data shard; without
        drafts it is a leaner program. A size of `prefill_tokens` makes one program of both, whose
        results are then bit for bit the same whatever runs beside a request.
      decode_batch_sizes: requests for which a step that only decodes has room, ascending; each is a
        program, and there is one for all requests in any case. A step takes the smallest that holds
        who decodes, since idle rows take time too. With the number of all alone, results of decode
        steps are bit for bit the same however many requests decode; with several they agree within
        rounding. None is on a GPU 1, 8, 32, 128 and 512, as far as they are less, once `warmup` has
        compiled them; before that, and elsewhere, it is `max_requests` alone. Not with
        `decode_tokens`.
      max_step_ms: the longest that a step with prompts shall take beside requests that decode, 1 to
        600,000. It has the largest of `prefill_tokens` that takes at most so long, as steps were
        seen to take, and by arithmetic before that, but leaves prompts half of itself at least.
        While nobody decodes, it has the largest. None is on a GPU 100 or five decode steps,
        whichever is longer, and elsewhere no bound; 600,000 is none in effect. Where it chooses
        between sizes, results follow these, and so the times of a machine, within rounding.
      draft_tokens: k, tokens that the draft guesses per step; 0 is no speculation. An MTP block
        guesses up to 8, DSpark stages up to their block size.
      draft_cut: of DSpark stages, checks a draft only where the chance that it is kept is worth the
        experts that its row reads, beside so many requests. It changes no answer.
      steps_per_call: decode steps that the host launches at once, for hosts that take longer for a
        step than the device: 1 to 64, best a divisor of a block's tokens. They compute what single
        steps do, to the bit, but tokens come in groups, and a new request waits for the calls in
        progress, so that its prompt is read beside other tokens. A request makes fewer where it
        ends, or fills a block that a snapshot may follow. A call makes one step while a prompt is
        read, and while some request has penalties, a grammar or log-probabilities, or on a GPU more
        than a temperature and min-p. With drafts each step checks them, and a request makes
        single steps where a call that keeps them all would pass its end. Not with `decode_tokens`.
      grammars: requests may have grammars, if there is a tokenizer. The device then has a bit for
        every slot, token and draw of a step, 16 KB a draw for V4's vocabulary. Without them no step
        takes masks, and a request with a grammar is refused.
      activations: what multiplies quantised weights: "fp8" rounds rows to E4M3 first, as the
        release does, "bfloat16" takes them as they are. Dense weights ignore it.
      prefill_activations: the same in steps that hold prompt tokens, and for all that runs beside
        them; None is `activations`. With two forms, results depend on which steps a token came in:
        on how a prompt is cut, on what a prefix hit or a preemption left to compute, and on the
        prompts beside a request. Each form of a size is a program.
      num_blocks: physical blocks, at least 1; None is full contexts in all slots, or what the
        budget holds.
      num_snapshots: prefixes that can be resumed at; None is `SNAPSHOTS_PER_SLOT` for every slot,
        or a tenth of the budget; 0 shares no prefixes.
      memory_bytes: budget of the cache.
      gpu_memory_fraction: the same as a share of the device's memory, above 0 and at most 1, less
        what is in use.
      host_cache_bytes: of the host's memory, a number or a text such as "64GiB", for blocks and
        snapshots of known prefixes that gave way on the devices, 0 for none; beside it there are
        copies on their way. "auto" is half of what is free when the engine is built
        (`EnginePlan.host_cache_bytes`). On a mesh of several processes it is of each one, which
        keeps what its devices have; "auto" is half of the least that a process has free.
      disk_cache_dir: a directory whose files outlive the process, for blocks and snapshots of known
        prefixes, which another engine of the same model, weights, format, mesh and versions finds
        there (`docs/disk_cache.md`). It is made if there is none; nobody else may write to it. One
        process writes, and others read. Pages go through the host's memory, of which they take
        256 MiB without `host_cache_bytes`. Not on a mesh of several processes.
      disk_cache_bytes: of its files, a number or a text such as "500GiB"; 0 only reads what others
        have written.
      engram_tables: where steps read the Engram tables of a model that has some. "pinned": a GPU
        reads rows in the host's memory, where the tables then stay until the process ends; it needs
        as much memory as they take. "device": they are copied to the devices. "host": the host
        gathers the rows of a step before it is launched, so that steps do not overlap. "auto" is
        "pinned" on GPUs of one process if the memory is there, with a `SlowTablesWarning` if it
        is not, and "host" elsewhere. Tables that `place_tables` has placed stay where they are.
      unroll: gives every layer arrays of its own (`unstack_layers`), which is what a step on a GPU
        wants; None does so on a GPU alone. If you keep stacked `params`, they are in memory twice.
      overlap: launches the next step before the last one's tokens are read, where the host can plan
        it without them. No token depends on it. Without it nothing runs between two calls, and a
        fork of a running request shares its open block and ring too.
      progress: says on stderr which program is compiled and how long that has taken so far, if it
        takes longer than 3 s.
      debug: poisons freed storage and verifies the whole cache after every step, without overlap;
        slow.

    Raises:
      ValueError: a field is of another type or out of range, or two contradict each other.
    """

    mesh: Annotated[Mesh | None, Ruled(Instance(Mesh))] = None
    split_cache: Annotated[
        bool,
        Ruled(
            Flag(),
            help="on a mesh, deal the blocks of each request over --model-shards, for few "
            "requests of a very long context: each device holds and reads its part, for two more "
            "collectives a layer",
        ),
    ] = False
    max_requests: Annotated[
        int, Ruled(Whole(1), flag=Whole(1, MAX_REQUESTS), help="requests that run at once")
    ] = 8
    max_context_tokens: Annotated[int, Ruled(Whole(1), help="longest prompt and answer")] = 4096
    cache_format: Annotated[
        FormatName | None,
        Ruled(
            By(check_format),
            flag=Word(tuple(CACHE_FORMATS)),
            help="how the cache stores entries and index keys; if not given, as the model was "
            "trained",
        ),
    ] = None
    idea: Annotated[Idea | None, Ruled(Instance(Idea))] = None
    prefill_tokens: Annotated[
        Sequence[int] | None,
        Ruled(
            ListOf(Whole(1), MAX_STEP_SIZES, "sizes"),
            help="sizes of steps that hold prompts; if not given, 64,256",
        ),
    ] = None
    decode_tokens: Annotated[int | None, Ruled(Whole(1))] = None
    decode_batch_sizes: Annotated[
        Sequence[int] | None,
        Ruled(
            ListOf(Whole(1), MAX_STEP_SIZES, "sizes"),
            help="numbers of requests for which decode steps have programs, beside one for all; a "
            "step takes the smallest that has room. The number of all (--max-requests, of each "
            "data shard) alone keeps results the same, bit for bit, however many requests decode; "
            "if not given, a GPU has 1,8,32,128,512, those that are less than all",
        ),
    ] = None
    max_step_ms: Annotated[
        float | None,
        Ruled(
            Real(1, NO_STEP_BOUND_MS, "1 to 600000"),
            help="the longest that a step with prompts shall take beside requests that decode: it "
            "is of the largest size that takes at most so long; if not given, a server on a GPU "
            f"has {DEFAULT_MAX_STEP_MS:g} or five decode steps, and else there is no bound",
        ),
    ] = None
    draft_tokens: Annotated[
        int,
        Ruled(
            Whole(0, MAX_DRAFT_TOKENS, f"0..{MAX_DRAFT_TOKENS}"),
            help="tokens that the draft guesses in a step; 0 is no speculation",
        ),
    ] = 0
    draft_cut: Annotated[bool, Ruled(Flag())] = False
    steps_per_call: Annotated[
        int,
        Ruled(
            Whole(1, MAX_STEPS_PER_CALL, f"1..{MAX_STEPS_PER_CALL}"),
            help="decode steps that the host launches at once; more are faster where it is slower "
            "than the GPUs, but tokens come in groups",
        ),
    ] = 1
    grammars: Annotated[
        bool,
        Ruled(
            Flag(),
            help="hold answers to JSON, schemas and calls of tools where requests ask for them, "
            "with a bit for each token, slot and draw on the device",
        ),
    ] = True
    activations: Annotated[
        str,
        Ruled(
            Word(ACTIVATIONS),
            help="what multiplies FP8 and FP4 weights: rows rounded to E4M3, or as they are",
        ),
    ] = DEFAULT_ACTIVATIONS
    prefill_activations: Annotated[
        str | None,
        Ruled(
            Word(ACTIVATIONS),
            help="the same in steps that hold prompt tokens; if not given, as --activations",
        ),
    ] = None
    num_blocks: Annotated[int | None, Ruled(Whole(1))] = None
    num_snapshots: Annotated[int | None, Ruled(Whole(0))] = None
    memory_bytes: Annotated[int | None, Ruled(Whole(0, 2**62))] = None
    gpu_memory_fraction: Annotated[
        float | None,
        Ruled(
            Share(),
            flag=Real(0.01, 1),
            help="of a device's memory; if not given, as much as all requests of full length take",
        ),
    ] = None
    host_cache_bytes: Annotated[
        int | str,
        Ruled(
            Bytes(has_auto=True),
            help="of the host's memory, such as 64GiB, for prefixes that gave way on the devices; "
            "auto is half of what is free, 0 is none",
        ),
    ] = 0
    disk_cache_dir: Annotated[
        str | None,
        Ruled(
            Folder(),
            help="a directory whose files outlive the process, for known prefixes: they hold what "
            "the model made of users' texts, and nobody else may write to it; if not given, none",
        ),
    ] = None
    disk_cache_bytes: Annotated[
        int | str,
        Ruled(
            Bytes(),
            help="of the files in --disk-cache, such as 500GiB; 0 only reads what is there",
        ),
    ] = 0
    engram_tables: Annotated[
        str,
        Ruled(
            Word(("auto", *PLACES, "host")),
            help="who reads the Engram tables of a model that has some: pinned, a GPU in "
            "the host's memory; device, in its own; host, the host between two steps; auto is "
            "pinned on GPUs if the host has the memory",
        ),
    ] = "auto"
    unroll: Annotated[bool | None, Ruled(Flag())] = None
    overlap: Annotated[bool, Ruled(Flag())] = True
    progress: Annotated[bool, Ruled(Flag())] = False
    debug: Annotated[bool, Ruled(Flag())] = False

    def __post_init__(self) -> None:
        """Every field becomes a checked, plain, immutable value."""
        given_sizes = {
            name: getattr(self, name) for name in ("prefill_tokens", "decode_batch_sizes")
        }
        given_bytes = self.disk_cache_bytes
        check_fields(self)
        for name, given in given_sizes.items():
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes))):
                shown = given if isinstance(given, list) else sizes
                checks.refuse(name, "ascending sizes", shown)
        if self.decode_batch_sizes is not None and self.decode_tokens is not None:
            raise ValueError(
                f"decode_batch_sizes={list(self.decode_batch_sizes)} needs steps that only decode, "
                f"and there are none with decode_tokens={self.decode_tokens}; leave one of them out"
            )
        if self.steps_per_call > 1 and self.decode_tokens is not None:
            raise ValueError(
                f"steps_per_call={self.steps_per_call} needs steps that only decode, and there are "
                f"none with decode_tokens={self.decode_tokens}; leave one of them out"
            )
        if self.disk_cache_bytes and self.disk_cache_dir is None:
            raise ValueError(
                f"disk_cache_bytes={given_bytes!r} needs disk_cache_dir, where files lie"
            )
        if self.memory_bytes is not None and self.gpu_memory_fraction is not None:
            raise ValueError(
                "give memory_bytes or gpu_memory_fraction, not both, got "
                f"{self.memory_bytes} and {self.gpu_memory_fraction}"
            )

    def changed(self, **fields: Any) -> EngineOptions:
        """The same with other values of some fields.

        Raises:
          ValueError: as of `EngineOptions`.
          TypeError: there is no such field.
        """
        return dataclasses.replace(self, **fields) if fields else self
