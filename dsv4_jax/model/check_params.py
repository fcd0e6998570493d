"""Whether parameters are those of a config, by the shapes of their leaves."""

from __future__ import annotations

import dataclasses
import functools

import jax

from dsv4_jax import checks
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.draft_params import DraftParams, DSparkParams, MTPParams
from dsv4_jax.model.params import DSV4Params, param_shapes, unstack_layers
from pallas_kernels.common.weights import is_quantized

_MAX_PROBLEMS = 5


def check_params(config: DSV4Config, params: DSV4Params) -> None:
    """Refuses parameters of another model; dtypes and weight formats are as they are.

    A draft may be missing or too many: who drafts asks for it.

    Args:
      config: the model.
      params: its parameters, stacked or not, or their shapes.

    Raises:
      ValueError: a leaf is missing, too many or of another shape, or its array has been deleted;
        the first few are listed.
    """
    checks.not_deleted("params", params)
    is_unstacked = any(isinstance(layers, tuple) for layers in params.layers.values())
    if isinstance(params.mtp, DSparkParams) and config.dspark is None:
        params = dataclasses.replace(params, mtp=None)  # of sizes that are not known
    kind = None if params.mtp is None else type(params.mtp)
    expected = _wanted_shapes(config, kind, is_unstacked)
    found = _shapes(dataclasses.replace(params, peers=None, engram=None))
    problems = [
        f"{name} must be {expected.get(name, 'absent')}, is {found.get(name, 'absent')}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        listed = problems[:_MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise ValueError("params must be those of config, got others:\n  " + "\n  ".join(listed))


@functools.lru_cache(maxsize=16)
def _wanted_shapes(
    config: DSV4Config, kind: type[DraftParams] | None, is_unstacked: bool
) -> dict[str, list[int]]:
    if kind is not DSparkParams:
        config = dataclasses.replace(config.without_draft(), num_mtp_layers=int(kind is MTPParams))
    wanted = param_shapes(config)
    return _shapes(unstack_layers(wanted) if is_unstacked else wanted)


def _shapes(params: DSV4Params) -> dict[str, list[int]]:
    leaves, _ = jax.tree.flatten_with_path(params, is_leaf=is_quantized)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): list(getattr(leaf, "shape", ()))
        for path, leaf in leaves
    }
