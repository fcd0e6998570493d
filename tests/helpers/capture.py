"""Collects the values that a function tags with `jax.ad_checkpoint.checkpoint_name`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

# Where the primitives that only call a function keep it.
_CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def capture(function: Callable[..., Any], *args: Any) -> list[tuple[str, jax.Array]]:
    """Runs a function and returns its tagged values, in the order in which it computes them.

    Values inside scans, loops and branches are not seen; a tag may come several times.

    Args:
      function: of pytrees of arrays, not itself jitted.
      *args: its arguments.
    """
    program = jax.make_jaxpr(function)(*args)
    names: list[str] = []

    @jax.jit
    def tagged_values(*flat: jax.Array) -> list[jax.Array]:
        seen: list[tuple[str, jax.Array]] = []
        _evaluate(program.jaxpr, flat, seen)
        names[:] = [name for name, _ in seen]
        return [value for _, value in seen]

    values = tagged_values(*jax.tree.leaves(args))
    return list(zip(names, values, strict=True))


def by_layer(tagged: list[tuple[str, jax.Array]]) -> dict[str, jax.Array]:
    """Prefixes `L<i>/` to the tags of decoder block i, which tags `in` first and `out` last."""
    values: dict[str, jax.Array] = {}
    layer, inside = -1, False
    for name, value in tagged:
        if name == "in":
            layer, inside = layer + 1, True
        full = f"L{layer}/{name}" if inside else name
        assert full not in values, f"{full} is tagged twice"
        values[full] = value
        inside = inside and name != "out"
    return values


def _evaluate(
    jaxpr: core.Jaxpr, args: Sequence[Any], seen: list[tuple[str, jax.Array]]
) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs, primitive = [read(atom) for atom in eqn.invars], eqn.primitive
        if primitive.name == "name":
            seen.append((eqn.params["name"], inputs[0]))
        if primitive.name in _CALLS:
            outputs = _evaluate(eqn.params[_CALLS[primitive.name]], inputs, seen)
        else:
            outputs = primitive.bind(*inputs, **primitive.get_bind_params(eqn.params))
            outputs = outputs if primitive.multiple_results else [outputs]
        env |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]
