"""Tries bad arguments on every public function, and looks for what that has changed."""

import jax
import numpy as np

from helpers import bad_inputs, targets
from helpers.serving import rows_of, run_to_end

LEFT_OUT = {
    "CachedRequest": "tests/dsv4_jax/serving/test_hand_over.py",
    "DSV4Config": "its fields are those of a file: tests/dsv4_jax/config",
    "load_checkpoint": "files: tests/dsv4_jax/checkpoint",
    "save_checkpoint": "files: tests/dsv4_jax/checkpoint",
    "inspect": "tests/dsv4_jax/test_inspection.py",
    "jit_decode_step": "inside jit values are masked: nobody hears",
    "jit_decode_loop": "inside jit",
    "jit_prefill": "inside jit",
    "LayerCacheHandle": "a pytree, made by ModelCache.layer",
    "OriginalHandle": "a pytree, made by acquire; its methods check shapes: test_handle",
    "TokenStream": "made by Engine.stream",
    "Grammar": "tests/dsv4_jax/serving/test_grammars.py",
    "Engine.submit_checked": "takes what AsyncEngine has checked by check_request",
    "AsyncStream": "made by AsyncEngine.submit",
    "read_batches": "takes streams of AsyncEngine",
    **dict.fromkeys(
        ("CacheError", "EngineClosedError", "QueueFullError", "RequestFailedError",
         "SlowReaderError"),
        "raised",
    ),
    **dict.fromkeys(
        ("ModelCache", "Sampling", "StepInput", "NewTokens", "PagedKVPool", "Projections", "Staged",
         "SlotChanges", "SnapshotPlan", "SnapshotStore", "StateCachePool"),
        "a pytree: JAX rebuilds it around tracers, so who takes it checks it",
    ),
    **dict.fromkeys(
        ("ClassicalView", "IndexerView", "SWAView", "LayerCacheSchema", "Ledger", "PoolPlan",
         "Problem", "Report", "Seals", "Completion", "Token", "TokenLogprobs",
         "Metrics"),
        "a result",
    ),
}  # fmt: skip
"""Public names without arguments of their own to check, and why."""

GOOD = {"prompt": [5, 6, 7], "max_new_tokens": 3, "temperature": 1.0, "seed": 3,
        "stop_token_ids": ()}  # fmt: skip


def state_of(engine):
    """All that a call could change on the host, and which arrays the device has."""
    loop = engine.loop
    return (
        repr(engine.metrics),
        engine.next_id,
        list(engine.requests),
        [one.request_id for one in loop.queue.waiting],
        list(loop.queue.running),
        state_of_manager(loop.shards.managers[0]),
        [id(leaf) for leaf in jax.tree.leaves((engine.cache, engine.loop.runner.devices.store))],
    )


def state_of_manager(manager):
    return (
        manager.length_tokens.tobytes(),
        manager.block_table.tobytes(),
        list(manager._free_slots),
        sorted(manager._blocks.free),
        manager._slot_generations.tobytes(),
        manager.prefixes.slots,
        len(manager.prefixes.tree.nodes),
    )


def good_answer(engine):
    """Tokens of a good request, and every byte that it can read before its last step."""
    request_id = engine.submit(**GOOD)
    while engine.requests[request_id].num_drawn < 2:
        engine.step()
    rows = [
        (name, np.asarray(rows).tobytes()) for name, rows in rows_of(engine, request_id).items()
    ]
    (done,) = run_to_end(engine, request_id)
    return done, rows


def search(count, seed, engine, manager, *, every):
    """Tries `count` bad arguments; a list of what was wrong."""
    expected = good_answer(engine)
    request_id = engine.submit([1, 2], max_new_tokens=5)
    slot = manager.admit(100)
    functions = targets.of_functions()
    methods = targets.of_engine(engine, request_id) + targets.of_manager(manager, slot)
    before, held, wrong = state_of(engine), state_of_manager(manager), []
    for number, case in enumerate(bad_inputs.cases(functions + methods, count, seed)):
        target, name, value, fragment = case
        problem = bad_inputs.try_one(target, name, value, fragment)
        if problem is None and (state_of(engine), state_of_manager(manager)) != (before, held):
            problem = "has changed the engine or the manager"
            before, held = state_of(engine), state_of_manager(manager)
        if problem is not None:
            wrong.append(f"{target.name}({name}={repr(value)[:60]}): {problem}")
        if number % every == every - 1:
            engine.cancel(request_id)
            engine.completion(request_id)
            if good_answer(engine) != expected:
                wrong.append(f"{target.name}({name}=...): another answer to a good request")
            request_id = engine.submit([1, 2], max_new_tokens=5)
            fresh = targets.of_engine(engine, request_id) + methods[-9:]
            for old, new in zip(methods, fresh, strict=True):
                old.good.update(new.good), old.kinds.update(new.kinds)
            before = state_of(engine)
    manager.release(slot)
    engine.cancel(request_id)
    engine.completion(request_id)
    return wrong
