"""EnginePlan: what the options of an engine come to, worked out before anything is allocated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh

from dsv4_jax import checks
from dsv4_jax.allocator.pool_plan import PoolPlan, device_memory_bytes, plan_pools
from dsv4_jax.cache.schema import FormatName, check_selector, choose_cache_format
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.upper_layers import upper_layers, upper_size
from dsv4_jax.hosts import hosts_of
from dsv4_jax.mesh import AXES, DATA, check_divides, mesh_sizes
from dsv4_jax.model.draft_params import DraftParams, DSparkParams
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.runtime import host_memory, shown_bytes
from dsv4_jax.serving.least_memory import least_memory
from dsv4_jax.serving.options import DEFAULT_MAX_STEP_MS, NO_STEP_BOUND_MS, EngineOptions
from dsv4_jax.serving.step_sizes import StepSizes, find_sizes
from dsv4_jax.step.call_cost import base_seconds
from dsv4_jax.step.draft_worth import StepCost, least_survival
from dsv4_jax.step.settings_size import count_entries

_SIZE_STEP, _WAVE = 128, 512
"""Tokens. Beyond `_WAVE` a size is a multiple of it: the tiles of a product run in waves, a CTA an
SM, and on an H200 a step of 1,664 tokens takes about as long as one of 2,048."""
_NEAR_ENOUGH = 0.75

_SURE_TO_FIT = 0.9
"""Share of a bound that arithmetic may fill: a size that misses it by little is never used."""
BESIDE_DISK_BYTES = 2**28
"""Of the host's memory, for pages on their way to a disk and from it, if no number is given."""
_SHARE_OF_HOST = 0.5
"""Of the host's free memory, for "auto"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpperSteps:
    """Steps in which `upper_layers` rest for some requests.

    Attributes:
      sizes: by size of a general step that has such a program, tokens that those layers run in it;
        where none has, they rest for no request, but may have for one that comes from elsewhere.
      step_sizes: all sizes of general steps, ascending.
      look_back: as of `UpperLayers`.
      share: of the layers of trunk and draft, those that rest.
    """

    sizes: Mapping[int, int]
    step_sizes: tuple[int, ...]
    look_back: int
    share: float

    @property
    def rest_cost(self) -> float:
        """What such a step takes, as a share of one that all layers run."""
        fullest = max((count / size for size, count in self.sizes.items()), default=1.0)
        return 1 - self.share * (1 - fullest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What an engine's options come to, for its model and mesh.

    Processes of a mesh compare what this shows when they build an engine: all options, the model
    and the pools. What follows from these is not shown again.

    Attributes:
      config: the model as the cache sees it: with a draft only if there are drafts.
      options: as they were given, but for the idea, which `config` has.
      pools: sizes of the pools of a data shard.
      step_sizes: tokens of steps on a data shard; each is a program.
      cache_format: the storage format.
      grammars: requests may have grammars; else no step takes masks.
      prefill_activations: what multiplies quantised weights in steps that hold prompt tokens.
      overlap: the next step is launched before the last one is read, where it can be.
      host_cache_bytes: of the host's memory, for known prefixes.
      cost: what a device reads and multiplies in a step, for its time by arithmetic.
      max_step_s: the longest, in seconds, that a step with prompts may take beside requests that
        decode; infinite where nothing bounds it. One that was not given grows with the times of
        decode steps (`Pace`).
      upper: steps in which upper layers rest; None of models that need all layers for all tokens.
      least_survival: chance of being kept at which a draft is checked, where one request decodes,
        two, and so on, of all data shards together; None checks all.
    """

    config: DSV4Config
    options: EngineOptions
    pools: PoolPlan
    step_sizes: StepSizes
    cache_format: FormatName
    grammars: bool
    prefill_activations: str = dataclasses.field(repr=False)
    overlap: bool = dataclasses.field(repr=False)
    host_cache_bytes: int = dataclasses.field(repr=False)
    cost: StepCost = dataclasses.field(repr=False)
    max_step_s: float = dataclasses.field(repr=False)
    upper: UpperSteps | None = dataclasses.field(default=None, repr=False)
    least_survival: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)

    @property
    def mesh(self) -> Mesh | None:
        """Where arrays lie; None is one device."""
        return self.options.mesh

    @property
    def is_on_gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return is_on_gpu(self.mesh)

    @property
    def draft_tokens(self) -> int:
        """k, tokens that the draft guesses per step."""
        return self.options.draft_tokens

    @property
    def steps_per_call(self) -> int:
        """n, steps that a call makes where every request only decodes."""
        return self.options.steps_per_call

    @property
    def call_tokens(self) -> int:
        """The most tokens that a call draws for a request: of all its steps, with all drafts."""
        return self.steps_per_call * (self.draft_tokens + 1)

    @property
    def data_shards(self) -> int:
        """Data shards of the mesh; 1 without one."""
        return 1 if self.mesh is None else mesh_sizes(self.mesh)[0]

    @property
    def count_entries(self) -> int:
        """Counts of tokens that requests with penalties have drawn, on each data shard."""
        pools = self.pools
        return count_entries(self.config.vocab_size, pools.max_requests, pools.max_context_tokens)


