"""Memory of the host in place of `PeerMemory`, for peer buffers of CPU devices."""

import itertools

import jax
import numpy as np

from dsv4_jax import peer_memory, peers


class HostMemory:
    """Words that are copied to a device; peers reach its address by nothing."""

    def __init__(self, num_words, device):
        self.words, self.device = np.zeros(num_words, np.int32), device
        self.address = self.words.ctypes.data

    def fill(self, word, first):
        self.words[first:] = word

    def write(self, words):
        self.words[: len(words)] = words

    def share(self):
        return self.address.to_bytes(peer_memory.SHARED_BYTES, "little")

    def to_array(self):
        return jax.device_put(self.words[None], self.device)


def allocate(mesh, axis):
    """The buffers of an axis; an address that another process opens ends in 1."""
    devices = itertools.cycle(mesh.local_devices)
    peers.PeerMemory = lambda num_words, ordinal: HostMemory(num_words, next(devices))
    peer_memory.let_reach = lambda ordinals: None
    peer_memory.open_shared = lambda shared, ordinal: int.from_bytes(shared, "little") | 1
    return peers._allocate(mesh, axis)
