"""Compiles a step of real sizes for an H200 that is not there: `python -m ... LAYERS BATCH`.

Prints, as JSON, the seconds it took, its launches, bytes of its arguments, bytes that it updates in
place and takes beside them, every copy of a MiB or more, and what the host would wait for. Nothing
is allocated: arguments are shapes. With `--drafts` it is the engine's step, draft block included,
or with `--dspark` DSpark stages, with `--prompts` its step that holds so many tokens of prompts,
with `--steps-per-call` its call of several decode steps, with `--draws` alone its decode step, or
the `trunk` of that or what it draws `apart`, else a decode step that gives logits. Flash with all
its experts, as the release stores them:

    python -m tools.step_at_size 43 1 --config flash --weights released --drafts 1
    python -m tools.step_at_size 43 1 --config flash --weights released --drafts 5 --dspark

DeepSeek-V4.1-Flash, in the format of its cache, with the experts that each of four devices has:

    python -m tools.step_at_size 40 64 --config v41_flash --weights released --experts 96
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.bench.parts import one_token_each
from dsv4_jax.bench.program import count_launches
from dsv4_jax.bench.round_case import usual_stages
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.cache.snapshots import SnapshotPlan, init_snapshot_store
from dsv4_jax.cli.arguments import add_activations, add_weights
from dsv4_jax.config.first_layers import first_layers
from dsv4_jax.config.upper_layers import upper_layers, upper_size
from dsv4_jax.engram import EngramTables, PlacedTables
from dsv4_jax.model.weight_forms import RELEASE_FORMS
from dsv4_jax.model.weight_sizes import FORMATS, walk_weights, weight_format
from dsv4_jax.step.decode_steps import jit_plain_decode_steps
from dsv4_jax.step.draws import DrawnCounts, TokenMasks
from dsv4_jax.step.plain_step import jit_plain_draw, jit_plain_trunk, plain_trunk
from dsv4_jax.step.sampling import MAX_LOGIT_BIAS, SamplingParams, stack_sampling
from dsv4_jax.step.serve_step import jit_plain_decode_step, jit_serve_step
from dsv4_jax.step.serve_values import ServeInput, ServeOutput
from dsv4_jax.step.settings_size import count_entries, mask_words
from pallas_kernels.common.weights import weight_bytes
from tools import aot, aot_figures

_DRAWS = "simple", "full", "trunk", "apart"

_NO_REMATERIALIZATION = {"xla_disable_hlo_passes": "rematerialization"}
"""XLA computes small values again in every layer where a model does not leave room on the GPU."""


def compile_step(
    config,
    *,
    batch,
    context,
    cache_format=None,
    weights="bfloat16",
    activations="fp8",
    draft_tokens=0,
    steps_per_call=1,
    draws=None,
    prompts=0,
):
    """The figures above, with unrolled layers."""
    device = aot._device("sm_90a")
    sharding = jax.sharding.SingleDeviceSharding(device)

    def placed(tree):
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )

    sizes = {"max_requests": batch, "max_context_tokens": context, "cache_format": cache_format}
    cache = placed(ds.cache.cache_shapes(config, **sizes))
    params = ds.model.param_shapes(config, weights=weights)
    is_engine_step = bool(draft_tokens or prompts or steps_per_call > 1 or draws is not None)
    if config.engram is not None and is_engine_step:
        params = dataclasses.replace(params, engram=_pinned_tables(config))
    params = placed(ds.unstack_layers(params))
    static = {"config": config, "activations": activations}
    donated = [cache]
    asked = {}
    if draws in ("full", "apart"):
        asked = _all_that_can_be_asked(config, batch, context, draft_tokens)
    if draft_tokens or prompts:
        store = placed(jax.eval_shape(lambda c: init_snapshot_store(c, batch), cache))
        serve_input = _serve_input(config, batch, draft_tokens, num_tokens=prompts)
        serve_input = placed(dataclasses.replace(serve_input, **asked))
        step, arguments = jit_serve_step, (params, cache, store, serve_input)
        donated.append(store)
        static["draft_tokens"] = draft_tokens
    elif steps_per_call > 1:
        serve_input = placed(_serve_input(config, batch, 0, num_steps=steps_per_call))
        step, arguments = jit_plain_decode_steps, (params, cache, serve_input)
        static["num_steps"] = steps_per_call
    elif draws is not None:
        serve_input = placed(dataclasses.replace(_serve_input(config, batch, 0), **asked))
        last = placed(jax.eval_shape(lambda: ServeOutput.empty(batch, 0, config.vocab_size)))
        step, arguments = jit_plain_decode_step, (params, cache, serve_input, last)
        if draws in ("trunk", "apart"):
            step, arguments = jit_plain_trunk, (params, cache, serve_input.step_input, last)
        if draws == "apart":
            with jax.default_device(device):
                _, rows = jax.eval_shape(functools.partial(plain_trunk, **static), *arguments)
            step, arguments = jit_plain_draw, (placed(rows), serve_input.draws, last)
            static, donated = {"config": config}, [last]
    else:
        call = placed(jax.eval_shape(functools.partial(one_token_each, config, batch)))
        step, arguments = ds.jit_decode_step, (params, cache, call)
    start = time.perf_counter()
    with jax.default_device(device):
        lowered = step.lower(*arguments, **static)
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=_NO_REMATERIALIZATION)
    beside = arguments if draws == "apart" else (arguments[1:], params.engram)
    params = dataclasses.replace(params, engram=None)
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    formats = collections.Counter()
    for _, weight in walk_weights(params):
        formats[weight_format(weight)] += weight_bytes(weight)
    return {
        "trace_s": traced - start,
        "compile_s": time.perf_counter() - traced,
        "launches": dataclasses.asdict(count_launches(hlo)),
        "kernels": _kernels(hlo),
        "weight_bytes": {name: formats[name] for name in FORMATS if name in formats},
        "cache_bytes": tree_bytes(donated),
        "argument_bytes": memory.argument_size_in_bytes,
        "argument_bytes_of_weights": memory.argument_size_in_bytes - tree_bytes(beside),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "large_copies": [size for size in aot_figures._copies(hlo) if size >= 2**20],
        "weight_sized": weight_sized(hlo, params),
        "waits": _waits(hlo),
    }


def _pinned_tables(config):
    """Shapes of Engram tables in the host's memory, which an engine's step reads by addresses."""
    ids = np.zeros(config.vocab_size, np.int64)
    byte = np.dtype(np.uint8)
    return PlacedTables(
        normalized=jax.ShapeDtypeStruct(ids.shape, jnp.int32),
        addresses=jax.ShapeDtypeStruct((len(config.engram.layers), 2, 2), jnp.int32),
        arrays=None,
        source=EngramTables(config.engram, ids, (), ""),
        dtypes=(byte, byte),
    )


def _serve_input(config, batch, draft_tokens, *, num_steps=1, num_tokens=0):
    """Shapes of a call in which every request decodes and all its drafts are checked.

    Or of one that holds prompts, `num_tokens` in all, and runs upper layers for as few as it may.
    """

    def build():
        count = num_tokens or batch * (draft_tokens + 1)
        tokens, row = jnp.zeros(count, jnp.int32), jnp.zeros(batch, jnp.int32)
        upper = upper_size(count, batch) if num_tokens and upper_layers(config) else 0
        return ServeInput(
            step_input=ds.StepInput(token_ids=tokens, request_ids=tokens, request_slots=row),
            num_checked=row,
            next_token_ids=row,
            sampling=ds.make_sampling(batch),
            snapshots=SnapshotPlan(rows=row, ends=row, places=row),
            num_steps=row if num_steps > 1 else None,
            upper=jnp.zeros(upper, jnp.int32) if upper else None,
        )

    return jax.eval_shape(build)


def _all_that_can_be_asked(config, batch, context, draft_tokens):
    """Fields of a `ServeInput` for draws of every kind, as an engine brings them: shapes."""
    entries = count_entries(config.vocab_size, batch, context)

    def build():
        rows = [SamplingParams()] * batch
        sampling = stack_sampling(rows, with_stops=False, bias_width=MAX_LOGIT_BIAS)
        entry = jnp.zeros(entries, jnp.int32)
        bits = jnp.zeros((batch, draft_tokens + 1, mask_words(config.vocab_size)), jnp.uint32)
        return {
            "sampling": jax.tree.map(jnp.asarray, sampling),
            "counts": DrawnCounts(rows=entry, token_ids=entry, counts=entry),
            "masks": TokenMasks(is_masked=jnp.zeros(batch, bool), bits=bits),
        }

    return jax.eval_shape(build)


def _waits(hlo):
    """Instructions whose outcome the host of a GPU reads before it launches what follows."""
    decides = re.findall(r"^.* (?:while|conditional)\(.*$", hlo, re.M)
    return [line.strip()[:200] for line in decides if "known_trip_count" not in line]


def _kernels(hlo):
    """Launches of our kernels in the program's text, by name."""
    ours = r'custom_call_target="(?:__gpu\$xla\.gpu\.(?:triton|ptx)|mosaic_gpu\w*)"'
    named = re.findall(ours + r'.*?op_name="[^"]*?([^"/]+)/[^"/]+"', hlo)
    return collections.Counter(named)


