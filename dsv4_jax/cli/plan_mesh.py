"""What `dsv4-jax plan` prints of a mesh: bytes of one device, requests, and the floor of a step."""

from __future__ import annotations

import argparse
import collections
import functools
from collections.abc import Callable

from dsv4_jax.bench.engine_bytes import EngineBytes
from dsv4_jax.bench.floor import StepFloor, step_floor
from dsv4_jax.bench.placement import Placement, fitting_meshes, placements_on
from dsv4_jax.checkpoint.engram_tables import list_tables
from dsv4_jax.cli.arguments import mesh_options
from dsv4_jax.cli.gpus import Gpus
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.weight_sizes import FORMATS
from dsv4_jax.runtime import host_memory, shown_bytes

BATCHES = (1, 32, 256)
HOST_ROWS = 10e9
"""Bytes per second of rows that an H200 read anywhere in the host's pinned memory (PCIe 5.0)."""
DISK_READS = 500_000
"""Random reads of a page that an NVMe disk serves in a second, with many at a time."""
_MIB, _GIB = 2**20, 2**30


def plan_mesh(
    args: argparse.Namespace, gpus: Gpus, place_model: Callable[..., Placement]
) -> Placement:
    """The mesh that was asked for, or that of the GPUs with room for most requests.

    Args:
      args: as of `plan`.
      gpus: the GPUs.
      place_model: `place` of the model, with all arguments but the mesh and `gpu_bytes`.

    Raises:
      ValueError: a size does not divide over the mesh, or it is of another number of GPUs.
    """
    place_model = functools.partial(place_model, gpu_bytes=gpus.memory_bytes)
    if args.data is None and args.model is None:
        return _roomiest(placements_on(gpus.count, place_model), gpus)
    data = args.data or max(1, gpus.count // args.model)
    placed = place_model(data=data, model=args.model or max(1, gpus.count // data))
    if gpus.count not in (1, placed.data * placed.model):
        raise ValueError(
            f"--gpu {gpus} must be one GPU, or as many as --data-shards {placed.data} times "
            f"--model-shards {placed.model}"
        )
    return placed


def print_mesh_plan(
    config: DSV4Config,
    args: argparse.Namespace,
    gpus: Gpus,
    placed: Placement,
    place_model: Callable[..., Placement],
) -> bool:
    """Prints the plan of a mesh, arguments as of `plan_mesh`.

    Returns:
      Whether it fits, which is what is printed first. Where weights and a step do not, nothing is
      printed but that, and meshes that would.
    """
    data, model, fitting = placed.data, placed.model, placed.requests
    if placed.missing_bytes:
        others = fitting_meshes(functools.partial(place_model, gpu_bytes=gpus.memory_bytes))
        _print_refusal(args.config, placed, others, gpus)
        return False
    fits = _print_answer(args, placed, gpus, config)
    split = ", cache split over model" if args.split_cache and model > 1 else ""
    print(
        f"\n{args.config}, {args.cache_format}: data={data}, model={model}{split}, {data * model} "
        f"GPU(s) of {gpus.memory_bytes / _GIB:,.1f} GiB; what follows is of each GPU"
    )
    count = print_weights(placed.families, args.weights)
    print(f"\nweights: {shown_bytes(count)}{draft_note(config)}")
    beside = placed.beside(-(-args.requests // data))
    print("\n".join(step_lines(beside)))
    free = gpus.memory_bytes - count - beside.total_bytes + beside.cache_bytes
    print(f"left for a cache: {shown_bytes(max(free, 0))}")
    print_cache(beside, args.context, of=args.requests if data > 1 else None)
    their = ""
    if fitting:
        their = f", whose cache takes {shown_bytes(placed.beside(fitting).pools.memory_bytes)}"
    print(
        f"requests that fit: {data * fitting:,}, {fitting:,} on each of {data} data shard(s){their}"
    )
    if not fitting:
        print(f"the longest context that fits: {placed.longest_context():,} tokens")
    if config.sources is not None:
        _print_shared(config, placed, args.cache_format)
    _print_floor(config, placed, args, gpus)
    return fits


def print_cache(beside: EngineBytes, context: int, *, of: int | None = None) -> None:
    """Prints what a cache takes on a device, and what of it are snapshots.

    Args:
      beside: what an engine takes on a device.
      context: tokens of a request.
      of: requests of all devices, if one has not all of them.
    """
    pools = beside.pools
    its = f"{pools.max_requests:,}"
    if of is not None:
        its += f" of the {of:,}"
    snapshots = pools.num_snapshots * pools.bytes_per_snapshot
    print(
        f"cache: {shown_bytes(pools.memory_bytes)} for {its} request(s) of "
        f"{context:,} tokens: slots and blocks {shown_bytes(pools.memory_bytes - snapshots)}, "
        f"tables and lengths included, and {pools.num_snapshots:,} snapshots, where known prefixes "
        f"are resumed, {shown_bytes(snapshots)}"
    )


def step_lines(beside: EngineBytes) -> list[str]:
    """What an engine takes on a device beside weights and cache."""
    return [
        f"workspace: {shown_bytes(beside.workspace_bytes)}, estimated, "
        f"{beside.step_tokens:,} tokens",
        f"settings of requests: {shown_bytes(beside.settings_bytes)}",
    ]


def _print_answer(
    args: argparse.Namespace, placed: Placement, gpus: Gpus, config: DSV4Config
) -> bool:
    """Prints whether all requests fit, and if not, what would; and says it."""
    most, where = placed.data * placed.requests, _where(placed, gpus)
    asked = f"{args.requests:,} request(s) of {args.context:,} tokens"
    if args.requests <= most:
        tables = sum(table.num_bytes for table in list_tables(config))
        host = (
            f", beside {shown_bytes(tables)} of Engram tables in a host's memory" if tables else ""
        )
        print(f"fits {where}: {asked}; at most {most:,} would fit{host}")
        return True
    would = [f"--requests {most}"] if most else []
    if not most and (longest := placed.longest_context()):
        would.append(f"--context {longest}")
    print(f"does not fit {where}: {asked}; at most {most:,} would fit")
    print(f"what would: {', '.join(would) or 'more GPUs'}")
    return False


def _where(placed: Placement, gpus: Gpus) -> str:
    """The GPUs of a mesh, as `--gpu` takes them, or how many of which memory."""
    count = placed.data * placed.model
    if gpus.kind is None:
        return f"{count} GPU(s) of {placed.gpu_bytes / _GIB:,.1f} GiB"
    return f"{gpus.kind}x{count}"


def print_weights(families: dict[str, dict[str, int]], title: str) -> int:
    """Prints a table of {family: {format: bytes}}; the sum of all bytes."""
    formats = [name for name in FORMATS if any(name in sizes for sizes in families.values())]
    print(f"\n{f'weights, {title}':<28}{''.join(f'{f"{name} MiB":>14}' for name in formats)}")
    total = collections.Counter[str]()
    for sizes in families.values():
        total.update(sizes)
    for family, sizes in [*families.items(), ("all", total)]:
        cells = (f"{sizes[name] / _MIB:,.2f}" if name in sizes else "-" for name in formats)
        print(f"{family:<28}{''.join(f'{cell:>14}' for cell in cells)}")
    return total.total()


def draft_note(config: DSV4Config) -> str:
    """What is said of the draft behind bytes of weights; nothing where there is none."""
    if not config.has_draft:
        return ""
    stages = "draft block" if config.dspark is None else f"{config.dspark.num_stages} draft stages"
    return f", {stages} included, as for --drafts auto; --drafts off leaves it out"


def _print_floor(
    config: DSV4Config, placed: Placement, args: argparse.Namespace, gpus: Gpus
) -> None:
    """Prints a table of batches, and the collectives of a step."""

    def floor(batch: int, *, busiest: bool = False) -> StepFloor:
        return step_floor(
            config,
            placed.params,
            data=placed.data,
            model=placed.model,
            batch=batch,
            context=args.context,
            cache_format=args.cache_format,
            collective_s=args.collective_us * 1e-6,
            busiest=busiest,
            split_cache=args.split_cache,
            rates=gpus.rates,
        )

    print(
        f"\nfloor of a decode step of requests of {args.context:,} tokens, "
        f"at the rates of {gpus.kind or 'h200'}: "
        f"{gpus.rates.bandwidth / 1e12:.2g} TB/s, {gpus.rates.link_bandwidth / 1e9:g} GB/s to "
        f"other GPUs, {args.collective_us:g} us a collective"
        + ("" if gpus.kind in (None, "h200") else "; by NVIDIA's figures, not measured")
    )
    titles = ("GPU ms", "collectives ms", "floor ms", "tokens/s", "per GPU", "picks at random ms")
    print(f"{'requests':<10}{''.join(f'{title:>20}' for title in titles)}")
    most = placed.data * placed.requests
    batches = sorted({*BATCHES, args.requests, most} - {0})
    for batch in batches:
        step = floor(batch)
        per_gpu = step.tokens_per_device_s
        cells = [f"{s * 1e3:,.2f}" for s in (step.device_s, step.collective_s, step.seconds)]
        cells += [f"{per_gpu * step.num_devices:,.0f}", f"{per_gpu:,.0f}"]
        cells.append(f"{floor(batch, busiest=True).seconds * 1e3:,.2f}")
        fits = -(-batch // placed.data) <= placed.requests
        note = "" if fits else "  more than fit"
        print(f"{batch:<10}{''.join(f'{cell:>20}' for cell in cells)}{note}")
    print(
        "tokens pick experts evenly; last column: each at random, so that all GPUs wait for the "
        "one with most to do"
    )
    rows = -(-(most or batches[-1]) // placed.data)
    for collective in floor(rows * placed.data).collectives:
        print(
            f"{collective.count} collectives over {collective.axis}, {collective.name}: "
            f"{collective.sent_bytes / 1e6:,.3f} MB sent by a GPU with {rows} requests"
        )


def _print_shared(config: DSV4Config, placed: Placement, cache_format: str) -> None:
    """Prints what a model with shared entries keeps of a token, and what it reads on the host."""
    sources, pools = config.sources, placed.beside(1).pools
    million = placed.beside(1, 2**20).pools
    of_million = million.memory_bytes - million.num_snapshots * million.bytes_per_snapshot
    assert sources is not None
    print(
        f"a token takes {pools.bytes_per_block / pools.block_tokens:,g} bytes in "
        f"{cache_format}: {len(sources.makers)} of {config.num_layers} layers make entries; a "
        f"request takes {pools.bytes_per_slot / 1e6:,.2f} MB beside that, and one of a million "
        f"tokens {of_million / 1e9:,.3f} GB"
    )
    if (engram := config.engram) is not None:
        sizes = [e.num_bytes for e in list_tables(config)]
        row = sum(sizes) / sum(engram.table_rows)
        read = len(engram.layers) * engram.num_columns * row
        print(
            f"Engram tables: {sum(sizes):,} bytes, {shown_bytes(sum(sizes))}, of each host's "
            f"memory or disk and none of a GPU; a token reads {read / 1e3:,.1f} KB of them"
        )
        _print_table_reads(engram.num_columns * len(engram.layers), read)
        _print_host_memory(sum(sizes))


def _print_table_reads(rows: int, num_bytes: float) -> None:
    """Prints what a step takes to read its tokens' rows, beside the floor of the devices."""
    for batch in BATCHES:
        # Codes and scales of a row lie in two places of a file, each in a page or two.
        pages = 2 * batch * rows
        print(
            f"rows of {batch} token(s): {batch * num_bytes / 1e6:,.3f} MB to a GPU, "
            f"{batch * num_bytes / HOST_ROWS * 1e3:,.3f} ms at {HOST_ROWS / 1e9:g} GB/s; from a "
            f"disk {pages:,} reads of a page, {pages / DISK_READS * 1e3:,.2f} ms at "
            f"{DISK_READS:,} a second"
        )


def _print_host_memory(num_bytes: int) -> None:
    """Prints whether tables fit the memory of this machine, where somebody knows it."""
    memory = host_memory()
    if memory is not None:
        fits = "hold" if memory.total_bytes >= num_bytes else "do not hold"
        print(
            f"the {memory.total_bytes / _GIB:,.1f} GiB of {memory.name} {fits} them, and "
            f"{memory.free_bytes / _GIB:,.1f} GiB are free now"
        )


def _roomiest(meshes: list[Placement], gpus: Gpus) -> Placement:
    """The mesh, out of those of all the GPUs, that holds most requests.

    Raises:
      ValueError: the model does not divide over any of them.
    """
    if not meshes:
        raise ValueError(
            f"no mesh of {gpus.count} GPUs divides this model's sizes; take a power of two"
        )
    return max(meshes, key=lambda p: (p.data * p.requests, -p.missing_bytes))


def _print_refusal(name: str, placed: Placement, fitting: list[Placement], gpus: Gpus) -> None:
    """Prints why a model does not fit a mesh, and meshes that it does fit."""
    step = placed.beside(1).workspace_bytes
    where, *others = (
        f"{_where(one, gpus)} ({mesh_options(one.data, one.model)})" for one in (placed, *fitting)
    )
    print(
        f"does not fit {where}: each GPU would hold "
        f"{placed.weight_bytes / _GIB:,.1f} GiB of the weights of {name} and a step takes "
        f"{step / _GIB:,.1f} GiB, {placed.missing_bytes / _GIB:,.1f} GiB more "
        f"than its {placed.gpu_bytes / _GIB:,.1f} GiB\n"
        f"what would: {', '.join(others) or 'no mesh of up to 16 GPUs'}"
    )
