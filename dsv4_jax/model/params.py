"""Parameters: pytrees named after the released checkpoint, layers of a kind stacked."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import (
    from_state_dict,
    register_serialization_state,
    to_state_dict,
)
from jax.sharding import NamedSharding, PartitionSpec

from dsv4_jax import checks
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, layer_schedule
from dsv4_jax.engram import EngramTables, PlacedTables
from dsv4_jax.model.draft_params import DraftParams, DSparkParams, draft_shapes
from dsv4_jax.model.layer_params import (
    HyperConnectionParams,
    LayerParams,
    head_connection_shapes,
    layer_of,
    layer_shapes,
    stack_shapes,
)
from dsv4_jax.model.released import quantize_leaves, released_shapes
from dsv4_jax.model.weight_forms import STORED, WEIGHT_FORMS, dtype_beside, float_dtype
from dsv4_jax.peers import PeerBuffers
from pallas_kernels.common.weights import is_quantized

_HOST_SIZE = 2**22  # elements


@flax.struct.dataclass(kw_only=True)
class DSV4Params:
    """All parameters of a model.

    Attributes:
      embed: [V, D].
      layers: by kind (`LayerSpec.kind`), every leaf stacked over the layers of that kind; or, after
        `unstack_layers`, a tuple of that kind's layers.
      hc_head: hyper-connections that collapse the streams before the head; None where the last
        sublayer's weights do (`DSV4Config.shifted_streams`).
      norm: [D].
      head: [V, D].
      mtp: the draft, or None.
      engram: the Engram tables: static, for the host to read, or placed where programs read them;
        None of a model without any.
      peers: what collectives go through on a mesh, from `peers.make_peer_buffers`; None is NCCL.
    """

    embed: jax.Array
    layers: dict[str, LayerParams | tuple[LayerParams, ...]]
    hc_head: HyperConnectionParams | None
    norm: jax.Array
    head: jax.Array
    mtp: DraftParams | None
    peers: PeerBuffers | None = None
    engram: EngramTables | PlacedTables | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return self.embed.dtype

    @property
    def stacked_layers(self) -> dict[str, LayerParams]:
        """`layers`, every kind stacked.

        Raises:
          ValueError: `unstack_layers` has taken them apart.
        """
        stacked = {k: v for k, v in self.layers.items() if not isinstance(v, tuple)}
        if len(stacked) < len(self.layers):
            raise ValueError("params must have stacked layers; pass them before unstack_layers")
        return stacked

    def layer(self, spec: LayerSpec) -> LayerParams:
        """The parameters of one trunk layer."""
        return layer_of(self.layers[spec.kind], spec.kind_idx)


def _state_of(params: DSV4Params) -> dict[str, Any]:
    """What flax writes of parameters: no tables, which are files, and lie elsewhere next time."""
    return {name: to_state_dict(getattr(params, name)) for name in _WRITTEN}


def _with_state(params: DSV4Params, state: dict[str, Any]) -> DSV4Params:
    """Parameters with what flax has read; their own tables.

    Raises:
      ValueError: a field is missing, or there is another one.
    """
    if state.keys() != set(_WRITTEN):
        raise ValueError(f"a state must have the fields {list(_WRITTEN)}, got {sorted(state)}")
    read = {name: from_state_dict(getattr(params, name), state[name], name) for name in _WRITTEN}
    return dataclasses.replace(params, **read)


_WRITTEN = tuple(one.name for one in dataclasses.fields(DSV4Params) if one.name != "engram")
register_serialization_state(DSV4Params, _state_of, _with_state, override=True)


def unstack_layers(params: DSV4Params, *, donate: bool = False) -> DSV4Params:
    """Gives every layer arrays of its own, so that the step unrolls the layers.

    A matrix product on a GPU reads its weights where they lie, but not out of a stack: XLA copies
    a layer of a stack first, which trebles the bytes of a decode step. Stacked layers are scanned,
    which compiles faster, and is what a CPU and small models want.

    Args:
      params: model parameters, or their shapes; layers that are separate already stay.
      donate: whether the stacks are freed on the way, one leaf after the other, so that no more
        than one is in memory twice.

    Returns:
      The same parameters; `layers` holds tuples, and so do the stages of a DSpark draft.
    """
    checks.instance("params", params, DSV4Params)
    donate = checks.flag("donate", donate)

    def unstack(stack: Any) -> list[Any]:
        sharding = getattr(stack, "sharding", None)
        of_layer = layer_sharding(sharding) if isinstance(sharding, NamedSharding) else None
        if isinstance(stack, jax.ShapeDtypeStruct):
            layer = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=of_layer)
            return [layer] * stack.shape[0]
        layers = [_take_layer(stack, i, of_layer) for i in range(stack.shape[0])]
        if donate:
            jax.block_until_ready(layers)
            stack.delete()
        return layers

    def take_apart(
        stacked: LayerParams | tuple[LayerParams, ...],
    ) -> tuple[LayerParams, ...]:
        if isinstance(stacked, tuple):
            return stacked
        leaves, treedef = jax.tree.flatten(stacked)
        columns = [unstack(leaf) for leaf in leaves]
        return tuple(jax.tree.unflatten(treedef, list(row)) for row in zip(*columns, strict=True))

    layers = {kind: take_apart(stacked) for kind, stacked in params.layers.items()}
    draft = params.mtp
    if isinstance(draft, DSparkParams):
        draft = dataclasses.replace(draft, stages=take_apart(draft.stages))
    return dataclasses.replace(params, layers=layers, mtp=draft)


def layer_sharding(sharding: NamedSharding) -> NamedSharding:
    """Where a layer of a stack lies: where the stack does."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


