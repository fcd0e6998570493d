"""Writes quant_vectors.npz: inputs and golden bytes of every quantised cache format.

PyTorch computes them, from the definitions and without looking at the code under test. Run by hand,
where torch is installed (2.13 wrote the committed file); the tests only read the file:

    python tests/data/make_quant_vectors.py

Arrays, for R entries of 448 + 64 dims and K index keys of 128:

    entry/x          f32[R, 512]   entry/rope      u16[R, 64], bf16 bits
    fp8_ue8m0/nope   u8[R, 448]    fp8_ue8m0/scale u8[R, 8]
    fp8_entry/nope   u8[R, 448]    fp8_entry/inv_scale f32[R]
    key/x            f32[K, 128]   key/rotated     u16[K, 128], bf16 bits
    mxfp4/codes      u8[K, 64]     mxfp4/scale     u8[K, 4]
    fp8_key/codes    u8[K, 128]    fp8_key/scale   f32[K]
    nvfp4/codes      u8[K, 64]     nvfp4/scale     u8[K, 8]
"""

import pathlib

import numpy as np
import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
AMAX_FLOOR = 1e-4
ROOT = torch.tensor(128.0**-0.5, dtype=torch.float32)


def pow2ceil(x):
    """The exponent of the smallest power of two that is at least x: integers."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    return exponent - (mantissa == 0.5).int()


def power_of_two(exponent):
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).float()


def e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def e2m1(x):
    """The nearest value's code; of two equally near ones, the even code."""
    distance = (x.double().abs().clamp_max(6)[..., None] - E2M1).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    odd_last = 2 * nearest.double() - (torch.arange(8) % 2)  # of the nearest, the even one scores 2
    return (odd_last.argmax(-1) + 8 * torch.signbit(x)).to(torch.uint8)


def nibbles(code):
    return code[..., 0::2] + 16 * code[..., 1::2]


def quantise_grouped_entry(nope):
    """bf16[..., n] -> E4M3 codes and one UE8M0 byte per 64."""
    groups = nope.float().unflatten(-1, (-1, 64))
    exponent = pow2ceil(groups.abs().amax(-1).clamp_min(AMAX_FLOOR) * torch.tensor(1 / 448.0))
    code = e4m3(groups / power_of_two(exponent)[..., None])
    return code.flatten(-2), (exponent + 127).to(torch.uint8)


def quantise_whole_entry(nope):
    """bf16[..., n] -> E4M3 codes and one f32 scale."""
    inv_scale = nope.float().abs().amax(-1).clamp_min(AMAX_FLOOR) / 448.0
    return e4m3(nope.float() / inv_scale[..., None]), inv_scale


def quantise_mxfp4(rotated):
    """bf16[..., n] -> E2M1 pairs and one UE8M0 byte per 32."""
    groups = rotated.float().unflatten(-1, (-1, 32))
    exponent = pow2ceil(groups.abs().amax(-1).clamp_min(6 * 2.0**-126) * torch.tensor(1 / 6.0))
    code = e2m1(groups / power_of_two(exponent)[..., None])
    return nibbles(code.flatten(-2)), (exponent + 127).to(torch.uint8)


def quantise_fp8_key(rotated):
    """bf16[..., n] -> E4M3 codes and one power of two in f32."""
    amax = rotated.float().abs().amax(-1).clamp_min(AMAX_FLOOR)
    scale = power_of_two(pow2ceil(amax * torch.tensor(1 / 448.0)))
    return e4m3(rotated.float() / scale[..., None]), scale


def quantise_nvfp4(rotated):
    """bf16[..., n] -> E2M1 pairs and one E4M3 byte per 16; the global scale is 1."""
    groups = rotated.float().unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6.0).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    code = e2m1(groups / scale.float()[..., None])
    return nibbles(code.flatten(-2)), scale.view(torch.uint8)


def hadamard(n):
    """Sylvester's matrix of +-1, f64[n, n]."""
    bits = torch.tensor([[(i & j).bit_count() for j in range(n)] for i in range(n)])
    return (1 - 2 * (bits % 2)).double()


def rotate(x):
    """f32[..., 128] -> bf16: exact sums, one f32 product, one rounding to bf16."""
    return ((x.double() @ hadamard(128)).float() * ROOT).bfloat16()


def unrotate(target):
    """Keys f32[..., 128] that rotate to exactly these bf16 values, in whatever order one adds."""
    x = (target.double() / ROOT.double() @ hadamard(128) / 128).float()
    y = x.clone()
    for axis in range(7):  # butterflies in f32, the last axis's highest bit first
        y = y.unflatten(-1, (2**axis, 2, -1))
        low, high = y.unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
    assert torch.equal(rotate(x), target)
    assert torch.equal((y * ROOT).bfloat16(), target)
    return x


def e4m3_midpoints(low, high):
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[:-1] + values[1:]) / 2
    return middle[(middle >= low) & (middle <= high)]


def beside(value):
    """A bf16 value, its two bf16 neighbours and its two f32 neighbours (bf16 rounds those off)."""
    x = torch.tensor([value], dtype=torch.float32)
    bits = x.bfloat16().view(torch.int16)
    neighbours = [(bits + d).view(torch.bfloat16).float() for d in (-1, 0, 1)]
    inf = torch.tensor(torch.inf)
    return torch.cat([*neighbours, torch.nextafter(x, -inf), torch.nextafter(x, inf)]).tolist()


