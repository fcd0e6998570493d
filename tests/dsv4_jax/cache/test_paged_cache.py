"""The pool of one compressed family: its arrays in every format."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds

pytestmark = pytest.mark.unoptimised

CONFIG = ds.DSV4Config.tiny()
SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
U8, F32, BF16 = jnp.uint8, jnp.float32, jnp.bfloat16
# Shape and dtype of each plane of one vector: 32 dims of which 8 rotate; keys have 16.
FP8_ENTRY = {"nope": ((24,), U8), "rope": ((8,), BF16)}
UE8M0_ENTRY = FP8_ENTRY | {"scale": ((8,), U8)}
FORMATS = {
    "f32": ({"values": ((32,), F32)}, {"values": ((16,), F32)}),
    "bf16": ({"values": ((32,), BF16)}, {"values": ((16,), BF16)}),
    "fp8_ue8m0": (UE8M0_ENTRY, {"codes": ((8,), U8), "scale": ((1,), U8)}),
    "fp8_ue8m0_fp8_index": (UE8M0_ENTRY, {"codes": ((16,), U8), "scale": ((), F32)}),
    "fp8_per_entry": (
        FP8_ENTRY | {"inv_scale": ((), F32)},
        {"codes": ((8,), U8), "scale": ((1,), U8)},
    ),
}


def schema_of(attn, cache_format="fp8_ue8m0", config=CONFIG):
    spec = next(spec for spec in ds.layer_schedule(config) if spec.attn == attn)
    return ds.build_schema(config, spec, cache_format)


def stacked(planes, *lead):
    return {name: np.zeros((*lead, *shape), dtype) for name, (shape, dtype) in planes.items()}


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize(("attn", "entries_per_block"), [(CSA, 32), (HCA, 4)])
def test_planes_have_their_shapes_and_start_at_zero(cache_format, attn, entries_per_block):
    pool = ds.cache.init_paged_pool(schema_of(attn, cache_format), 5, num_layers=3)
    entry, key = FORMATS[cache_format]
    lead = (3, 5, entries_per_block)
    expected = (stacked(entry, *lead), stacked(key, *lead) if attn == CSA else None)
    chex.assert_trees_all_equal_shapes_and_dtypes((pool.entries, pool.index_keys), expected)
    chex.assert_trees_all_equal((pool.entries, pool.index_keys), expected)
    assert pool.num_blocks == 5


@pytest.mark.parametrize("cache_format", FORMATS)
def test_memory_is_that_of_the_arrays(cache_format):
    schema = schema_of(CSA, cache_format)
    pool = ds.cache.init_paged_pool(schema, 5, num_layers=3)
    assert pool.memory_bytes() == sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(pool))
    per_entry = schema.format.entry_bytes(32, 8) + schema.format.index_key_bytes(16)
    assert pool.memory_bytes() == 3 * 5 * 32 * per_entry


@pytest.mark.parametrize(
    ("cache_format", "csa_bytes", "hca_bytes"),
    [
        ("fp8_ue8m0", 584 + 68, 584),
        ("fp8_ue8m0_fp8_index", 584 + 132, 584),
        ("fp8_per_entry", 580 + 72, 580),  # the global scale of the keys is 1 and not stored
        ("bf16", 1024 + 256, 1024),
    ],
)
def test_a_block_of_the_released_model_has_its_published_bytes(cache_format, csa_bytes, hca_bytes):
    flash = ds.DSV4Config.flash()
    csa = ds.cache.init_paged_pool(schema_of(CSA, cache_format, flash), 2)
    hca = ds.cache.init_paged_pool(schema_of(HCA, cache_format, flash), 2)
    assert csa.memory_bytes() == 2 * 32 * csa_bytes
    assert hca.memory_bytes() == 2 * hca_bytes


def test_a_pool_is_one_layer_unless_said():
    assert ds.cache.init_paged_pool(schema_of(CSA), 2).entries["nope"].shape == (1, 2, 32, 24)


@pytest.mark.parametrize(("num_blocks", "num_layers"), [(0, 1), (4, 0), (-1, 1)])
def test_sizes_below_one_are_refused(num_blocks, num_layers):
    name = "num_layers" if num_blocks > 0 else "num_blocks"
    message = f"{name} must be at least 1, got {min(num_blocks, num_layers)}"
    with pytest.raises(ValueError, match=message):
        ds.cache.init_paged_pool(schema_of(CSA), num_blocks, num_layers=num_layers)


def test_a_window_layer_has_no_pool():
    with pytest.raises(ValueError, match="layer 0 is swa: it has no entries"):
        ds.cache.init_paged_pool(schema_of(SWA), 4)
