"""Times decode steps, their cache-dependent part, single ops and prefill at a model's real shapes.

`bench decode`, `bench experts` and `bench serve` have modules of their own.

Weights are random and made on the device. Caches are filled with random contents up to the given
context. Every figure is written to the JSON file as soon as it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import jax

from dsv4_jax.bench import kernels, prefill, report
from dsv4_jax.bench.results import Output
from dsv4_jax.bench.timing import copy_bandwidth
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cli import bench_decode, bench_experts, bench_serve
from dsv4_jax.cli.arguments import chosen_mesh
from dsv4_jax.cli.bench_checks import (
    check_case_memory,
    check_contexts,
    check_mesh,
    find_shortage,
)
from dsv4_jax.cli.bench_options import (
    OP_BATCHES,
    OP_CONTEXTS,
    PROMPTS,
    STEP_CONTEXTS,
    add_batches,
    add_common,
    add_contexts,
    add_formats,
    add_routings,
    config_of,
    status_of,
)
from dsv4_jax.cli.values import whole, wholes
from dsv4_jax.config.upper_layers import upper_layers
from dsv4_jax.runtime import claim_memory

CHUNK, RESTING_CHUNK = 8192, 4096
"""Tokens of a call; of fewer, the last call has fewer that upper layers run without need."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    what = parser.add_subparsers(dest="what")
    steps = what.add_parser("decode", help="decode steps, whole and in parts")
    bench_decode.add_arguments(steps)
    ops = what.add_parser("kernels", help="single ops of one layer each")
    add_common(ops)
    add_contexts(ops, OP_CONTEXTS)
    add_batches(ops, "1,64 on a GPU and 1 without one")
    fill = what.add_parser("prefill", help="chunked prefill of one prompt")
    add_common(fill)
    add_formats(fill)
    add_routings(fill)
    fill.add_argument(
        "--tokens",
        type=wholes(),
        help="length of the prompt, one number or more; if not given, 8192,32768 on a GPU and "
        "256 without one",
    )
    fill.add_argument(
        "--chunk",
        type=whole(1, 2**20),
        help=f"tokens per call; if not given, {CHUNK}, and {RESTING_CHUNK} of a model whose upper "
        "layers may rest",
    )
    fill.add_argument(
        "--all-layers",
        action="store_true",
        help="run all layers for all tokens, also where a prompt does not need the upper ones",
    )
    fill.add_argument("--profile", action="store_true", help="list the launches with their times")
    bench_experts.add_arguments(
        what.add_parser("experts", help="how many different experts neighbouring rows pick")
    )
    bench_serve.add_arguments(
        what.add_parser("serve", help="a server under load: first tokens, tokens/s, errors")
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; a case that fails is reported, and the others run."""
    if args.what == "serve":  # which uses no device
        return bench_serve.run(args)
    if args.what == "experts":
        return bench_experts.run(args)
    claim_memory(at_once=not (args.what == "decode" and args.compile_only))
    commands = {"decode": bench_decode.run, "kernels": _run_kernels, "prefill": _run_prefill}
    with bench_decode.join(args) if args.what == "decode" else contextlib.nullcontext():
        _choose_sizes(args)
        check_mesh(args)
        return commands[args.what](args)


def _choose_sizes(args: argparse.Namespace) -> None:
    """Fills in what was not given: real sizes on a GPU, and elsewhere those of a first try."""
    has_gpu = jax.default_backend() == "gpu"
    if args.config is None:
        args.config = "flash_slim" if has_gpu else "tiny"
    if args.what == "decode" and args.points:
        if args.batch or args.contexts:
            raise ValueError("--points says which batches and contexts; leave those options out")
        args.batch = sorted({batch for batch, _, _ in args.points})
        args.contexts = sorted({context for _, context, _ in args.points})
    chosen = {
        "decode": {"contexts": STEP_CONTEXTS, "batch": ("1", "1")},
        "kernels": {"contexts": OP_CONTEXTS, "batch": OP_BATCHES},
        "prefill": {"tokens": PROMPTS},
    }[args.what]
    for name, (large, small) in chosen.items():
        if getattr(args, name) is None:
            setattr(args, name, wholes()(large if has_gpu else small))


def _run_kernels(args: argparse.Namespace) -> int:
    begun = time.perf_counter()
    config = config_of(args)
    check_contexts(config, "contexts", args.contexts)
    check_case_memory(args, config, min(args.batch), min(args.contexts), weights=None)
    output = Output(args.json, command="bench kernels", config=args.config)
    output.set(copy_bandwidth=copy_bandwidth())
    rows: list[dict[str, Any]] = []
    for context in args.contexts:
        for batch in args.batch:
            if time.perf_counter() - begun > args.budget_s:
                continue
            if shortage := find_shortage(config, args, batch, context):
                print(f"batch {batch}, context {context:,}: skipped {shortage}", flush=True)
                continue
            for row in kernels.bench_kernels(
                config,
                batch=batch,
                context=context,
                cache_format=args.cache_format,
                bandwidth=output.fields["copy_bandwidth"],
            ):
                rows.append(row)
                output.set(rows=rows)
                print(report.kernel_line(row), flush=True)
    print(report.kernel_table(rows))
    return status_of(rows)


def _run_prefill(args: argparse.Namespace) -> int:
    begun = time.perf_counter()
    config = config_of(args)
    if args.chunk is None:
        args.chunk = CHUNK if upper_layers(config) is None else RESTING_CHUNK
    check_contexts(config, "tokens", args.tokens)
    for num_tokens in args.tokens:
        if num_tokens % min(args.chunk, num_tokens):
            raise ValueError(f"chunk must divide tokens, got {args.chunk} and {num_tokens}")
    longest = max(args.tokens)
    check_case_memory(
        args, config, 1, longest, weights=args.weights, call_tokens=min(args.chunk, longest)
    )
    output = Output(args.json, command="bench prefill", config=args.config)
    output.set(weights=args.weights, experts=config.num_routed_experts)
    mesh = chosen_mesh(args)
    made = random_params(config, weights=args.weights, mesh=mesh, routing=args.routing[0])
    params = jax.block_until_ready(made)
    output.set(weight_bytes=tree_bytes(params))
    rows: list[dict[str, Any]] = []
    for num_tokens in args.tokens:
        if time.perf_counter() - begun > args.budget_s:
            continue
        chunk_tokens = min(args.chunk, num_tokens)
        rows.append({"tokens": num_tokens, "chunk_tokens": chunk_tokens})
        said = ""
        try:
            for row in prefill.bench_prefill(
                config,
                params,
                num_tokens=num_tokens,
                chunk_tokens=chunk_tokens,
                cache_format=args.cache_format,
                activations=args.activations,
                profile=args.profile,
                mesh=mesh,
                routings=args.routing,
                rests=not args.all_layers,
            ):
                rows[-1] = row
                output.set(rows=rows)
                if (line := report.prefill_line(row)) != said:
                    print(line, flush=True)
                said = line
        except jax.errors.JaxRuntimeError as error:
            rows[-1]["failed"] = report.first_line(error)
            output.set(rows=rows)
            print(report.prefill_line(rows[-1]), flush=True)
        if text := report.profile_table(rows[-1]):
            print(text, flush=True)
    return status_of(rows)