@functools.partial(jax.jit, static_argnums=2)
def _take_layer(
    stack: jax.Array, index: jax.Array | int, sharding: NamedSharding | None
) -> jax.Array:
    layer = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return layer if sharding is None else jax.lax.with_sharding_constraint(layer, sharding)


def param_shapes(
    config: DSV4Config, dtype: Any = None, *, weights: str | None = None
) -> DSV4Params:
    """The shapes and dtypes of all parameters, as a tree of `jax.ShapeDtypeStruct`.

    Args:
      config: the model.
      dtype: dtype of activations and of the weights released as BF16, FP8 or FP4; others are f32
        and i32. None is as in `load_checkpoint`, and f32 without `weights` too.
      weights: the form they are held in, one of `WEIGHT_FORMS`; None is dense in `dtype`.

    Raises:
      ValueError: there are no such weights, or `dtype` is not that of dense ones.
    """
    if weights is None:
        return _dense_shapes(config, jnp.float32 if dtype is None else float_dtype(dtype))
    weights = WEIGHT_FORMS.check("weights", weights)
    shapes = _dense_shapes(config, dtype_beside(weights, dtype))
    return released_shapes(shapes, config.weight_block) if weights == STORED else shapes


def quantize_params(config: DSV4Config, params: DSV4Params) -> DSV4Params:
    """Dense parameters in the formats of the release; what is quantised already stays.

    Raises:
      ValueError: the parameters are not those of `config`, or an expert has an odd number of
        inputs, which MXFP4 cannot store.
    """
    found = [leaf.shape for leaf in jax.tree.leaves(params, is_leaf=is_quantized)]
    if found != [leaf.shape for leaf in jax.tree.leaves(_dense_shapes(config, params.dtype))]:
        raise ValueError("params must be those of config, stacked; their shapes differ")
    return quantize_leaves(params, config.weight_block)


def _dense_shapes(config: DSV4Config, dtype: Any) -> DSV4Params:
    kinds: dict[str, list[LayerSpec]] = {}
    for spec in layer_schedule(config):
        kinds.setdefault(spec.kind, []).append(spec)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    d = config.hidden_size
    return DSV4Params(
        embed=array(config.vocab_size, d),
        layers={
            kind: stack_shapes(layer_shapes(config, specs[0], array), len(specs))
            for kind, specs in kinds.items()
        },
        hc_head=head_connection_shapes(config),
        norm=array(d),
        head=array(config.vocab_size, d),
        mtp=draft_shapes(config, dtype),
    )


def init_params(config: DSV4Config, key: jax.Array, dtype: Any = jnp.float32) -> DSV4Params:
    """Random parameters, for tests and benchmarks: no bias, sink or table is left trivial.

    Args:
      config: the model.
      key: a PRNG key.
      dtype: dtype as in `param_shapes`.

    Returns:
      Matrices with variance 1 / fan-in, norms near 1, biases and sinks of order 1, hash tables of
      distinct experts.

    Raises:
      ValueError: an argument is of another type, or the dtype none of f32, bf16 and f16.
    """
    checks.instance("config", config, DSV4Config)
    kind = np.dtype(bool) if isinstance(key, type) else getattr(key, "dtype", np.dtype(bool))
    if not (jnp.issubdtype(kind, jax.dtypes.prng_key) or kind == np.uint32):
        checks.refuse("key", "a PRNG key", key, "make one with jax.random.key(0)")
    dtype = float_dtype(dtype)
    leaves, treedef = jax.tree.flatten_with_path(param_shapes(config, dtype))
    host = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    params = []
    for number, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        if math.prod(leaf.shape) > _HOST_SIZE and name != "tid2eid":
            leaf_key = jax.random.split(key, len(leaves))[number]
            params.append(_draw_on_device(name, leaf, leaf_key))
        else:
            params.append(_draw_on_host(name, leaf, host, config))
    return jax.tree.unflatten(treedef, params)


def _draw_on_device(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    mean, spread = leaf_spread(name, leaf.shape)
    return (mean + spread * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)


def _draw_on_host(
    name: str, leaf: jax.ShapeDtypeStruct, host: np.random.Generator, config: DSV4Config
) -> jax.Array:
    """Small leaves are drawn on the host, since on a device every shape compiles for 0.2 s."""
    if name == "tid2eid":
        noise = host.random((*leaf.shape[:-1], config.num_routed_experts), np.float32)
        return _to_device(np.argsort(noise, axis=-1)[..., : leaf.shape[-1]], leaf.dtype)
    if name == "scale":
        return _to_device(host.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
    mean, spread = leaf_spread(name, leaf.shape)
    noise = host.standard_normal(leaf.shape, np.float32)
    return _to_device(mean + np.float32(spread) * noise, leaf.dtype)


def _to_device(values: np.ndarray, dtype: np.dtype) -> jax.Array:
    """NumPy converts, since JAX would compile a program for each shape that does nothing else."""
    return jnp.asarray(values.astype(dtype), dtype)


def leaf_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation that `init_params` gives a leaf of that name and shape."""
    if name == "scale":
        return 1.0, 0.3
    if "norm" in name or name in ("q_weight", "k_weight"):
        return 1.0, 0.2
    if name in ("base", "attn_sink", "bias"):
        return 0.0, 0.5
    return 0.0, 1.0 if name in ("ape", "embed") else shape[-1] ** -0.5
