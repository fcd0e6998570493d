"""The memory through which the devices of an axis exchange arrays: a buffer on each of them.

    header    the buffer's own address, its device's place on the axis, the addresses of all buffers
    turns     i32, how often a line was exchanged: in sums [lines], in exchanges [devices, lines]
    slots     of sums and of exchanges [2, devices, lines, 16 bytes]: half, sender, line

A line is 16 bytes, which one thread sends and receives. The sender stores it in its slot of the
receiver's buffer. The receiver waits until no 32-bit word of the line is EMPTY, and leaves EMPTY
there. An exchange of a line uses the half that the last one did not. So a device sends a line into
a half again only after it has received the line that every peer sent in between; and a peer sent
that after its kernel of the first exchange was done.

This holds where collectives of one kind come in one order on all devices, and each begins after the
last one has ended there: as those of a model's layers do, where each needs what the last one gave.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.common.checks import check_integer

MAX_DEVICES = 8
EMPTY = 0x7FA5FFA3
"""What a slot holds that nothing was sent to: a NaN as f32, as two BF16 and as E4M3."""
LINE_BYTES = 16
OWN_ADDRESS, PLACE, ADDRESSES = 0, 8, 16
"""Bytes of the header where its fields begin."""

_HEADER_BYTES = 256
_WORD_BYTES = 4
_LINES_STEP = 128  # those of a program
_MAX_LINES = 1 << 19  # offsets have 32 bits


@dataclasses.dataclass(frozen=True)
class PeerLayout:
    """Where the fields of a buffer lie, in bytes from its beginning.

    Attributes:
      devices: of the axis, 2 to 8.
      lines: of a slot, which is what a device sends to another at once: 2 MiB if not given.

    Raises:
      ValueError: one of them is out of range, or lines are no multiple of 128.
    """

    devices: int
    lines: int = 1 << 17

    def __post_init__(self) -> None:
        """Checks them."""
        check_integer("devices", self.devices, 2, MAX_DEVICES)
        check_integer("lines", self.lines, 0)
        if self.lines % _LINES_STEP or not 0 < self.lines <= _MAX_LINES:
            raise ValueError(
                f"lines must be a multiple of {_LINES_STEP} up to {_MAX_LINES}, got {self.lines}"
            )

    @classmethod
    def of(cls, devices: int, num_words: int) -> PeerLayout:
        """That of a buffer by its size.

        Raises:
          ValueError: no buffer of an axis of so many devices has it.
        """
        header = _HEADER_BYTES // _WORD_BYTES
        step = cls(devices, _LINES_STEP).num_words - header
        steps, rest = divmod(num_words - header, step)
        if rest or steps < 1:
            raise ValueError(
                f"buffer must have {header} + n * {step} words on an axis of {devices} devices, "
                f"got {num_words}"
            )
        return cls(devices, steps * _LINES_STEP)

    @property
    def slot_bytes(self) -> int:
        """What a device sends to another at once."""
        return self.lines * LINE_BYTES

    @property
    def half_bytes(self) -> int:
        """The slots of all senders."""
        return self.devices * self.slot_bytes

    @property
    def turns(self) -> tuple[int, int]:
        """Of sums and of exchanges."""
        return _HEADER_BYTES, _HEADER_BYTES + self.lines * _WORD_BYTES

    @property
    def slots(self) -> tuple[int, int]:
        """Of sums and of exchanges."""
        first = self.turns[1] + self.devices * self.lines * _WORD_BYTES
        return first, first + 2 * self.half_bytes

    @property
    def num_words(self) -> int:
        """32-bit words of the whole buffer."""
        return (self.slots[1] + 2 * self.half_bytes) // _WORD_BYTES

    @property
    def first_slot_word(self) -> int:
        """From here on a new buffer holds EMPTY, and zeros before it."""
        return self.slots[0] // _WORD_BYTES

    def header(self, rank: int, addresses: list[int]) -> np.ndarray:
        """The first words of a buffer.

        Args:
          rank: of its device on the axis.
          addresses: where the buffers of all devices of the axis begin, in order.

        Returns:
          i32[64].
        """
        words = np.zeros(_HEADER_BYTES // 8, np.uint64)
        words[OWN_ADDRESS // 8] = addresses[rank]
        words[PLACE // 8] = rank
        words[ADDRESSES // 8 :][: len(addresses)] = addresses
        return words.view(np.int32)
