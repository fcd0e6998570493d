"""Tags: how a model names the tags of calls, behind the token that begins each."""

from __future__ import annotations

from typing import NamedTuple


class Tags(NamedTuple):
    """Of a block of calls, a call and a parameter.

    Attributes:
      block: `tool_calls`, or what stands for it.
      call: `invoke`.
      parameter: `parameter`.
    """

    block: str
    call: str
    parameter: str


V4_TAGS = Tags("tool_calls", "invoke", "parameter")
V41_TAGS = Tags(" calls", " invoke", " parameter")
"""Of DeepSeek-V4.1, each with a space before its name."""