def entries(generator):
    """f32[R, 512]; each row strings seven hard groups of 64 together, then 64 rope dims."""

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    def group(amax):
        x = noise(64).clamp(-4, 4) * (amax / 8)
        x[int(torch.randint(64, (), generator=generator))] = amax
        return x

    amaxes = [1e-30, 1e-6, 3e-5, 9.9e-5, 1.01e-4, 1e-3, 0.02, 0.0447, 0.0449, 1.0, 30.0, -500.0]
    amaxes += [1e10, -1e30, 3e38, -(2.0**-30)]
    for value in (2.0**-12, 1.0, 256.0, 448.0, 448.0 * 2.0**-11, 448.0 * 2.0**40, 7.0, 232.0):
        amaxes += beside(value)
    groups = [torch.zeros(64), -torch.zeros(64), torch.full((64,), 448.0), torch.full((64,), -7.0)]
    groups += [group(amax) for amax in amaxes]
    ties = torch.cat([torch.tensor([448.0]), e4m3_midpoints(0, 448)])  # 127 values, two groups
    ties = torch.cat([ties, -ties[1:2]]).reshape(2, 64)
    ties[1, 0] = -448.0
    for exponent in (0, -7, -22, 30):
        groups += [*(ties * 2.0**exponent), *(-ties.flip(-1) * 2.0**exponent)]
    groups += [torch.zeros(64)] * (-len(groups) % 7)
    rows = torch.stack(groups).reshape(-1, 448)

    whole = noise(6, 448) * torch.tensor([1e-6, 0.01, 0.3, 1.0, 5.0, 1e4])[:, None]
    one_scale = ties.flatten().repeat(4)[:448] * torch.tensor([[1.0], [2.0**-9]])
    zero = torch.stack([torch.zeros(448), -torch.zeros(448)])
    rows = torch.cat([rows, whole, one_scale, zero])
    rope = noise(len(rows), 64)
    rope[-1, :4] = torch.tensor([0.0, -0.0, 3e38, -(2.0**-100)])
    return torch.cat([rows, rope], -1)


def keys(generator):
    """f32[K, 128]; ordinary keys have sums that f32 holds exactly, the others a chosen rotation."""
    ordinary = (torch.randn(12, 128, generator=generator) * 128).round() / 128
    exponents = torch.tensor([0, 0, 0, 1, 3, 7, 20, 100, -3, -8, -20, -100])
    ordinary = ordinary * power_of_two(exponents)[:, None]

    fp4 = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(2)
    fp4[8:] *= -1
    designed = [fp4.repeat(8) * 2.0**e for e in (0, 5, -5, 40)]
    fp8 = torch.cat([torch.tensor([448.0]), e4m3_midpoints(1.0, 448)])
    fp8 = torch.cat([fp8, -fp8[1:]]).repeat(2)[:128]
    designed += [fp8, fp8.flip(-1) * 2.0**-6]
    # The largest value of each group of 16. UE8M0 turns over at 6 * 2**n and, for FP8 keys, at
    # 448 * 2**n; an E4M3 scale at 6 * each midpoint.
    edges = torch.tensor([*beside(6.0)[:3], *beside(6 * 2.0**-4)[:3], 8.0, -4.0]).reshape(2, 4)
    middles = (6 * e4m3_midpoints(0.25, 16.0)[::3])[:16].reshape(2, 8)
    whole = torch.tensor(beside(448.0)[:3] + beside(-1.0)[:3])[:, None]
    for amax in (*edges.repeat_interleave(2, dim=1), *middles, *whole.expand(6, 8)):
        target = torch.rand(8, 16, generator=generator) * 0.8 + 0.1
        target[:, 8:] *= -1
        target[:, 3] = 1
        designed.append((target * amax[:, None]).flatten())
    designed = unrotate(torch.stack(designed).bfloat16())
    return torch.cat([torch.zeros(1, 128), ordinary, designed])


def golden(seed):
    """Every array of the file."""
    generator = torch.Generator().manual_seed(seed)
    x, key = entries(generator), keys(generator)
    nope, rope = x[:, :448].bfloat16(), x[:, 448:].bfloat16()
    out = {"entry/x": x, "entry/rope": rope.view(torch.uint16)}
    out["fp8_ue8m0/nope"], scale = quantise_grouped_entry(nope)
    out["fp8_ue8m0/scale"] = torch.nn.functional.pad(scale, (0, 1))
    out["fp8_entry/nope"], out["fp8_entry/inv_scale"] = quantise_whole_entry(nope)
    rotated = rotate(key)
    out |= {"key/x": key, "key/rotated": rotated.view(torch.uint16)}
    out["mxfp4/codes"], out["mxfp4/scale"] = quantise_mxfp4(rotated)
    out["fp8_key/codes"], out["fp8_key/scale"] = quantise_fp8_key(rotated)
    out["nvfp4/codes"], out["nvfp4/scale"] = quantise_nvfp4(rotated)
    return {name: array.numpy() for name, array in out.items()}


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("quant_vectors.npz")
    np.savez_compressed(path, **golden(seed=0))
    print(f"{path}: {path.stat().st_size} bytes")
