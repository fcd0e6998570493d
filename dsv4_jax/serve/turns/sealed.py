"""Sealed reasoning: the `encrypted_content` of responses, which clients give back.

Nothing is stored here, so that what stands for a reasoning item has to hold its text. It is no
secret: the item shows it too. What other servers have sealed cannot be read here.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from dsv4_jax.serve.errors import refuse

_HEAD = "dsv4-jax:1:"


def seal(text: str) -> str:
    """Reasoning as `encrypted_content`."""
    return _HEAD + base64.urlsafe_b64encode(text.encode()).decode()


def seal_items(items: Any) -> None:
    """Gives the reasoning items of an answer, which are changed, an `encrypted_content`."""
    for item in items:
        if item.get("type") == "reasoning" and "encrypted_content" in item:
            text = _text_of(item)
            item["encrypted_content"] = seal(text) if text else None


def open_items(items: list[Any]) -> list[Any]:
    """Input items, where reasoning that has no text is what its `encrypted_content` holds.

    What another server has sealed stays without text, as if it were not there: it can't be read,
    and is no text for the model.

    Raises:
      ApiError: what was sealed here is damaged.
    """
    return [_opened(item, f"input[{number}]") for number, item in enumerate(items)]


def _opened(item: Any, where: str) -> Any:
    if not isinstance(item, dict) or item.get("type") != "reasoning" or _text_of(item):
        return item
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(_HEAD):
        return item
    data = sealed.removeprefix(_HEAD).encode()
    try:
        text = base64.b64decode(data, altchars=b"-_", validate=True).decode()
    except ValueError:  # of the codec, too
        refuse(f"{where}.encrypted_content", "must be as it was given out, and is damaged")
    return item | {"content": [{"type": "reasoning_text", "text": text}]}


def _text_of(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item, "" if it has none."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return ""
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str) and text)
