"""A checkpoint's draft (MTP) block: whole, in part or absent."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.checkpoint import LeftOutWarning
from helpers.checkpoints import problems_of
from helpers.saved_checkpoint import (
    assert_same,
    load,
    released_names,
    saved_config,
    saved_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.unoptimised


def draft_tensors():
    """An MTP block in DeepSeek's names: a window layer with learned routing, and its own."""
    rng = np.random.default_rng(5)
    released = released_names(saved_tensors())
    layer = {n.removeprefix("layers.0."): a for n, a in released.items() if "layers.0." in n}
    layer["ffn.gate.bias"] = released["layers.1.ffn.gate.bias"]
    del layer["ffn.gate.tid2eid"]
    layer |= {f"{name}.weight": released["norm.weight"] for name in ("enorm", "hnorm", "norm")}
    layer |= {f"hc_head_{part}": released[f"hc_head_{part}"] for part in ("fn", "base", "scale")}
    layer |= {f"{name}.weight": np.zeros((32, 32), np.float32) for name in ("e_proj", "h_proj")}
    return {
        f"mtp.0.{name}": rng.standard_normal(array.shape, dtype=np.float32)
        for name, array in layer.items()
    }


def test_draft_absent(fixture_params):
    """The config announces a draft block, as transformers' own saves do; the file has none."""
    assert saved_config()["num_nextn_predict_layers"] == 1
    config, params = fixture_params
    assert config.num_mtp_layers == 0
    assert params.mtp is None


def test_draft_whole(tmp_path, fixture_params):
    draft = draft_tensors()
    config, params = load(write_checkpoint(tmp_path / "x", saved_tensors() | draft))
    assert config == dataclasses.replace(fixture_params[0], num_mtp_layers=1)
    assert_same(dataclasses.replace(params, mtp=None), fixture_params[1])
    mtp = params.mtp
    for name, leaf in [
        ("e_proj.weight", mtp.e_proj),
        ("h_proj.weight", mtp.h_proj),
        ("enorm.weight", mtp.enorm),
        ("hnorm.weight", mtp.hnorm),
        ("norm.weight", mtp.norm),
        ("hc_head_fn", mtp.hc_head.fn),
        ("hc_head_base", mtp.hc_head.base),
        ("hc_head_scale", mtp.hc_head.scale),
        ("attn_norm.weight", mtp.block.attn_norm),
        ("attn.wq_a.weight", mtp.block.attn.wq_a),
        ("attn.kv_norm.weight", mtp.block.attn.kv_norm),
        ("attn.attn_sink", mtp.block.attn.attn_sink),
        ("hc_attn_fn", mtp.block.hc_attn.fn),
        ("ffn.gate.bias", mtp.block.ffn.bias),
        ("ffn.experts.3.w3.weight", mtp.block.ffn.w3[3]),
        ("ffn.shared_experts.w2.weight", mtp.block.ffn.shared_w2),
    ]:
        np.testing.assert_array_equal(leaf, draft[f"mtp.0.{name}"])


def test_draft_in_part_is_an_error(tmp_path):
    draft = draft_tensors()
    del draft["mtp.0.enorm.weight"], draft["mtp.0.ffn.experts.2.w1.weight"]
    folder = write_checkpoint(tmp_path / "x", saved_tensors() | draft)
    assert problems_of(folder, dtype=jnp.float32) == [
        "missing: mtp.0.enorm.weight [32]",
        "missing: mtp.0.ffn.experts.2.w1.weight [20, 32]",
    ]


@pytest.mark.parametrize("num_nextn", [0, 3])
def test_draft_is_ignored_where_the_config_has_none(tmp_path, fixture_params, num_nextn):
    """With three stages, which are of another kind, too."""
    draft = draft_tensors()
    draft |= {name.replace("mtp.0", f"mtp.{i}"): a for name, a in draft.items() for i in (1, 2)}
    form = saved_config() | {"num_nextn_predict_layers": num_nextn}
    folder = write_checkpoint(tmp_path / "x", saved_tensors() | draft, form)
    with pytest.warns(LeftOutWarning, match=r"its draft \(MTP block, mtp\.\) is left out"):
        config, params = load(folder)
    assert config.num_mtp_layers == 0
    assert_same(params, fixture_params[1])
