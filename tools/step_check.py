"""A step with kernels against the same step with references, on one device and equal inputs.

    python -m tools.step_check --config flash_slim --context 1048576 --json out.json

Op by op: each op of a layer of each attention type runs both ways on the same filled cache, so
that an error of one op does not reach the next. Selections are compared as sets and flips counted,
stored bytes are counted where they differ, and attention is compared in ulps of bf16. Then, with
`--step`, the whole step: the logits' largest difference and how many rows' best token differs; of
references it compiles slowly, so that `--layers 5` is a good idea.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.bench.fill import filled_cache
from dsv4_jax.bench.parts import append, one_token_each, random_inputs
from dsv4_jax.bench.weights import random_params
from dsv4_jax.model.trunk import keep
from pallas_kernels.common import backend

BF16_ULP = 2.0**-8


@contextlib.contextmanager
def references_only():
    """Inside, `backend=None` is the reference, as on a device without kernels."""
    jax.clear_caches()  # what is traced knows its backend
    with unittest.mock.patch.object(backend, "compute_capability", return_value=None):
        yield
    jax.clear_caches()


def compare_ops(config, *, batch, context, cache_format="fp8_ue8m0", references=references_only):
    """(op of a layer, figures), one by one, of the last layer of each attention type."""
    lengths = context - 1 - np.arange(batch) % 4
    cache = filled_cache(
        config, length_tokens=lengths, max_context_tokens=context, cache_format=cache_format
    )
    step_input = one_token_each(config, batch)
    inputs = random_inputs(config, batch)
    for spec in {spec.attn: spec for spec in ds.layer_schedule(config)}.values():
        with references():
            expected, given = _run_ops(config, spec, cache, inputs, step_input, None)
        actual, _ = _run_ops(config, spec, cache, inputs, step_input, given)
        for name in list(expected):  # results hold copies of a family: none is kept for long
            yield f"{spec.attn} {name}", _FIGURES[name](actual.pop(name), expected.pop(name))


def compare_steps(config, *, batch, context, cache_format="fp8_ue8m0", references=references_only):
    """Figures of the logits of a whole step, on the same weights and cache."""
    params = random_params(config)
    sizes = {"max_context_tokens": context, "cache_format": cache_format}
    step_input = one_token_each(config, batch)
    logits = {}
    for way, around in (("reference", references), ("kernels", contextlib.nullcontext)):
        cache = filled_cache(config, length_tokens=np.full(batch, context - 1), **sizes)
        with around():
            logits[way] = ds.jit_decode_step(params, cache, step_input, config=config)[1]
            logits[way].block_until_ready()
        del cache
    off = jnp.abs(logits["kernels"] - logits["reference"])
    best = {way: jnp.argmax(values, axis=-1) for way, values in logits.items()}
    return {
        "largest_difference": float(jnp.max(off)),
        "rms_difference": float(jnp.sqrt(jnp.mean(off**2))),
        "logits_std": float(jnp.std(logits["reference"])),
        "flipped_best_tokens": int(jnp.sum(best["kernels"] != best["reference"])),
        "rows": batch,
    }


def _run_ops(config, spec, cache, inputs, step_input, given):
    """Every op's result, and what later ops read of earlier ones; `given`, if there is any."""

    def appended(cache, inputs, in_place):
        call = cache.index(step_input, max_row_tokens=1)
        handle = cache.layer(spec.attn, spec.family_idx, call, in_place=in_place)
        handle, done = append(handle, inputs, config)
        kept, _ = keep(cache, None, handle, done.new_tokens)
        stored = kept.state[spec.attn], kept.paged.get(spec.attn)
        return handle, done.queries, done.index_queries, stored

    results = {}
    for name, in_place in (("append", False), ("append in place", True)):
        run = jax.jit(appended, static_argnums=2)
        handle, queries, index_queries, results[name] = run(cache, inputs, in_place)
    results["queries"] = queries
    own = {"handle": handle, "queries": queries, "index queries": index_queries}
    handle, queries = (given or own)["handle"], (given or own)["queries"]
    if spec.attn == ds.AttentionType.HCA:
        own["selected"] = handle.all_visible()
    elif spec.attn == ds.AttentionType.CSA:
        results["index queries"] = index_queries
        select = jax.jit(lambda h, *arguments: h.select(*arguments))
        seen = (given or own)["index queries"]
        own["selected"] = results["select"] = select(handle, seen, inputs.index_weights)
    selected = (given or own).get("selected")
    attend = jax.jit(lambda h, *arguments: h.attend(*arguments))
    results["attend"] = attend(handle, queries, inputs.sink, selected)
    return results, own


