"""Planes of V4-Flash's pools in the released format, of which `pack_rows` moves rows."""

import jax
import numpy as np

from benchmarks.cases.cache import (
    ENTRIES_PER_BLOCK,
    IC,
    NUM_LAYERS,
    RELEASED,
    WINDOW,
    C,
    state_shape,
)
from benchmarks.cases.product import FLASH as CONFIG
from helpers import cache_specs
from pallas_kernels import get_cache_format
from pallas_kernels.pack_rows.reference import plane_bytes

FORMAT = get_cache_format(RELEASED)


def flash_blocks(num_blocks):
    """Planes [L, A, ...] of its blocks: entries and keys of CSA, then entries of HCA."""
    of_csa, of_hca = (
        (NUM_LAYERS[kind], num_blocks, ENTRIES_PER_BLOCK[kind]) for kind in ("csa", "hca")
    )
    return [
        *_planes(FORMAT.entry, C, *of_csa),
        *_planes(FORMAT.index_key, IC, *of_csa),
        *_planes(FORMAT.entry, C, *of_hca),
    ]


def flash_slots(num_slots):
    """Of its slots: windows, and what compressors keep of CSA and HCA layers."""

    def windows(num_layers):
        return _planes(FORMAT.ring, C, num_layers, num_slots, WINDOW)

    def states(kind, dim):
        shape = state_shape(kind, NUM_LAYERS[kind], num_slots, dim=dim)
        return jax.ShapeDtypeStruct(shape, np.float32)

    tails = [states("csa", dim) for dim in (C, C, IC, IC)]  # values and scores of each
    others = NUM_LAYERS["swa"] + CONFIG.num_mtp_layers
    return [
        *windows(NUM_LAYERS["csa"]),
        *tails,
        *windows(NUM_LAYERS["hca"]),
        states("hca", C),
        *windows(others),
    ]


def _planes(codec, dim, *lead):
    return list(cache_specs.planes(codec, dim, *lead).values())


FLASH = {"blocks": flash_blocks, "slots": flash_slots}
WIDTH = {what: sum(map(plane_bytes, planes(1))) for what, planes in FLASH.items()}
"""Bytes of a row."""
