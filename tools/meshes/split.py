"""A cache whose blocks are dealt over `model`, against one device: for each mesh what layers select
and attend, what is stored after random schedules of every kind of step, and by how much it differs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.collectives import gather_over_model
from dsv4_jax.mesh import BY_ROW, MODEL, axis_size, on_mesh, place_on, put
from helpers import configs
from tools.meshes.harness import DRAFTS, ROWS, Runner, divisible, mesh_of, smallest

CONTEXT = 128 * 11 + 5
"""Tokens of a request: no multiple of blocks, nor blocks of devices."""
MOST_TOKENS = 1200
TOP_K, ALL = 24, 512
"""Entries that a layer selects; all that a request can have."""


def add_arguments(parser):
    parser.add_argument("--steps", type=int, default=0, help="of a random schedule")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")


def check_all(arguments):
    found = {}
    if arguments.steps:
        found = check_schedule(arguments.meshes, steps=arguments.steps, seed=arguments.seed)
    for name in arguments.meshes:
        mesh = mesh_of(name)
        mine = found.setdefault(name, {})
        for attn in (ds.AttentionType.CSA, ds.AttentionType.HCA):
            mine[attn.value] = check_layer(mesh, attn)
        mine["csa, all"] = check_layer(mesh, ds.AttentionType.CSA, ALL)
        mine["wrong_device"] = find_wrong_device(mesh)
        if arguments.steps:
            mine["first_layer"] = check_first_layer(name)
    return found


def one_layer(attn, top_k=TOP_K):
    routers = (ds.RouterType.LEARNED,)
    fields = {"layer_types": (attn,), "router_types": routers, "num_mtp_layers": 0}
    return configs.scanned(**fields, num_attention_heads=8, o_groups=8, indexer_top_k=top_k)


def with_blocks(cache, contents):
    """The cache with planes of all requests' blocks, [L, slots, LB, ...], where tables say.

    Blocks of a data shard are numbered within it; `contents` is in the order of slots.
    """
    tables = np.asarray(cache.block_table)
    mesh = cache.block_table.sharding.mesh if cache.split_cache else None
    shards = 1 if mesh is None else mesh.shape["data"]
    shard = np.arange(len(tables)) // (len(tables) // shards)

    def fill(plane, content):
        found = np.zeros(plane.shape, plane.dtype)
        found[:, tables + shard[:, None] * (plane.shape[1] // shards)] = content
        return jax.device_put(found, plane.sharding)

    return dataclasses.replace(cache, paged=jax.tree.map(fill, cache.paged, contents))


def read_blocks(cache, *, shards):
    """Planes [L, slots, LB, ...] of all requests' blocks, by the tables."""
    tables = np.asarray(cache.block_table)
    shard = np.arange(len(tables)) // (len(tables) // shards)

    def read(plane):
        plane = np.asarray(plane)
        return plane[:, tables + shard[:, None] * (plane.shape[1] // shards)]

    return jax.tree.map(read, cache.paged)


@functools.partial(jax.jit, static_argnames="attn")
@on_mesh((BY_ROW, BY_ROW))
def read_layer(cache, step_input, queries, index_queries, weights, *, attn):
    """What each token of a call selects, and what it gets of that and of its window."""
    call = cache.index(step_input)
    handle = cache.layer(attn, 0, call)
    window = {name: plane[0, 0, :1] for name, plane in handle.state.window.items()}
    rows = {name: jnp.repeat(row, len(queries), axis=0) for name, row in window.items()}
    handle = dataclasses.replace(handle, window=rows)
    heads = _own_heads(queries)
    sink = jnp.linspace(-1.0, 1.0, 8)
    sink = _own_heads(sink[None, :, None])[0, :, 0]
    if attn == ds.AttentionType.CSA:
        selected, (gathered,) = handle.select_for((heads,), index_queries, weights)
        attended = handle.attend(gathered, sink, selected)
        selected = handle.select(index_queries, weights)
    else:
        selected = handle.all_visible()
        attended = handle.attend_to_all(heads, sink)
    return selected, _all_heads(attended)


def _own_heads(x):

    own = x.shape[1] // axis_size(MODEL)
    return jax.lax.dynamic_slice_in_dim(x, place_on(MODEL) * own, own, axis=1)


def _all_heads(x):

    parts = gather_over_model(x)
    return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], -1, x.shape[-1])


