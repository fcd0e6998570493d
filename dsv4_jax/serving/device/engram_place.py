"""Where the steps of an engine read the Engram tables: decided once, when it is built."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import jax

from dsv4_jax.config import DSV4Config
from dsv4_jax.engram import EngramTables, PinError, PlacedTables, place_tables
from dsv4_jax.engram.placed_tables import DEVICE, PINNED, PLACES, memory_to_pin
from dsv4_jax.hosts import hosts_of
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.runtime import Memory, find_memory, host_memory, shown_bytes
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.sizing import is_on_gpu


class SlowTablesWarning(UserWarning):
    """On a GPU the host gathers rows of the Engram tables, between two steps."""


def with_placed_tables(
    config: DSV4Config, params: DSV4Params, options: EngineOptions
) -> DSV4Params:
    """Parameters whose Engram tables lie where `options.engram_tables` says.

    Args:
      config: the model.
      params: its parameters; tables that are placed already stay as they are.
      options: of the engine.

    Raises:
      ValueError: the tables are to be placed, and cannot be: on a mesh of several processes, or
        since some tokens have no normalised id.
      PinError: they are to be pinned, and the driver refuses.
    """
    tables, asked = params.engram, options.engram_tables
    if isinstance(tables, PlacedTables):
        if obstacle := _obstacle(config, tables.source, options):
            raise ValueError(f"params.engram cannot be of placed tables: {obstacle}")
        return params
    if tables is None or asked == "host":
        return params
    obstacle = _obstacle(config, tables, options)
    if asked in PLACES:
        if asked == DEVICE:
            obstacle = obstacle or _lack(tables.num_bytes, find_memory())
        if obstacle:
            raise ValueError(f'engram_tables={asked!r} cannot be: {obstacle}; leave it at "auto"')
        return _placed(params, tables, asked, options)
    if not is_on_gpu(options.mesh):
        return params
    obstacle = obstacle or _lack(memory_to_pin(tables), host_memory())
    if not obstacle:
        try:
            return _placed(params, tables, PINNED, options)
        except (PinError, ValueError) as error:
            obstacle = str(error)
    warnings.warn(
        "the host gathers rows of the Engram tables between two steps, which cannot overlap then, "
        f'since the tables cannot be pinned: {obstacle}; engram_tables="host" is silent about it',
        SlowTablesWarning,
        stacklevel=3,
    )
    return params


def _obstacle(config: DSV4Config, tables: EngramTables, options: EngineOptions) -> str:
    """Why programs cannot read tables at all; nothing if they can."""
    if hosts_of(options.mesh) is not None:
        return "the mesh spans several processes, each of which reads its own host's tables"
    if len(tables.normalized) < config.vocab_size:
        return (
            f"the tokenizer has {len(tables.normalized)} tokens, and the model "
            f"vocab_size={config.vocab_size}"
        )
    return ""


def _placed(
    params: DSV4Params, tables: EngramTables, where: str, options: EngineOptions
) -> DSV4Params:
    """Arrays are made where the engine's are: on a device of its mesh, or on JAX's default one."""
    mesh = options.mesh
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.default_device(mesh.devices.flat[0]))
        placed = place_tables(tables, where, on_gpu=is_on_gpu(mesh))
    return dataclasses.replace(params, engram=placed)


def _lack(needed: int, memory: Memory | None) -> str:
    """Says that memory is too little; nothing if it is not, or nobody knows."""
    if memory is None or memory.free_bytes >= needed:
        return ""
    free = shown_bytes(memory.free_bytes)
    return f"they take {shown_bytes(needed)}, and {memory.name} has {free} free"
