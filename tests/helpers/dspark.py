"""Small checkpoints with DSpark stages, in the form of V4-Flash-0731."""

import dataclasses
import json

import ml_dtypes
import numpy as np

import dsv4_jax as ds
from dsv4_jax.checkpoint.inventory import list_dspark
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.config.write_json import write_config
from helpers.checkpoints import random_fp8, released_tensors, write_tensors

SWA, CSA, HCA = ds.AttentionType.SWA, ds.AttentionType.CSA, ds.AttentionType.HCA
HASH, LEARNED = ds.RouterType.HASH, ds.RouterType.LEARNED
TRUNK = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(SWA, CSA, HCA, CSA),
    router_types=(HASH, LEARNED, LEARNED, LEARNED),
    num_mtp_layers=0,
)
DRAFT = DSparkConfig(
    block_size=5, markov_rank=16, noise_token_id=95, target_layers=(1, 2, 3), num_stages=3
)


def dspark_config(config=TRUNK, draft=DRAFT):
    """As 0731 has it: ratios with a 0 for each stage, and one block announced."""
    fields = write_config(config)
    del fields["layer_types"], fields["mlp_layer_types"]
    ratios = [0 if attn == SWA else config.compression_ratio(attn) for attn in config.layer_types]
    return fields | {
        "compress_ratios": ratios + [0] * draft.num_stages,
        "num_hash_layers": config.router_types.count(HASH),
        "num_nextn_predict_layers": 1,
        "dspark_block_size": draft.block_size,
        "dspark_markov_rank": draft.markov_rank,
        "dspark_noise_token_id": draft.noise_token_id,
        "dspark_target_layer_ids": list(draft.target_layers),
    }


def dspark_tensors(config=TRUNK, draft=DRAFT, seed=0):
    """Random ones of the stages alone, in the dtypes of the release."""
    rng = np.random.default_rng(seed)
    made = {}
    for entry in list_dspark(config, draft):
        codes = random_fp8(rng, entry.shape)
        if entry.dtype == ml_dtypes.float8_e8m0fnu:
            codes = rng.integers(121, 136, entry.shape, dtype=np.uint8)
        is_code = entry.dtype.itemsize == 1
        values = codes if is_code else rng.standard_normal(entry.shape, np.float32)
        made[entry.name] = values.view(entry.dtype) if is_code else values.astype(entry.dtype)
    return made


def write_checkpoint(folder, contents, tensors):
    """A directory with this config and these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(contents))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def write_dspark(folder, config=TRUNK, draft=DRAFT, **changes):
    """A whole checkpoint; `changes` are of its config."""
    tensors = released_tensors(config) | dspark_tensors(config, draft)
    return write_checkpoint(folder, dspark_config(config, draft) | changes, tensors)
