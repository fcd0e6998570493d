"""What a command says that it needs is what it allocates."""

import pytest

import dsv4_jax as ds
from dsv4_jax.cache.model_cache import tree_bytes
from dsv4_jax.checkpoint.find import SHIPPED, find_checkpoint
from dsv4_jax.cli import memory
from dsv4_jax.model.params import param_shapes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("drafts", [True, False])
def test_weights_are_asked_for_as_they_are_loaded(dtype, drafts):
    """Parameters of hyper-connections and the like are f32 beside BF16."""
    folder = find_checkpoint(SHIPPED)
    config, params = ds.load_checkpoint(folder, dtype=dtype, drafts=drafts)
    asked = memory.stored_bytes(folder, dtype, follow_links=False, drafts=drafts)
    assert asked == tree_bytes(params) == tree_bytes(param_shapes(config, dtype))
