"""Runs PTX on the CPU, that of `peer_collectives` with a thread for each device, in any order.

It knows the instructions that those texts have. Every access to memory is a step of its own, and
whoever runs the threads says which takes the next one.
"""

import re

import numpy as np

_MEMORY = re.compile(r"(ld|st)\.(?:volatile\.)?global\.(v4\.)?b(32|64) (.*)")
_U32, _U64 = np.uint64(0xFFFFFFFF), (1 << 64) - 1


class StuckError(RuntimeError):
    """Threads wait for each other, or for what nobody sends."""


class Memory:
    """The buffers of all devices, each at an address of its own, above 2**32."""

    def __init__(self, buffers):
        self.buffers = buffers
        self.bases = [(7 + 2 * place) << 33 for place in range(len(buffers))]

    def words(self, address, count):
        """The u32 words from an address on, as a view."""
        [place] = [p for p, base in enumerate(self.bases) if 0 <= address - base < 1 << 33]
        first, rest = divmod(address - self.bases[place], 4)
        assert rest == 0, "a word must be aligned"
        assert count != 4 or first % 4 == 0, "a line must be aligned"
        found = self.buffers[place].view(np.uint32)[first : first + count]
        assert len(found) == count, "an access beyond the buffer"
        return found


def thread(text, operands, memory):
    """Runs a text; yields before each access to memory that others can see.

    Args:
      text: of `ptx.add_up` or `ptx.exchange`.
      operands: {number: u32} of `$number`; results are written there.
      memory: of all devices.
    """
    lines = [line.strip().rstrip(";") for line in text.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    registers, at = {}, 0

    def get(name):
        name = name.strip()
        if name.startswith("$"):
            return operands[int(name[1:])]
        return int(name, 0) if name[0].isdigit() or name[0] == "-" else registers[name]

    def put(name, value):
        if name.startswith("$"):
            operands[int(name[1:])] = value
        else:
            registers[name] = value

    while at < len(lines):
        line, at = lines[at], at + 1
        if not line or line[0] in "{}." or line.endswith(":"):
            continue
        if found := re.match(r"(?:@(!?)(\w+) )?bra (\w+)", line):
            if found[2] is None or bool(registers[found[2]]) != bool(found[1]):
                at = labels[found[3]]
            continue
        if found := _MEMORY.match(line):
            yield
            place = re.search(r"\[(\w+)\+(\d+)\]", found[4])
            address = registers[place[1]] + int(place[2])
            names = re.findall(r"[$\w]+", re.sub(r"\[.*?\]", "", found[4]))
            words = memory.words(address, 4 if found[2] else int(found[3]) // 32)
            if found[1] == "st":
                words[:] = [get(name) for name in names]
            elif found[3] == "64":
                put(names[0], int(words[0]) | int(words[1]) << 32)
            else:
                for name, word in zip(names, words, strict=True):
                    put(name, int(word))
            continue
        name, _, rest = line.partition(" ")
        target, *sources = [part.strip() for part in re.sub(r"[{}]", "", rest).split(",")]
        put(target, _compute(name, [get(source) for source in sources]))


def _compute(name, values):
    if name == "setp.le.u32":
        return values[0] <= values[1]
    if name == "sub.u32":
        return (values[0] - values[1]) & 0xFFFFFFFF
    if name == "min.u32":
        return min(values)
    if name.startswith("setp.eq"):
        return values[0] == values[1] or (".or" in name and values[2])
    if name == "selp.b32":
        return values[0] if values[2] else values[1]
    if name == "mov.b64":
        return values[0] | values[1] << 32
    if name in ("mul.wide.u32", "mad.wide.u32"):
        return values[0] * values[1] + sum(values[2:]) & _U64
    if name == "shf.r.wrap.b32":
        return (values[0] | values[1] << 32) >> (values[2] & 31) & 0xFFFFFFFF
    if name in ("mul.lo.u32", "mad.lo.u32"):
        return (values[0] * values[1] + sum(values[2:])) & 0xFFFFFFFF
    if name in ("add.u64", "add.u32"):
        return sum(values) & (_U64 if name.endswith("64") else 0xFFFFFFFF)
    if name in ("and.b32", "and.b64"):
        return values[0] & values[1]
    if name == "cvt.u32.u64":
        return values[0] & 0xFFFFFFFF
    if name == "shl.b32":
        return values[0] << values[1] & 0xFFFFFFFF
    if name in ("mov.b32", "mov.f32", "cvt.u64.u32"):
        return values[0]
    if name == "add.rn.f32":
        return _bits(_float(values[0]) + _float(values[1]))
    if name == "cvt.rn.bf16x2.f32":
        return _bf16(values[0]) << 16 | _bf16(values[1])
    raise NotImplementedError(name)


def _float(bits):
    return np.uint32(bits).view(np.float32)


def _bits(value):
    return int(np.float32(value).view(np.uint32))


def _bf16(bits):
    """Rounded to even; NaN is not among what is added."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def run_in_any_order(threads, rng):
    """Runs threads to their end, one access to memory at a time.

    Raises:
      StuckError: they do not end.
    """
    left, waited = list(threads), 0
    while left:
        chosen = left[rng.integers(len(left))]
        for _ in range(int(rng.integers(1, 12))):
            try:
                next(chosen)
            except StopIteration:
                left.remove(chosen)
                waited = 0
                break
        waited += 1
        if waited > 3_000:
            raise StuckError("the threads wait for what does not come")
