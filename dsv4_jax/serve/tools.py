"""Tools of a conversation: how many there may be, which are allowed, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dsv4_jax.serve.errors import refuse


class Function(NamedTuple):
    """One function that the model may call.

    Attributes:
      called: by which name the model calls it.
      name: what the client calls it.
      namespace: where it has that name; None outside of one.
      is_strict: its arguments have to be of its schema.
    """

    called: str
    name: str
    namespace: str | None
    is_strict: bool


def functions_of(given: Mapping[str, Any]) -> list[Function]:
    """The functions of tools that were checked; the library writes a namespace before a name."""
    found = []
    for tool in given.get("tools", []):
        if tool.get("type") == "namespace":
            space = tool["name"]
            lead = space if space.endswith("__") else f"{space}__"
            for one in tool.get("tools", []):
                strict = bool(one.get("strict"))
                found.append(Function(lead + one["name"], one["name"], space, strict))
        else:
            one = tool.get("function", tool)
            found.append(Function(one["name"], one["name"], None, bool(one.get("strict"))))
    return found


def namespaces_of(given: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """By the name that the model calls a function by, its namespace and its name there."""
    return {
        one.called: (one.namespace, one.name)
        for one in functions_of(given)
        if one.namespace is not None
    }


def strict_tools(given: Mapping[str, Any]) -> set[str]:
    """Names by which the model calls those whose calls have to be of their schema."""
    return {one.called for one in functions_of(given) if one.is_strict}


def check_tools(given: Mapping[str, Any], max_tools: int) -> None:
    """Refuses too many tools.

    Raises:
      ApiError: it is so.
    """
    num_tools = len(functions_of(given))
    if num_tools > max_tools:
        refuse("tools", f"must be a list of at most {max_tools}, got {num_tools}")


def allow_tools(given: dict[str, Any]) -> None:
    """Obeys a choice among some of the tools: the model is given no other.

    Args:
      given: fields that were checked; changed in place.

    Raises:
      ApiError: what is allowed are no tools of the request.
    """
    choice = given.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    allowed = choice.get("allowed_tools", choice)
    wanted = {_name_of(one) for one in allowed["tools"]} - {None}
    kept = [tool for tool in given.get("tools", []) if _name_of(tool) in wanted]
    if {_name_of(tool) for tool in kept} != wanted:
        where = "tool_choice.tools" if allowed is choice else "tool_choice.allowed_tools.tools"
        refuse(where, "must be a list of some of the tools")
    given["tools"], given["tool_choice"] = kept, allowed.get("mode", "auto")


def _name_of(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
