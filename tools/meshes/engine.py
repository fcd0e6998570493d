"""An engine on meshes: for each the greedy tokens of a few prompts, what happened in random lives,
and what `verify` found of planted damage.

A life raises where a request does not get, to the bit, what the same mesh gives it alone.
"""

import dataclasses
import tempfile

import jax
import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

import dsv4_jax as ds
from helpers import serving, v41_cache
from helpers.engine_life import Life
from tools.meshes.harness import mesh_of

PROMPT_TOKENS = (5, 150, 37, 1, 90, 61)
FEW_BLOCKS, FEW_SNAPSHOTS = 4, 3
OPTIONS = {}
"""Further arguments of every engine."""


def add_arguments(parser):
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the lives")
    parser.add_argument("--events", type=int, default=0, help="of each life")
    parser.add_argument("--scarce", action="store_true", help="few blocks, and nothing poisoned")
    parser.add_argument("--damage", action="store_true", help="plant some, and verify")
    parser.add_argument("--everywhere", action="store_true", help="damage to every array")
    parser.add_argument("--alone", action="store_true", help="greedy tokens of one device too")
    parser.add_argument("--split", action="store_true", help="deal blocks over model")
    parser.add_argument("--moves", action="store_true", help="requests leave, and come again")
    parser.add_argument("--host", action="store_true", help="all that is unused goes to the host")
    parser.add_argument("--disk", action="store_true", help="and from there to a disk alone")
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--small", action="store_true", help="one layer, no drafts")
    models.add_argument("--v41", action="store_true", help="a DeepSeek-V4.1 model with drafts")


def check_all(arguments):
    if arguments.small:
        use_small_model()
    if arguments.v41:
        use_v41_model()
    if arguments.host:
        OPTIONS["host_cache_bytes"] = 10**6
    if arguments.disk:
        OPTIONS["disk_cache_bytes"] = 10**7
    if arguments.split:
        OPTIONS["split_cache"] = True
    found = {name: check(name, arguments) for name in arguments.meshes}
    if arguments.alone:
        found["one device"] = greedy(engine_on(None))
    if arguments.v41:
        meshes = {name: mesh_of(name) for name in arguments.meshes}
        found["resting"] = {name: resting(mesh) for name, mesh in meshes.items()}
        found["resting"]["one device"] = resting(None)
    return found


def resting(mesh):
    """Greedy tokens where upper layers rest in some steps, and for how many tokens they did."""
    engine = engine_on(mesh, prefill_tokens=(64,), decode_tokens=None)
    return greedy(engine), engine.metrics.rested_tokens


def use_small_model():
    """One compressed layer and no drafts, which compiles in a few seconds; it divides by eight."""
    sizes = {"num_attention_heads": 8, "o_groups": 8}
    config, params = serving.one_layer(hc_sinkhorn_iters=1, num_mtp_layers=0, **sizes)
    serving.CONFIG, serving.params = config, lambda: params
    serving.SIZES["draft_tokens"] = 0


def use_v41_model():
    """Every kind of layer, tables and two stages."""
    config, params = v41_cache.model()
    serving.CONFIG, serving.params = config, lambda: params
    serving.SIZES["cache_format"] = "f32"


def engine_on(mesh, **changes):
    """An engine of `helpers.serving` with two slots on each data shard, or on one device."""
    shards = 1 if mesh is None else mesh.shape["data"]
    sizes = {"max_requests": 2 * shards, "num_snapshots": 8 * shards, "mesh": mesh}
    if "disk_cache_bytes" in OPTIONS:
        sizes["disk_cache_dir"] = tempfile.mkdtemp()  # each has a disk of its own
    return serving.make_engine(**(sizes | OPTIONS | changes))


def greedy(engine, *, together=True):
    """Tokens of a few prompts, all at once or one after the other."""
    rng = np.random.default_rng(0)
    texts = [serving.prompt(rng, length) for length in PROMPT_TOKENS]
    calls = [texts] if together else [[text] for text in texts]
    options = {"max_new_tokens": 12, "stop_token_ids": ()}
    return [one.token_ids for call in calls for one in engine.generate(call, **options)]


