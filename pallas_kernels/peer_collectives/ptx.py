"""What a thread does with its line of 16 bytes, in PTX: send it to peers, wait for theirs.

A line is four words. Other operands come once for each element of it, and the first is read.
Stores and loads are volatile, which makes each 32-bit word of a line arrive whole. `buffer.py` says
why no word is written before its reader is done with it.
"""

from __future__ import annotations

from pallas_kernels.peer_collectives.buffer import (
    ADDRESSES,
    EMPTY,
    LINE_BYTES,
    PeerLayout,
)

_WORDS = 4
_PACK = LINE_BYTES // 2
_NONE = f"0x{EMPTY:08X}"


def add_up(layout: PeerLayout, parts: int) -> tuple[str, str]:
    """Sends a line to each device, and adds up those of all devices for this one.

    Args:
      layout: of the buffers.
      parts: `layout.devices`, a line for each of them; or 1, the same line for all.

    Returns:
      The text, and its constraints. Operands: the sum; the lines; the line's number, the buffer's
      address in two words, and the device's place.
    """
    # Operands are numbered: the result's words, then each line's, then the numbers, of which every
    # element has a register and the first is read.
    lines = [[f"${_WORDS * (1 + part) + word}" for word in range(_WORDS)] for part in range(parts)]
    line, low, high, place = (f"${_WORDS * (1 + parts) + _PACK * i}" for i in range(4))
    peers = range(layout.devices)
    text = [
        ".reg .b64 own, at;",
        f".reg .b64 peer<{layout.devices}>;",
        ".reg .b32 turn, half, slot, low, high;",
        f".reg .b32 sent<{_WORDS}>;",
        f".reg .b32 got<{_WORDS * layout.devices}>;",
        f".reg .f32 sum<{_PACK}>;",
        ".reg .f32 term;",
        ".reg .pred none;",
        f"mov.b64 own, {{{low}, {high}}};",
        *(f"ld.global.b64 peer{j}, [own+{ADDRESSES + 8 * j}];" for j in peers),
        # The half that the last exchange did not use: a late peer may not have read that one yet.
        *_take_turn(layout, line, layout.turns[0]),
        f"mad.lo.u32 slot, {line}, {LINE_BYTES}, half;",
        f"mad.lo.u32 half, {place}, {layout.slot_bytes}, slot;",
    ]
    for j in peers:
        if j < parts:
            text += _hide_empty(lines[j])
        # To all peers before any is waited for, this device's own buffer among them.
        text += ["cvt.u64.u32 at, half;", f"add.u64 at, at, peer{j};"]
        text += [_store(layout.slots[0], [f"sent{word}" for word in range(_WORDS)])]
    text += ["cvt.u64.u32 at, slot;", "add.u64 at, at, own;"]
    places = [layout.slots[0] + j * layout.slot_bytes for j in peers]
    received = [[f"got{_WORDS * j + word}" for word in range(_WORDS)] for j in peers]
    # All loads are on their way before the first line is looked at.
    text += [_load(where, words) for where, words in zip(places, received, strict=True)]
    for j, (where, words) in enumerate(zip(places, received, strict=True)):
        # Whole, and EMPTY is left there: the slot is the sender's again, for the exchange after
        # next.
        text += _wait(f"wait{j}", where, words)
        for word, found in enumerate(words):
            # Two bf16 as f32, added in the order of devices: all of them get the same bits.
            text += [f"shl.b32 low, {found}, 16;", f"and.b32 high, {found}, 0xFFFF0000;"]
            for half, bits in enumerate(("low", "high")):
                total = f"sum{2 * word + half}"
                text += [f"mov.b32 term, {bits};"]
                text += [f"add.rn.f32 {total}, {total}, term;" if j else f"mov.f32 {total}, term;"]
    text += [f"cvt.rn.bf16x2.f32 ${w}, sum{2 * w + 1}, sum{2 * w};" for w in range(_WORDS)]
    return _scoped(text), _constraints(parts, 4 * _PACK)


