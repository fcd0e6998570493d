"""The kernel that makes block FP8 of MXFP4 against what both formats stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases.expert_mlp import COMPILED_UNPACKED
from helpers import slow
from helpers.quantised import quantize
from pallas_kernels.common import weights
from pallas_kernels.expert_mlp import triton_unpack

EXPERTS, OUT, IN = 2, 256, 384


def draw(*, spread=0, seed=0):
    """MXFP4 whose scales of 32 inputs lie up to 2^spread apart."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(EXPERTS, OUT, IN)).astype(np.float32)
    groups = rng.integers(-spread, 1, (EXPERTS, OUT, IN // 32)).repeat(32, axis=-1)
    return quantize("mxfp4", values * np.exp2(groups, dtype=np.float32))


decode = jax.jit(weights.decode_weight)


def unpack_to_fp8(weight):
    return jax.tree.map(np.asarray, jax.jit(triton_unpack.unpack_to_fp8)(weight))


@pytest.mark.slow
@pytest.mark.parametrize("spread", slow.all_but([9], [0, 9]))
def test_no_value_is_lost(lane, spread):
    del lane
    weight = draw(spread=spread)
    wide = unpack_to_fp8(weight)
    assert wide.scale.dtype == np.uint8
    assert wide.scale.shape == (EXPERTS, OUT // 128, IN // 128)
    np.testing.assert_array_equal(decode(wide), decode(weight))


def test_far_below_the_largest_scale_values_are_rounded_to_nearest(lane):
    """Codes of a block have steps of 2^-9 of its scale."""
    del lane
    weight = draw(spread=24)
    wide, values = unpack_to_fp8(weight), np.asarray(decode(weight))
    scales = np.exp2(wide.scale.astype(np.float32) - 127).repeat(128, axis=1).repeat(128, axis=2)
    assert (np.abs(decode(wide) - values) <= scales * 2.0**-10).all()
    assert (decode(wide) != values).any()
    assert (np.abs(values) > 0).any()


@pytest.mark.slow
def test_zeros_stay_zeros(lane):
    del lane
    weight = quantize("mxfp4", np.zeros((1, 128, 128), np.float32))
    wide = unpack_to_fp8(weight)
    assert not wide.decode().any()
    assert wide.scale.min() >= 1, "2^-127 is no f32 of a normal exponent"


@pytest.mark.slow
def test_other_weights_are_left():
    weight = draw()
    assert triton_unpack.can_unpack(weight)
    assert not triton_unpack.can_unpack(weights.with_activations(weight, "bfloat16"))
    assert not triton_unpack.can_unpack(jnp.zeros((2, 128, 128), jnp.bfloat16))
    for shape in ((128, 192), (192, 128)):
        weight = quantize("mxfp4", np.zeros(shape, np.float32))
        assert not triton_unpack.can_unpack(weight)


def _aot_case(num_experts, out, into):
    shape = jax.ShapeDtypeStruct((num_experts, out, into), jnp.float32)
    weight = jax.eval_shape(lambda x: weights.quantize_mxfp4(x, dtype="bfloat16"), shape)
    return (f"{num_experts} of {out}x{into}", triton_unpack.unpack_to_fp8, [weight])


AOT_CASES = [_aot_case(*case) for case in COMPILED_UNPACKED]