def lives(mesh, plain, *, seeds, events, scarce, moves=False):
    """What happened in random lives, and on which data shards requests ran."""
    counts = []
    for seed in seeds:
        few = {"num_blocks": FEW_BLOCKS, "num_snapshots": FEW_SNAPSHOTS}
        engine = _scarce_engine(mesh, few) if scarce else engine_on(mesh, debug=True)
        life, most, moved = Life(engine, seed, plain), [0] * mesh.shape["data"], 0
        for number in range(events):
            life.event()
            if moves and number % 5 == 0:
                moved += life.move(life)
            for manager in engine.loop.shards.managers if engine.loop.host else ():
                manager.evict(manager.num_blocks)
            if "disk_cache_bytes" in OPTIONS and number % 2:
                drop_host_pages(engine)
            now = [shard.running for shard in engine.metrics.data_shards]
            most = [max(pair) for pair in zip(most, now, strict=True)]
            check_metrics(engine)
        life.finish()
        metrics = engine.metrics
        names = ("hit_tokens", "accepted_tokens", "preempted", "evicted_blocks", "snapshots")
        names += ("host_hit_tokens", "disk_hit_tokens")
        counts.append(life.counts | {name: getattr(metrics, name) for name in names})
        counts[-1] |= {"most_running": most, "moved": moved}
    return counts


def drop_host_pages(engine):
    """What is not on its way is on the disk alone, or gone."""
    tier = engine.loop.host.tier
    for page in tier.pages:
        if not page.slab.holders:
            tier.drop(page)


