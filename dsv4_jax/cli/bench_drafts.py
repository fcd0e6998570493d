"""`dsv4-jax bench decode --drafts`: rounds of a DSpark draft beside plain decode steps."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from typing import Any

import jax
from jax.sharding import Mesh

from dsv4_jax.bench import report, round_report
from dsv4_jax.bench.decode_case import PARTS as DECODE_PARTS
from dsv4_jax.bench.mesh_rounds import MeshRoundCase, RandomModel
from dsv4_jax.bench.program import Program
from dsv4_jax.bench.report import table_lines
from dsv4_jax.bench.results import Output
from dsv4_jax.bench.round_case import RoundCase, usual_stages
from dsv4_jax.bench.round_depths import DepthPrograms, bench_depths, depth_columns
from dsv4_jax.bench.round_programs import BLOCK_PICKS, PARTS, PICKS, Model, RoundPrograms
from dsv4_jax.bench.rounds import bench_rounds
from dsv4_jax.bench.timing import copy_bandwidth
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cli.arguments import chosen_mesh
from dsv4_jax.cli.bench_checks import check_case_memory, check_contexts
from dsv4_jax.cli.bench_options import config_of, status_of
from dsv4_jax.cli.presets import read_config
from dsv4_jax.config import DSV4Config
from dsv4_jax.step.draft_worth import KEPT_TOGETHER

_FEW = 8  # requests


def run(args: argparse.Namespace) -> int:
    """Times each point; one that fails is reported, and the others run."""
    begun = time.perf_counter()
    config = with_stages(args, config_of(args))
    _check(args, config)
    output = Output(args.json, command="bench decode --drafts", config=args.config)
    output.set(weights=args.weights, experts=config.num_routed_experts, drafts=args.drafts)
    mesh, points = chosen_mesh(args), _points(args)
    if not args.compile_only:
        size = max(points, key=math.prod)
        check_case_memory(args, config, *size, weights=args.weights)
    cases = [_case(args, mesh, *point) for point in points]
    weights = RandomModel(config, mesh, weights=args.weights)
    model: Model | None = None
    rows: list[dict[str, Any]] = []
    print(f"{output.fields['device']}, jax {jax.__version__}, {_described(args, config)}")
    ahead = {}  # of a mesh, whose devices should not wait between two points
    if mesh is not None:
        ahead = {case: _compile(args, weights.shapes, case) for case in cases}
    for case in cases:
        rows.append({"batch": case.batch, "context": case.context})
        if time.perf_counter() - begun > args.budget_s:
            rows[-1]["skipped"] = f"would start later than --budget-s {args.budget_s:g}"
            output.set(rows=rows)
            print(report.decode_line(rows[-1]), flush=True)
            continue
        start = time.perf_counter()
        compiling = ahead.pop(case, None) or _compile(args, weights.shapes, case)
        if args.compile_only:
            rows[-1] |= _compiled(case, compiling.wait())
            output.set(rows=rows)
            print("\n".join(_lines(rows[-1])), flush=True)
            continue
        if model is None:
            model = weights.make(args.routing[0])
            taken, made = time.perf_counter() - start, dataclasses.replace(model.params, peers=None)
            output.set(weight_bytes=tree_bytes(made), weights_s=taken)
            print(f"weights after {taken:.0f} s", flush=True)
            for waited in ahead.values():  # nothing compiles beside what is timed
                waited.wait()
        programs = compiling.wait()
        rows[-1]["ready_s"] = time.perf_counter() - start
        print(f"programs after {rows[-1]['ready_s']:.0f} s", flush=True)
        if "copy_bandwidth" not in output.fields:
            output.set(copy_bandwidth=copy_bandwidth())
            print(f"a copy moves {output.fields['copy_bandwidth'] / 1e12:.3f} TB/s", flush=True)
        if args.depths:
            for depths in bench_depths(model, case, programs):
                rows[-1]["depths"] = depths
                output.set(rows=rows)
            lines = [rows[-1] | each for each in rows[-1]["depths"]]
            if failed := {each["depth"]: each["failed"] for each in lines if "failed" in each}:
                rows[-1]["failed"] = failed
            print("\n".join(table_lines(depth_columns(), lines)), flush=True)
            continue
        told: set[str] = set()
        for found in bench_rounds(model, case, programs, profile=args.profile):
            rows[-1] |= found
            output.set(rows=rows)
            for line in _lines(rows[-1]):
                if line not in told:
                    print(line, flush=True)
                    told.add(line)
        del programs
    if text := round_report.token_table(rows):
        print(text, flush=True)
    return status_of(rows)


def _points(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Requests and context of each point, in the order in which they were given."""
    if args.points:
        return [(batch, context) for batch, context, _ in args.points]
    return [(batch, context) for context in args.contexts for batch in args.batch]


def _case(args: argparse.Namespace, mesh: Mesh | None, batch: int, context: int) -> RoundCase:
    sizes: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "draft_tokens": args.drafts,
        "cache_format": args.cache_format,
        "activations": args.activations,
        "limit_s": args.part_limit_s,
        "routing": args.routing[0],
    }
    return RoundCase(**sizes) if mesh is None else MeshRoundCase(**sizes, mesh=mesh)


