"""The table of GPUs that kernels are cut for."""

import pytest

from pallas_kernels.gpu import devices

OLDER = "is for Hopper and Blackwell, got compute capability "


@pytest.mark.parametrize(
    ("capability", "obstacle"),
    [
        (None, None),
        ((9, 0), None),
        ((10, 3), None),
        ((8, 9), OLDER + "(8, 9)"),
        ((12, 0), OLDER + "(12, 0)"),
    ],
)
def test_kernels_are_for_hopper_and_blackwell(capability, obstacle, monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    assert devices.find_obstacle() == obstacle


@pytest.mark.parametrize(
    ("capability", "device"),
    [(None, devices.H200), ((9, 0), devices.H200), ((10, 0), devices.B200)],
)
def test_a_kernel_is_cut_for_the_gpu_at_hand(capability, device, monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    assert devices.current_device() == device
    assert device.has_tmem == (device == devices.B200)