def _scarce_engine(mesh, few):
    """An engine with so few blocks and snapshots on each data shard."""
    if not OPTIONS.get("split_cache"):
        return serving.limit(engine_on(mesh), **few)
    shards, devices = mesh.shape["data"], mesh.shape["model"]
    blocks = -(-few["num_blocks"] // devices) * devices * shards  # each device has its own ids
    engine = engine_on(mesh, num_blocks=blocks)
    return serving.limit(engine, num_snapshots=few["num_snapshots"])


def check_metrics(engine):
    """What holds now on each data shard adds up to what holds on all."""
    metrics, shards = engine.metrics, engine.metrics.data_shards
    for name in ("cached_blocks", "free_blocks", "used_blocks", "running"):
        assert getattr(metrics, name) == sum(getattr(one, name) for one in shards), name
    for one, manager in zip(shards, engine.loop.shards.managers, strict=True):
        assert one.used_blocks + one.free_blocks + one.cached_blocks == manager.plan.num_blocks
    registry = CollectorRegistry()
    registry.register(ds.serving.MetricsCollector(metrics))
    text = generate_latest(registry).decode()
    for number, one in enumerate(shards):
        assert f'dsv4_data_shards_used_blocks{{data="{number}"}} {float(one.used_blocks)}' in text


def outgrow(mesh, plain):
    """Two requests on each data shard outgrow few blocks: how many gave way, and who got others."""
    engine = _scarce_engine(mesh, {"num_blocks": FEW_BLOCKS, "num_snapshots": FEW_SNAPSHOTS})
    rng, options = np.random.default_rng(2), {"max_new_tokens": 190, "stop_token_ids": ()}
    texts = [serving.prompt(rng, 100) for _ in range(2 * mesh.shape["data"])]
    together = [one.token_ids for one in engine.generate(texts, **options)]
    alone = [plain.generate([text], **options)[0].token_ids for text in texts]
    wrong = [number for number, tokens in enumerate(together) if tokens != alone[number]]
    return {"preempted": engine.metrics.preempted, "wrong": wrong}


def damage(mesh):
    """Problems after a bit is changed on the last data shard, then on one device of it."""
    engine, rng = engine_on(mesh), np.random.default_rng(1)
    length = 270 if OPTIONS.get("split_cache") else 140  # two full blocks
    for _ in range(2 * mesh.shape["data"]):
        engine.submit(serving.prompt(rng, length), max_new_tokens=60, stop_token_ids=())
    while min(engine.loop.shards.length_tokens) < length:
        engine.step()
    found = {"before": [str(one) for one in _verify(engine)]}
    shard = mesh.shape["data"] - 1
    manager = engine.loop.shards.managers[shard]
    block = int(manager.block_table[0, 0])
    number = shard * manager.num_blocks + block
    devices = mesh.devices[shard].tolist()
    found["one_shard"] = _changed(engine, number, devices)
    found["block"] = block
    if OPTIONS.get("split_cache"):  # the second block lies on the second device, and nowhere else
        second = int(manager.block_table[0, 1])
        number = shard * manager.num_blocks + second
        found["second_block"] = second
        found["on_others"] = _changed(engine, number, [devices[0], *devices[2:]])
        found["on_its_own"] = _changed(engine, number, devices[1:2])
    elif len(devices) > 1:
        found["one_replica"] = _changed(engine, number, devices[-1:])
    return found


def _verify(engine):
    """Problems now; what was sealed is what the first call found."""
    report = engine.verify()
    engine.loop.seals = engine.loop.seals or report.seals
    return report.problems


def _changed(engine, block, devices):
    """What `verify` finds where these devices have another value in a block; then it is undone."""
    arrays, cache = engine.loop.runner.devices, engine.cache
    (attn, pool), *_ = cache.paged.items()
    name = next(iter(pool.entries))
    plane = pool.entries[name]
    parts = []
    for part in plane.addressable_shards:
        value = np.array(part.data)
        start = part.index[1].start or 0
        if part.device in devices and 0 <= block - start < value.shape[1]:
            value[:, block - start].view(np.uint8)[0, 0, 0] ^= 1
        parts.append(jax.device_put(value, part.device))
    wrong = jax.make_array_from_single_device_arrays(plane.shape, plane.sharding, parts)
    entries = {**pool.entries, name: wrong}
    paged = {**cache.paged, attn: dataclasses.replace(pool, entries=entries)}
    arrays.cache = dataclasses.replace(cache, paged=paged)
    problems = _verify(engine)
    arrays.cache = cache
    assert not _verify(engine)
    return [f"{one.kind}: {one.where}" for one in problems]


def damage_everywhere(mesh):
    """Of every array of a cache and its snapshots: what is found if it changes.

    A bit of each value of the last shard, on all its devices ("shard") or the last one ("replica").
    """
    engine, rng = engine_on(mesh), np.random.default_rng(1)
    head = serving.prompt(rng, 130)  # a snapshot is kept after its first 128
    for _ in range(2 * mesh.shape["data"]):
        engine.submit(head + serving.prompt(rng, 13), max_new_tokens=60, stop_token_ids=())
    while min(engine.loop.shards.length_tokens) < 147:  # all kinds of windows are open
        engine.step()
    assert not _verify(engine)
    arrays = engine.loop.runner.devices
    last = mesh.devices[-1].tolist()
    found = {}
    for room in ("cache", "store"):
        whole = getattr(arrays, room)
        paths, tree = jax.tree_util.tree_flatten_with_path(whole)
        for number, (path, leaf) in enumerate(paths):
            name = room + jax.tree_util.keystr(path)
            for kind, devices in (("shard", last), ("replica", last[-1:])):
                leaves = [leaf for _, leaf in paths]
                leaves[number] = _flipped(leaf, devices)
                setattr(arrays, room, jax.tree.unflatten(tree, leaves))
                kinds = [(one.kind, one.where.split(",")[0]) for one in _verify(engine)]
                found.setdefault(name, {})[kind] = sorted(set(kinds))
                setattr(arrays, room, whole)
    assert not _verify(engine)
    return found


def _flipped(leaf, devices):
    """An array with the lowest bit of every value changed on these devices."""
    parts = []
    for part in leaf.addressable_shards:
        value = np.array(part.data)
        if part.device in devices:
            value.view(f"u{value.dtype.itemsize}")[...] ^= 1
        parts.append(jax.device_put(value, part.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def check(name, arguments):
    """What happened on a mesh "DATAxMODEL"."""
    mesh = mesh_of(name)
    plain = serving.limit(engine_on(mesh, overlap=False), num_snapshots=0)
    found = {"greedy": greedy(serving.limit(engine_on(mesh), num_snapshots=0)), "lives": []}
    if arguments.events:
        kinds = {"seeds": arguments.seeds, "events": arguments.events, "moves": arguments.moves}
        found["lives"] = lives(mesh, plain, scarce=arguments.scarce, **kinds)
    if arguments.scarce:
        found["outgrown"] = outgrow(mesh, plain)
    if arguments.damage:
        found["damage"] = damage(mesh)
    if arguments.everywhere:
        found["everywhere"] = damage_everywhere(mesh)
    return found
