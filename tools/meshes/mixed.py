"""Arguments on different meshes, and meshes that no step can run on: the error of each misuse by
name, or null where there was none.
"""

import functools

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

import dsv4_jax as ds
from dsv4_jax.allocator.pending_changes import idle_changes
from dsv4_jax.step.serve_step import jit_plain_decode_step
from tools.meshes.harness import Runner, smallest

SIZES = {"max_requests": 8, "max_context_tokens": 160, "cache_format": "f32"}


def misuses():
    """Calls by name, each of which must be refused."""
    config, mesh, other = smallest(), ds.make_mesh(2, 4), ds.make_mesh(4, 2)
    devices = jax.devices()
    params = ds.init_params(config, jax.random.key(0))
    init = functools.partial(ds.init_cache, config, **SIZES)
    runner = Runner(config, params, mesh)
    placed, cache, alone = runner.params, runner.cache, init()
    rows = np.tile(np.arange(4, dtype=np.int32), 2)
    call = ds.StepInput(token_ids=rows, request_ids=rows, request_slots=rows)  # type: ignore
    sampling, changes = ds.make_sampling(8), idle_changes(8, 2)
    store, lone_store = (ds.cache.init_snapshot_store(one, 2) for one in (cache, alone))
    assert jax.tree.leaves(store)[0].sharding.mesh == mesh
    calls = {}
    mixes = {
        "params on a mesh": (placed, alone),
        "cache on a mesh": (params, cache),
        "two meshes": (placed, init(mesh=other)),
    }
    for name, (weights, pools) in mixes.items():
        for function in (ds.prefill, ds.decode_step, ds.stage_step):
            step = jax.jit(function, static_argnames="config")
            calls[f"{function.__name__}, {name}"] = functools.partial(
                step, weights, pools, call, config=config
            )
        loop = jax.jit(ds.decode_loop, static_argnames=("config", "num_steps"))
        calls[f"decode_loop, {name}"] = functools.partial(
            loop, weights, pools, call, sampling, config=config, num_steps=2
        )
        serve_input = runner.serve_input([[1]] * 8, [1] * 8, sampling)
        calls[f"plain_decode_step, {name}"] = functools.partial(
            jit_plain_decode_step, weights, pools, serve_input, config=config
        )
    for name, pools, snapshots in (("cache", alone, store), ("store", cache, lone_store)):
        calls[f"apply_changes, {name} on one device"] = functools.partial(
            ds.cache.apply_changes, pools, snapshots, changes
        )
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(EXPLICIT,) * 2)
    twice = Mesh(np.array([devices[0]] * 2).reshape(2, 1), ("data", "model"))
    for name, wrong in (("explicit axes", explicit), ("a device twice", twice)):
        calls[f"init_cache, {name}"] = functools.partial(init, mesh=wrong)
        calls[f"param_shardings, {name}"] = functools.partial(ds.param_shardings, config, wrong)
        calls[f"Engine, {name}"] = functools.partial(ds.Engine, config, params, mesh=wrong)
    make = ds.make_mesh
    grid = mesh_utils.create_device_mesh((2, 4))
    assert grid.shape == (2, 4)
    mixed = grid[::-1, ::-1]  # so that their order is not that of `jax.devices()`
    assert np.array_equal(make(2, 4, devices=mixed).devices, mixed)
    assert make(2, 4, devices=mixed.tolist()[0] + mixed.tolist()[1]) == make(2, 4, devices=mixed)
    assert make(2, 4, devices=grid) == Mesh(grid, ("data", "model"))
    assert jax.tree.leaves(init(mesh=make(2, 4, devices=grid)))[0].sharding.mesh.shape["model"] == 4
    calls |= {
        "make_mesh, more devices": functools.partial(make, 2, 2, devices=devices),
        "make_mesh, fewer devices": functools.partial(make, 2, 8, devices=devices),
        "make_mesh, a device twice": functools.partial(make, 2, 1, devices=[devices[3]] * 2),
        "make_mesh, of other axes": functools.partial(make, 4, 2, devices=grid),
        "make_mesh, of three axes": functools.partial(
            make, 2, 4, devices=mesh_utils.create_device_mesh((2, 2, 2))
        ),
        "make_mesh, no devices": functools.partial(make, 2, 4, devices=np.arange(8).reshape(2, 4)),
        "make_mesh, too many": functools.partial(make, 4, 4),
        "acquire, cache on a mesh": functools.partial(
            ds.KVCacheManager.acquire, cache, call, layer_idx=0
        ),
        "init_snapshot_store, odd": functools.partial(ds.cache.init_snapshot_store, cache, 3),
    }
    return calls


EXPLICIT = jax.sharding.AxisType.Explicit


def error_of(call):
    """The text of a `ValueError`; None where there was none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def check_all(arguments):
    return {name: error_of(call) for name, call in misuses().items()}
