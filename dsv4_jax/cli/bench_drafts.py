"""`dsv4-jax bench decode --drafts`: rounds of a DSpark draft beside plain decode steps."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from typing import Any

import jax

from dsv4_jax.bench import report, round_report
from dsv4_jax.bench.decode_case import PARTS as DECODE_PARTS
from dsv4_jax.bench.report import table_lines
from dsv4_jax.bench.results import Output
from dsv4_jax.bench.round_case import RoundCase, usual_stages
from dsv4_jax.bench.round_depths import DepthPrograms, bench_depths, depth_columns
from dsv4_jax.bench.round_programs import BLOCK_PICKS, PARTS, PICKS, Model, RoundPrograms
from dsv4_jax.bench.rounds import bench_rounds
from dsv4_jax.bench.timing import copy_bandwidth
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cli.arguments import chosen_mesh
from dsv4_jax.cli.bench_checks import check_case_memory, check_contexts
from dsv4_jax.cli.bench_options import config_of, status_of
from dsv4_jax.cli.presets import read_config
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import param_shapes, unstack_layers
from dsv4_jax.step.draft_worth import KEPT_TOGETHER

_FEW = 8  # requests


def run(args: argparse.Namespace) -> int:
    """Times each point; one that fails is reported, and the others run."""
    begun = time.perf_counter()
    config = with_stages(args, config_of(args))
    _check(args, config)
    output = Output(args.json, command="bench decode --drafts", config=args.config)
    output.set(weights=args.weights, experts=config.num_routed_experts, drafts=args.drafts)
    size = max(args.batch), max(args.contexts)
    check_case_memory(args, config, *size, weights=args.weights)
    shapes = param_shapes(config, weights=args.weights)
    shapes = Model(config, unstack_layers(shapes))
    cases = [
        RoundCase(
            batch=batch,
            context=context,
            draft_tokens=args.drafts,
            cache_format=args.cache_format,
            activations=args.activations,
            limit_s=args.part_limit_s,
            routing=args.routing[0],
        )
        for context in args.contexts
        for batch in args.batch
    ]
    model: Model | None = None
    rows: list[dict[str, Any]] = []
    print(f"{output.fields['device']}, jax {jax.__version__}, {_described(args, config)}")
    for case in cases:
        rows.append({"batch": case.batch, "context": case.context})
        if time.perf_counter() - begun > args.budget_s:
            rows[-1]["skipped"] = f"would start later than --budget-s {args.budget_s:g}"
            output.set(rows=rows)
            print(report.decode_line(rows[-1]), flush=True)
            continue
        start = time.perf_counter()
        threads = os.cpu_count() or 1
        compiling = (
            DepthPrograms(shapes, case, threads)
            if args.depths
            else RoundPrograms(shapes, case, _parts(args, case), threads)
        )
        if model is None:
            made = random_params(config, weights=args.weights, routing=args.routing[0])
            model = Model(config, jax.block_until_ready(made))
            taken = time.perf_counter() - start
            output.set(weight_bytes=tree_bytes(model.params), weights_s=taken)
            print(f"weights after {taken:.0f} s", flush=True)
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
    print(round_report.token_table(rows), flush=True)
    return status_of(rows)


def _parts(args: argparse.Namespace, case: RoundCase) -> tuple[str, ...]:
    """What is compiled of a case: of many requests less, whose rows pick nearly all experts."""
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
    lines = round_report.floor_lines(row)
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
    if chosen_mesh(args) is not None:
        raise ValueError(
            "bench decode --drafts runs on one device; leave --data-shards and --model-shards out"
        )
    given = {
        "--points": args.points,
        "--parts": args.parts != DECODE_PARTS,
        "--one-bucket": args.one_bucket,
        "--compile-only": args.compile_only,
        "--plot": args.plot,
    }
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} is of steps without drafts; leave it out beside --drafts")
    if args.depths and (args.quick or args.profile):
        raise ValueError("--quick and --profile are of rounds in parts; leave them out or --depths")
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