def plan_engine(
    config: DSV4Config,
    options: EngineOptions,
    *,
    params: DSV4Params,
    has_tokenizer: bool,
) -> EnginePlan:
    """Works an engine's sizes out.

    Args:
      config: the model, with the idea of the options.
      options: what was asked for.
      params: of the model, or their shapes.
      has_tokenizer: the engine has one, without which there are no grammars.

    Raises:
      ValueError: an option does not fit the model or divide over the mesh, or a budget is too
        little.
      MemoryError: the host has less memory than `host_cache_bytes` says.
    """
    checks.instance("config", config, DSV4Config)
    mesh, draft_tokens = options.mesh, options.draft_tokens
    check_selector(config, split_cache=options.split_cache)
    _check_drafts(options, config, params.mtp)
    memory_bytes = options.memory_bytes
    if options.gpu_memory_fraction is not None:
        memory_bytes = device_memory_bytes(options.gpu_memory_fraction)
    cached = config if draft_tokens else config.without_draft()
    pools = plan_pools(
        cached,
        max_requests=_of_shard("max_requests", options.max_requests, mesh),
        max_context_tokens=options.max_context_tokens,
        cache_format=options.cache_format,
        num_blocks=None
        if options.num_blocks is None
        else _of_shard("num_blocks", options.num_blocks, mesh, split=options.split_cache),
        num_snapshots=None
        if options.num_snapshots is None
        else _of_shard("num_snapshots", options.num_snapshots, mesh),
        memory_bytes=memory_bytes,
        block_parts=mesh_sizes(mesh)[1] if options.split_cache and mesh is not None else 1,
    )
    sizes = find_sizes(options, max_requests=pools.max_requests, on_gpu=is_on_gpu(mesh))
    data, model = (1, 1) if mesh is None else mesh_sizes(mesh)
    cost = StepCost.of(cached, params, num_devices=data * model)
    max_step_s = _max_step_s(options)
    # Each data shard has all weights but those of experts.
    of_device = dataclasses.replace(cost, fixed=cost.fixed * data)
    if options.decode_tokens is None:
        least = 2 * pools.max_requests
        prompts = with_fitting_size(sizes.prompts, of_device, max_step_s, data=data, least=least)
        sizes = dataclasses.replace(sizes, prompts=prompts)
    plan = EnginePlan(
        config=cached,
        options=options.changed(idea=None),
        pools=pools,
        step_sizes=sizes,
        cache_format=choose_cache_format(config, options.cache_format),
        grammars=options.grammars and has_tokenizer,
        prefill_activations=options.prefill_activations or options.activations,
        overlap=options.overlap and not options.debug,
        host_cache_bytes=find_host_cache_bytes(options),
        cost=of_device,
        max_step_s=max_step_s,
        upper=_upper_steps(cached, options, sizes.prompts, pools.max_requests, cost.num_layers),
    )
    return dataclasses.replace(plan, least_survival=_least_survivals(plan, cost))


def _upper_steps(
    config: DSV4Config,
    options: EngineOptions,
    sizes: Sequence[int],
    max_requests: int,
    num_layers: int,
) -> UpperSteps | None:
    """`EnginePlan.upper`.

    A step in which some rest has all layers for what decodes, and for some tokens of prompts that
    end. Beside `decode_tokens` all steps have the same, whatever runs beside a request.
    """
    upper = upper_layers(config)
    if upper is None:
        return None
    decoding = max_requests * (options.draft_tokens + 1)
    return UpperSteps(
        sizes={} if options.decode_tokens is not None else _upper_sizes(sizes, decoding),
        step_sizes=tuple(sizes),
        look_back=upper.look_back,
        share=(config.num_layers - upper.first) / num_layers,
    )


def _upper_sizes(sizes: Sequence[int], decoding: int) -> dict[int, int]:
    """`UpperSteps.sizes`, where so many tokens may decode: of sizes of which half can rest."""
    found = {size: upper_size(size, decoding) for size in sizes}
    return {size: count for size, count in found.items() if count}


def check_processes(options: EngineOptions) -> None:
    """Refuses what an engine on a mesh of several processes cannot have.

    Raises:
      ValueError: an option is one of those.
    """
    if hosts_of(options.mesh) is None:
        return
    if options.gpu_memory_fraction is not None:
        raise ValueError(
            f"gpu_memory_fraction may differ from process to process, got "
            f"{options.gpu_memory_fraction} on a mesh of several; give memory_bytes"
        )
    if options.disk_cache_dir:
        raise ValueError(
            f"disk_cache_dir needs all devices of the mesh in one process, got "
            f"{options.disk_cache_dir} on a mesh of several; leave it out"
        )


