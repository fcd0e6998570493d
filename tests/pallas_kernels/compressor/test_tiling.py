import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import layer_cases, slow
from helpers.layer_cases import (
    COMPRESSION_RATIOS,
    KERNEL,
    LENGTHS,
    draw_histories,
    draw_norms,
    flat,
    run,
)
from helpers.schedules import assert_same_bytes
from pallas_kernels.compressor import triton_gpu
from pallas_kernels.compressor.tiling import Tiling, choose_csa, choose_hca
from pallas_kernels.gpu import devices
from pallas_kernels.gpu.devices import B200, H200

pytestmark = pytest.mark.unoptimised


@pytest.mark.parametrize(("windows", "apart"), [(64, False), (2047, False), (2048, True)])
def test_compressors_of_many_windows_are_flushed_apart(windows, apart):
    assert choose_csa(windows).apart == apart


@pytest.mark.parametrize(
    ("windows", "tokens", "channels"),
    [(1, 16, 64), (66, 8448, 64), (67, 8576, 0), (66, 1055, 0), (64, 64, 0)],
)
def test_few_long_windows_are_pooled_by_several_programs(windows, tokens, channels):
    """Not those of a decode step, of a token each."""
    assert choose_hca(windows, tokens).channels == channels


@pytest.mark.parametrize(("device", "fits"), [(H200, 132), (B200, 148)])
def test_windows_are_compared_with_the_sms_of_the_device(device, fits, monkeypatch):
    """Of one that is named, and of the one at hand."""

    def chunks():
        return [choose_hca(windows, 1, device).chunk for windows in (fits, fits + 1)]

    assert chunks() == [16, 8]
    monkeypatch.setattr(devices, "compute_capability", lambda: (device.capability_major, 0))
    assert devices.current_device() == device
    assert [choose_hca(windows, 1).chunk for windows in (fits, fits + 1)] == chunks()


TILINGS = {
    "csa": [
        Tiling(warps=2),
        Tiling(warps=4, apart=True),
    ],
    "hca": [
        Tiling(warps=4, chunk=8, channels=4, pool_warps=2),
        Tiling(warps=4, chunk=3, channels=12, pool_warps=1),
    ],
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "tiling"),
    slow.all_but(
        [],
        [(kind, tiling) for kind in COMPRESSION_RATIOS for tiling in TILINGS[kind]],
    ),
)
def test_every_tiling_of_a_flush_gives_the_same_bits(lane, kind, tiling, monkeypatch):
    """Windows cut by calls, several a call, and absent blocks, in launches of every kind."""
    rng = np.random.default_rng(0)
    histories, norms = draw_histories(rng, kind, LENGTHS), draw_norms(rng, kind, jnp.bfloat16)
    flush = functools.partial(
        run, "fp8_ue8m0", kind, histories, layer_cases.CUTS, norms, num_tokens=64, backend=KERNEL
    )
    expected, _ = flush()
    layer_cases.step.clear_cache()
    monkeypatch.setattr(triton_gpu, f"choose_{kind}", lambda *sizes: tiling)
    actual, _ = flush()
    layer_cases.step.clear_cache()
    assert_same_bytes(flat(jax.device_get(actual)), flat(expected))
