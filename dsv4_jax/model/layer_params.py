"""Parameters of one layer: pytrees named after the released checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp

from dsv4_jax.attention.params import AttentionParams, attention_shapes, f32_shape
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec
from dsv4_jax.config.layer_types import RouterType
from pallas_kernels.common.weights import Weight


@flax.struct.dataclass(kw_only=True)
class HyperConnectionParams:
    """Hyper-connections (mHC) of the head, or of a sublayer: the second size of each.

    Attributes:
      fn: f32[S, S * D] in the head, f32[(2 + S) * S, S * D] in a sublayer.
      base: f32[S], f32[(2 + S) * S].
      scale: f32[1], f32[3].
    """

    fn: jax.Array
    base: jax.Array
    scale: jax.Array


@flax.struct.dataclass(kw_only=True)
class MoEParams:
    """One mixture of experts; w1 is the gate, w3 the up and w2 the down projection.

    Attributes:
      gate: [E, D], router.
      bias: f32[E], added to a score for selection only; None on hash layers.
      tid2eid: i32[V, k], experts of each token id; None on learned layers.
      w1: [E, I, D].
      w2: [E, D, I].
      w3: [E, I, D].
      shared_w1: [I, D].
      shared_w2: [D, I].
      shared_w3: [I, D].
    """

    gate: jax.Array
    bias: jax.Array | None
    tid2eid: jax.Array | None
    w1: Weight
    w2: Weight
    w3: Weight
    shared_w1: Weight
    shared_w2: Weight
    shared_w3: Weight


@flax.struct.dataclass(kw_only=True)
class EngramParams:
    """What writes rows of an Engram table into the streams; the table lies elsewhere.

    Attributes:
      wkv: [(S + 1) * D, width], a key for each stream and a value, from a token's rows.
      q_weight: [S, D], weight of each stream's norm.
      k_weight: [S, D], weight of each key's norm.
    """

    wkv: Weight
    q_weight: jax.Array
    k_weight: jax.Array


@flax.struct.dataclass(kw_only=True)
class LayerParams:
    """One decoder block: hyper-connection, norm and sublayer, twice; norms are [D].

    `engram` is what comes before them, or None.
    """

    hc_attn: HyperConnectionParams
    attn_norm: jax.Array
    attn: AttentionParams
    hc_ffn: HyperConnectionParams
    ffn_norm: jax.Array
    ffn: MoEParams
    engram: EngramParams | None = None


def layer_of(layers: LayerParams | tuple[LayerParams, ...], index: int | jax.Array) -> LayerParams:
    """One layer of a kind; `index` must be static where the layers are a tuple."""
    if isinstance(layers, tuple):
        assert isinstance(index, int)
        return layers[index]
    return jax.tree.map(lambda leaf: leaf[index], layers)


def without_source(layer: LayerParams) -> LayerParams:
    """The layer without what it makes entries with, for tokens whose entries are there."""
    return dataclasses.replace(layer, attn=dataclasses.replace(layer.attn, source=None))


def stack_shapes(shapes: LayerParams, count: int) -> LayerParams:
    """Of so many layers alike, stacked."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), shapes)


def head_connection_shapes(config: DSV4Config) -> HyperConnectionParams | None:
    """Of what collapses the streams before a head; None where the last sublayer's weights do."""
    if config.shifted_streams:
        return None
    return _connection_shapes(config, rows=config.hc_mult, scales=1)


def _connection_shapes(config: DSV4Config, *, rows: int, scales: int) -> HyperConnectionParams:
    return HyperConnectionParams(
        fn=f32_shape(rows, config.hc_mult * config.hidden_size),
        base=f32_shape(rows),
        scale=f32_shape(scales),
    )


def _moe_shapes(config: DSV4Config, router: RouterType, array: Any, experts: int) -> MoEParams:
    d, width = config.hidden_size, config.moe_intermediate_size
    bias = table = None
    if router == RouterType.LEARNED:
        bias = f32_shape(experts)
    else:
        shape = (config.vocab_size, config.num_experts_per_token)
        table = cast(Any, jax.ShapeDtypeStruct(shape, jnp.int32))
    return MoEParams(
        gate=array(experts, d),
        bias=bias,
        tid2eid=table,
        w1=array(experts, width, d),
        w2=array(experts, d, width),
        w3=array(experts, width, d),
        shared_w1=array(width, d),
        shared_w2=array(d, width),
        shared_w3=array(width, d),
    )


def layer_shapes(
    config: DSV4Config, spec: LayerSpec, array: Any, *, num_experts: int | None = None
) -> LayerParams:
    """Of one layer.

    Args:
      config: the model.
      spec: the layer.
      array: makes a shape in the dtype of activations.
      num_experts: routed experts; None is as many as the trunk has.
    """
    rows = (2 + config.hc_mult) * config.hc_mult
    engram, experts = None, config.num_routed_experts if num_experts is None else num_experts
    if spec.writes_engram:
        assert config.engram is not None
        streams, d = config.hc_mult, config.hidden_size
        engram = EngramParams(
            wkv=array((streams + 1) * d, config.engram.width),
            q_weight=array(streams, d),
            k_weight=array(streams, d),
        )
    return LayerParams(
        hc_attn=_connection_shapes(config, rows=rows, scales=3),
        attn_norm=array(config.hidden_size),
        attn=attention_shapes(config, spec, array),
        hc_ffn=_connection_shapes(config, rows=rows, scales=3),
        ffn_norm=array(config.hidden_size),
        ffn=_moe_shapes(config, spec.router, array, experts),
        engram=engram,
    )