def find_host_cache_bytes(options: EngineOptions) -> int:
    """What `host_cache_bytes` comes to on this machine now, or on the fullest of several.

    Raises:
      ValueError: it is "auto", and nobody says what is free.
      MemoryError: it is more than what is free.
    """
    asked, memory = options.host_cache_bytes, host_memory()
    if (hosts := hosts_of(options.mesh)) is not None:
        memory = least_memory(hosts, memory)
    if not asked and options.disk_cache_dir is not None:
        asked = BESIDE_DISK_BYTES
    if isinstance(asked, str):
        if memory is None:
            raise ValueError(
                'host_cache_bytes must be a number where nobody says how much memory is free, got "'
                f'{asked}"; give one, such as "8GiB"'
            )
        return int(memory.free_bytes * _SHARE_OF_HOST)
    if memory is not None and asked > memory.free_bytes:
        raise MemoryError(
            f"host_cache_bytes must be at most the {shown_bytes(memory.free_bytes)} of "
            f"{shown_bytes(memory.total_bytes)} that {memory.name} has free, got "
            f'{shown_bytes(asked)}; give less, or "auto" for half of it'
        )
    return asked


def _max_step_s(options: EngineOptions) -> float:
    """`EnginePlan.max_step_s`."""
    if options.max_step_ms is not None:
        is_none = options.max_step_ms >= NO_STEP_BOUND_MS
        return math.inf if is_none else options.max_step_ms / 1e3
    return DEFAULT_MAX_STEP_MS / 1e3 if is_on_gpu(options.mesh) else math.inf


def is_on_gpu(mesh: Mesh | None) -> bool:
    """Whether an engine's devices are GPUs: those of a mesh, or JAX's default one."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return platform == "gpu"


def with_fitting_size(
    sizes: tuple[int, ...], cost: StepCost, max_step_s: float, *, data: int, least: int
) -> tuple[int, ...]:
    """Adds the size that fits a bound best, where others leave a gap.

    The largest of them would take too long beside requests that decode, and the largest that would
    not holds less than `_NEAR_ENOUGH` of what could be read in that time. The one that is added
    takes `_SURE_TO_FIT` of the bound by arithmetic, which may be wrong by the rest; all times here
    are held against that share.

    Args:
      sizes: of steps with prompts on a data shard, ascending.
      cost: what a device reads and multiplies, for the arithmetic that decides.
      max_step_s: the bound, in seconds.
      data: data shards.
      least: a size below is not worth a program.
    """

    def seconds(size: int) -> float:
        return base_seconds(cost, size * data, size)

    sure_s = _SURE_TO_FIT * max_step_s
    if seconds(sizes[-1]) <= sure_s:
        return sizes
    some = itertools.chain(range(_SIZE_STEP, _WAVE, _SIZE_STEP), range(_WAVE, sizes[-1], _WAVE))
    best = max(itertools.takewhile(lambda size: seconds(size) <= sure_s, some), default=0)
    fitting = max((size for size in sizes if seconds(size) <= sure_s), default=0)
    if best < least or fitting >= _NEAR_ENOUGH * best:
        return sizes
    return tuple(sorted({*sizes, best}))


def _least_survivals(plan: EnginePlan, cost: StepCost) -> tuple[float, ...] | None:
    """`EnginePlan.least_survival`."""
    if not plan.options.draft_cut:
        return None
    most = plan.pools.max_requests * plan.data_shards
    return tuple(least_survival(cost, count, plan.draft_tokens) for count in range(1, most + 1))


def _check_drafts(options: EngineOptions, config: DSV4Config, draft: DraftParams | None) -> None:
    """Refuses drafts that the parameters cannot make, or not so many, or not cut.

    Raises:
      ValueError: config and parameters have no draft, or of different kinds, or `draft_tokens` is
        more than it guesses, or `draft_cut` is set for drafts without confidences.
    """
    draft_tokens = options.draft_tokens
    if options.draft_cut and not (draft_tokens and isinstance(draft, DSparkParams)):
        raise ValueError(
            "draft_cut=True needs draft_tokens of DSpark stages, which say how sure they are, got "
            f"{draft_tokens=} and a draft that is {_kind_of(draft)}"
        )
    if not draft_tokens:
        return
    if draft is None:
        raise ValueError(
            f"draft_tokens={draft_tokens} needs a draft (an MTP block or DSpark stages), and "
            "params.mtp is None"
        )
    if isinstance(draft, DSparkParams) != (config.dspark is not None) or not config.has_draft:
        raise ValueError(
            f"draft_tokens={draft_tokens} needs a config with the draft of the parameters, which "
            f"is {_kind_of(draft)}; take the config that load_checkpoint gave with them"
        )
    if draft_tokens > config.max_draft_tokens:
        raise ValueError(
            f"draft_tokens must be at most {config.max_draft_tokens}, the tokens that the draft "
            f"guesses, got {draft_tokens}"
        )


def _kind_of(draft: DraftParams | None) -> str:
    if draft is None:
        return "None"
    return "DSpark stages" if isinstance(draft, DSparkParams) else "an MTP block"


def _of_shard(name: str, count: int, mesh: Mesh | None, *, split: bool = False) -> int:
    """A data shard's part of so many slots, blocks or snapshots; if split, over its devices too."""
    if mesh is None:
        return count
    check_divides(mesh, {name: count}, AXES if split else (DATA,))
    return count // mesh_sizes(mesh)[0]