def weight_sized(hlo, params):
    """Results of XLA's own kernels that have the shape of a large weight: slices, transposes.

    Of a quantised weight it is that of its codes, or of the matrix that they stand for.
    """
    sizes = [leaf.shape for leaf in jax.tree.leaves(params)]
    sizes += [weight.shape for _, weight in walk_weights(params)]
    shapes = {",".join(map(str, size)) for size in sizes if np.prod(size) > 2**20}
    run = [hlo[hlo.index("\nENTRY") :]]
    for body in re.findall(r" while\(.*body=(%[\w.-]+)", hlo):
        run.append(hlo[hlo.index(f"\n{body} (") :].split("\n}", 1)[0])
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", "".join(run))
    return [shape for shape in found if shape in shapes]


def chosen_config(arguments):
    """The first layers of a preset, with a draft block or stages if it is asked to draft."""
    config = getattr(ds.DSV4Config, arguments.config)()
    experts = arguments.experts or config.num_routed_experts
    layers = arguments.layers or len(config.layer_types)
    config = dataclasses.replace(
        first_layers(dataclasses.replace(config, dspark=None), layers),
        num_routed_experts=experts,
        num_mtp_layers=int(arguments.drafts > 0 and not arguments.dspark),
    )
    return dataclasses.replace(config, dspark=usual_stages(config)) if arguments.dspark else config


def main():
    os.environ.update(aot.WITHOUT_A_GPU)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", type=int, help="the first so many")
    parser.add_argument("batch", type=int)
    parser.add_argument("--config", default="flash_slim")
    parser.add_argument("--context", type=int, default=131_072)
    add_weights(parser, RELEASE_FORMS, "bfloat16", "their form")
    parser.add_argument("--experts", type=int, help="if not given, as many as the preset has")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the draft guesses")
    parser.add_argument("--dspark", action="store_true", help="three DSpark stages are the draft")
    parser.add_argument("--prompts", type=int, default=0, help="tokens of a step that holds any")
    parser.add_argument("--steps-per-call", type=int, default=1)
    parser.add_argument("--draws", choices=_DRAWS, help="what rows may ask of them")
    add_activations(parser, prefill=False)
    arguments = parser.parse_args()
    config = chosen_config(arguments)
    found = compile_step(
        config,
        batch=arguments.batch,
        context=arguments.context,
        weights=arguments.weights,
        activations=arguments.activations,
        draft_tokens=arguments.drafts,
        steps_per_call=arguments.steps_per_call,
        draws=arguments.draws,
        prompts=arguments.prompts,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    ds.set_xla_flags()  # not all of them are options of a compilation
    main()
