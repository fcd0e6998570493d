"""`dsv4-jax bench decode`: decode steps, whole and in parts, on one device or a mesh."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import time
from typing import Any

import jax

from dsv4_jax.bench import decode, report
from dsv4_jax.bench.decode_case import ALL_PARTS, PARTS, DecodeCase
from dsv4_jax.bench.engram_reads import make_tables, reduced, table_bytes
from dsv4_jax.bench.mesh_step import MeshSteps
from dsv4_jax.bench.results import Output
from dsv4_jax.bench.timing import copy_bandwidth
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cli import bench_drafts
from dsv4_jax.cli.arguments import chosen_mesh, join_mesh
from dsv4_jax.cli.bench_checks import check_case_memory, check_contexts
from dsv4_jax.cli.bench_options import (
    MAX_SECONDS,
    STEP_CONTEXTS,
    add_batches,
    add_common,
    add_contexts,
    add_formats,
    add_routings,
    config_of,
    status_of,
)
from dsv4_jax.cli.output_files import output_file
from dsv4_jax.cli.values import points_of, real, whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.kinds import show
from dsv4_jax.hosts import agree
from dsv4_jax.model.params import param_shapes, unstack_layers
from dsv4_jax.runtime import host_memory


def add_arguments(steps: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_common(steps, hosts=True)
    add_formats(steps)
    add_routings(steps)
    add_contexts(steps, STEP_CONTEXTS)
    add_batches(steps, "1")
    steps.add_argument(
        "--points",
        type=points_of,
        help="BATCH@CONTEXT, one or more, in place of --batch and --contexts; /split after one is "
        "--split-cache for it alone; if not given, all of those two",
    )
    steps.add_argument(
        "--parts",
        type=_parts,
        default=PARTS,
        help=f"parts to time, out of {','.join(ALL_PARTS)}; cache alone needs no weights, and loop "
        "is `decode_loop`, on a mesh too",
    )
    steps.add_argument(
        "--one-bucket",
        action="store_true",
        help="compile once per batch, for the longest context, and use that cache for all contexts",
    )
    steps.add_argument(
        "--quick",
        action="store_true",
        help="time only the step, and the loop if --parts has it, and compile them once",
    )
    steps.add_argument(
        "--compile-only",
        action="store_true",
        help="fill the compilation cache without running; several processes may do so at once",
    )
    steps.add_argument(
        "--plot",
        type=output_file(".png", ".svg"),
        help="PNG or SVG file for ms against context; if not given, none",
    )
    steps.add_argument(
        "--part-limit-s",
        type=real(0, MAX_SECONDS),
        default=20.0,
        help="seconds for the measurements of each part",
    )
    steps.add_argument(
        "--engram-rows",
        type=_engram_rows,
        help="also time steps that wait for rows of Engram tables in host memory, of so many rows "
        "each, or all for as many as the model has; if not given, rows lie on the devices",
    )
    steps.add_argument("--profile", action="store_true", help="list the launches with their times")
    steps.add_argument(
        "--drafts",
        type=whole(1, 16),
        help="time rounds that check so many drafts of DSpark stages, whole, in parts and by how "
        "many they keep, beside plain steps, and with --quick the two alone; on a mesh with "
        "--quick; if not given, steps without drafts",
    )
    steps.add_argument(
        "--depths",
        action="store_true",
        help="with --drafts, time rounds of one draft, two and so on instead, and rounds whose "
        "drafts are cut by their confidences",
    )


def join(args: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Joins other processes, if there are any; in the context all but process 0 say nothing.

    Raises:
      ValueError: as `join_mesh`.
    """
    _, follows = join_mesh(args)
    if not follows:
        return contextlib.nullcontext()
    args.json = args.plot = None
    return contextlib.redirect_stdout(io.StringIO())


