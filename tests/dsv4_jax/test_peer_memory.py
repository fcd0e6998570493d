import ctypes
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import cuda_driver, peer_memory
from dsv4_jax.peer_memory import PeerMemory

WORDS = 1024
DLPACK_CPU = 1


class FakeDriver:
    """A CUDA driver whose GPUs have the host's memory."""

    def __init__(self):
        self.reaches, self.status = 1, 0
        self.contexts, self.memory, self.reaching = [], {}, []

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceCanAccessPeer(self, reaches, one, other):
        assert one.value != other.value
        reaches._obj.value = self.reaches
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 90 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.contexts.pop()
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):
        return 0

    def cuCtxEnablePeerAccess(self, context, flags):
        pair = self.contexts[-1], context.value
        status = 704 if pair in self.reaching else self.status
        self.reaching.append(pair)
        return status

    def cuCtxSynchronize(self):
        return 0

    def cuMemAlloc_v2(self, address, size):
        words = np.full(size.value // 4 + 64, 7, np.int32)
        address._obj.value = -(-words.ctypes.data // 256) * 256
        self.memory[address._obj.value] = words
        return self.status

    def cuMemFree_v2(self, address):
        del self.memory[address.value]
        return 0

    def cuMemsetD32_v2(self, place, word, count):
        words = (ctypes.c_uint32 * count.value).from_address(place.value)
        words[:] = [word.value] * count.value
        return 0

    def cuMemcpyHtoD_v2(self, place, source, size):
        ctypes.memmove(place.value, source.value, size.value)
        return 0

    def cuIpcGetMemHandle(self, handle, address):
        assert self.contexts == [91]
        assert address.value in self.memory
        handle._obj.bytes[0], handle._obj.bytes[63] = 7, 9
        return self.status

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):
        assert (handle.bytes[0], handle.bytes[63], flags) == (7, 9, 1)
        address._obj.value = 0x5000 + self.contexts[-1]
        return self.status


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    yield fake
    assert fake.contexts == []


def test_an_array_is_the_memory_and_frees_it(driver, monkeypatch):
    monkeypatch.setattr(peer_memory, "_DLPACK_GPU", DLPACK_CPU)
    memory = PeerMemory(WORDS, 0)
    memory.fill(0x7FA5FFA3, 1000)
    memory.write(np.arange(4, dtype=np.int32))
    array, address = memory.to_array(), memory.address
    assert (array.shape, array.dtype) == ((1, WORDS), jnp.int32)
    assert array.unsafe_buffer_pointer() == address
    expected = np.zeros(WORDS, np.int32)
    expected[:4], expected[1000:] = range(4), 0x7FA5FFA3
    np.testing.assert_array_equal(array[0], expected)
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(array)[0], expected + 1)
    del memory
    gc.collect()
    assert list(driver.memory) == [address]
    del array
    gc.collect()
    assert not driver.memory


def test_memory_that_no_array_holds_is_freed(driver):
    memory = PeerMemory(WORDS, 1)
    assert list(driver.memory) == [memory.address]
    del memory
    gc.collect()
    assert not driver.memory


def test_another_process_opens_memory_by_a_handle(driver):
    memory = PeerMemory(WORDS, 1)
    shared = memory.share()
    assert len(shared) == peer_memory.SHARED_BYTES
    assert peer_memory.open_shared(shared, 0) == 0x5000 + 90
    driver.status = 201
    for call in (memory.share, lambda: peer_memory.open_shared(shared, 0)):
        with pytest.raises(RuntimeError, match="error 201"):
            call()


def test_each_gpu_of_a_process_is_let_reach_the_others(driver):
    peer_memory.let_reach([0, 2])
    assert sorted(driver.reaching) == [(90, 92), (92, 90)]
    peer_memory.let_reach([0, 2])  # a second time is no error
    driver.status = 101
    with pytest.raises(RuntimeError, match="error 101"):
        peer_memory.let_reach([0, 1])


def test_gpus_that_cannot_reach_each_other_are_named(driver):
    assert peer_memory.find_unreachable([0, 1]) is None
    driver.reaches = 0
    assert peer_memory.find_unreachable([2]) is None
    said = "GPU 0 can't reach the memory of GPU 1"
    assert peer_memory.find_unreachable([0, 1]) == said
