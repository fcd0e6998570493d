"""Planes of the released models' pools, of which `pack_rows` moves rows."""

import jax
import jax.numpy as jnp
import numpy as np

FLASH_BLOCK_BYTES = 449_824
FLASH_SLOT_BYTES = 5_132_288


def flash_blocks(num_blocks):
    """Planes [L, A, ...] of V4-Flash's blocks in fp8_ue8m0: entries and keys of CSA, then HCA."""
    of_entry = ((448, np.uint8), (64, jnp.bfloat16), (8, np.uint8))
    of_key = ((64, np.uint8), (4, np.uint8))
    return [
        *(_plane(21, num_blocks, 32, *each) for each in (*of_entry, *of_key)),
        *(_plane(20, num_blocks, 1, *each) for each in of_entry),
    ]


def flash_slots(num_slots):
    """Of its slots: windows, and what compressors keep of CSA and HCA layers."""

    def window(num_layers):
        of_token = ((448, np.uint8), (64, jnp.bfloat16), (8, np.uint8))
        return [_plane(num_layers, num_slots, 128, *each) for each in of_token]

    tails = [_plane(21, num_slots, 8, width, np.float32) for width in (1024, 1024, 256, 256)]
    running = _plane(20, num_slots, 3, 512, np.float32)
    return [*window(21), *tails, *window(20), running, *window(3)]


def _plane(num_layers, num_rows, per_row, width, dtype):
    return jax.ShapeDtypeStruct((num_layers, num_rows, per_row, width), dtype)