def exchange(layout: PeerLayout, pack: int) -> tuple[str, str]:
    """Sends a line to one device, and receives one from it.

    Args:
      layout: of the buffers.
      pack: elements of a line, 8 or 4.

    Returns:
      The text, and its constraints. Operands: the line that was received; the line to send; the
      line's number, the buffer's address in two words, this device's place, and the other's.
    """
    line, low, high, place, other = (f"${2 * _WORDS + pack * i}" for i in range(5))
    words = [f"${word}" for word in range(_WORDS)]
    text = [
        ".reg .b64 own, at, peer;",
        ".reg .b32 turn, half, slot;",
        f".reg .b32 sent<{_WORDS}>;",
        ".reg .pred none;",
        f"mov.b64 own, {{{low}, {high}}};",
        f"mul.wide.u32 at, {other}, 8;",
        "add.u64 at, at, own;",
        f"ld.global.b64 peer, [at+{ADDRESSES}];",
        # A line is counted for each peer by itself: its programs need not run in one order.
        f"mad.lo.u32 slot, {other}, {layout.lines}, {line};",
        *_take_turn(layout, "slot", layout.turns[1]),
        f"mad.lo.u32 half, {line}, {LINE_BYTES}, half;",
        *_hide_empty([f"${_WORDS + word}" for word in range(_WORDS)]),
        f"mad.lo.u32 slot, {place}, {layout.slot_bytes}, half;",
        "cvt.u64.u32 at, slot;",
        "add.u64 at, at, peer;",
        _store(layout.slots[1], [f"sent{word}" for word in range(_WORDS)]),
        f"mad.lo.u32 slot, {other}, {layout.slot_bytes}, half;",
        "cvt.u64.u32 at, slot;",
        "add.u64 at, at, own;",
        _load(layout.slots[1], words),
        *_wait("wait", layout.slots[1], words),
    ]
    return _scoped(text), _constraints(1, 5 * pack)


def _take_turn(layout: PeerLayout, number: str, turns: int) -> list[str]:
    """Counts one more exchange of a line; `half` is where the half that it uses begins."""
    return [
        f"mul.wide.u32 at, {number}, 4;",
        "add.u64 at, at, own;",
        f"ld.volatile.global.b32 turn, [at+{turns}];",
        "add.u32 turn, turn, 1;",
        f"st.volatile.global.b32 [at+{turns}], turn;",
        "and.b32 half, turn, 1;",
        f"mul.lo.u32 half, half, {layout.half_bytes};",
    ]


def _hide_empty(words: list[str]) -> list[str]:
    """What is sent: a word that equals EMPTY loses a bit, and stays a NaN."""
    text = []
    for number, word in enumerate(words):
        text += [f"setp.eq.u32 none, {word}, {_NONE};"]
        text += [f"selp.b32 sent{number}, 0x{EMPTY - 1:08X}, {word}, none;"]
    return text


def _wait(label: str, where: int, words: list[str]) -> list[str]:
    """Until the line at `at + where` is whole; leaves it empty."""
    # Words may arrive one by one: whole is a line with no EMPTY word in it.
    text = [f"{label}:", f"setp.eq.u32 none, {words[0]}, {_NONE};"]
    text += [f"setp.eq.or.u32 none, {word}, {_NONE}, none;" for word in words[1:]]
    text += [f"@!none bra {label}_done;", _load(where, words), f"bra {label};", f"{label}_done:"]
    return [*text, _store(where, [_NONE] * _WORDS)]


def _load(where: int, words: list[str]) -> str:
    return f"ld.volatile.global.v4.b32 {{{', '.join(words)}}}, [at+{where}];"


def _store(where: int, words: list[str]) -> str:
    return f"st.volatile.global.v4.b32 [at+{where}], {{{', '.join(words)}}};"


def _scoped(text: list[str]) -> str:
    """Registers and labels are those of this text alone, however often it is inlined."""
    return "\n".join(["{", *text, "}"])


def _constraints(lines: int, numbers: int) -> str:
    return ",".join(["=&r"] * _WORDS + ["r"] * (_WORDS * lines + numbers))
