"""Times whole decode steps on a mesh, alone and in a loop, beside their floor there."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.bench.decode import MARGIN_BYTES
from dsv4_jax.bench.decode_case import CaseSetup, DecodeCase, decode_call
from dsv4_jax.bench.decode_loop import compile_loop, greedy_rows, time_loop
from dsv4_jax.bench.floor import StepFloor, step_floor
from dsv4_jax.bench.memory import memory_limit, peak_bytes
from dsv4_jax.bench.parts import one_token_each
from dsv4_jax.bench.placement import place
from dsv4_jax.bench.program import Program, compile_program
from dsv4_jax.bench.report import first_line
from dsv4_jax.bench.routing_laws import LAWS, expected_experts
from dsv4_jax.bench.weights import with_routing
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.step_input import StepInput
from dsv4_jax.config import DSV4Config
from dsv4_jax.hosts import meet
from dsv4_jax.mesh import mesh_sizes, shardings_of
from dsv4_jax.model.params import DSV4Params, param_shapes, unstack_layers
from dsv4_jax.model.shardings import param_shardings
from dsv4_jax.peers import PeerBuffers, make_peer_buffers
from dsv4_jax.runtime import decode_options
from dsv4_jax.step.decode import jit_decode_step

type Programs = dict[str, Program]
"""Of the parts of a case: "step", "loop"."""


class MeshSteps:
    """Decode steps of one model on a mesh: caches of all data shards have equal contents."""

    def __init__(self, config: DSV4Config, mesh: Mesh, *, weights: str) -> None:
        """Allocates the peer buffers, if the mesh has some, and nothing else.

        Args:
          config: the model.
          mesh: the devices.
          weights: what the parameters are, as in `param_shapes`.
        """
        self.config, self.mesh, self.weights = config, mesh, weights
        self.peers = make_peer_buffers(mesh)
        self._compiling: dict[DecodeCase, concurrent.futures.Future[Programs]] = {}

    def compile_ahead(self, cases: Sequence[DecodeCase], *, threads: int) -> None:
        """Begins to compile the steps of all cases, and waits for none.

        Traces hold Python's lock, so that only what follows them runs side by side; nothing should
        be timed before `wait`.
        """
        pool = concurrent.futures.ThreadPoolExecutor(threads)
        gc.disable()  # traces are millions of objects that stay, and each collection visits all
        for case in cases:
            self._compiling[case] = pool.submit(self._compile, case)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Waits for all that `compile_ahead` began; errors are those of the cases."""
        concurrent.futures.wait(self._compiling.values())
        gc.enable()

    def step_input(self, batch: int) -> StepInput:
        """So many requests of each data shard, whose tokens are its own."""
        shards = range(mesh_sizes(self.mesh)[0])
        return on_shards([one_token_each(self.config, batch, n) for n in shards], self.mesh)

    def _setup(self, case: DecodeCase) -> CaseSetup:
        data, _ = mesh_sizes(self.mesh)
        return CaseSetup(self.config, dataclasses.replace(case, batch=case.batch // data))

    def _compile(self, case: DecodeCase) -> Programs:
        setup = self._setup(case)
        params = param_shapes_on(self.mesh, self.config, weights=self.weights, peers=self.peers)
        cache = shapes_on_every_shard(setup.shapes, self.mesh)
        call = shapes_on_every_shard(setup.step_input, self.mesh)
        programs: Programs = {}
        if "step" in case.parts:
            static = {"config": self.config, "activations": case.activations}
            static["options"] = decode_options()
            programs["step"] = compile_program(jit_decode_step, params, cache, call, **static)
        if "loop" in case.parts:
            rows = shapes_on_every_shard(greedy_rows(setup.case.batch), self.mesh)
            programs["loop"] = compile_loop(setup, params, cache, call, rows)
        return programs

    def bench(
        self, params: DSV4Params | None, case: DecodeCase, *, bandwidth: float | None
    ) -> Iterator[dict[str, Any]]:
        """Compiles and times a step.

        Args:
          params: model parameters on the mesh; None where the case is only compiled.
          case: the point to measure, with the requests of all data shards; parts other than the
            step and the loop are not run.
          bandwidth: bytes per second of a copy on a device, for `copy_share`.

        Yields:
          The row so far: times in ms, bytes and launches of one device, and the floor of
          `step_floor`. `skipped` gives the reason if the case was not run, and `failed` the error
          of a step that failed.
        """
        data, model = mesh_sizes(self.mesh)
        setup = self._setup(case)
        splits = case.block_parts > 1
        sizes = {"context": case.context, "cache_format": case.cache_format}
        row: dict[str, Any] = {
            "batch": case.batch,
            "data": data,
            "model": model,
            "bucket_context": case.bucket_context,
            "activations": case.activations,
            "cache_bytes": setup.cache_bytes,
            "split_cache": splits,
        } | sizes
        limit = memory_limit() or 0
        placed = place(
            self.config, data=data, model=model, gpu_bytes=limit, weights=self.weights, **sizes,
            split_cache=splits,
        )  # fmt: skip
        if params is not None:
            row["weight_bytes"] = bytes_on_a_device(params)
            params = dataclasses.replace(params, peers=self.peers)
            needed = row["weight_bytes"] + setup.cache_bytes + MARGIN_BYTES
            if jax.default_backend() != "cpu" and limit and needed > limit:
                needed, has = needed / 2**30, limit / 2**30
                yield row | {"skipped": f"needs {needed:.1f} GiB of {has:.1f} GiB"}
                return
        yield row
        try:
            waiting = self._compiling.pop(dataclasses.replace(case, tables=None), None)
            programs = self._compile(case) if waiting is None else waiting.result()
            for part, program in programs.items():
                row |= program.row("" if part == "step" else f"{part}_")
            yield row
            if params is None or case.compile_only:
                return
            meet()
            floors = {
                routing: step_floor(
                    self.config, placed.params, data=data, model=model, batch=case.batch,
                    activations=case.activations, split_cache=splits, exponent=LAWS[routing],
                    **sizes,
                )
                for routing in case.routings
            }  # fmt: skip
            row |= _floor_fields(floors[case.routings[0]])
            for more in self._measure(setup, programs, params, batch=case.batch):
                for routing, each in more.get("by_routing", {}).items():
                    seconds, floor = each["step_ms"] / 1e3, floors[routing]
                    each |= _floor_fields(floor) | {
                        "routing": routing,
                        "expected_experts": expected_experts(
                            self.config, rows=case.batch, exponent=LAWS[routing]
                        ),
                        "tokens_per_s": case.batch / seconds,
                        "tokens_per_device_s": case.batch / seconds / (data * model),
                        "copy_share": floor.num_bytes / seconds / bandwidth if bandwidth else None,
                    }
                row |= more | next(iter(more.get("by_routing", {}).values()), {})
                yield dict(row)
        except Exception as error:
            yield row | {"failed": {"step": first_line(error)}}

    def _measure(
        self, setup: CaseSetup, programs: Programs, params: DSV4Params, *, batch: int
    ) -> Iterator[dict[str, Any]]:
        """Times the loop and the step, and looks at its launches where the case wants that.

        `batch` has the requests of all data shards.
        """

        def fill() -> ModelCache:
            return on_every_shard(setup.fill(), self.mesh)

        cache = fill()
        step_input = self.step_input(setup.case.batch)
        lengths = jnp.copy(cache.length_tokens)  # the first call donates the cache's own

        def rewind(state: Any) -> Any:
            return dataclasses.replace(state[0], length_tokens=jnp.copy(lengths)), state[1]

        if (loop := programs.get("loop")) is not None:
            rows = on_every_shard(greedy_rows(setup.case.batch), self.mesh)
            yield time_loop(setup, loop, (params, step_input, rows), cache, rewind=rewind)
            cache = fill()
        if (program := programs.get("step")) is None:
            return
        by_routing: dict[str, dict[str, Any]] = {}
        for routing in setup.case.routings:
            routed = with_routing(params, self.config, routing)
            call = decode_call(program.run, routed, step_input)
            timing, state = setup.measure(call, (cache, None), rewind=rewind)
            cache, logits = program.run(routed, rewind(state)[0], step_input)
            finite = bool(jnp.isfinite(logits).all())
            del logits
            by_routing[routing] = timing.row("step") | {"finite": finite}
            yield {"by_routing": by_routing, "peak_bytes": peak_bytes()}
        if setup.case.tables is not None:
            routed = with_routing(params, self.config, setup.case.routings[0])
            yield setup.time_reads(
                program.run, routed, cache, step_input, batch=batch, rewind=rewind
            )
            yield setup.time_pinned(routed, fill(), step_input, rewind=rewind)
            cache = fill()
        if setup.case.profile:
            call = decode_call(program.run, params, step_input)
            devices = len(self.mesh.local_devices)
            launches = setup.profile(
                program.run, call, (cache, None), rewind=rewind, devices=devices
            )
            yield {"profile": launches}


def _floor_fields(floor: StepFloor) -> dict[str, Any]:
    """What a row tells of a floor."""
    return {
        "bytes_moved": floor.num_bytes,
        "floor_ms": floor.seconds * 1e3,
        "floor_collectives_ms": floor.collective_s * 1e3,
        "collectives": sum(collective.count for collective in floor.collectives),
    }


def param_shapes_on(
    mesh: Mesh, config: DSV4Config, *, weights: str, peers: PeerBuffers | None
) -> DSV4Params:
    """Shapes of parameters on a mesh, unstacked, with its peer buffers; weights as `param_shapes`.

    Programs that are compiled for them run with parameters of `random_params`.
    """
    shapes = unstack_layers(param_shapes(config, weights=weights))
    params, buffers = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        (shapes, peers),
        (param_shardings(config, mesh, shapes), jax.tree.map(lambda one: one.sharding, peers)),
    )
    return dataclasses.replace(params, peers=buffers)


def on_every_shard[T](tree: T, mesh: Mesh) -> T:
    """Arrays of one data shard, as those of a mesh whose data shards all have the same.

    Of blocks that are dealt over `model`, they are one device's, and all devices have the same.
    """
    return on_shards([tree] * mesh_sizes(mesh)[0], mesh)


def on_shards[T](trees: Sequence[T], mesh: Mesh) -> T:
    """Arrays of each data shard, as those of a mesh.

    Args:
      trees: one for each data shard, all of the same shapes.
      mesh: the devices.
    """
    axis = mesh.axis_names.index("data")
    shard_of = {device: index[axis] for index, device in np.ndenumerate(mesh.devices)}

    def spread(where: Any, *leaves: jax.Array) -> jax.Array:
        parts = [jax.device_put(leaves[shard_of[one]], one) for one in mesh.local_devices]
        shape = _whole_shape(leaves[0].shape, where, mesh)
        return jax.make_array_from_single_device_arrays(shape, where, parts)

    return jax.tree.map(spread, shardings_of(trees[0], mesh), *trees)


def shapes_on_every_shard[T](tree: T, mesh: Mesh) -> T:
    """`on_every_shard` of shapes."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            _whole_shape(leaf.shape, where, mesh), leaf.dtype, sharding=where
        ),
        tree,
        shardings_of(tree, mesh),
    )


def _whole_shape(shape: tuple[int, ...], where: Any, mesh: Mesh) -> tuple[int, ...]:
    """The shape of an array on a mesh of which each device holds an array of this shape."""
    over = [(axes,) if isinstance(axes, str) else axes or () for axes in where.spec]
    over += [()] * (len(shape) - len(over))
    return tuple(
        size * math.prod(mesh.shape[axis] for axis in axes)
        for size, axes in zip(shape, over, strict=True)
    )


def bytes_on_a_device(tree: Any) -> int:
    """Bytes of what one device holds of a tree of arrays on a mesh."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