def _stored(actual, expected):
    """Elements of planes and states, and how many differ."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    return {
        "elements": sum(a.size for a, _ in pairs),
        "different": sum(int(jnp.sum(~((a == b) | ((a != a) & (b != b))))) for a, b in pairs),
    }


def _selection(actual, expected):
    """Selected entries, and how many of them the other way did not select."""
    flips = 0
    for row, wanted in zip(np.asarray(actual), np.asarray(expected), strict=True):
        one, other = set(row[row >= 0].tolist()), set(wanted[wanted >= 0].tolist())
        flips += max(len(one - other), len(other - one))
    return {"selected": int(np.sum(np.asarray(expected) >= 0)), "flips": flips}


def _attended(actual, expected):
    """The largest difference, in ulps of bf16 of the largest value of its token's head."""
    a, b = (np.asarray(x, np.float32) for x in (actual, expected))
    size = np.abs(b).max(axis=-1, keepdims=True)
    return {"ulps": float((np.abs(a - b) / (BF16_ULP * size)).max())}


_FIGURES = {
    "append": _stored,
    "append in place": _stored,
    "queries": _attended,
    "index queries": _stored,
    "select": _selection,
    "attend": _attended,
}


def complaints(found):
    """What is out of bounds, in words.

    Copies and codes are exact but for a code beside a rounding boundary, 1 in 1,000; the FP8 tensor
    core's sums may move entries near the last selected score, 1 in 50; attention rounds its weights
    and its result to bf16: 4 ulps.
    """
    wrong = []
    for name, figures in found.items():
        if figures.get("different", 0) > figures.get("elements", 0) / 1000:
            wrong.append(f"{name}: {figures['different']} of {figures['elements']} differ")
        if figures.get("flips", 0) > figures.get("selected", 0) / 50:
            wrong.append(f"{name}: {figures['flips']} of {figures['selected']} flipped")
        if figures.get("ulps", 0) > 4:
            wrong.append(f"{name}: {figures['ulps']:.1f} ulps")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="flash_slim")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1_048_576)
    parser.add_argument("--step", action="store_true", help="the whole step too")
    parser.add_argument("--layers", type=int, help="the first so many; all if not given")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    ds.runtime.claim_memory()
    ds.set_xla_flags()
    ds.use_compilation_cache()
    config = getattr(ds.DSV4Config, arguments.config)()
    config = dataclasses.replace(
        config,
        layer_types=config.layer_types[: arguments.layers],
        router_types=config.router_types[: arguments.layers],
        num_mtp_layers=0,
    )
    sizes = {"batch": arguments.batch, "context": arguments.context}
    results = {"device": jax.devices()[0].device_kind, "config": arguments.config, **sizes}
    results["ops"] = {}

    def keep(**fields):
        results.update(fields)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    for name, figures in compare_ops(config, **sizes):
        results["ops"][name] = figures
        print(name, json.dumps(figures), flush=True)
        keep(complaints=complaints(results["ops"]))
    print("complaints:", results["complaints"], flush=True)
    if arguments.step:
        keep(step=compare_steps(config, **sizes))
        print("step", json.dumps(results["step"]), flush=True)


if __name__ == "__main__":
    main()
