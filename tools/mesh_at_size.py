"""Compiles a step of real sizes for a host of H200s that are not there.

    python -m tools.mesh_at_size 1x2 8x1 --config flash --batch 8 --drafts 1
    python -m tools.mesh_at_size 1x2 8x1 --config flash --own-kernels ALL_COLLECTIVES

Prints, as JSON, for each mesh "DATAxMODEL": bytes of arguments on a device, of weights and cache
among them, bytes that are updated in place and taken beside them, launches, results of XLA's own
kernels that have the shape of a large weight of a device, and every collective by its axis: how
many a layer and how many a step, with bytes. With `--drafts` it is the engine's step, draft block
included, else a decode step. Weights are the released ones, the cache has the model's own format,
and arguments are shapes: nothing is allocated. `--own-kernels` lets XLA make kernels of its own of
collectives (`xla_gpu_experimental_use_collective_kernels`); if it is not given, NCCL runs all of
them, as `dsv4_jax.runtime` has it.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import dsv4_jax as ds
from dsv4_jax.bench.parts import one_token_each
from dsv4_jax.bench.program import count_launches
from dsv4_jax.cache.empty_cache import cache_shapes
from dsv4_jax.cache.snapshots import init_snapshot_store
from dsv4_jax.mesh import shardings_of
from dsv4_jax.peers import peer_buffer_shapes
from dsv4_jax.step.draws import DrawnCounts, TokenMasks
from dsv4_jax.step.sampling import MAX_LOGIT_BIAS, stack_sampling
from dsv4_jax.step.serve_step import jit_serve_step
from dsv4_jax.step.serve_values import ServeOutput
from pallas_kernels.common.backend import forbid_fallbacks
from tools import aot, aot_figures
from tools.step_at_size import _serve_input, chosen_config, weight_sized

_LINKS = "gpu_device_info {\n  device_interconnect_info { active_links: 18 }"
"""Without it, XLA believes that there is no NVLink."""
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" = (.+?) ({COLLECTIVES})(-start)?\((.*)$", re.M)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "u16": 2, "s16": 2}


@functools.cache
def mesh_of_h200s(data, model):
    """A mesh of the H200s of one host."""
    text = aot._DESCRIPTION.format(**vars(aot.TARGETS["sm_90a"]))
    text = text.replace("gpu_device_info {", _LINKS, 1)
    name = f"1x1x{data * model}"
    found = topologies.get_topology_desc(name, "cuda", target_config=text, topology=name)
    return ds.make_mesh(data, model, devices=found.devices)


def compile_on(
    mesh,
    config,
    *,
    batch,
    context,
    prompt=0,
    draft_tokens=0,
    cache_format=None,
    own_kernels="",
    split=False,
    peers=False,
):
    """The figures above; `batch` and `prompt` are those of all data shards, `context` a request's.

    With `prompt` tokens it is a prefill; `split` deals blocks over `model`.
    """

    def placed(tree, shardings=None):
        shardings = shardings_of(tree, mesh) if shardings is None else shardings
        return jax.tree.map(
            lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), tree, shardings
        )

    params = ds.model.param_shapes(config, weights="stored")
    params = ds.unstack_layers(params)
    params = placed(params, ds.param_shardings(config, mesh, params))
    if peers:
        params = dataclasses.replace(params, peers=peer_buffer_shapes(mesh))
    sizes = {"max_requests": batch, "max_context_tokens": context, "cache_format": cache_format}
    cache = placed(cache_shapes(config, **sizes, split_cache=split))
    static = {"config": config}
    donated = [cache]
    if draft_tokens:
        store = placed(jax.eval_shape(lambda c: init_snapshot_store(c, batch), cache))
        whole = engine_input(config, batch, context, draft_tokens, shards=mesh.shape["data"])
        step, (call, last) = jit_serve_step, map(placed, whole)
        arguments = (params, cache, store, call, last)
        donated += [store, last]
        static["draft_tokens"] = draft_tokens
    else:
        call = jax.eval_shape(functools.partial(one_token_each, config, batch))
        if prompt:
            token = jax.ShapeDtypeStruct((prompt,), jnp.int32)
            call = dataclasses.replace(call, token_ids=token, request_ids=token, engram=None)
        call = placed(call)
        step = ds.jit_prefill if prompt else ds.jit_decode_step
        arguments = (params, cache, call)
    start = time.perf_counter()
    with jax.default_device(mesh.devices.flat[0]), forbid_fallbacks():
        lowered = step.lower(*arguments, **static)
    traced = time.perf_counter()
    flags = {}
    if own_kernels:
        flags["xla_gpu_experimental_use_collective_kernels"] = f"COLLECTIVE_KERNEL_{own_kernels}"
    compiled = lowered.compile(compiler_options=flags)
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    weights = bytes_on_a_device(params)
    return {
        "trace_s": round(traced - start, 1),
        "compile_s": round(time.perf_counter() - traced, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "weight_bytes": weights,
        "largest_weight_bytes": largest_on_a_device(params),
        "largest_cache_bytes": largest_on_a_device(donated),
        "cache_bytes": bytes_on_a_device(donated),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "launches": dataclasses.asdict(count_launches(hlo)),
        "large_copies": [size for size in aot_figures._copies(hlo) if size >= 2**20],
        "weight_sized": weight_sized(hlo, [_on_a_device(leaf) for leaf in jax.tree.leaves(params)]),
        "collectives": collectives(hlo, layers=len(config.layer_types)),
    }


def engine_input(config, batch, context, draft_tokens, *, shards):
    """Shapes of what an engine gives its step: settings, counts, masks; and the step before's."""
    each = min(config.vocab_size, context)
    entries = shards * max(each, batch // shards * min(each, 1024))  # as `EnginePlan` has it
    width, words = draft_tokens + 1, -(-config.vocab_size // 32)
    rows = [ds.SamplingParams()] * batch
    sampling = stack_sampling(rows, with_stops=False, bias_width=MAX_LOGIT_BIAS)

    def build():
        entry = jnp.zeros(entries, jnp.int32)
        return dataclasses.replace(
            _serve_input(batch, draft_tokens),
            sampling=jax.tree.map(jnp.asarray, sampling),
            counts=DrawnCounts(rows=entry, token_ids=entry, counts=entry),
            masks=TokenMasks(
                is_masked=jnp.zeros(batch, bool), bits=jnp.zeros((batch, width, words), jnp.uint32)
            ),
        ), ServeOutput.empty(batch, draft_tokens, config.vocab_size)

    return jax.eval_shape(build)


def bytes_on_a_device(tree):
    """Bytes of the shards of a tree of shapes that one device holds."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in map(_on_a_device, jax.tree.leaves(tree))
    )


def largest_on_a_device(tree):
    """Bytes of the largest leaf of a tree of shapes that one device holds."""
    return max(map(bytes_on_a_device, jax.tree.leaves(tree)))


def collectives(hlo, *, layers):
    """{"AXIS OPERATION": figures} of a program's collectives, whatever loop they stand in.

    Bytes are those of the largest operand or result, of one device.
    """
    found = collections.defaultdict(list)
    for match in _COLLECTIVE.finditer(hlo):
        result, name, _, rest = match.groups()
        axis = _axis_of(rest)
        strategy = re.search(r'"kernel_strategy":"(\w+)"', rest)
        sizes = [_size(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", result)]
        found[f"{axis} {name}"].append((max(sizes), strategy and strategy.group(1)))
    return {
        name: {
            "in_program": len(all_of),
            "a_layer": len(all_of) // layers,
            "bytes": dict(collections.Counter(size for size, _ in all_of)),
            "kernels": dict(collections.Counter(str(kernel) for _, kernel in all_of)),
        }
        for name, all_of in sorted(found.items())
    }


def run(*arguments):
    """What the program prints, in a process of its own."""
    command = [sys.executable, "-m", "tools.mesh_at_size", *arguments]
    done = subprocess.run(command, env=aot.environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _on_a_device(leaf):
    """The shape of the part of a leaf that a device has."""
    return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _size(dtype, dims):
    return _BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)


def _axis_of(rest):
    """The axes whose devices a collective joins, as XLA prints its groups."""
    groups = re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", rest)
    return "+".join(re.findall(r"'(\w+)'", groups.group(1))) if groups else "unknown"


def main():
    os.environ.update(aot.WITHOUT_A_GPU)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("meshes", nargs="+", metavar="DATAxMODEL")
    parser.add_argument("--config", default="flash")
    parser.add_argument("--layers", type=int, help="the first so many; all if not given")
    parser.add_argument("--batch", type=int, default=8, help="of all data shards")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prefill; 0 decodes")
    parser.add_argument("--split", action="store_true", help="deal blocks over model")
    parser.add_argument("--peers", action="store_true", help="collectives through peer buffers")
    parser.add_argument("--drafts", type=int, default=0, help="tokens of the draft block")
    parser.set_defaults(experts=None, dspark=False)  # as the preset has them
    kinds = ("ALL_REDUCE", "ALL_COLLECTIVES")
    parser.add_argument("--own-kernels", default="", choices=kinds, help="of XLA, not of NCCL")
    arguments = parser.parse_args()
    config = chosen_config(arguments)
    names = ("batch", "context", "prompt", "own_kernels", "peers")
    sizes = {name: getattr(arguments, name) for name in names}
    figures = {}
    for name in arguments.meshes:
        mesh = mesh_of_h200s(*map(int, name.split("x")))
        figures[name] = compile_on(
            mesh, config, **sizes, draft_tokens=arguments.drafts, split=arguments.split
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    ds.set_xla_flags()  # not all of them are options of a compilation
    main()
