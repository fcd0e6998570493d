"""`read_state`: what it says is what the engine holds, it is bounded, and it changes nothing."""

import asyncio
import json

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import AsyncEngine, EngineClosedError, engine_state
from dsv4_jax.serving.engine_state import read_state
from helpers.serve import warm_engine
from helpers.serving import run_to_end


@pytest.fixture(scope="module")
def engine():
    return warm_engine(number=2)


def submit(engine, length, **fields):
    settings = {"max_new_tokens": 300, "stop_token_ids": ()} | fields
    return engine.submit(list(np.arange(length) % 200), **settings)


def end_all(engine):
    for request_id in list(engine.requests):
        engine.cancel(request_id)
        engine.completion(request_id)


def test_an_idle_engine_holds_nothing(engine):
    state = read_state(engine)
    assert state["requests"] == []
    assert state["sizes"]["slots"] == 8
    assert state["sizes"]["draft_tokens"] == 0
    assert state["drafted_at"] == state["accepted_at"] == {}
    assert state["sizes"]["families"] == {
        "csa": {"layers": 1, "tokens_of_an_entry": 4, "entries_of_a_block": 32,
                "ring_tokens": state["sizes"]["families"]["csa"]["ring_tokens"]}
    }  # fmt: skip
    assert state["counters"]["used_blocks"] == 0
    assert json.loads(json.dumps(state)) == state


@pytest.mark.slow
def test_requests_their_blocks_and_shared_prefixes(engine):
    """Two of one prompt, one of another, and more than there are slots for."""
    first = submit(engine, 300)
    while engine.requests[first].num_drawn < 1:
        engine.step()
    second = submit(engine, 300)
    fork = engine.fork(first, seed=4)
    others = [engine.submit([7] * 20, max_new_tokens=99, stop_token_ids=()) for _ in range(7)]
    engine.step()
    state = read_state(engine)
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    by_id = {one["id"]: one for one in state["requests"]}
    assert list(by_id) == [first, second, fork, *others]
    manager = engine.loop.shards.managers[0]
    for request_id, one in by_id.items():
        request = engine.requests[request_id]
        assert one["is_running"] == (request.slot >= 0)
        assert (one["prompt_tokens"], one["drawn_tokens"], one["hit_tokens"]) == (
            request.prompt_tokens, request.num_drawn, request.hit_tokens,
        )  # fmt: skip
        assert one["most_tokens"] == request.prompt_tokens + request.sampling.max_new_tokens
        if request.slot >= 0:
            table = manager.block_table[request.slot]
            assert one["blocks"] == table[table >= 0].tolist()
            assert one["held_tokens"] == manager.length_tokens[request.slot]
            assert one["blocks_left_out"] == 0
    assert [one["is_running"] for one in state["requests"]] == [True] * 8 + [False] * 2
    shared = by_id[second]["hit_tokens"] // 128
    assert shared == 2
    assert by_id[first]["block_users"][:2] == [3, 3]
    assert by_id[second]["block_users"][:2] == [3, 3]
    assert by_id[first]["block_users"][2:] == [1] * len(by_id[first]["block_users"][2:])
    root, child = state["prefixes"][:2]
    assert (root["parent"], root["users"], root["tokens"]) == (-1, 3, 128)
    assert (child["parent"], child["users"], child["tokens"], child["resumes"]) == (0, 3, 256, True)
    assert [root["block"], child["block"]] == by_id[first]["blocks"][:2]
    assert state["prefixes_left_out"] == 0
    end_all(engine)
    after = read_state(engine)
    assert after["requests"] == []
    assert [one["users"] for one in after["prefixes"]] == [0] * len(after["prefixes"])
    assert len(after["prefixes"]) == manager.prefixes.tree.num_nodes > 0


def test_looking_changes_no_answer(engine):
    asked = {"max_new_tokens": 40, "temperature": 0.9, "stop_token_ids": ()}
    (expected,) = run_to_end(engine, engine.submit([3] * 150, **asked))
    request = engine.submit([3] * 150, **asked)
    while engine.requests[request].finish_reason is None:
        read_state(engine)
        engine.step()
    assert engine.completion(request).token_ids == expected.token_ids


def test_its_size_is_bounded(engine, monkeypatch):
    ids = [submit(engine, 400, salt=str(i)) for i in range(12)]
    for _ in range(60):
        engine.step()
    whole = read_state(engine)
    monkeypatch.setattr(engine_state, "MAX_REQUESTS", 5)
    monkeypatch.setattr(engine_state, "MAX_BLOCKS", 2)
    monkeypatch.setattr(engine_state, "MAX_NODES", 7)
    state = read_state(engine)
    assert [one["id"] for one in state["requests"]] == ids[:5]
    assert state["requests_left_out"] == 7
    for one, more in zip(state["requests"], whole["requests"], strict=False):
        assert one["blocks"] == more["blocks"][:2]
        assert one["blocks_left_out"] == len(more["blocks"]) - 2
    assert len(state["prefixes"]) == 7
    assert state["prefixes_left_out"] == len(whole["prefixes"]) + whole["prefixes_left_out"] - 7
    for number, one in enumerate(state["prefixes"]):
        assert one["parent"] < number
        if one["parent"] >= 0:
            assert state["prefixes"][one["parent"]]["tokens"] == one["tokens"] - 128
    end_all(engine)


def test_a_step_that_raised_is_settled_first(engine, monkeypatch):
    request = submit(engine, 50)
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.loop.runner, "run", None)
        with pytest.raises(TypeError):
            engine.step()
    state = read_state(engine)
    assert [one["is_running"] for one in state["requests"]] == [False]
    assert state["counters"]["used_blocks"] == 0
    engine.step()
    assert read_state(engine)["requests"][0]["is_running"]
    assert read_state(engine)["requests"][0]["id"] == request
    end_all(engine)


@pytest.mark.slow
def test_it_is_read_between_steps_by_the_thread_that_steps(engine):
    async def main():
        async with AsyncEngine(engine) as shared:
            assert (await shared.state())["requests"] == []
            stream = shared.submit([1] * 130, max_new_tokens=300, stop_token_ids=())
            held = []
            async for _ in stream:
                (one,) = (await shared.state())["requests"] or [{}]
                held += [one["held_tokens"]] if one else []
            assert held == sorted(held)
            assert len(set(held)) > 20
            looks = [asyncio.ensure_future(shared.state()) for _ in range(20)]
            looks[3].cancel()
            await asyncio.sleep(0)
            shared.stop()
            seen = await asyncio.gather(*looks, return_exceptions=True)
            assert isinstance(seen[3], asyncio.CancelledError)
            assert all(isinstance(one, dict | EngineClosedError) for one in seen[:3] + seen[4:])
        with pytest.raises(EngineClosedError):
            await shared.state()

    asyncio.run(main())


def test_two_threads_cannot_look_at_once(engine):
    with engine.call_lock.lock, pytest.raises(RuntimeError, match="one call at a time"):
        read_state(engine)


def test_every_family_of_a_model_is_described():
    engine = ds.Engine.from_checkpoint(ds.SHIPPED_CHECKPOINT, max_requests=2, progress=False)
    sizes = read_state(engine)["sizes"]
    assert {name: one["layers"] for name, one in sizes["families"].items()} == {
        "swa": 1, "csa": 3, "hca": 2,
    }  # fmt: skip
    assert sizes["unit_bytes"] == {
        family: unit.num_bytes for family, unit in engine.loop.runner.unit_bytes.items()
    }
