"""A small DeepSeek-V4.1 model on a cache, call by call, with one program for every cutting."""

import functools
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.cache.poison import poison
from helpers import v41
from helpers.arrays import on_device

SIZE = 24
"""Tokens of a call, most of them padding."""
SLOTS = 3
CONTEXT = 256


@functools.cache
def recorded(name):
    with np.load(v41.oracle_path(name)) as file:
        return dict(file)


@functools.cache
def model(preset="tiny"):
    with tempfile.TemporaryDirectory() as name:
        seed = int(recorded(preset)["seed"])
        folder = v41.write_folder(pathlib.Path(name), preset, seed=seed)
        return ds.load_checkpoint(folder, weights="float32", progress=False)


def call_of(rows, size=SIZE):
    """A call of (slot, tokens) rows, filled up with padding."""
    ids = np.concatenate([tokens for _, tokens in rows])
    row = np.concatenate([np.full(len(tokens), n) for n, (_, tokens) in enumerate(rows)])
    spare = size - len(ids)
    slots = [slot for slot, _ in rows] + [-1] * (SLOTS - len(rows))
    return ds.StepInput(
        token_ids=on_device(np.pad(ids, (0, spare)), jnp.int32),
        request_ids=on_device(np.pad(row, (0, spare), constant_values=-1), jnp.int32),
        request_slots=on_device(slots, jnp.int32),
    )


def fresh(config, cache_format="f32"):
    """An empty cache whose storage has every bit set: what is read before it is written shows."""
    cache = ds.init_cache(
        config, max_requests=SLOTS, max_context_tokens=CONTEXT, cache_format=cache_format
    )
    return poison(cache, np.ones(SLOTS, bool), np.ones(cache.num_blocks, bool))


def run(calls, *, cache_format="f32"):
    """Logits of every call's tokens in turn, and the cache; a call is a list of (slot, tokens)."""
    config, params = model()
    cache, found = fresh(config, cache_format), []
    for rows in calls:
        cache, logits = ds.jit_prefill(params, cache, call_of(rows), config=config, all_logits=True)
        count = sum(len(tokens) for _, tokens in rows)
        found.append(np.asarray(logits)[:count])
    return found, cache


def greedy(tokens, count):
    """The tokens that follow some, each the likeliest, by calls of `SIZE` tokens."""
    config, params = model()
    cache, known = fresh(config), list(tokens)
    done = 0
    while len(known) < len(tokens) + count:
        part = known[done : done + SIZE]
        cache, logits = ds.jit_prefill(
            params, cache, call_of([(1, part)]), config=config, all_logits=True
        )
        done += len(part)
        if done == len(known):
            known.append(int(np.argmax(logits[len(part) - 1])))
    return known[len(tokens) :]
