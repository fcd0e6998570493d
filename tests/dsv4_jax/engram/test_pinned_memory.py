"""Pinning by a driver that is none: which pages, once each, and none of them after a refusal."""

import contextlib
import mmap

import jax
import numpy as np
import pytest

from dsv4_jax import cuda_driver
from dsv4_jax.engram import PinError, pinned_memory
from dsv4_jax.engram.pinned_memory import pin

PAGE = mmap.PAGESIZE


class Driver:
    """Keeps what is registered, as CUDA does: no page twice."""

    def __init__(self):
        self.runs, self.flags, self.most, self.elsewhere = {}, set(), None, 0
        self.has_context, self.interrupts = False, False

    @contextlib.contextmanager
    def on_gpu(self, ordinal):
        assert ordinal == 3
        self.has_context = True
        try:
            yield
        finally:
            self.has_context = False

    def cuMemHostRegister_v2(self, address, size, flags):
        assert self.has_context
        if self.interrupts and self.runs:
            raise KeyboardInterrupt
        begin, end = address.value, address.value + size.value
        assert begin % PAGE == end % PAGE == 0
        if any(first < end and begin < last for first, last in self.runs.items()):
            return 712  # already registered
        if self.most is not None and len(self.runs) >= self.most:
            return 2  # out of memory
        self.flags.add(flags)
        self.runs[begin] = end
        return 0

    def cuMemHostGetDevicePointer_v2(self, seen, address, flags):
        assert flags == 0
        seen._obj.value = address.value + self.elsewhere
        return 0

    def cuMemHostUnregister(self, address):
        if not self.has_context:
            return 201
        del self.runs[address.value]
        return 0

    def holds(self, array):
        pages = range(array.ctypes.data // PAGE, -(-(array.ctypes.data + array.nbytes) // PAGE))
        held = {n for a, b in self.runs.items() for n in range(a // PAGE, b // PAGE)}
        return held >= set(pages)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    monkeypatch.setattr(cuda_driver, "on_gpu", made.on_gpu)
    monkeypatch.setattr(pinned_memory, "_first_gpu", lambda: 3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(pinned_memory, "_kept", [])
    monkeypatch.setattr(pinned_memory, "_pinned", [])
    return made


def file_of(tmp_path, pages, mode="r"):
    path = tmp_path / f"{pages}.{mode}"
    path.write_bytes(b"\1" * (pages * PAGE))
    return np.memmap(path, np.uint8, mode)


def test_planes_of_one_file_share_pages(driver, tmp_path):
    whole = file_of(tmp_path, 9)
    planes = [
        whole[100 : 3 * PAGE + 7],
        whole[3 * PAGE + 7 : 5 * PAGE],
        whole[7 * PAGE : 7 * PAGE + 9],
    ]
    assert pin(planes) == [plane.ctypes.data for plane in planes]
    assert all(map(driver.holds, planes))
    assert driver.flags == {1 | 2 | 8}  # it is mapped to be read
    before = dict(driver.runs)
    assert pin(planes[::-1]) == [plane.ctypes.data for plane in planes[::-1]]
    assert driver.runs == before  # once
    assert pinned_memory.bytes_to_pin(planes) == 0
    assert pinned_memory.bytes_to_pin([whole]) == 3 * PAGE
    pin([whole])
    assert driver.holds(whole)


def test_large_memory_is_pinned_piece_by_piece(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(pinned_memory, "_PIECE_BYTES", 2 * PAGE)
    whole = file_of(tmp_path, 7, "r+")
    pin([whole])
    assert [b - a for a, b in driver.runs.items()] == [2 * PAGE, 2 * PAGE, 2 * PAGE, PAGE]
    assert driver.flags == {1 | 2}  # it may be written to


def test_a_refusal_leaves_nothing_pinned_that_was_not(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(pinned_memory, "_PIECE_BYTES", PAGE)
    whole = file_of(tmp_path, 8)
    pin([whole[:PAGE]])
    before, driver.most = dict(driver.runs), 4
    with pytest.raises(PinError, match="refuses to pin 4,096 bytes of the host's memory, error 2"):
        pin([whole])
    assert driver.runs == before
    driver.most = None
    pin([whole])
    assert driver.holds(whole)


def test_gpus_that_see_memory_elsewhere_do_not_read_it(driver, tmp_path):
    driver.elsewhere = 64
    with pytest.raises(PinError, match="see the host's memory elsewhere"):
        pin([file_of(tmp_path, 2)])
    assert not driver.runs


def test_a_machine_without_a_driver_cannot_pin(monkeypatch, tmp_path):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "driver", missing)
    monkeypatch.setattr(pinned_memory, "_first_gpu", lambda: 0)
    monkeypatch.setattr(pinned_memory, "_kept", [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(PinError, match=r"libcuda\.so\.1"):
        pin([file_of(tmp_path, 1)])


def test_an_interrupt_leaves_no_page_pinned_of_memory_that_may_go(driver, tmp_path, monkeypatch):
    monkeypatch.setattr(pinned_memory, "_PIECE_BYTES", PAGE)
    whole, driver.interrupts = file_of(tmp_path, 4), True
    with pytest.raises(KeyboardInterrupt):
        pin([whole])
    assert not driver.runs
    assert pinned_memory.bytes_to_pin([whole]) == 4 * PAGE
    driver.interrupts = False
    pin([whole])
    assert driver.holds(whole)


def test_a_cpu_of_a_machine_with_gpus_pins_nothing(driver, tmp_path):
    array = file_of(tmp_path, 1)
    assert pin([array], on_gpu=False) == [array.ctypes.data]
    assert not driver.runs


def test_what_is_pinned_is_kept(driver, tmp_path):
    pin([file_of(tmp_path, 2)])
    assert len(pinned_memory._kept) == 1
