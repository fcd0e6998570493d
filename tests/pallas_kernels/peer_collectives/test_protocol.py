"""The PTX of the kernels, run by the threads of several devices in random orders on the CPU.

Nothing else can run it without GPUs: the interpreters of Pallas know no inline PTX.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.ptx_threads import Memory, StuckError, run_in_any_order, thread
from pallas_kernels.peer_collectives import PeerLayout, ptx
from pallas_kernels.peer_collectives.buffer import EMPTY

ROUNDS = 12


class Devices:
    """Devices that exchange single lines through their buffers."""

    def __init__(self, count, seed=0):
        self.layout, self.rng = PeerLayout(count, 128), np.random.default_rng(seed)
        words = np.zeros(self.layout.num_words, np.int32)
        words[self.layout.first_slot_word :] = EMPTY
        self.memory = Memory([words.copy() for _ in range(count)])
        for place, buffer in enumerate(self.memory.buffers):
            header = self.layout.header(place, self.memory.bases)
            buffer[: len(header)] = header
        self.count = count

    def values(self, *shape):
        """BF16 lines, as u32 words."""
        found = self.rng.normal(size=(*shape, 8)) * 2.0 ** self.rng.integers(-9, 9, (*shape, 8))
        return found.astype(jnp.bfloat16).view(np.uint32)

    def start(self, text, place, lines, line, pack, *more):
        """A thread, and its operands; results are words 0 to 3."""
        base = self.memory.bases[place]
        given = [line, base & 0xFFFFFFFF, base >> 32, place, *more]
        words = [int(word) for part in lines for word in part]
        operands = dict(enumerate([0] * 4 + words + [n for n in given for _ in range(pack)]))
        return thread(text, operands, self.memory), operands


def chain(start_one):
    """A thread that runs others one after the other, each when the last one has ended."""
    for start in start_one:
        yield from start()


def expected_sum(lines):
    """The lines of all devices added in f32, in their order, rounded once."""
    total = lines[0].view(jnp.bfloat16).astype(np.float32)
    for line in lines[1:]:
        total = total + line.view(jnp.bfloat16).astype(np.float32)
    return total.astype(jnp.bfloat16).view(np.uint32)


def run_sums(devices, text, parts):
    """Every device runs ROUNDS sums of a line; what they found beside what they should."""
    given = devices.values(ROUNDS, devices.count, parts)
    found = [[] for _ in range(devices.count)]

    def rounds(place):
        for turn in range(ROUNDS):

            def start(turn=turn):
                run, operands = devices.start(text, place, given[turn, place], 5, 8)
                yield from run
                found[place].append([operands[word] for word in range(4)])

            yield start

    run_in_any_order([chain(rounds(place)) for place in range(devices.count)], devices.rng)
    wanted = [
        [expected_sum(given[turn, :, place % parts]) for turn in range(ROUNDS)]
        for place in range(devices.count)
    ]
    return np.array(found, np.uint32), np.array(wanted)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("scatters", [False, True])
def test_sums_in_any_order_of_the_threads(count, scatters):
    devices = Devices(count, seed=count)
    parts = count if scatters else 1
    text, _ = ptx.add_up(devices.layout, parts)
    np.testing.assert_array_equal(*run_sums(devices, text, parts))


@pytest.mark.parametrize(("count", "pack"), [(2, 8), (4, 4), (8, 8)])
def test_exchanges_in_any_order_of_the_threads(count, pack):
    devices = Devices(count, seed=pack)
    text, _ = ptx.exchange(devices.layout, pack)
    given = devices.values(ROUNDS, count, count)
    given[3, 0, 1] = given[4, :, :, 2] = EMPTY  # what stands for nothing can be sent
    found = np.zeros_like(given)

    def rounds(place, peer):
        for turn in range(ROUNDS):

            def start(turn=turn):
                line = [given[turn, place, peer]]
                run, operands = devices.start(text, place, line, 7, pack, peer)
                yield from run
                found[turn, peer, place] = [operands[word] for word in range(4)]

            yield start

    # A kernel ends before the next one begins, so that a device's threads go from turn to turn.
    def kernels(place):
        chains = [list(rounds(place, peer)) for peer in range(count)]
        for turn in range(ROUNDS):
            yield functools.partial(interleave, [chains[peer][turn]() for peer in range(count)])

    run_in_any_order([chain(kernels(place)) for place in range(count)], devices.rng)
    np.testing.assert_array_equal(found, np.where(given == EMPTY, EMPTY - 1, given))


def interleave(threads):
    """One step of each thread after the other, until all have ended."""
    left = list(threads)
    while left:
        for one in list(left):
            try:
                yield next(one)
            except StopIteration:
                left.remove(one)


@pytest.mark.parametrize(
    ("broken", "instead"),
    [
        ("and.b32 half, turn, 1;", "mov.b32 half, 0;"),  # one half for all turns
        ("mad.lo.u32 half, $20,", "mad.lo.u32 half, 0,"),  # all senders in one slot
    ],
)
def test_a_protocol_that_reuses_a_slot_too_early_is_seen(broken, instead):
    for seed in range(20):
        devices = Devices(3, seed)
        text, _ = ptx.add_up(devices.layout, 1)
        operand = f"${4 + 4 + 8 * 3}"  # the device's place
        changed = text.replace(broken.replace("$20", operand), instead)
        assert changed != text
        try:
            found, wanted = run_sums(devices, changed, 1)
        except StuckError:
            return
        if np.any(found != wanted):
            return
    pytest.fail("20 random orders gave the right sums")


def test_a_line_that_was_received_leaves_its_slot_empty():
    devices = Devices(2)
    text, _ = ptx.add_up(devices.layout, 1)
    run_sums(devices, text, 1)
    for buffer in devices.memory.buffers:
        assert np.all(buffer[devices.layout.first_slot_word :] == EMPTY)
