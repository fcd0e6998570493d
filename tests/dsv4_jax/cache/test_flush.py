"""What closes in a call becomes an entry: where it is written, what it holds, and what is refused.

The oracle pools whole windows in float64, as deepseek_v4.md section 2.2 writes them down.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from helpers import slow
from helpers.arrays import on_device, ones
from helpers.schedules import poison, random_cuts, step_input
from pallas_kernels.common.formats import CACHE_FORMATS

pytestmark = pytest.mark.unoptimised

COMPRESSION_RATIO = {"csa": 2, "hca": 8}
CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    csa_compression_ratio=COMPRESSION_RATIO["csa"],
    hca_compression_ratio=COMPRESSION_RATIO["hca"],
)
LAYER = {"csa": 3, "hca": 4}  # the second of its family
EPS, T = CONFIG.rms_norm_eps, 24
TABLE = [[5, 2, 0], [3, 8, -1], [1, 7, 4], [6, -1, -1]]
TOLERANCE = 2e-5  # float32 against float64; values are of order 1
RNG = np.random.default_rng(0)
NORMS = [on_device(1 + 0.2 * RNG.standard_normal(n), jnp.float32) for n in (32, 16)]


def make(cache_format="f32"):
    cache = ds.init_cache(
        CONFIG, max_requests=4, max_context_tokens=300, cache_format=cache_format, num_blocks=9
    )
    return dataclasses.replace(cache, block_table=jnp.asarray(TABLE, jnp.int32))


def frequencies(theta):
    return on_device(theta ** (-np.arange(0, 8, 2) / 8), jnp.float32)


def projections(attn, num_tokens, rng):
    """Values and scores of the compressor, and on CSA layers of the indexer's."""
    widths = (64, 32) if attn == "csa" else (32,)
    return [rng.standard_normal((2, num_tokens, n)).astype(np.float32) for n in widths]


MAIN = frequencies(1e4)


def flush(handle, schema, compression_ratio, table=MAIN):
    arguments = {"norm": NORMS[0], "frequencies": table, "eps": EPS}
    if schema.attn_type == "csa":
        return ds.maybe_flush_csa(
            handle, schema, compression_ratio, indexer_norm=NORMS[1], **arguments
        )
    return ds.maybe_flush_hca(handle, schema, compression_ratio, **arguments)


def write(attn, cache, call, rows):
    """The layer's handle with a call's tokens in it."""
    handle = ds.KVCacheManager.acquire(cache, call, layer_idx=LAYER[attn])
    given = [ds.cache.Projections(values=jnp.asarray(v), scores=jnp.asarray(z)) for v, z in rows]
    return handle.write_swa(jnp.ones((T, 32)), *given)


@functools.partial(jax.jit, static_argnames="attn")
def step(cache, call, rows, table, *, attn):
    """Append, flush, commit, advance: the cache side of a layer's step."""
    handle = write(attn, cache, call, rows)
    handle = flush(handle, handle.schema, COMPRESSION_RATIO[attn], table).commit()
    slots = jnp.where(call.request_slots < 0, 4, call.request_slots)
    lengths = cache.length_tokens.at[slots].add(handle.call.row_counts, mode="drop")
    return dataclasses.replace(cache.with_layer(handle), length_tokens=lengths)


