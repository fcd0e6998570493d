"""Ideas by name: `none`, a cache format, or something of a Python module."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from dsv4_jax.config.idea import NO_IDEA, Idea
from dsv4_jax.research.users_code import describe_error
from pallas_kernels.common.formats import CACHE_FORMATS


def find_idea(name: str) -> Idea:
    """The idea that a name stands for.

    Args:
      name: `none`; a cache format; or `module:name` of an `Idea` or of a selector. Modules are
        looked for in the working directory first.

    Raises:
      ValueError: there is no such thing; the error says what could be meant.
    """
    if name == "none":
        return NO_IDEA
    if name in CACHE_FORMATS:
        return Idea(cache_format=name)
    if ":" not in name:
        raise ValueError(
            f"an idea must be none, a cache format ({', '.join(CACHE_FORMATS)}) or module:name, "
            f"got {name!r}"
        )
    value = find_object(name)
    return value if isinstance(value, Idea) else Idea(selector=value)


def find_object(name: str) -> Any:
    """What `module:name` names, with its module imported.

    Raises:
      ValueError: there is no such module or name, or its import raises.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"must be module:name, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:  # whatever the module raises
        raise ValueError(f"{name} cannot be imported: {describe_error(error)}") from error
    return value
