"""Reads what `config.json` says about RoPE: both tables, in whichever form holds them."""

from __future__ import annotations

from typing import Any

from dsv4_jax.config.kinds import Fields, Flag, Real, Word, agree, require, show
from dsv4_jax.config.limits import KINDS, YARN_KINDS
from dsv4_jax.config.yarn import YarnScaling

DEFAULT_THETA = 10_000.0
"""Base of the main table where a config names none at its root, to transformers."""

PARTIAL = Real(0.0, 1.0)
"""Part of a head's dims that rotate."""

ROPE_TABLE = Fields(
    {
        "rope_type": Word(),
        "type": Word(),
        "rope_theta": KINDS["rope_theta"],
        "partial_rotary_factor": PARTIAL,
        "factor": YARN_KINDS["factor"],
        "original_max_position_embeddings": YARN_KINDS["original_max_positions"],
        "beta_fast": YARN_KINDS["beta_fast"],
        "beta_slow": YARN_KINDS["beta_slow"],
        "attention_factor": Real(0.0, 1e6),
        "truncate": Flag(),
    }
)


def read_rope_dim(data: dict[str, Any]) -> int:
    """Dims of a head that rotate, on which all that name them agree."""
    head_dim = require(data, "head_dim")
    dims = {"qk_rope_head_dim": data.get("qk_rope_head_dim")}
    factors = {"partial_rotary_factor": data.get("partial_rotary_factor")}
    nested = data.get("rope_parameters") or {}
    for label in ("main", "compress"):
        if isinstance(nested.get(label), dict):
            name = f"rope_parameters.{label}.partial_rotary_factor"
            factors[name] = nested[label].get("partial_rotary_factor")
    dims |= {name: int(head_dim * f) for name, f in factors.items() if f is not None}
    given = {name: dim for name, dim in dims.items() if dim is not None}
    if not given:
        raise ValueError("qk_rope_head_dim (or partial_rotary_factor) is missing")
    first = next(iter(given))
    for name, dim in given.items():
        agree(first, given[first], name, dim)
    return given[first]


def read_rope(data: dict[str, Any]) -> dict[str, Any]:
    """Both RoPE bases and the compress table's YaRN, from whichever form holds them."""
    parameters = data.get("rope_parameters") or {}
    is_nested = "main" in parameters or "compress" in parameters
    if is_nested:
        for label in ("main", "compress"):
            if not isinstance(parameters.get(label), dict):
                raise ValueError(f"rope_parameters.{label} is missing beside the other table")
        main, compress = parameters["main"], parameters["compress"]
        field = "rope_parameters.compress"
    else:
        _check_flat_theta(data, parameters)
        is_scaling = parameters.keys() - {"rope_theta", "partial_rotary_factor"}
        main, compress = {}, parameters if is_scaling else data.get("rope_scaling") or {}
        field = "rope_parameters" if is_scaling else "rope_scaling"
    thetas = {}
    for name, label, table in (
        ("rope_theta", "main", main),
        ("compress_rope_theta", "compress", compress),
    ):
        nested = table.get("rope_theta") if is_nested else None
        agree(name, data.get(name), f"rope_parameters.{label}.rope_theta", nested)
        if is_nested and label == "compress" and nested is None:
            raise ValueError(
                "rope_parameters.compress.rope_theta is missing, for which transformers takes "
                "rope_theta and others compress_rope_theta; add it"
            )
        if nested is None and name == "rope_theta":
            nested = parameters.get(name) if data.get(name) is None else data[name]
        thetas[name] = float(nested if nested is not None else require(data, name))
    if main.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters.main.rope_type must be 'default', got {show(main)}")
    scaling = _yarn(compress, field)
    released = data.get("rope_scaling")
    if released and _yarn(released, "rope_scaling") != scaling:
        raise ValueError(
            f"rope_parameters and rope_scaling contradict each other: {show(compress)} and "
            f"{show(released)}"
        )
    return thetas | {"rope_scaling": scaling}


def _check_flat_theta(data: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Refuses a base in a flat `rope_parameters` alone that tools read in different ways."""
    theta = parameters.get("rope_theta")
    if data.get("rope_theta") is None and theta not in (None, DEFAULT_THETA):
        raise ValueError(
            f"rope_theta is missing beside rope_parameters.rope_theta={theta:g}, for which "
            f"transformers takes {DEFAULT_THETA:g}; write the base that is meant as rope_theta"
        )


def _yarn(table: dict[str, Any], field: str) -> YarnScaling | None:
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"{field}.rope_type must be 'yarn' or 'default', got {show(kind)}")
    for name in ("factor", "original_max_position_embeddings"):
        if table.get(name) is None:
            raise ValueError(f"{field}, which is yarn, lacks {name}")
    if "attention_factor" not in table and field == "rope_parameters.compress":
        raise ValueError(
            f"{field}, which is yarn, lacks attention_factor, for which transformers takes another "
            "than the 1.0 of DeepSeek-V4; add it"
        )
    if table.get("attention_factor", 1.0) != 1.0:
        raise ValueError(
            f"{field}.attention_factor must be 1.0, got {show(table['attention_factor'])}"
        )
    if not table.get("truncate", True):
        raise ValueError(
            f"{field}.truncate must be true, got false, which stretches other frequencies"
        )
    return YarnScaling(
        factor=float(table["factor"]),
        original_max_positions=int(table["original_max_position_embeddings"]),
        beta_fast=float(table.get("beta_fast", 32.0)),
        beta_slow=float(table.get("beta_slow", 1.0)),
    )
