"""What a layer makes of a token's rows of its Engram table, and how it writes it to the streams.

Source: deepseek_v41.md section 9.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax import checks
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.token_ids import look_back
from dsv4_jax.collectives import rows_of_a_device, take_rows
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec
from dsv4_jax.engram import EngramRows, EngramTables, PlacedTables
from dsv4_jax.linear import linear
from dsv4_jax.model.hyper_connections import Residual
from dsv4_jax.model.layer_params import EngramParams, LayerParams
from dsv4_jax.model.params import DSV4Params
from pallas_kernels.common.call import CallIndices
from pallas_kernels.common.norm_rope import rms_norm

_LEAST = 1e-6
"""Floor of the size of a product of key and stream."""


def look_up_rows(tables: EngramTables | PlacedTables, token_ids: jax.Array) -> jax.Array:
    """f32[B, T, L, width] of i32[B, T]; where the host gathers them, in a program by a callback."""
    if isinstance(tables, PlacedTables):
        return tables.rows(token_ids)
    values = checks.known_values(token_ids)
    if values is not None:
        return jnp.asarray(tables.rows(values))
    shape = (*token_ids.shape, len(tables.tables), tables.config.width)
    wanted = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.pure_callback(functools.partial(_rows, tables), wanted, token_ids)


def _rows(tables: EngramTables, token_ids: jax.Array) -> np.ndarray:
    return tables.rows(np.asarray(token_ids))


def look_up_call(
    params: DSV4Params,
    cache: ModelCache,
    token_ids: jax.Array,
    call: CallIndices,
    config: DSV4Config,
) -> EngramRows:
    """What the tokens of a call read; where the host gathers it, in a program by a callback.

    Raises:
      ValueError: the parameters do not have the tables.
    """
    tables = tables_of(params, config)
    back = look_back(cache, token_ids, call)
    if isinstance(tables, PlacedTables):
        return tables.take(back)
    values = checks.known_values(back)
    if values is not None:
        return tables.take(values)
    return jax.pure_callback(functools.partial(_take, tables), tables.shapes(len(token_ids)), back)


def _take(tables: EngramTables, back: np.ndarray) -> EngramRows:
    return tables.take(np.asarray(back))


def tables_of(params: DSV4Params, config: DSV4Config) -> EngramTables | PlacedTables:
    """The tables of a model.

    Raises:
      ValueError: the model has tables, and the parameters do not.
    """
    if params.engram is None or params.engram.config != config.engram:
        raise ValueError(
            "params.engram must be the Engram tables of config, got "
            f"{None if params.engram is None else params.engram.config}; load_checkpoint gives them"
        )
    return params.engram


def write_rows(
    layer: LayerParams,
    residual: Residual,
    rows: EngramRows | None,
    spec: LayerSpec,
    config: DSV4Config,
    offset: jax.Array | int = 0,
) -> Residual:
    """The residual before a layer, with its table's rows written to the streams, if it has one.

    Args:
      layer: parameters of the layer.
      residual: streams [T, S, D]; on a mesh of those rows that this device has.
      rows: of all tokens.
      spec: the layer, or the one of the first copy of its pattern.
      config: the model.
      offset: tables between that one and the layer's own.
    """
    if layer.engram is None:
        return residual
    assert config.engram is not None
    assert rows is not None
    own = rows.of_table(config.engram.layers.index(spec.layer_idx) + offset)
    own = take_rows(own, rows_of_a_device(own.shape[0]))
    name = f"L{spec.layer_idx}/engram"
    return residual.with_streams(write_engram(layer.engram, residual.written(), own, config, name))


def write_engram(
    params: EngramParams, streams: jax.Array, rows: jax.Array, config: DSV4Config, name: str
) -> jax.Array:
    """The streams [..., S, D] after a table's rows [..., width] were written to them.

    `name` is what a capture of intermediates calls it.

    Each stream has a key of its own; the value is the same for all:

        dot_i  = sum over d of rms(X_i) q_i rms(key_i) k_i / sqrt(D)
        X_i   += sigmoid(sign(dot_i) sqrt(max(|dot_i|, 1e-6))) value
    """
    num, dim = streams.shape[-2:]
    made = linear(checkpoint_name(rows.astype(streams.dtype), f"{name}/rows"), params.wkv)
    made = made.reshape(*made.shape[:-1], num + 1, dim)
    keys = checkpoint_name(made[..., :num, :], f"{name}/key")
    value = checkpoint_name(made[..., num, :], f"{name}/value")
    wide = streams.astype(jnp.float32)

    def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
        each = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 2))
        return rms_norm(x, None, eps=config.rms_norm_eps) * each

    products = normed(wide, params.q_weight) * normed(keys.astype(jnp.float32), params.k_weight)
    dot = checkpoint_name(jnp.sum(products, axis=-1) * np.float32(dim**-0.5), f"{name}/dot")
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), _LEAST))
    gate = checkpoint_name(jax.nn.sigmoid(jnp.copysign(root, dot)), f"{name}/gate")
    written = wide + gate[..., None] * value.astype(jnp.float32)[..., None, :]
    return checkpoint_name(written.astype(streams.dtype), f"{name}/out")
