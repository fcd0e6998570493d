"""Launcher: launches the programs of an engine's steps at less cost than a jitted function has."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import jax

from dsv4_jax import compat
from dsv4_jax.stored_programs import stored_programs


class Launcher:
    """Launches jitted functions whose first argument is always the same parameters.

    A jitted function looks at every array that it is given, to find the program that is for them.
    V4-Flash has 1,822 arrays of parameters, and with them that takes the host longer than to launch
    the program. Here the arrays of the parameters are listed once, and a program is found by the
    sizes of the other arguments, and by where they lie on a mesh. The programs are those of the
    jitted functions, and are compiled once for both.
    """

    def __init__(self, params: Any, **static: Any) -> None:
        """Of parameters, and of static arguments, that all programs are given."""
        self._params, self._static = params, static
        self._leaves = jax.tree.leaves(params)
        # XLA would take a shard of one axis for that of another. A wrong device it refuses itself.
        arrays = [leaf for leaf in self._leaves if isinstance(leaf, jax.Array)]
        self._is_on_mesh = any(len(leaf.devices()) > 1 for leaf in arrays)
        self._programs: dict[Any, tuple[compat.Program, Any]] = {}

    def __call__(self, program: Any, *arguments: Any, **static: Any) -> Any:
        """What `program(params, *arguments, **static)` gives; donated arguments are gone.

        Args:
          program: a jitted function.
          *arguments: all but the parameters: trees of arrays on the devices.
          **static: hashable values, beside those that all programs are given.
        """
        config = jax.config
        if config.jax_debug_nans or config.jax_debug_infs or config.jax_disable_jit:
            return program(self._params, *arguments, **self._static, **static)
        leaves, structure = jax.tree.flatten(arguments)
        key = self._key(program, leaves, structure, static)
        if key not in self._programs:
            self._programs[key] = _launched(self._maker_of(program, arguments, static)())
        found, out_structure = self._programs[key]
        leaves = self._leaves + leaves
        if len(found.used) < len(leaves):
            leaves = [leaves[place] for place in found.used]
        results = found.execute(leaves).consume_with_handlers(found.handlers)
        return jax.tree.unflatten(out_structure, results)

    def begin(self, program: Any, *arguments: Any, **static: Any) -> Callable[[], None]:
        """Traces the program of a call, unless it is stored.

        Returns:
          What compiles or loads it, in any thread, for the call to find.
        """
        key = self._key(program, *jax.tree.flatten(arguments), static)
        make = self._maker_of(program, arguments, static)

        def finish() -> None:
            self._programs[key] = _launched(make())

        return finish

    def lower(self, program: Any, *arguments: Any, **static: Any) -> jax.stages.Lowered:
        """The program that a call with these arguments would launch, not yet compiled."""
        return program.lower(self._params, *arguments, **self._static, **static)

    def _key(self, program: Any, leaves: list[Any], structure: Any, static: dict[str, Any]) -> Any:
        sizes = tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        where = tuple([leaf.sharding for leaf in leaves]) if self._is_on_mesh else ()
        return program, structure, sizes, where, tuple(static.items())

    def _maker_of(
        self, program: Any, arguments: tuple[Any, ...], static: dict[str, Any]
    ) -> Callable[[], jax.stages.Compiled]:
        """What loads the program of a call, or compiles it, which is traced now."""
        store, given = stored_programs(), (self._params, *arguments)
        key = store and store.key_of(program, given, self._static | static)
        if not store or not key:
            return self.lower(program, *arguments, **static).compile

        def trace() -> Callable[[], jax.stages.Compiled]:
            lowered = self.lower(program, *arguments, **static)

            def compile_and_keep() -> jax.stages.Compiled:
                with compat.read_executables() as read:
                    compiled = lowered.compile()
                store.keep(key, compiled, given, read)
                return compiled

            return compile_and_keep

        if not store.has(key):
            return trace()
        context = contextvars.copy_context()  # threads have none of it
        return lambda: store.find(key, given) or context.run(trace)()


def _launched(compiled: jax.stages.Compiled) -> tuple[compat.Program, Any]:
    """What launches a program, and the structure of its results."""
    return compat.program_of(compiled), compiled.out_tree
