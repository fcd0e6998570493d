"""Collects the values that a function tags with `jax.ad_checkpoint.checkpoint_name`."""

from collections.abc import Callable
from typing import Any

import jax

from dsv4_jax.bench.tagged import evaluate


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
        evaluate(program.jaxpr, flat, seen)
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