def _compile(
    args: argparse.Namespace, shapes: Model, case: RoundCase
) -> DepthPrograms | RoundPrograms:
    """Begins to compile the programs of a case."""
    threads = os.cpu_count() or 1
    if args.depths:
        return DepthPrograms(shapes, case, threads)
    return RoundPrograms(shapes, case, _parts(args, case), threads)


def _compiled(case: RoundCase, programs: dict[Any, Any]) -> dict[str, Any]:
    """The row of a case whose programs were compiled alone."""
    row: dict[str, Any] = case.sizes() | {"parts": {}}
    for part, program in programs.items():
        if isinstance(program, Exception):
            row.setdefault("failed", {})[part] = report.first_line(program)
        elif isinstance(program, Program) and part in PARTS:
            row["parts"][part] = program.row() | {"alias_bytes": program.alias_bytes}
    return row


def _parts(args: argparse.Namespace, case: RoundCase) -> tuple[str, ...]:
    """What is compiled of a case: of many requests less, whose rows pick nearly all experts."""
    if math.prod(case.mesh_sizes) > 1:  # as an engine compiles them
        return ("plain", "overlapped" if jax.default_backend() == "gpu" else "round")
    if args.quick:
        return ("plain", "round")
    left_out = set()
    if case.batch > _FEW:
        left_out = {"overlapped", PICKS}
    if jax.default_backend() != "gpu":  # whose programs are no graphs
        left_out.add("overlapped")
    return tuple(part for part in (*PARTS, BLOCK_PICKS, PICKS) if part not in left_out)


def _lines(row: dict[str, Any]) -> list[str]:
    """All that is known of a case."""
    lines = round_report.floor_lines(row) if "bytes" in row else []
    for part, found in row["parts"].items():
        lines.append(round_report.part_line(row, part))
        if text := report.profile_table(found):
            lines.append(text)
    lines += [round_report.turns_line(row, part) for part in row.get("beside_plain", {})]
    lines += [round_report.kept_line(row, kept) for kept in row.get("kept", {})]
    for part in row.get("failed", {}).keys() - row["parts"].keys():
        lines.append(f"{part} failed, {row['failed'][part]}")
    if "tokens_per_s" in row:
        lines.append(round_report.token_table([row]))
    return lines


def with_stages(args: argparse.Namespace, config: DSV4Config) -> DSV4Config:
    """The trunk with the DSpark stages of its preset or folder, or where it has none, usual ones.

    Stages of a trunk that was cut see its last layers.
    """
    spec = read_config(args.config, follow_links=args.follow_links).dspark
    usual = usual_stages(config)
    if spec is None:
        spec = usual
    if spec.num_stages is None:
        spec = dataclasses.replace(spec, num_stages=usual.num_stages)
    if spec.target_layers[-1] >= config.num_layers:
        count = min(len(spec.target_layers), config.num_layers)
        last = tuple(range(config.num_layers - count, config.num_layers))
        spec = dataclasses.replace(spec, target_layers=last)
    return dataclasses.replace(config, dspark=spec)


def _check(args: argparse.Namespace, config: DSV4Config) -> None:
    """Refuses what rounds are not measured with.

    Raises:
      ValueError: a context is longer than the model's or too short for a round, there are more
        drafts than a block has, or an option is one of steps without drafts.
    """
    check_contexts(config, "contexts", args.contexts)
    assert config.dspark is not None
    if args.drafts > config.dspark.block_size:
        raise ValueError(
            f"drafts must be at most the {config.dspark.block_size} of a block, got {args.drafts}"
        )
    if min(args.contexts) <= args.drafts + 4:
        raise ValueError(
            f"contexts must be longer than {args.drafts + 4} with {args.drafts} drafts, got "
            f"{min(args.contexts)}"
        )
    if jax.process_count() > 1:
        raise ValueError(
            "bench decode --drafts runs in one process; leave --hosts, --coordinator, "
            "--num-processes and --process-id out"
        )
    given = {
        "--parts": args.parts != DECODE_PARTS,
        "--one-bucket": args.one_bucket,
        "--split-cache": args.split_cache,
        "/split in --points": any(split for _, _, split in args.points or ()),
        "--plot": args.plot,
    }
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} is of steps without drafts; leave it out beside --drafts")
    if args.depths and (args.quick or args.profile):
        raise ValueError("--quick and --profile are of rounds in parts; leave them out or --depths")
    if args.depths and args.compile_only:
        raise ValueError("--compile-only compiles no --depths; leave one of them out")
    if args.depths and args.drafts > len(KEPT_TOGETHER):
        raise ValueError(
            f"--depths knows chances of {len(KEPT_TOGETHER)} drafts, got --drafts {args.drafts}"
        )


def _described(args: argparse.Namespace, config: DSV4Config) -> str:
    assert config.dspark is not None
    return (
        f"{args.config} of {config.num_layers} layers and {config.num_routed_experts} experts, "
        f"{args.weights} weights, {config.dspark.num_stages} stages, {args.routing[0]} routing"
    )
