"""Reads published cache pages with NumPy alone, from the layout's description and not from ours.

An entry page of P entries: P x (448 bytes of E4M3 | 128 bytes of bf16 rope), then P x (7 bytes of
UE8M0 | 1 byte of padding), then zeros up to a multiple of 576 bytes. A page of P index keys: all
codes, then all scales. Numbers are little-endian.
"""

import math

import numpy as np

NOPE_DIM, ROPE_DIM, GROUP = 448, 64, 64
DATA_BYTES, SCALE_BYTES, PAGE_MULTIPLE = 576, 8, 576


def e4m3_value(code: int) -> float:
    """Sign, four exponent bits with bias 7, three mantissa bits; 0x7F and 0xFF are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) / 8 * 2.0 ** (exponent - 7)


def e2m1_value(code: int) -> float:
    """Sign, two exponent bits with bias 1, one mantissa bit."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


E4M3 = np.array([e4m3_value(code) for code in range(256)])
E2M1 = np.array([e2m1_value(code) for code in range(16)])


def ue8m0_values(code: np.ndarray) -> np.ndarray:
    """u8 -> f64; 255 is NaN."""
    return np.where(code == 255, np.nan, 2.0 ** (code.astype(np.float64) - 127))


def bf16_values(raw: np.ndarray) -> np.ndarray:
    """u8[..., 2 * n] -> f32[..., n]; a bf16 number is the upper half of an f32 one."""
    upper = np.ascontiguousarray(raw).view("<u2").astype(np.uint32)
    return (upper << 16).view(np.float32)


def entry_page_bytes(num_entries: int) -> int:
    return -(-num_entries * (DATA_BYTES + SCALE_BYTES) // PAGE_MULTIPLE) * PAGE_MULTIPLE


def read_entry_page(page: np.ndarray, num_entries: int) -> np.ndarray:
    """u8[page bytes] -> f32[P, 512], the entries."""
    assert page.shape == (entry_page_bytes(num_entries),)
    entries = np.empty((num_entries, NOPE_DIM + ROPE_DIM), np.float32)
    for i in range(num_entries):
        data = page[i * DATA_BYTES :][:DATA_BYTES]
        scale = ue8m0_values(page[num_entries * DATA_BYTES + i * SCALE_BYTES :][:7])
        entries[i, :NOPE_DIM] = E4M3[data[:NOPE_DIM]] * np.repeat(scale, GROUP)
        entries[i, NOPE_DIM:] = bf16_values(data[NOPE_DIM:])
    return entries


def entry_padding(num_entries: int) -> np.ndarray:
    """The positions in a page that hold no entry: each scale group's last byte, and the end."""
    scales = num_entries * DATA_BYTES
    pad_bytes = scales + SCALE_BYTES * np.arange(num_entries) + 7
    end = np.arange(scales + SCALE_BYTES * num_entries, entry_page_bytes(num_entries))
    return np.concatenate([pad_bytes, end])


def read_fp8_key_page(page: np.ndarray, num_keys: int, dim: int) -> np.ndarray:
    """u8[page bytes] -> f32[P, dim]: `dim` bytes of E4M3 each, then one f32 scale each."""
    codes, scales = np.split(page, [num_keys * dim])
    scale = scales.view("<f4")
    assert scale.shape == (num_keys,)
    return (E4M3[codes.reshape(num_keys, dim)] * scale[:, None]).astype(np.float32)


def read_fp4_key_page(page: np.ndarray, num_keys: int, dim: int, group: int) -> np.ndarray:
    """u8[page bytes] -> f32[P, dim]: E2M1 pairs, low nibble first, then one scale per `group`.

    The scales of groups of 32 are UE8M0, those of groups of 16 are E4M3.
    """
    codes, scales = np.split(page, [num_keys * dim // 2])
    pairs = codes.reshape(num_keys, dim // 2)
    values = np.empty((num_keys, dim))
    values[:, 0::2], values[:, 1::2] = E2M1[pairs & 0xF], E2M1[pairs >> 4]
    scale = ue8m0_values(scales) if group == 32 else E4M3[scales]
    return (values * scale.reshape(num_keys, -1).repeat(group, axis=1)).astype(np.float32)
