"""The functions and methods of the original cache's interface, with kinds of bad arguments."""

import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from helpers import bad_inputs as bad
from helpers.bad_inputs import Target


def of_original(config, cache, step, step_kinds):
    """They are called with a handle of a CSA layer in a call of one token.

    Args:
      config: a model of one CSA layer.
      cache: of that model.
      step: fields of a `StepInput` of three tokens.
      step_kinds: kinds of bad ones.
    """
    one = {"token_ids": [1], "request_ids": [0], "request_slots": [0]}
    call = ds.StepInput(**{name: jnp.asarray(values) for name, values in one.items()})
    acquire, schema = ds.KVCacheManager.acquire, cache.schemas[0]
    handle = acquire(cache, call, layer_idx=0)
    dim, index_dim = config.head_dim, config.indexer_head_dim

    def row(size):
        return np.ones((1, size), np.float32)

    def projections(size):
        return ds.cache.Projections(values=row(2 * size), scores=row(2 * size))  # type: ignore

    def acquire_fields(**fields):
        return acquire(cache, ds.StepInput(**fields), layer_idx=0)

    def write_fields(**fields):
        return handle.write_swa(row(dim), ds.cache.Projections(**fields), projections(index_dim))

    flush = {
        "handle": handle,
        "schema": schema,
        "norm": row(dim)[0],
        "frequencies": row(config.rope_dim // 2)[0],
        "eps": 1e-6,
    }
    flush_kinds = {"handle": bad.instance(), "schema": bad.instance()}
    norm_kinds = {
        "norm": bad.float_array((dim,)),
        "indexer_norm": bad.float_array((index_dim,)),
        "frequencies": bad.float_array((config.rope_dim // 2,)),
        "eps": bad.number(0),
    }
    written = {
        "kv": row(dim),
        "compressor": projections(dim),
        "indexer": projections(index_dim),
    }
    wide = bad.float_array((1, 2 * dim))
    entries = {"compressed": row(dim), "indexer_keys": row(index_dim)}
    entry_kinds = {
        "compressed": bad.float_array((1, dim)),
        "indexer_keys": bad.float_array((1, index_dim)),
    }
    return [
        Target("KVCacheManager.acquire", acquire,
               {"cache": cache, "step_input": call, "layer_idx": 0},
               {"cache": bad.instance(), "step_input": bad.instance(),
                "layer_idx": bad.integer(0, 0)}),
        Target("KVCacheManager.acquire fields", acquire_fields, step,
               step_kinds | {"token_ids": bad.int_array((3,), 0, None)}),
        Target("ModelCache.with_layer", cache.with_layer, {}, {"handle": bad.instance()}),
        Target("OriginalHandle.write_swa", handle.write_swa, written,
               {"kv": bad.float_array((1, dim)), "compressor": bad.instance(),
                "indexer": bad.instance()}),
        Target("OriginalHandle.write_swa projections", write_fields,
               {"values": row(2 * dim), "scores": row(2 * dim)},
               {"values": wide, "scores": wide}),
        Target("OriginalHandle.flush_compression", handle.flush_compression, entries, entry_kinds),
        Target("OriginalHandle.gather_compressed_kv", handle.gather_compressed_kv, {},
               {"selected": bad.instance()}),
        Target("maybe_flush_csa", ds.maybe_flush_csa,
               flush | {"m": 4, "indexer_norm": row(index_dim)[0]},
               flush_kinds | norm_kinds | {"m": bad.integer(1)}),
        Target("maybe_flush_hca", ds.maybe_flush_hca, flush | {"m_prime": 4},
               flush_kinds | {"m_prime": bad.integer(1)}, free=("norm", "frequencies", "eps")),
    ]  # fmt: skip
