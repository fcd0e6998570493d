"""How a layer attends and how it routes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class AttentionType(enum.StrEnum):
    """How a layer sees tokens beyond its window."""

    SWA = "swa"
    """The window only."""
    CSA = "csa"
    """Compressed sparse attention: an indexer selects entries of a few tokens each."""
    HCA = "hca"
    """Heavily compressed attention: every entry, each of many tokens."""


class RouterType(enum.StrEnum):
    """How a layer picks its experts."""

    LEARNED = "learned"
    """By score plus bias."""
    HASH = "hash"
    """By a table of token ids."""
