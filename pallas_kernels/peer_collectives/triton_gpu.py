"""Triton kernels of the collectives: a thread sends a line of 16 bytes and receives its peers'.

A kernel waits for its peers on the card, so that a step needs the host for none of its collectives,
and one CUDA graph holds all of it. A program sends before it waits, and waits for the programs of
its own number alone; so not all programs of a launch need to run at once.

Bytes: each device sends what it has to all others, over NVLink. Measurements:
docs/kernels/peer_collectives.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.pending import MaybeSplit, SplitSums
from pallas_kernels.gpu import triton
from pallas_kernels.peer_collectives import ptx
from pallas_kernels.peer_collectives.buffer import LINE_BYTES, OWN_ADDRESS, PLACE, PeerLayout

Ref = Any
_NUM_WARPS = 4
_THREADS = 32 * _NUM_WARPS
_PACK = LINE_BYTES // 2


def add_up(terms: Sequence[MaybeSplit], buffer: jax.Array, layout: PeerLayout) -> jax.Array:
    """Sums over the devices.

    Args:
      terms: bf16[devices, N], a part for each device; or [1, N], the same for all. Each may be in
        f32 parts. The device adds them up, two at most, and rounds before it sends.
      buffer: i32[words], this device's.
      layout: of the buffers.

    Returns:
      bf16[N].
    """
    parts, size = terms[0].shape
    block = _THREADS * _PACK
    text, constraints = ptx.add_up(layout, parts)

    def kernel(inputs: tuple[list[Ref], Ref], total: Ref) -> None:
        terms, buffer = inputs
        at = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        exists = at < size
        # What this device sends to each: its own terms, added up and rounded.
        lines = []
        for part in range(parts):
            line, *more = (_load(x, jnp.int32(part), at, exists) for x in terms)
            for other in more:
                line = (line.astype(jnp.float32) + other.astype(jnp.float32)).astype(line.dtype)
            lines.append(line)
        numbers = [at // _PACK, *_header(buffer, block)]
        # Stores to the peers' buffers, then waits for theirs in its own (`ptx.add_up`).
        found = triton.inline_lines(
            text, [*lines, *numbers], constraints, pack=_PACK, dtype=jnp.bfloat16
        )
        triton.store_where(total, (at,), found, exists)

    return triton.launch(
        kernel,
        grid=(pl.cdiv(size, block),),
        inputs=([x.parts if isinstance(x, SplitSums) else x for x in terms], buffer),
        outputs=jax.ShapeDtypeStruct((size,), jnp.bfloat16),
        num_warps=_NUM_WARPS,
        name="add_up_peers",
    )


def _load(term: Ref, part: jax.Array, at: jax.Array, exists: jax.Array) -> jax.Array:
    """Numbers for a device: bf16, as they are or the sum of f32[S, devices, N]."""
    if len(term.shape) == 2:
        return triton.load_where(term, (part, at), exists)
    # Parts are added in their order and rounded once, as their product would have been.
    total = jnp.zeros(at.shape, jnp.float32)
    for number in range(term.shape[0]):
        total = total + triton.load_where(term, (jnp.int32(number), part, at), exists)
    return total.astype(jnp.bfloat16)


def exchange(arrays: Sequence[jax.Array], buffer: jax.Array, layout: PeerLayout) -> list[jax.Array]:
    """What each device has for this one, of several arrays in one launch.

    Args:
      arrays: [devices, N] each, of 16 or 32 bits, a part for each device; or [1, N], the same for
        all.
      buffer: i32[words], this device's.
      layout: of the buffers.

    Returns:
      [devices, N] each.
    """
    dtypes = [x.dtype for x in arrays]
    # Triton has no unsigned results of PTX.
    arrays = [
        jax.lax.bitcast_convert_type(x, jnp.int16 if x.dtype.itemsize == 2 else jnp.int32)
        for x in arrays
    ]
    # Whole programs for each array, so that a program's lines are of one array and one width of
    # elements.
    programs = [num_lines(x.nbytes // len(x)) // _THREADS for x in arrays]
    firsts = [sum(programs[:number]) for number in range(len(arrays))]

    def kernel(inputs: tuple[list[Ref], Ref], outputs: list[Ref]) -> None:
        given, buffer = inputs
        program, peer = pl.program_id(0), pl.program_id(1)
        for x, every, first, count in zip(given, outputs, firsts, programs, strict=True):

            @pl.when((program >= first) & (program < first + count))
            def _(x: Ref = x, every: Ref = every, first: int = first) -> None:
                parts, size = x.shape
                pack = LINE_BYTES // x.dtype.itemsize
                block = _THREADS * pack
                text, constraints = ptx.exchange(layout, pack)
                at = (program - first) * block + jnp.arange(block, dtype=jnp.int32)
                # Arrays of one launch have lines of their own, one array's after another's.
                line, exists = at // pack + first * _THREADS, at < size
                values = triton.load_where(x, (peer if parts > 1 else jnp.int32(0), at), exists)
                numbers = [line, *_header(buffer, block), jnp.full(block, peer, jnp.int32)]
                # Stores to one peer's buffer, then waits for that peer's line in its own.
                found = triton.inline_lines(
                    text, [values, *numbers], constraints, pack=pack, dtype=x.dtype
                )
                triton.store_where(every, (peer, at), found, exists)

    found = triton.launch(
        kernel,
        grid=(sum(programs), layout.devices),
        inputs=(arrays, buffer),
        outputs=[jax.ShapeDtypeStruct((layout.devices, x.shape[1]), x.dtype) for x in arrays],
        num_warps=_NUM_WARPS,
        name="exchange_with_peers",
    )
    return [jax.lax.bitcast_convert_type(x, dtype) for x, dtype in zip(found, dtypes, strict=True)]


def num_lines(num_bytes: int) -> int:
    """Lines that an exchange takes for so many bytes: whole programs, of _THREADS lines each."""
    return pl.cdiv(num_bytes, _THREADS * LINE_BYTES) * _THREADS


def _header(buffer: Ref, block: int) -> list[jax.Array]:
    """The buffer's address in two words, and the device's place: i32[block] each."""
    words = (OWN_ADDRESS // 4, OWN_ADDRESS // 4 + 1, PLACE // 4)
    return [jnp.full(block, buffer[jnp.int32(word)], jnp.int32) for word in words]
