"""Compiles a decode step of real sizes for an H200 that is not there: `python -m ... LAYERS BATCH`.

Prints, as JSON, the seconds it took, its launches, bytes that it updates in place and takes beside
its arguments, and every copy of a MiB or more. Nothing is allocated: arguments are shapes.
"""

import dataclasses
import json
import os
import re
import sys
import time

import jax
import jax.numpy as jnp

import dsv4_jax as ds
from dsv4_jax.bench.program import count_launches
from dsv4_jax.cache.model_cache import tree_bytes
from programs import aot, aot_figures


def compile_step(config, *, batch, context, cache_format="fp8_ue8m0"):
    """The figures above, of `jit_decode_step` with unrolled layers."""
    device = aot._device("sm_90a")
    sharding = jax.sharding.SingleDeviceSharding(device)

    def placed(tree):
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )

    sizes = {"max_requests": batch, "max_context_tokens": context, "cache_format": cache_format}
    cache = placed(ds.cache.cache_shapes(config, **sizes))
    params = placed(ds.unstack_layers(ds.model.param_shapes(config, jnp.bfloat16)))
    row = placed(jax.ShapeDtypeStruct((batch,), jnp.int32))
    call = ds.StepInput(token_ids=row, request_ids=row, request_slots=row)
    start = time.perf_counter()
    with jax.default_device(device):
        lowered = ds.jit_decode_step.lower(params, cache, call, config=config)
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=ds.runtime.XLA_GPU_FLAGS)
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    return {
        "trace_s": traced - start,
        "compile_s": time.perf_counter() - traced,
        "launches": dataclasses.asdict(count_launches(hlo)),
        "cache_bytes": tree_bytes(cache),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "large_copies": [size for size in aot_figures._copies(hlo) if size >= 2**20],
        "weight_sized": _weight_sized(hlo, params),
    }


def _weight_sized(hlo, params):
    """Results of XLA's own kernels that have the shape of a large weight: slices, transposes."""
    shapes = {
        ",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(params) if leaf.size > 2**20
    }
    entry = hlo[hlo.index("\nENTRY") :]
    found = re.findall(r"= bf16\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", entry)
    return [shape for shape in found if shape in shapes]


def main():
    os.environ.update(aot.WITHOUT_A_GPU)
    layers, batch = map(int, sys.argv[1:])
    config = ds.DSV4Config.flash_slim()
    config = dataclasses.replace(
        config,
        layer_types=config.layer_types[:layers],
        router_types=config.router_types[:layers],
        num_mtp_layers=0,
    )
    print(json.dumps(compile_step(config, batch=batch, context=131_072)))


if __name__ == "__main__":
    main()