def run(args: argparse.Namespace) -> int:
    """Times each point; one that fails is reported, and the others run."""
    if args.depths and not args.drafts:
        raise ValueError("--depths is of rounds with drafts; give --drafts too, or leave it out")
    if args.drafts and args.engram_rows is not None:
        raise ValueError("--engram-rows is of steps without drafts; leave it or --drafts out")
    if args.drafts:
        return bench_drafts.run(args)
    begun = time.perf_counter()
    config = config_of(args)
    check_contexts(config, "contexts", args.contexts)
    if args.plot:
        report.find_matplotlib()
    parts = args.parts
    if args.quick:
        parts = ("step", *(["loop"] if "loop" in parts else []))
    if config.engram is not None and set(parts) != {"step"}:
        raise ValueError(
            "--parts must be step for a model with Engram tables, whose layers share entries and "
            f"whose rows come from the host, got {','.join(parts)}; give --parts step"
        )
    _check_tables(args, config)
    output = Output(args.json, command="bench decode", config=args.config)
    output.set(weights=args.weights, experts=config.num_routed_experts)
    cases, mesh, params = _cases(args, parts), chosen_mesh(args), None
    if args.compile_only:
        output.set(copy_bandwidth=None)
        if mesh is None:
            params = param_shapes(config, weights=args.weights)
            params = unstack_layers(params)
    else:
        with_weights = set(parts) != {"cache"}
        size = min(args.batch), min(args.contexts)
        check_case_memory(args, config, *size, weights=args.weights if with_weights else None)
        if mesh is None:
            output.set(copy_bandwidth=copy_bandwidth())
    steps = None
    if mesh is not None:
        steps = MeshSteps(config, mesh, weights=args.weights)
        steps.compile_ahead(cases, threads=min(len(cases), os.cpu_count() or 1))
    if args.engram_rows is not None and not args.compile_only:
        cases = _with_tables(args, config, cases, output)
    if set(parts) == {"cache"}:
        params = None
    elif params is None and not args.compile_only:
        start = time.perf_counter()
        made = random_params(config, weights=args.weights, mesh=mesh, routing=args.routing[0])
        params = jax.block_until_ready(made)
        output.set(weight_bytes=tree_bytes(params), weights_s=time.perf_counter() - start)
    if steps is not None:
        steps.wait()
        output.set(ready_s=time.perf_counter() - begun)
        print(f"weights and programs after {output.fields['ready_s']:.0f} s", flush=True)
        if not args.compile_only:
            output.set(copy_bandwidth=copy_bandwidth())
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append({"batch": case.batch, "context": case.context})
        if agree(time.perf_counter() - begun > args.budget_s):
            rows[-1]["skipped"] = f"would start later than --budget-s {args.budget_s:g}"
            output.set(rows=rows)
            continue
        bandwidth, said = output.fields["copy_bandwidth"], ""
        if steps is None:
            case = dataclasses.replace(case, recompile=not args.quick and len(rows) == 1)
            found = decode.bench_case(config, params, case, bandwidth=bandwidth)
        else:
            found = steps.bench(params, case, bandwidth=bandwidth)
        for row in found:
            rows[-1] = row
            output.set(rows=rows)
            if (line := report.decode_line(row)) != said:
                print(line, flush=True)
            said = line
        if text := report.profile_table(rows[-1]):
            print(text, flush=True)
    print(report.decode_table(rows))
    if args.plot:
        report.plot_decode(rows, args.plot, title=args.config)
    return status_of(rows)


def _check_tables(args: argparse.Namespace, config: DSV4Config) -> None:
    """Refuses Engram tables that the model or the host does not have room for.

    Raises:
      ValueError: the model has no tables, or others than those.
      MemoryError: the host's free memory is less.
    """
    if args.engram_rows is None:
        return
    if config.engram is None:
        raise ValueError("--engram-rows is of a model with Engram tables; leave it out")
    needed = table_bytes(reduced(config.engram, args.engram_rows or None))
    memory = host_memory()
    if memory is not None and needed > memory.free_bytes:
        raise MemoryError(
            f"Engram tables of --engram-rows need {needed / 2**30:.1f} GiB of host memory, and "
            f"{memory.name} has {memory.free_bytes / 2**30:.1f} GiB free; give fewer rows"
        )


def _with_tables(
    args: argparse.Namespace, config: DSV4Config, cases: list[DecodeCase], output: Output
) -> list[DecodeCase]:
    """The cases with tables in host memory, which are made while programs compile."""
    start = time.perf_counter()
    tables = make_tables(config, args.engram_rows or None)
    seconds, heights = time.perf_counter() - start, tables.config.table_rows
    whole = "" if args.engram_rows else ", the model's own height"
    print(
        f"Engram tables of {' and '.join(f'{rows:,}' for rows in heights)} rows{whole}, "
        f"{tables.num_bytes / 2**30:.2f} GiB of host memory, made in {seconds:.0f} s",
        flush=True,
    )
    output.set(engram_rows=list(heights), engram_bytes=tables.num_bytes, engram_s=seconds)
    return [dataclasses.replace(case, tables=tables) for case in cases]


def _engram_rows(text: str) -> int:
    """Rows of each table; 0 is all."""
    return 0 if text == "all" else whole(1, 2**31 - 1)(text)


def _cases(args: argparse.Namespace, parts: tuple[str, ...]) -> list[DecodeCase]:
    """The points to measure, in the order in which they were given."""
    points = args.points or [(b, c, False) for b in args.batch for c in args.contexts]
    points = [(batch, context, split or args.split_cache) for batch, context, split in points]
    longest: dict[tuple[int, bool], int] = {}
    for batch, context, split in points:
        longest[batch, split] = max(context, longest.get((batch, split), 0))
    return [
        DecodeCase(
            batch=batch,
            context=context,
            bucket_context=longest[batch, split] if args.one_bucket else context,
            cache_format=args.cache_format,
            activations=args.activations,
            parts=parts,
            profile=args.profile,
            compile_only=args.compile_only,
            limit_s=args.part_limit_s,
            routings=args.routing,
            block_parts=args.model if split else 1,
        )
        for batch, context, split in points
    ]


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if set(parts) - set(ALL_PARTS):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(ALL_PARTS)}, got {show(text)}")
    return parts
