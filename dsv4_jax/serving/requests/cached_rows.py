"""CachedRows: what the devices hold of a request, as bytes on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class CachedRows(NamedTuple):
    """What the devices hold of a request, as `cache/packed_rows.py` lays it out.

    Attributes:
      length_tokens: tokens that it stands for.
      slot: u8[m], rings and compressor states, those of the draft included.
      blocks: u8[n, k], blocks of these tokens, in order; the last one may be open.
    """

    length_tokens: int
    slot: np.ndarray
    blocks: np.ndarray