def check_layer(mesh, attn, top_k=TOP_K):
    """Selected entries that differ, of scores with many ties, and how far sums are off."""
    config, rng = one_layer(attn, top_k), np.random.default_rng(0)
    sizes = {"max_requests": ROWS, "max_context_tokens": CONTEXT, "cache_format": "f32"}
    alone = ds.init_cache(config, **sizes)
    split = ds.init_cache(config, **sizes, mesh=mesh, split_cache=True)
    lead = (1, *alone.block_table.shape)
    contents = jax.tree.map(
        lambda plane: rng.integers(-1, 2, (*lead, *plane.shape[2:])).astype(np.float32),
        alone.paged,
    )
    lengths = np.array([0, 3, 130, 700, 1024, 1281, 1290, CONTEXT - 4], np.int32)
    counts = np.minimum(lengths, 4)
    shards = mesh.shape["data"]
    groups = np.array_split(np.arange(ROWS), shards)
    size = max(counts[group].sum() for group in groups)
    ids = np.full((shards, size), -1, np.int32)
    for own, group in zip(ids, groups, strict=True):
        own[: counts[group].sum()] = np.repeat(np.arange(len(group)), counts[group])
    flat = np.full(shards * size, -1, np.int32)
    for number, (own, group) in enumerate(zip(ids, groups, strict=True)):
        part = own >= 0
        flat[number * size : (number + 1) * size][part] = group[0] + own[part]
    index_queries = rng.integers(-1, 2, (flat.size, 32, 16)).astype(np.float32)
    weights = rng.integers(-1, 2, (flat.size, 32)).astype(np.float32)
    queries = rng.normal(size=(flat.size, 8, config.head_dim)).astype(np.float32)
    found = []
    for cache, rows in ((alone, flat), (split, ids.reshape(-1))):
        here = mesh if cache is split else None
        slots = np.tile(np.arange(ROWS // shards), shards) if here else np.arange(ROWS)
        cache = dataclasses.replace(
            with_blocks(cache, contents), length_tokens=put(lengths - counts, here)
        )
        call = ds.StepInput(
            token_ids=np.zeros(flat.size, np.int32),
            request_ids=rows,
            request_slots=slots.astype(np.int32),
        )
        arguments = (call, queries, index_queries, weights)
        found.append(read_layer(cache, *(put(one, here) for one in arguments), attn=attn))
    (selected, attended), (own_selected, own_attended) = jax.tree.map(np.asarray, found)
    return {
        "selected_differ": int(np.sum(selected != own_selected)),
        "most_selected": int(np.sum(selected >= 0, axis=1).max()),
        "attended_off": float(np.abs(attended - own_attended).max()),
    }


def check_schedule(meshes, *, steps, seed=0):
    """Random ragged steps of all kinds on every mesh, given the same tokens, and what is stored."""
    config = divisible()
    params = ds.init_params(config, jax.random.key(0))
    names = {name: mesh_of(name) for name in meshes}
    alone = Runner(config, params, None, context=CONTEXT)
    others = {
        name: Runner(config, params, mesh, context=CONTEXT, split=True)
        for name, mesh in names.items()
    }
    rng, found = np.random.default_rng(seed), {name: {} for name in meshes}
    held = np.zeros(ROWS, int)

    def tokens_of(counts):
        return [rng.integers(0, config.vocab_size, n).tolist() for n in counts]

    def random_step():
        """Its kind, what it is of a runner, and how much longer requests are after it."""
        kind = rng.choice(["prefill", "prefill", "decode", "stage", "serve"])
        if number < steps // 3:  # first some blocks for every device
            counts = rng.integers(0, 161, ROWS)
            counts[0] = 160
            tokens = tokens_of(counts)
            return (
                "prefill",
                lambda runner: np.concatenate(runner.prefill(tokens, num_tokens=ROWS * 160)),
                counts,
            )
        if kind == "decode" or np.any(held + 8 > MOST_TOKENS):
            tokens = [one[0] for one in tokens_of([1] * ROWS)]
            return "decode", lambda runner: runner.decode(tokens), np.ones(ROWS, int)
        if kind == "prefill":
            long = rng.random(ROWS) < 0.3
            counts = np.where(long, rng.integers(0, 160, ROWS), rng.integers(0, 6, ROWS))
            counts = np.minimum(counts, MOST_TOKENS - held)
            tokens = tokens_of(counts)
            size = ROWS * 160
            return (
                kind,
                lambda runner: np.concatenate(runner.prefill(tokens, num_tokens=size)),
                counts,
            )
        if kind == "stage":
            tokens, kept = tokens_of([3] * ROWS), rng.integers(0, 4, ROWS)
            return kind, lambda runner: np.concatenate(runner.stage(tokens, kept)), kept
        tokens = tokens_of([1 + DRAFTS] * ROWS)
        sampling = ds.make_sampling(ROWS)

        def serve(runner):
            output = runner.serve(tokens, [len(one) for one in tokens], sampling)
            return output.columns

        return kind, serve, None

    for number in range(steps):
        kind, step, added = random_step()
        expected = step(alone)
        if added is None:
            added = expected[:, 1 + DRAFTS]
        held += added
        for name, runner in others.items():
            result = step(runner)
            mine = found[name]
            if expected.dtype.kind == "f":
                off = float(np.max(np.abs(result - expected), initial=0))
                mine["logits_off"] = max(mine.get("logits_off", 0.0), off)
                same = np.array_equal(np.argmax(result, axis=-1), np.argmax(expected, axis=-1))
            else:
                same = np.array_equal(result, expected)
            mine.setdefault("different", [])
            if not same:
                mine["different"].append(f"{number} {kind}")
    for name, runner in others.items():
        found[name] |= compare_stored(alone.cache, runner.cache, names[name], held)
        found[name]["held"] = held.tolist()
    return found


def compare_stored(alone, split, mesh, lengths):
    """Live entries, read through both tables, and the bytes that a device holds of blocks."""
    expected, mine = read_blocks(alone, shards=1), read_blocks(split, shards=mesh.shape["data"])
    off = 0.0
    for attn, pool in expected.items():
        live = lengths // pool.schema.compression_ratio
        pairs = zip(jax.tree.leaves(pool), jax.tree.leaves(mine[attn]), strict=True)
        for one, other in pairs:
            for slot, count in enumerate(live):
                a, b = (
                    plane[:, slot].reshape(plane.shape[0], -1, *plane.shape[4:])[:, :count]
                    for plane in (one, other)
                )
                off = max(off, float(np.abs(a - b).max(initial=0)))
    leaves = jax.tree.leaves(split.paged)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    whole = sum(leaf.nbytes for leaf in leaves) // mesh.shape["data"]
    return {"stored_off": off, "share_of_blocks": whole / held}


def check_first_layer(name):
    """How many values of a first layer's blocks differ from those of one device, and how far.

    Its input is the embedding, so that only roundings of f32 sums differ: the order of a CPU's sums
    depends on the number of rows. Differences are in steps of the stored codes.
    """
    config = smallest()
    params = ds.init_params(config, jax.random.key(0))
    mesh = mesh_of(name)
    stored = []
    for where in (None, mesh):
        runner = Runner(
            config, params, where, cache_format="fp8_ue8m0", context=CONTEXT, split=where is mesh
        )
        rng = np.random.default_rng(0)
        for _ in range(2):
            tokens = rng.integers(0, config.vocab_size, (ROWS, 140)).tolist()
            runner.prefill(tokens, num_tokens=ROWS * 140)
        shards = 1 if where is None else mesh.shape["data"]
        stored.append(read_blocks(runner.cache, shards=shards)["csa"])
    codes = [
        [codes_of(np.asarray(leaf)[:, :, :2]) for leaf in jax.tree.leaves(one)] for one in stored
    ]
    steps = np.concatenate([np.abs(a - b).ravel() for a, b in zip(*codes, strict=True)])
    return {"share": float(np.mean(steps > 0)), "most": int(steps.max())}


def codes_of(stored):
    """The bits of values as whole numbers, of which neighbours of one sign are neighbours too."""
    return stored.view(f"u{stored.dtype.itemsize}").astype(np.int64)


def find_wrong_device(mesh):
    """What `verify_cache` says of a table that has a request's first two blocks in turn."""
    config = one_layer(ds.AttentionType.HCA)
    sizes = {"max_requests": ROWS, "max_context_tokens": CONTEXT, "cache_format": "f32"}
    cache = ds.init_cache(config, **sizes, mesh=mesh, split_cache=True)
    assert not ds.allocator.verify_cache(cache).problems
    table = np.array(cache.block_table)
    table[-1, :2] = table[-1, 1::-1]
    cache = dataclasses.replace(cache, block_table=put(table, mesh))
    return [str(one.message) for one in ds.allocator.verify_cache(cache).problems]
