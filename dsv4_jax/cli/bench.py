"""Times decode steps, their cache-dependent part, single ops and prefill at a model's real shapes.

`bench serve` times a server, and has a module of its own.

Weights are random and made on the device. Caches are filled with random contents up to the given
context. Every figure is written to the JSON file as soon as it is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from dsv4_jax.bench import decode, kernels, prefill, report
from dsv4_jax.bench.decode_case import PARTS, DecodeCase
from dsv4_jax.bench.mesh_step import MeshSteps
from dsv4_jax.bench.results import Output
from dsv4_jax.bench.timing import copy_bandwidth
from dsv4_jax.bench.weights import random_params
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cli import bench_serve
from dsv4_jax.cli.arguments import (
    WEIGHTS,
    add_activations,
    add_cache_format,
    add_follow_links,
    add_mesh,
    chosen_mesh,
    output_file,
    points_of,
    real,
    whole,
    wholes,
)
from dsv4_jax.cli.bench_checks import (
    check_case_memory,
    check_contexts,
    check_mesh,
    find_shortage,
)
from dsv4_jax.cli.presets import PRESETS, read_config
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.kinds import show
from dsv4_jax.model.params import param_shapes, unstack_layers
from dsv4_jax.runtime import claim_memory

_MAX_BATCH, _MAX_SECONDS = 2**16, 1e9
_STEP_CONTEXTS, _OP_CONTEXTS = ("4096,131072,1048576", "256,4096"), ("16384", "256")
_OP_BATCHES, _PROMPTS = ("1,64", "1"), ("8192,32768", "256")
"""Defaults with a GPU and without one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    what = parser.add_subparsers(dest="what", required=True)
    steps = what.add_parser("decode", help="decode steps, whole and in parts")
    _add_common(steps, split_cache=True)
    _add_weights(steps)
    _add_contexts(steps, _STEP_CONTEXTS)
    _add_batches(steps, "1")
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
        help=f"parts to time, out of {','.join(PARTS)}; cache alone needs no weights",
    )
    steps.add_argument(
        "--one-bucket",
        action="store_true",
        help="compile once per batch, for the longest context, and use that cache for all contexts",
    )
    steps.add_argument(
        "--quick", action="store_true", help="time only the step, and compile it once"
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
        type=real(0, _MAX_SECONDS),
        default=20.0,
        help="seconds for the measurements of each part",
    )

    ops = what.add_parser("kernels", help="single ops of one layer each")
    _add_common(ops)
    _add_contexts(ops, _OP_CONTEXTS)
    _add_batches(ops, "1,64 on a GPU and 1 without one")
    fill = what.add_parser("prefill", help="chunked prefill of one prompt")
    _add_common(fill)
    _add_weights(fill)
    fill.add_argument(
        "--tokens",
        type=wholes(),
        help="length of the prompt, one number or more; if not given, 8192,32768 on a GPU and "
        "256 without one",
    )
    fill.add_argument("--chunk", type=whole(1, 2**20), default=8192, help="tokens per call")
    for each in (steps, fill):
        each.add_argument(
            "--profile", action="store_true", help="list the launches with their times"
        )
    bench_serve.add_arguments(
        what.add_parser("serve", help="a server under load: first tokens, tokens/s, errors")
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; a case that fails is reported, and the others run."""
    if args.what == "serve":  # which uses no device
        return bench_serve.run(args)
    claim_memory(at_once=not (args.what == "decode" and args.compile_only))
    _choose_sizes(args)
    check_mesh(args)
    return {"decode": _run_decode, "kernels": _run_kernels, "prefill": _run_prefill}[args.what](
        args
    )


def _add_common(parser: argparse.ArgumentParser, *, split_cache: bool = False) -> None:
    parser.add_argument(
        "--config",
        help=f"{', '.join(PRESETS)} or a folder; if not given, flash_slim on a GPU and tiny "
        "without one",
    )
    parser.add_argument(
        "--layers", type=whole(), help="first layers of the model to use; if not given, all"
    )
    parser.add_argument(
        "--experts", type=whole(), help="routed experts; if not given, as many as the config has"
    )
    add_follow_links(parser)
    add_mesh(parser, split_cache=split_cache)
    add_cache_format(parser)
    parser.add_argument(
        "--json", type=output_file(), help="JSON file for the figures; if not given, none"
    )
    parser.add_argument(
        "--budget-s",
        type=real(0, _MAX_SECONDS),
        default=540.0,
        help="seconds after which no case starts",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=tuple(WEIGHTS),
        default="bfloat16",
        help="all weights in bfloat16, or FP8 and FP4 where the release has them",
    )
    add_activations(parser, prefill=False)


def _add_batches(parser: argparse.ArgumentParser, usual: str) -> None:
    parser.add_argument(
        "--batch",
        type=wholes(1, _MAX_BATCH),
        help=f"requests, one number or more; if not given, {usual}",
    )


def _add_contexts(parser: argparse.ArgumentParser, sizes: tuple[str, str]) -> None:
    parser.add_argument(
        "--contexts",
        type=wholes(),
        help=f"tokens of each request, one number or more; if not given, {sizes[0]} on a GPU and "
        f"{sizes[1]} without one",
    )


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
        "decode": {"contexts": _STEP_CONTEXTS, "batch": ("1", "1")},
        "kernels": {"contexts": _OP_CONTEXTS, "batch": _OP_BATCHES},
        "prefill": {"tokens": _PROMPTS},
    }[args.what]
    for name, (large, small) in chosen.items():
        if getattr(args, name) is None:
            setattr(args, name, wholes()(large if has_gpu else small))


def _config(args: argparse.Namespace) -> DSV4Config:
    config = read_config(args.config, draft=False, follow_links=args.follow_links)
    layers = config.num_layers if args.layers is None else args.layers
    experts = config.num_routed_experts if args.experts is None else args.experts
    if not 1 <= layers <= config.num_layers:
        raise ValueError(f"layers must be in 1..{config.num_layers}, got {layers}")
    if experts < config.num_experts_per_token:
        raise ValueError(f"experts must be at least {config.num_experts_per_token}, got {experts}")
    return dataclasses.replace(
        config,
        layer_types=config.layer_types[:layers],
        router_types=config.router_types[:layers],
        num_routed_experts=experts,
    )


def _status(rows: list[dict[str, Any]]) -> int:
    """1 if a case failed, else 0; a case skipped for lack of memory or time has not failed."""
    return int(any("failed" in row for row in rows))


def _run_decode(args: argparse.Namespace) -> int:
    begun = time.perf_counter()
    config = _config(args)
    check_contexts(config, "contexts", args.contexts)
    if args.plot:
        report.find_matplotlib()
    parts = ("step",) if args.quick else args.parts
    output = Output(args.json, command="bench decode", config=args.config)
    output.set(weights=args.weights, experts=config.num_routed_experts)
    cases, mesh, params = _cases(args, parts), chosen_mesh(args), None
    if args.compile_only:
        output.set(copy_bandwidth=None)
        if mesh is None:
            params = param_shapes(config, jnp.bfloat16, weights=WEIGHTS[args.weights])
            params = unstack_layers(params)
    else:
        with_weights = set(parts) != {"cache"}
        size = min(args.batch), min(args.contexts)
        check_case_memory(args, config, *size, weights=args.weights if with_weights else None)
        if mesh is None:
            output.set(copy_bandwidth=copy_bandwidth())
    steps = None
    if mesh is not None:
        steps = MeshSteps(config, mesh, weights=WEIGHTS[args.weights])
        steps.compile_ahead(cases, threads=min(len(cases), os.cpu_count() or 1))
    if set(parts) == {"cache"}:
        params = None
    elif params is None and not args.compile_only:
        start = time.perf_counter()
        made = random_params(config, weights=WEIGHTS[args.weights], mesh=mesh)
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
        if time.perf_counter() - begun > args.budget_s:
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
    return _status(rows)


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
            block_parts=args.model if split else 1,
        )
        for batch, context, split in points
    ]


def _run_kernels(args: argparse.Namespace) -> int:
    begun = time.perf_counter()
    config = _config(args)
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
    return _status(rows)


def _run_prefill(args: argparse.Namespace) -> int:
    begun = time.perf_counter()
    config = _config(args)
    check_contexts(config, "tokens", args.tokens)
    for num_tokens in args.tokens:
        if num_tokens % min(args.chunk, num_tokens):
            raise ValueError(f"chunk must divide tokens, got {args.chunk} and {num_tokens}")
    check_case_memory(args, config, 1, max(args.tokens), weights=args.weights)
    output = Output(args.json, command="bench prefill", config=args.config)
    output.set(weights=args.weights, experts=config.num_routed_experts)
    mesh = chosen_mesh(args)
    made = random_params(config, weights=WEIGHTS[args.weights], mesh=mesh)
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
    return _status(rows)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(PARTS)}, got {show(text)}")
    return parts
