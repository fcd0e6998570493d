"""Problem: one thing that is wrong with a cache."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      kind: "length", "owner", "leak", "unwritten", "checksum" or "replica".
      where: the family, slot or block.
      message: what was found and what should be.
    """

    kind: str
    where: str
    message: str
