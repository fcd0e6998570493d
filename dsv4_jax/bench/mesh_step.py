"""Times whole decode steps on a mesh, beside their floor there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv4_jax.bench.decode_case import CaseSetup, DecodeCase
from dsv4_jax.bench.floor import step_floor
from dsv4_jax.bench.memory import memory_limit, peak_bytes
from dsv4_jax.bench.placement import place
from dsv4_jax.bench.program import compile_program
from dsv4_jax.bench.report import first_line
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import DATA, mesh_sizes, shardings_of
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.decode import jit_decode_step


def bench_mesh_step(
    config: DSV4Config,
    params: DSV4Params,
    case: DecodeCase,
    mesh: Mesh,
    *,
    weights: str,
    bandwidth: float,
) -> Iterator[dict[str, Any]]:
    """Compiles and times a step; caches of all data shards have equal contents.

    Args:
      config: the model.
      params: model parameters on the mesh.
      case: the point to measure, with the requests of all data shards; parts other than the step
        are not run.
      mesh: the devices.
      weights: what the parameters are, as in `param_shapes`; the floor is computed from it.
      bandwidth: bytes per second of a copy on a device, for `copy_share`.

    Yields:
      The row so far: times in ms, bytes and launches of one device, and the floor of `step_floor`.
      `failed` gives the error of a step that failed.
    """
    data, model = mesh_sizes(mesh)
    setup = CaseSetup(config, dataclasses.replace(case, batch=case.batch // data))
    sizes = {"context": case.context, "cache_format": case.cache_format}
    placed = place(
        config, data=data, model=model, gpu_bytes=memory_limit() or 0, weights=weights, **sizes
    )
    row: dict[str, Any] = {
        "batch": case.batch,
        "data": data,
        "model": model,
        "bucket_context": case.bucket_context,
        "activations": case.activations,
        "weight_bytes": bytes_on_a_device(params),
        "cache_bytes": setup.cache_bytes,
    } | sizes
    yield row
    try:
        cache = on_every_shard(setup.fill(), mesh)
        step_input = on_every_shard(setup.step_input, mesh)
        static = {"config": config, "activations": case.activations}
        program = compile_program(jit_decode_step, params, cache, step_input, **static)
        row |= program.row()
        yield row
        lengths = jnp.copy(cache.length_tokens)  # the first call donates the cache's own

        def call(state: Any) -> Any:
            return program.run(params, state[0], step_input)

        def rewind(state: Any) -> Any:
            return dataclasses.replace(state[0], length_tokens=jnp.copy(lengths)), state[1]

        timing, state = setup.measure(call, (cache, None), rewind=rewind)
        floor = step_floor(
            config, placed.params, data=data, model=model, batch=case.batch,
            activations=case.activations, **sizes,
        )  # fmt: skip
        yield row | {
            "step_ms": timing.median_s * 1e3,
            "step_ms_least": timing.least_s * 1e3,
            "step_ms_most": timing.most_s * 1e3,
            "step_calls": timing.calls,
            "tokens_per_s": case.batch / timing.median_s,
            "tokens_per_device_s": case.batch / timing.median_s / (data * model),
            "bytes_moved": floor.num_bytes,
            "copy_share": floor.num_bytes / timing.median_s / bandwidth,
            "floor_ms": floor.seconds * 1e3,
            "floor_collectives_ms": floor.collective_s * 1e3,
            "peak_bytes": peak_bytes(),
            "finite": bool(jnp.isfinite(state[1]).all()),
        }
    except Exception as error:
        yield row | {"failed": {"step": first_line(error)}}


def on_every_shard[T](tree: T, mesh: Mesh) -> T:
    """Arrays of one data shard, as those of a mesh whose data shards all have the same."""

    def spread(leaf: jax.Array, where: Any) -> jax.Array:
        sizes = mesh.shape
        shape = tuple(
            size * (sizes[DATA] if over == DATA else 1)
            for size, over in zip(leaf.shape, (*where.spec, *[None] * leaf.ndim), strict=False)
        )
        parts = [jax.device_put(leaf, device) for device in mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(shape, where, parts)

    return jax.tree.map(spread, tree, shardings_of(tree, mesh))


def bytes_on_a_device(tree: Any) -> int:
    """Bytes of what one device holds of a tree of arrays on a mesh."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
