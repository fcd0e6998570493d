"""Values that a function tags with `jax.ad_checkpoint.checkpoint_name`, by running its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

PICKED = "gate/picked"
"""Tag of the experts that each token picks, i32[T, k], in each layer of its own."""

# Where the primitives that only call a function keep it.
_CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def tagged(function: Callable[..., Any], name: str) -> Callable[..., list[jax.Array]]:
    """A function of the same arguments that gives the values of that tag, in order.

    Values inside scans, loops and branches are not seen. What they do not need is not computed
    where the result is jitted.
    """

    def values(*args: Any) -> list[jax.Array]:
        program = jax.make_jaxpr(function)(*args)
        seen: list[tuple[str, jax.Array]] = []
        evaluate(program.jaxpr, jax.tree.leaves(args), seen)
        return [value for found, value in seen if found == name]

    return values


def evaluate(
    jaxpr: core.Jaxpr, args: Sequence[Any], seen: list[tuple[str, jax.Array]]
) -> list[Any]:
    """Results of a jaxpr; appends (tag, value) of each that is tagged."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs, primitive = [read(atom) for atom in eqn.invars], eqn.primitive
        if primitive.name == "name":
            seen.append((eqn.params["name"], inputs[0]))
        if primitive.name in _CALLS:
            outputs = evaluate(eqn.params[_CALLS[primitive.name]], inputs, seen)
        else:
            outputs = primitive.bind(*inputs, **primitive.get_bind_params(eqn.params))
            outputs = outputs if primitive.multiple_results else [outputs]
        env |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]
