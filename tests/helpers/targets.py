"""Every public function that takes Python arguments, with the kinds of them, for `bad_inputs`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as ds
from dsv4_jax.allocator.pending_changes import idle_changes
from dsv4_jax.cache.new_tokens import empty_staged
from dsv4_jax.serving.engine import MAX_SAMPLES
from dsv4_jax.serving.requests.prompts import MAX_PROMPTS, MAX_SALT_CHARS
from dsv4_jax.serving.requests.text import load_tokenizer
from dsv4_jax.step.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKENS,
)
from helpers import bad_inputs as bad
from helpers import original_targets
from helpers.bad_inputs import Target

CONFIG = dataclasses.replace(
    ds.DSV4Config.tiny(),
    layer_types=(ds.AttentionType.CSA,),
    router_types=(ds.RouterType.LEARNED,),
    num_mtp_layers=0,
    hc_sinkhorn_iters=1,
)  # blocks of 128 tokens, 32 entries each
SIZES = {"max_requests": 3, "max_context_tokens": 256}
NUM_SLOTS, WIDTH, NUM_BLOCKS, NUM_SNAPSHOTS = 3, 2, 6, 4
VOCAB = CONFIG.vocab_size

SAMPLING = {
    "max_new_tokens": bad.integer(1),
    "temperature": bad.number(0),
    "top_k": bad.integer(0),
    "top_p": bad.number(0, 1, above=True),
    "min_p": bad.number(0, 1),
    "logit_bias": bad.biases(MAX_LOGIT_BIAS),
    "presence_penalty": bad.number(-2, 2),
    "frequency_penalty": bad.number(-2, 2),
    "logprobs": bad.integer(0, MAX_LOGPROBS, optional=True),
    "seed": bad.scalar_only(bad.integer(high=None)),
    "stop_token_ids": bad.list_of(bad.integer(0), limit=MAX_STOP_TOKENS, good=1, optional=True),
    "stop_texts": bad.list_of(bad.text(MAX_STOP_CHARS), limit=MAX_STOP_TEXTS, good="end"),
    "grammar": bad.instance(optional=True),
}
NEED_ENGINE = (
    "max_new_tokens", "stop_texts", "presence_penalty", "frequency_penalty", "logprobs", "grammar",
)  # fmt: skip
DRAWS = {name: SAMPLING[name] for name in SAMPLING if name not in NEED_ENGINE}
SEEDS = bad.seeds(2)

FORMAT = {"cache_format": bad.choice(optional=True)}
COUNTS = {
    "max_requests": bad.integer(1),
    "max_context_tokens": bad.integer(1),
    "num_blocks": bad.integer(1, optional=True),
}
OF_ENGINES = ("config", "params", "tokenizer")
ENGINE = COUNTS | FORMAT | {
    "config": bad.instance(),
    "params": bad.instance(),
    "mesh": bad.instance(optional=True),
    "split_cache": bad.flag(),
    "prefill_tokens": bad.list_of(bad.integer(1), limit=64, good=8, optional=True, empty=False),
    "decode_tokens": bad.integer(1, optional=True),
    "decode_batch_sizes": bad.list_of(bad.integer(1), limit=64, good=8, optional=True, empty=False),
    "max_step_ms": bad.number(1, 600_000, optional=True),
    "draft_tokens": bad.integer(0, 16),
    "draft_cut": bad.flag(),
    "steps_per_call": bad.integer(1, 64),
    "grammars": bad.flag(),
    "activations": bad.choice(),
    "prefill_activations": bad.choice(optional=True),
    "num_snapshots": bad.integer(0, optional=True),
    "memory_bytes": bad.integer(1000, None, optional=True),
    "gpu_memory_fraction": bad.number(0, 1, above=True, optional=True),
    "engram_tables": bad.choice(),
    "unroll": bad.flag(optional=True),
    "progress": bad.flag(),
    "debug": bad.flag(),
    "overlap": bad.flag(),
    "idea": bad.instance(optional=True), "host_cache_bytes": bad.byte_count(0, 2**62),
    "disk_cache_dir": bad.folder(optional=True), "disk_cache_bytes": bad.byte_count(0, 2**62),
    "tokenizer": bad.instance(optional=True),
}  # fmt: skip
OPTIONS = {name: kind for name, kind in ENGINE.items() if name not in OF_ENGINES}
OPTIONS |= {"memory_bytes": bad.integer(0, 2**62, optional=True)}  # whatever an engine needs


@functools.cache
def params():
    return ds.init_params(CONFIG, jax.random.key(0))


def make_engine(**changes):
    """Its one program has no masks of grammars; `test_engine.py` takes it too."""
    sizes = {
        "prefill_tokens": (24,), "decode_tokens": 24, "cache_format": "f32",
        "num_snapshots": NUM_SNAPSHOTS, "grammars": False,
    }  # fmt: skip
    tokenizer = load_tokenizer(ds.SHIPPED_CHECKPOINT)
    return ds.Engine(CONFIG, params(), **({"tokenizer": tokenizer} | SIZES | sizes | changes))


def of_engine(engine, request_id):
    """Methods of an engine in which `request_id` is unfinished."""
    request = {"request_id": bad.integer(0, request_id)}
    id_named = {"request_id": request_id}
    prompts = bad.list_of(bad.ids(VOCAB), limit=MAX_PROMPTS, good=[1])
    settings = SAMPLING | {"sampling": bad.scalar_only(bad.instance(optional=True))}
    both = {"prompts": [[1], [2]]}
    found = engine.requests.get(request_id)
    cached = None
    if found is not None and found.finish_reason is None:
        cached = engine.snapshot(request_id)
    return [
        Target(
            "Engine.submit", engine.submit, {"prompt": [1]},
            settings | {
                "prompt": bad.ids(VOCAB), "salt": bad.text(MAX_SALT_CHARS),
                "speculate": bad.flag(),
            },
        ),
        Target(
            "Engine.submit_many", engine.submit_many, {"prompt": [1], "n": 2},
            settings | {
                "prompt": bad.ids(VOCAB), "salt": bad.text(MAX_SALT_CHARS),
                "speculate": bad.flag(), "n": bad.integer(1, MAX_SAMPLES),
            },
        ),
        Target("Engine.submit_many seeds", engine.submit_many, {"prompt": [1], "n": 2},
               {"seed": SEEDS}),
        Target("Engine.generate", engine.generate, both, settings | {"prompts": prompts}),
        Target("Engine.generate seeds", engine.generate, both, {"seed": SEEDS}),
        Target("Engine.fork", engine.fork, id_named | {"seed": 1},
               request | {"seed": SAMPLING["seed"]}),
        Target("Engine.cancel", engine.cancel, id_named, request),
        Target("Engine.snapshot", engine.snapshot, id_named, request),
        Target("Engine.restore", engine.restore, {"cached": cached},
               {"cached": bad.instance()}),
        Target("Engine.preempt", engine.preempt, id_named, request),
        Target("Engine.completion", engine.completion, id_named, request),
        Target(
            "Engine.stream", engine.stream, {"request_ids": request_id},
            {"request_ids": request["request_id"]}, {"request_ids": ("request_id",)},
            star="request_ids",
        ),
    ]  # fmt: skip


def of_manager(manager, slot):
    """Methods of a manager in which `slot` is held, for 100 tokens of 256."""
    tokens = {"max_tokens": bad.integer(1, 256)}
    prefix = {
        "token_ids": lambda rng: bad.pick(
            rng, [one for one in bad.no_number(rng) if not isinstance(one[0], np.ndarray)]
        ),
        "salt": lambda rng: bad.pick(
            rng, [one for one in bad.no_number(rng) if not isinstance(one[0], bytes)]
        ),
    }
    held = {"slot": bad.integer(slot, slot)}
    return [
        Target("KVCacheManager.admit", manager.admit, {"max_tokens": 9}, tokens | prefix),
        Target(
            "KVCacheManager.can_admit", manager.can_admit, {"max_tokens": 9},
            tokens | prefix | {"spare_blocks": bad.integer(0)},
        ),
        Target("KVCacheManager.extend", manager.extend, {"slot": slot, "max_tokens": 9},
               held | tokens),
        Target(
            "KVCacheManager.advance", manager.advance, {"slot": slot, "num_tokens": 1},
            held | {"num_tokens": bad.integer(0, 128)},
        ),
        Target("KVCacheManager.fork", manager.fork, {"slot": slot, "max_tokens": 9}, held | tokens),
        Target("KVCacheManager.release", manager.release, {"slot": slot}, held),
        Target(
            "KVCacheManager.share", manager.share,
            {"slot": slot, "token_ids": np.zeros(1, np.int32)},
            held | {"token_ids": prefix["token_ids"]},
        ),
        Target("KVCacheManager.evict", manager.evict, {"num_blocks": 0},
               {"num_blocks": bad.integer(0)}, free=("room",)),  # of those who copy what leaves
        Target(
            "PoolPlan.blocks_needed", manager.plan.blocks_needed, {"tokens": 1},
            {"tokens": bad.integer(1, 256), "in_flight_tokens": bad.integer(0, None)},
            {"tokens": ("max_tokens",), "in_flight_tokens": ("max_tokens",)},
        ),
    ]  # fmt: skip


def of_functions():
    """Functions and constructors; what they get is refused before anything runs."""
    cache = ds.init_cache(CONFIG, cache_format="f32", **SIZES)
    store = ds.cache.init_snapshot_store(cache, NUM_SNAPSHOTS)
    i32 = functools.partial(np.asarray, dtype=np.int32)
    sizes = {"config": CONFIG} | SIZES
    config, split = {"config": bad.instance()}, {"split_cache": bad.flag()}
    spec = ds.layer_schedule(CONFIG)[0]
    schema = cache.schemas[0]
    model = {"config": bad.instance(), "params": bad.instance()}
    forms = {"activations": bad.choice()}
    step = {
        "token_ids": i32([1, 2, 3]),
        "request_ids": i32([0, 1, 2]),
        "request_slots": i32([0, 1, 2]),
    }
    slots = bad.int_array((3,), -1, NUM_SLOTS - 1, unique=True, good=[0, 1, 2])
    step_kinds = {
        "token_ids": bad.int_array((3,), 0, VOCAB - 1),
        "request_ids": bad.int_array((3,), -1, 2, good=[0, 1, 2]),
        "request_slots": slots,
    }
    idle = idle_changes(NUM_SLOTS, WIDTH)
    stage = {"token_ids": jnp.asarray([1]), "request_ids": jnp.asarray([0])}
    call = cache.index(ds.StepInput(request_slots=jnp.asarray([0]), **stage))
    staged = ds.cache.Staged(new_tokens=empty_staged(cache.state, 1), call=call)
    sampling = ds.make_sampling(3)
    plan = ds.cache.SnapshotPlan(rows=i32([0]), ends=i32([128]), places=i32([0]))  # type: ignore
    engine_good = {"config": CONFIG, "params": params()} | SIZES

    def stepped(function, good, kinds, name):
        """A step as it is, and by the fields of its input."""

        def by_field(**fields):
            rest = {k: fields.pop(k) for k in list(fields) if k not in step}
            return function(step_input=ds.StepInput(**fields), **rest)

        arguments = {"params": params(), "cache": cache, "config": CONFIG} | good
        whole = arguments | {"step_input": ds.StepInput(**step)}
        return [
            Target(name, function, whole, model | forms | kinds | {
                "cache": bad.instance(), "step_input": bad.instance(),
            }),
            Target(f"{name} fields", by_field, arguments | step, step_kinds),
        ]  # fmt: skip

    def with_field(function, value):
        def call(**fields):
            return function(dataclasses.replace(value, **fields))

        return call

    one_of = {name: bad.int_array((3,), -1, 2) for name in ("copy_from", "copy_to", "load_slots")}
    one_of |= {name: bad.int_array((3,), -1, NUM_BLOCKS - 1) for name in ("block_from", "block_to")}
    one_of |= {"load_places": bad.int_array((3,), -1, NUM_SNAPSHOTS - 1)}
    one_of |= {"slots": slots}
    widths = {"num_layers": bad.integer(1)}
    return [
        Target("Engine", ds.Engine, engine_good, ENGINE | {"options": bad.instance(optional=True)}),
        Target("EngineOptions", ds.serving.EngineOptions, {}, OPTIONS),
        Target(
            "Engine.from_checkpoint", ds.Engine.from_checkpoint, {"path": ds.SHIPPED_CHECKPOINT},
            {
                "unroll": bad.flag(optional=True), "check_weights": bad.flag(optional=True),
                "tokenizer": bad.instance(optional=True),
                "options": bad.instance(optional=True),
                "follow_links": bad.flag(), "progress": bad.flag(),
            },
            free=("path", "revision", "weights", "dtype"),
        ),
        Target("SamplingParams", ds.SamplingParams, {}, SAMPLING),
        Target("make_sampling", ds.make_sampling, {"num_rows": 2},
               DRAWS | {"num_rows": bad.integer(1, 2**16),
                        "sampling": bad.scalar_only(bad.instance(optional=True))}),
        Target("make_sampling seeds", ds.make_sampling, {"num_rows": 2}, {"seed": SEEDS}),
        Target("init_cache", ds.init_cache, sizes,
               COUNTS | FORMAT | config | split | {"mesh": bad.instance(optional=True)}),
        Target("cache_shapes", ds.cache.cache_shapes, sizes | {"cache_format": "f32"},
               {"max_requests": bad.integer(1), "max_context_tokens": bad.integer(1)}
               | FORMAT | config | split),
        Target("plan_pools", ds.allocator.plan_pools, sizes, COUNTS | FORMAT | config | {
            "num_snapshots": ENGINE["num_snapshots"], "memory_bytes": ENGINE["memory_bytes"],
            "block_parts": bad.integer(1, 2**16)}),
        Target("KVCacheManager", ds.KVCacheManager, sizes, COUNTS | FORMAT | config | {
            "num_snapshots": ENGINE["num_snapshots"], "poison": bad.flag(),
            "block_parts": bad.integer(1, 2**16)}),
        Target("init_params", ds.init_params, {"config": CONFIG, "key": jax.random.key(0)},
               config | {"key": bad.instance(), "dtype": bad.integer(0, None)}),
        Target("make_mesh", ds.make_mesh, {}, {
            "data": bad.integer(1), "model": bad.integer(1),
            "devices": bad.list_of(bad.instance(), limit=2**16, good=jax.devices()[0],
                                   optional=True, empty=False)}),
        Target("param_shardings", ds.param_shardings, {"config": CONFIG, "mesh": ds.make_mesh()},
               config | {"mesh": bad.instance(), "params": bad.instance(optional=True)}),
        Target("cache_shardings", ds.cache_shardings, {"config": CONFIG, "mesh": ds.make_mesh()},
               config | FORMAT | split | {"mesh": bad.instance()}),
        Target("unstack_layers", ds.unstack_layers, {"params": params()},
               {"params": bad.instance(), "donate": bad.flag()}),
        Target("set_xla_flags", ds.set_xla_flags, {}, {"flags": bad.text()}),
        Target("use_compilation_cache", ds.use_compilation_cache, {},
               {"folder": lambda rng: bad.pick(rng, bad.no_text(rng))}),
        Target("forward", ds.forward,
               {"params": params(), "config": CONFIG, "token_ids": i32([[1, 2]])},
               model | FORMAT | forms | {
                   "token_ids": bad.int_array((1, 2), 0, VOCAB - 1),
                   "selector": bad.scalar_only(bad.instance(optional=True))}),
        *stepped(ds.decode_step, {}, {}, "decode_step"),
        *stepped(ds.prefill, {}, {"all_logits": bad.flag()}, "prefill"),
        *stepped(ds.stage_step, {}, {}, "stage_step"),
        *stepped(ds.decode_loop, {"sampling": sampling, "num_steps": 1},
                 {"sampling": bad.instance(), "num_steps": bad.integer(1)}, "decode_loop"),
        Target("sample", ds.sample,
               {"logits": np.zeros((3, 5), np.float32), "sampling": sampling,
                "positions": i32([1, 1, 1])},
               {"logits": bad.instance(), "sampling": bad.instance(),
                "positions": bad.scalar_only(bad.instance())}),
        Target("update_slots", ds.update_slots,
               {"cache": cache, "slots": i32([0, 1, 2]), "length_tokens": i32([0, 0, 0]),
                "block_table": np.full((3, WIDTH), -1, np.int32)},
               {"cache": bad.instance(), "slots": slots,
                "length_tokens": bad.int_array((3,), 0, 256),
                "block_table": bad.int_array((3, WIDTH), -1, NUM_BLOCKS - 1)}),
        Target("reset_slots", ds.reset_slots, {"cache": cache, "slots": i32([0])},
               {"cache": bad.instance(), "slots": bad.int_array((2,), -1, 2)}),
        Target("commit", ds.commit, {"cache": cache, "staged": staged, "num_tokens": i32([1])},
               {"cache": bad.instance(), "staged": bad.instance(),
                "num_tokens": bad.int_array((1,), 0, 1)}),
        Target("apply_changes", ds.cache.apply_changes,
               {"cache": cache, "store": store, "changes": idle},
               {"cache": bad.instance(), "store": bad.instance(), "changes": bad.instance()}),
        Target("apply_changes fields",
               with_field(functools.partial(ds.cache.apply_changes, cache, store), idle),
               {}, one_of),
        Target("save_snapshots", ds.cache.save_snapshots,
               {"store": store, "state": cache.state, "rows": None, "call": call, "plan": plan},
               {"store": bad.instance(), "call": bad.instance(), "plan": bad.instance()},
               free=("state", "rows")),
        Target("save_snapshots fields",
               with_field(
                   functools.partial(ds.cache.save_snapshots, store, cache.state, None, call),
                   plan),
               {}, {"rows": bad.int_array((1,), -1, 0), "places": bad.int_array((1,), -1, 3)}),
        Target("load_snapshots", ds.cache.load_snapshots,
               {"state": cache.state, "store": store, "slots": i32([0, 1]), "places": i32([0, 1]),
                "ends": i32([128, 128])},
               {"store": bad.instance(), "slots": bad.int_array((2,), -1, 2, unique=True),
                "places": bad.int_array((2,), -1, 3), "ends": bad.int_array((2,), -1, None)},
               free=("state",)),
        Target("init_snapshot_store", ds.cache.init_snapshot_store,
               {"cache": cache, "num_snapshots": 1},
               {"cache": bad.instance(), "num_snapshots": bad.integer(0)}),
        Target("init_paged_pool", ds.cache.init_paged_pool, {"schema": schema, "num_blocks": 1},
               widths | {"schema": bad.instance(), "num_blocks": bad.integer(1)}),
        Target("init_state_pool", ds.cache.init_state_pool, {"schema": schema, "max_requests": 1},
               widths | {"schema": bad.instance(), "max_requests": bad.integer(1)}),
        Target("build_schema", ds.cache.build_schema, {"config": CONFIG, "spec": spec},
               config | FORMAT | {"spec": bad.instance()}),
        Target("compute_block_budget", ds.cache.compute_block_budget,
               {"config": CONFIG, "schedule": (spec,), "max_context_tokens": 9,
                "max_concurrent_requests": 1},
               config | {
                   "schedule": bad.list_of(bad.instance(), limit=4096, good=spec),
                   "max_context_tokens": bad.integer(1), "max_concurrent_requests": bad.integer(1),
                   "headroom": bad.number(0)}),
        Target("family_bytes", ds.cache.family_bytes, {}, {"cache": bad.instance()}),
        Target("verify_cache", ds.allocator.verify_cache, {"cache": cache},
               {"cache": bad.instance()}
               | {name: bad.instance(optional=True) for name in ("ledger", "seals", "store")}),
        *original_targets.of_original(CONFIG, cache, step, step_kinds),
        Target("KVCacheManager.apply",
               ds.KVCacheManager(CONFIG, cache_format="f32", **SIZES).apply, {"cache": cache},
               {"cache": bad.instance(), "store": bad.instance(optional=True)}),
        Target("AsyncEngine", ds.serving.AsyncEngine, {"engine": None}, {"engine": bad.instance()},
               free=("max_waiting", "queue_timeout_s", "max_unread_tokens")),
        Target("StateCachePool.reset_slots", cache.state["csa"].reset_slots, {},
               {"slots": bad.int_array((2,), -1, 2)}),
        Target("StateCachePool.reset_slot", cache.state["csa"].reset_slot, {},
               {"slot": bad.integer(-1, 2)}),
        Target("Histogram", ds.serving.Histogram, {},
               {"bounds": bad.list_of(bad.number(), limit=1000, good=1.0, empty=False)},
               free=("counts", "total")),
        Target("Histogram.add", ds.serving.Histogram().add, {}, {"value": bad.number()}),
        Target("Histogram.quantile", ds.serving.Histogram().quantile, {},
               {"share": bad.number(0, 1)}),
        Target("MetricsCollector", ds.serving.MetricsCollector, {"metrics": ds.serving.Metrics()},
               {"metrics": bad.instance(), "prefix": bad.text(200)}),
    ]  # fmt: skip
