"""Where every parameter lies on a mesh, and which meshes a model fits."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dsv4_jax import checks
from dsv4_jax.config import DSV4Config
from dsv4_jax.mesh import (
    AXES,
    DATA,
    MODEL,
    AnyMesh,
    check_divides,
    mesh_sizes,
    shardings_of,
    specs_of,
)
from dsv4_jax.model.params import DSV4Params, param_shapes
from pallas_kernels.common.weights import MXFP4, BlockFP8, Weight, is_quantized

_SPLITS = (
    (r"(^|\.)(embed|head|markov_w2)$", (MODEL, None)),  # vocabulary
    (r"\.attn\.(wq_b|wo_a)$", (MODEL, None)),  # heads, output groups
    (r"\.attn\.wo_b$", (None, MODEL)),
    (r"\.attn_sink$", (MODEL,)),
    (r"\.ffn\.w[123]$", ((DATA, MODEL), None, None)),  # experts
    (r"\.ffn\.shared_w[13]$", (MODEL, None)),  # width
    (r"\.ffn\.shared_w2$", (None, MODEL)),
    (r"^peers\.", ((DATA, MODEL), None)),
)
"""How the axes of a layer's weight lie, by its dotted path; all others are replicated."""


def param_shardings(
    config: DSV4Config, mesh: AnyMesh, params: DSV4Params | None = None
) -> DSV4Params:
    """Where every parameter lies on a mesh.

    Args:
      config: the model.
      mesh: with the axes `data` and `model`, as `make_mesh` gives it.
      params: parameters or their shapes, stacked or not, dense or quantised; None is
        `param_shapes(config)`.

    Returns:
      A `NamedSharding` for every leaf of `params`, in a tree of its structure.

    Raises:
      ValueError: the mesh has other axes, or a size of the model does not divide over it.
    """
    checks.instance("config", config, DSV4Config)
    check_mesh(config, mesh)
    if params is None:
        params = param_shapes(config)
    checks.instance("params", params, DSV4Params)
    check_scales(params, mesh)
    return shardings_of(params, mesh)


def check_mesh(config: DSV4Config, mesh: AnyMesh) -> None:
    """Refuses a mesh over which a model cannot be split evenly.

    Raises:
      ValueError: the mesh has other axes, or a size does not divide; which, over what it would, and
        the meshes of as many devices, or else of the most below that, over which all sizes divide.
    """
    data, model = mesh_sizes(mesh)
    try:
        _check_sizes(config, mesh)
    except ValueError as error:
        experts = config.num_routed_experts
        most = min(data * model, experts)
        count = next(count for count in range(most, 0, -1) if experts % count == 0)
        listed = ", ".join(f"data={d} and model={m}" for d, m in _meshes_of(config, count))
        raise ValueError(f"{error}; of {count} devices, {listed} would fit") from None


def _meshes_of(config: DSV4Config, count: int) -> list[tuple[int, int]]:
    """(data, model) of the meshes of so many devices over which a model's sizes divide."""
    fitting = []
    for model in range(1, count + 1):
        if count % model == 0:
            with contextlib.suppress(ValueError):
                _check_sizes(config, AbstractMesh((count // model, model), AXES))
                fitting.append((count // model, model))
    return fitting


def _check_sizes(config: DSV4Config, mesh: AnyMesh) -> None:
    over_model = {
        "num_attention_heads": config.num_attention_heads,
        "o_groups": config.o_groups,
        "moe_intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
    }
    check_divides(mesh, over_model, (MODEL,))
    check_divides(mesh, {"num_routed_experts": config.num_routed_experts}, (DATA, MODEL))


def check_scales(params: Any, mesh: AnyMesh) -> None:
    """Refuses a mesh that would cut a weight through a block of scales.

    Raises:
      ValueError: a block of outputs or inputs would lie on two devices.
    """
    for path, weight in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]:
        if not isinstance(weight, BlockFP8):
            continue
        for size, axis in zip(weight.shape, _spec(_dotted(path), weight), strict=True):
            if axis == MODEL:
                name = f"the size of {_dotted(path)}"
                check_divides(mesh, {name: size}, (MODEL,), unit=weight.block)


@specs_of.register
def _param_specs(params: DSV4Params) -> Any:

    def specs(path: Any, weight: Weight) -> Any:
        axes = _spec(_dotted(path), weight)
        if isinstance(weight, MXFP4):  # tiles of outputs and inputs come after the experts
            axes = axes[:-2]
        while axes and axes[-1] is None:
            axes = axes[:-1]
        return jax.tree.map(lambda _: P(*axes), weight)

    return jax.tree.map_with_path(specs, params, is_leaf=is_quantized)


def _spec(path: str, weight: Weight) -> tuple[Any, ...]:
    """One entry for each axis of a weight, the axis of stacked layers among them."""
    axes = next((axes for found, axes in _SPLITS if re.search(found, path)), ())
    return (None,) * (weight.ndim - len(axes)) + axes


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