def expected_entries(attn, values, scores, norm, theta, position_of):
    """f64[E, C] of a whole history [n, width]."""
    compression_ratio, entries = COMPRESSION_RATIO[attn], []
    values, scores = values.astype(np.float64), scores.astype(np.float64)
    dim = norm.shape[0]
    for j in range(len(values) // compression_ratio):
        own = slice(j * compression_ratio, (j + 1) * compression_ratio)
        v, z = values[own, -dim:], scores[own, -dim:]
        if attn == "csa" and j:
            previous = slice((j - 1) * compression_ratio, j * compression_ratio)
            v = np.vstack([values[previous, :dim], v])
            z = np.vstack([scores[previous, :dim], z])
        weights = np.exp(z)
        pooled = np.sum(weights * v, axis=0) / np.sum(weights, axis=0)
        entry = pooled / np.sqrt(np.mean(pooled**2) + EPS) * np.asarray(norm, np.float64)
        pairs = entry[-8::2] + 1j * entry[-7::2]
        pairs = pairs * np.exp(
            1j * position_of(j, compression_ratio) * theta ** (-np.arange(0, 8, 2) / 8)
        )
        entry[-8::2], entry[-7::2] = pairs.real, pairs.imag
        entries.append(entry)
    return np.array(entries)


def stored(planes, attn, slot, num_entries):
    """f32[E, C], read from a "f32" cache through the table."""
    j, per_block = np.arange(num_entries), 128 // COMPRESSION_RATIO[attn]
    return np.asarray(planes["values"])[1, np.take(TABLE[slot], j // per_block), j % per_block]


@pytest.mark.parametrize("theta", [1e4, 1.6e5])
@pytest.mark.parametrize("attn", slow.all_but(["csa"], ["csa", "hca"]))
def test_entries_are_pooled_windows_rotated_to_their_first_position(attn, theta):
    """Ragged calls of 1 to 12 tokens a row, several windows closing in one.

    Known bug B25: entry j stands at position j * M, with any base.
    """
    rng, cache, lengths = np.random.default_rng(1), make(), {2: 150, 0: 37}
    history = {slot: projections(attn, n, rng) for slot, n in lengths.items()}
    cuts = {slot: random_cuts(rng, n, 12) for slot, n in lengths.items()}
    done = dict.fromkeys(lengths, 0)
    while any(cuts.values()):
        counts = {slot: queue.pop(0) if queue else 0 for slot, queue in cuts.items()}
        tokens = [[1] * n for n in counts.values()]
        call = step_input(tokens, [0, 1], [*counts, -1], num_tokens=T, rng=rng)
        rows = [np.zeros((2, T, source.shape[-1]), np.float32) for source in history[0]]
        for row, (slot, count) in enumerate(counts.items()):
            taken = slice(done[slot], done[slot] + count)
            for pair, source in zip(rows, history[slot], strict=True):
                pair[:, np.asarray(call.request_ids) == row] = source[:, taken]
            done[slot] += count
        cache = step(cache, call, rows, frequencies(theta), attn=attn)
    pool = cache.paged[attn]
    for planes, norm, which in zip((pool.entries, pool.index_keys), NORMS, (0, 1), strict=True):
        if planes is None:
            continue
        for slot, pairs in history.items():
            arguments = (attn, *pairs[which], norm, theta)
            expected = expected_entries(
                *arguments, lambda j, compression_ratio: j * compression_ratio
            )
            actual = stored(planes, attn, slot, len(expected))
            np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
            for wrong in (
                lambda j, compression_ratio: j * compression_ratio + compression_ratio - 1,
                lambda j, compression_ratio: (j - 1) * compression_ratio,
                lambda j, compression_ratio: j,
            ):
                off = np.abs(expected_entries(*arguments, wrong) - actual).max()
                assert off > 1000 * TOLERANCE


@pytest.mark.parametrize(
    ("attn", "cache_format"),
    slow.all_but(
        [("csa", "fp8_ue8m0")],
        list(itertools.product(COMPRESSION_RATIO, CACHE_FORMATS)),
    ),
)
def test_exactly_the_closed_windows_are_written(attn, cache_format):
    """Known bug B17: entries and index keys both written, in every layout.

    Two rows close several windows, an idle row and padding close none; storage starts poisoned.
    """
    cache = dataclasses.replace(
        poison(make(cache_format)), length_tokens=jnp.asarray([120, 0, 0, 0], jnp.int32)
    )
    # Slot 0 goes on after 120 tokens, which left numbers in its state, no matter which.
    state = jax.tree.map(lambda leaf: ones(leaf.shape, leaf.dtype), cache.state)
    call = step_input([[1] * 9, [1] * 8, [1] * 5], range(3), [0, 3, -1], num_tokens=T)
    rows = projections(attn, T, np.random.default_rng(0))
    pool = step(dataclasses.replace(cache, state=state), call, rows, MAIN, attn=attn).paged[attn]
    compression_ratio, per_block = COMPRESSION_RATIO[attn], 128 // COMPRESSION_RATIO[attn]
    closed = [(0, j) for j in range(120 // compression_ratio, 129 // compression_ratio)] + [
        (3, j) for j in range(8 // compression_ratio)
    ]
    expected = {(1, TABLE[slot][j // per_block], j % per_block) for slot, j in closed}
    families = [pool.entries] + ([pool.index_keys] if attn == "csa" else [])
    for name, plane in ((n, p) for family in families for n, p in family.items()):
        array = np.asarray(plane.astype(jnp.float32)).reshape(*plane.shape[:3], -1)
        untouched = array == 255 if plane.dtype == jnp.uint8 else np.isnan(array)
        written = {tuple(map(int, at)) for at in np.argwhere(~untouched.all(axis=-1))}
        assert written == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("attn", ["csa", "hca"])
def test_nothing_is_written_where_nothing_closes(attn):
    cache = poison(make())
    rows = projections(attn, T, np.random.default_rng(0))
    for counts, slots in (
        ([COMPRESSION_RATIO[attn] - 1] * 3, [1, 0, 3]),
        ([8, 8, 8], [-1, -1, -1]),
        ([0, 0, 0], [1, 2, 0]),
    ):
        call = step_input([[1] * n for n in counts], range(3), slots, num_tokens=T)
        after = step(cache, call, rows, MAIN, attn=attn)
        jax.tree.map(np.testing.assert_array_equal, after.paged, cache.paged)


CALL = step_input([[1] * T], [0], [0], num_tokens=T)


@functools.cache
def given_handle(attn):
    rows = projections(attn, T, np.random.default_rng(0))
    return jax.jit(write, static_argnames="attn")(attn, make(), CALL, rows)


@pytest.mark.slow
@pytest.mark.parametrize("attn", slow.all_but(["csa"], ["csa", "hca"]))
def test_the_layers_own_schema_is_taken(attn):
    """The one that `build_schema` gives for the layer, as well as the handle's."""
    spec = ds.layer_schedule(CONFIG)[LAYER[attn]]
    handle = given_handle(attn)
    own = ds.build_schema(CONFIG, spec, "f32")
    flushed = jax.jit(lambda handle: flush(handle, own, COMPRESSION_RATIO[attn]))(handle)
    assert np.any(flushed.paged.entries["values"])


@pytest.mark.parametrize(("attn", "other"), [("csa", "hca"), ("hca", "csa")])
def test_another_type_rate_or_schema_is_refused(attn, other):
    handle, foreign = given_handle(attn), given_handle(other).schema
    own, names = handle.schema, {"csa": "m", "hca": "m_prime"}
    function = {"csa": ds.maybe_flush_csa, "hca": ds.maybe_flush_hca}[other]
    arguments = {"norm": NORMS[0], "frequencies": MAIN, "eps": EPS}
    arguments |= {"indexer_norm": NORMS[1]} if other == "csa" else {}
    with pytest.raises(ValueError, match=f"is {attn}, not {other}"):
        function(handle, own, COMPRESSION_RATIO[attn], **arguments)
    with pytest.raises(ValueError, match=f"schema and {names[other]} must be the handle's"):
        flush(handle, foreign, COMPRESSION_RATIO[other])
    with pytest.raises(ValueError, match=f"got {names[attn]}=5 for a layer that compresses"):
        flush(handle, own, 5)
    with pytest.raises(ValueError, match=f"schema and {names[attn]} must be the handle's"):
        flush(handle, dataclasses.replace(own, cache_format="bf16"), COMPRESSION_RATIO[attn])


@pytest.mark.parametrize(("attn", "other"), [("csa", "hca"), ("hca", "csa")])
def test_a_handle_without_tokens_or_with_another_state_is_refused(attn, other):
    handle = given_handle(attn)
    with pytest.raises(ValueError, match="call write_swa first"):
        flush(dataclasses.replace(handle, new_tokens=None), handle.schema, COMPRESSION_RATIO[attn])
    foreign = dataclasses.replace(handle, state=given_handle(other).state)
    with pytest.raises(ValueError, match="state pool was built for another type"):
        flush(foreign, handle.schema, COMPRESSION_RATIO[attn])
