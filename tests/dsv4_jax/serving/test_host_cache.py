"""The host tier: whoever is evicted, moved and brought back gets what he gets alone, to the bit."""

import threading
import time

import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.allocator.block_contents import BlockContent, HashedTokens
from dsv4_jax.allocator.host_tier import HostTier
from dsv4_jax.allocator.leaving import Leaving
from dsv4_jax.cache.packed_rows import row_bytes
from dsv4_jax.runtime import Memory
from dsv4_jax.serving import sizing
from dsv4_jax.serving.device import (
    far_fetch,
    far_pages,
    host_copies,
    page_memory,
    page_moves,
    page_stores,
)
from dsv4_jax.serving.device.host_copies import HostCopies
from dsv4_jax.serving.engine_state import read_state
from dsv4_jax.serving.schedule import request_queue
from helpers import serving, slow
from helpers.engine_life import Life, alone
from helpers.serving import limit, make_engine, prompt, run_to_end, until

OPTIONS = {"max_new_tokens": 6, "stop_token_ids": ()}


def evict(engine):
    """All that no request uses leaves the device, and is on the host after it."""
    for manager in engine.loop.shards.managers:
        manager.evict(manager.num_blocks)
    settle(engine)


def settle(engine):
    host = engine.loop.host
    engine.loop.host.keep()
    while host.stores.begun:
        time.sleep(0.001)
        host.keep()


def check(engine):
    """The bound is exact, and only what is on its way is held."""
    host = engine.loop.host
    slabs = host.tier.slabs
    assert host.tier.num_bytes == sum(slab.num_bytes for slab in slabs) <= host.tier.max_bytes
    for slab in slabs:
        assert slab.num_bytes == slab.num_rows * slab.row_bytes
        assert slab.data is None or slab.data.nbytes == slab.num_bytes
        assert 0 < len(slab.pages) <= slab.num_rows
    if not host.fetches and not host.stores.begun:
        assert not any(slab.holders for slab in slabs)


class MovedLife(Life):
    """A life in which everything is evicted after every event, now and then at once."""

    def event(self):
        super().event()
        if self.rng.random() < 0.8:
            evict(self.engine)
        check(self.engine)


def live(engine, seed, count):
    life = MovedLife(engine, seed)
    for _ in range(count):
        life.event()
    life.finish()
    settle(engine)
    check(engine)
    assert not engine.loop.host.fetches
    return engine.metrics


@pytest.mark.slow
def test_whatever_is_evicted_and_brought_back_a_request_gets_what_it_gets_alone():
    metrics = live(limit(make_engine(host_cache_bytes=10**6), num_blocks=12), 1, 70)
    assert metrics.host_hit_tokens > 0
    assert metrics.host_stored_bytes >= metrics.host_loaded_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [5_000, 20_000, 60_000, 10**6])
@pytest.mark.parametrize("debug", [False, True])
def test_long_lives_with_tiny_tiers(num_bytes, debug):
    """Tiers of a page or two, of some, and of all; with few blocks; with freed bytes poisoned."""
    hits = 0
    for seed in range(3):
        if debug:
            engine = make_engine(debug=True, host_cache_bytes=num_bytes)
        else:
            engine = limit(make_engine(host_cache_bytes=num_bytes), num_blocks=6, num_snapshots=3)
        hits += live(engine, seed, 200).host_hit_tokens
    assert hits > 0 or num_bytes < 20_000


def test_a_prefix_comes_back_and_nothing_of_it_is_computed_again():
    """Its blocks and its snapshot; another salt gets none of it."""
    engine = make_engine(debug=True, host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(2), 300)
    wanted = alone(text, OPTIONS)
    assert run_to_end(engine, engine.submit(text, salt="a", **OPTIONS))[0] == wanted
    evict(engine)
    assert engine.metrics.cached_blocks == 0
    other = run_to_end(engine, engine.submit(text, salt="b", **OPTIONS))[0]
    assert (other, other.hit_tokens, engine.metrics.host_hit_tokens) == (wanted, 0, 0)
    again = run_to_end(engine, engine.submit(text, salt="a", **OPTIONS))[0]
    assert (again, again.hit_tokens) == (wanted, 256)
    assert engine.metrics.host_hit_tokens == 256
    blocks, snapshot = 2 * row_bytes(engine.cache.paged), engine.plan.pools.bytes_per_snapshot
    assert engine.metrics.host_loaded_bytes == blocks + snapshot
    assert engine.metrics.host_wait_s.count == 1


def test_the_state_of_an_engine_says_where_a_prefix_lies():
    engine = make_engine(host_cache_bytes=10**6)
    rng = np.random.default_rng(2)
    run_to_end(engine, engine.submit(prompt(rng, 520), **OPTIONS))
    assert {tuple(one["where"]) for one in read_state(engine)["prefixes"]} == {("device",)}
    engine.loop.shards.managers[0].evict(2)
    settle(engine)
    state = read_state(engine)
    shown = [(one["where"], one["parent"], one["tokens"]) for one in state["prefixes"]]
    near, far = ["device"], ["host"]
    assert shown == [(near, -1, 128), (near, 0, 256), (far, 1, 384), (far, 2, 512)]
    assert [one["block"] >= 0 for one in state["prefixes"]] == [True, True, False, False]
    assert state["prefixes"][3]["resumes"]
    tier = engine.loop.host.tier
    sizes = {"num_pages": tier.num_pages, "num_bytes": tier.num_bytes, "max_bytes": 10**6}
    assert (state["tiers"], state["prefixes_left_out"]) == ({"host": sizes}, 0)


def test_a_prefix_on_the_device_resumes_where_its_snapshot_lies_on_the_host():
    engine = make_engine(host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(2), 300)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    tree = engine.loop.shards.managers[0].prefixes.tree
    for node in tree.nodes:
        tree.drop_snapshot(node)
    assert read_state(engine)["prefixes"] == []
    settle(engine)
    shown = [(one["where"], one["resumes"]) for one in read_state(engine)["prefixes"]]
    assert shown == [(["device"], True)] * 2
    loaded = engine.metrics.host_loaded_bytes
    assert run_to_end(engine, engine.submit(text, **OPTIONS))[0].hit_tokens == 256
    snapshot = engine.plan.pools.bytes_per_snapshot
    assert engine.metrics.host_loaded_bytes - loaded == snapshot


def test_others_run_while_a_copy_is_on_its_way(monkeypatch):
    """One that runs and one that comes later are served; who waits is admitted when it has come."""
    engine = make_engine(host_cache_bytes=10**6)
    rng = np.random.default_rng(3)
    text, short = prompt(rng, 300), prompt(rng, 9)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    evict(engine)
    gather, may_come = page_moves.gather_run, []

    def late(*arguments):
        while not may_come:
            time.sleep(0.001)
        return gather(*arguments)

    monkeypatch.setattr(page_moves, "gather_run", late)
    runs = engine.submit(short, **(OPTIONS | {"max_new_tokens": 60}))
    engine.step()
    waits, later = engine.submit(text, **OPTIONS), engine.submit(short, **OPTIONS)
    gone = engine.submit(text, **OPTIONS)
    run_to_end(engine, later)
    assert engine.requests[runs].slot >= 0
    assert engine.requests[waits].slot < 0
    assert engine.cancel(gone)
    may_come.append(True)
    done = run_to_end(engine, waits)[0]
    assert (done, done.hit_tokens) == (wanted, 256)
    engine.cancel(runs)
    settle(engine)
    check(engine)


@pytest.mark.slow
def test_copies_on_their_way_back_are_bounded_however_many_wait_for_them(monkeypatch):
    """They are memory of the device; who waits gets them in turn, and nothing is computed again."""
    engine = make_engine(host_cache_bytes=10**6)
    rng = np.random.default_rng(6)
    texts = [prompt(rng, 300) for _ in range(3)]
    wanted = [alone(text, OPTIONS) for text in texts]
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
    monkeypatch.setattr(page_memory, "RUN_SIZES", (1,))
    evict(engine)
    gather, may_come = page_moves.gather_run, threading.Event()

    def late(*arguments):
        may_come.wait()
        return gather(*arguments)

    monkeypatch.setattr(page_moves, "gather_run", late)
    monkeypatch.setattr(host_copies, "MOST_LOADING", 2)
    runs = engine.submit(prompt(rng, 9), **(OPTIONS | {"max_new_tokens": 60}))
    engine.step()
    ids = [engine.submit(text, **OPTIONS) for text in texts]
    engine.step()
    fetches = engine.loop.host.fetches.values()
    begun = [sum(run.packed is not None for run in fetch.runs) for fetch in fetches]
    assert [len(fetch.runs) for fetch in fetches] == [3, 3, 3]
    assert begun == [2, 0, 0]
    may_come.set()
    done = run_to_end(engine, *ids)
    assert done == wanted
    assert [one.hit_tokens for one in done] == [256] * 3
    engine.cancel(runs)
    settle(engine)
    check(engine)


def test_work_for_a_prefix_comes_in_portions_while_somebody_runs(monkeypatch):
    """A step never waits for more than one; alone nobody waits, and all comes at once."""
    engine = make_engine(host_cache_bytes=10**6)
    rng = np.random.default_rng(14)
    text, short = prompt(rng, 600), prompt(rng, 9)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    monkeypatch.setattr(page_memory, "RUN_SIZES", (1,))
    evict(engine)
    host, done = engine.loop.host, []
    monkeypatch.setattr(host_copies, "STEP_S", 0.0)
    monkeypatch.setattr(host_copies, "_LOOKED_UP_TOGETHER", 1)
    monkeypatch.setattr(request_queue, "_HASHED_A_STEP", 2)
    monkeypatch.setattr(engine.loop.runner.devices, "is_ready", lambda back: True)
    for owner, name in ((far_fetch.FarSearch, "go_on"), (HostCopies, "_bring_back")):
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, call=call, name=name: (done.append(name), call(*a))[1]
        )
    runs = engine.submit(short, **(OPTIONS | {"max_new_tokens": 200}))
    engine.step()
    waits = engine.submit(text, **OPTIONS)
    most, steps = 0, 0
    while engine.requests[waits].slot < 0:
        done.clear()
        engine.step()
        steps += 1
        most = max(most, len(done))
        assert engine.requests[runs].finish_reason is None
        time.sleep(0.001)
    assert (most <= 2, steps >= 8) == (True, True)  # five runs, and four blocks before them
    completion = run_to_end(engine, waits)[0]
    assert (completion, completion.hit_tokens) == (wanted, 512)
    engine.cancel(runs)
    evict(engine)
    again = engine.submit(text, **OPTIONS)
    while engine.requests[again].slot < 0:
        engine.step()
    assert run_to_end(engine, again)[0].hit_tokens == 512
    settle(engine)
    check(engine)
    assert not host.fetches


def test_while_the_host_would_wait_for_a_step_all_comes_that_can(monkeypatch):
    """Whoever runs gets what he gets alone, though tables change beside two steps in flight."""
    engine = make_engine(host_cache_bytes=10**6)
    rng = np.random.default_rng(14)
    text, short = prompt(rng, 600), prompt(rng, 9)
    wanted, wanted_short = alone(text, OPTIONS), alone(short, OPTIONS | {"max_new_tokens": 40})
    run_to_end(engine, engine.submit(text, **OPTIONS))
    monkeypatch.setattr(page_memory, "RUN_SIZES", (1,))
    evict(engine)
    monkeypatch.setattr(host_copies, "STEP_S", 0.0)
    monkeypatch.setattr(host_copies, "_LOOKED_UP_TOGETHER", 1)
    monkeypatch.setattr(request_queue, "_HASHED_A_STEP", 2)
    runs = engine.submit(short, **(OPTIONS | {"max_new_tokens": 40}))
    engine.step()
    waits = engine.requests[engine.submit(text, **OPTIONS)]
    looks = []

    def has_all_come(back):
        looks.append(back)
        fetch = engine.loop.host.fetches.get(waits)
        return fetch is not None and not fetch.is_coming

    monkeypatch.setattr(engine.loop.runner.devices, "is_ready", has_all_come)
    engine.step()  # hashes, since nobody asked for a prefix before
    assert engine.loop.queue.hashed_of(waits).hash_more(0)
    while waits not in engine.loop.host.fetches:
        engine.step()
    before = engine.metrics.steps
    until(lambda: engine.step() is not None and waits.slot >= 0)
    assert (engine.metrics.steps - before <= 3, set(looks) <= {0, 1}) == (True, True)
    done = run_to_end(engine, waits.request_id, runs)
    assert (done, done[0].hit_tokens) == ([wanted, wanted_short], 512)
    settle(engine)
    check(engine)


def test_pages_of_slabs_are_found_together_up_to_the_first_that_is_another():
    """Whole slabs are compared at once, and so are the keys of what comes before."""
    tokens = HashedTokens(np.arange(24, dtype=np.int32), b"", 2)
    contents, tier = tokens.upto(12), HostTier(10**4)

    def add(*numbers, parents=tokens.parents):
        rows = [Leaving("blocks", n, contents[n], parents[n], 2 * n + 2) for n in numbers]
        return tier.add("blocks", rows, 10)

    add(0, 1), add(2), add(5, 4, 3), add(6, 7, 8)
    others = add(9, 10, 11, parents=[*tokens.parents[:10], b"another", tokens.parents[11]])

    def found(start, stop):
        pages = tier.find_blocks(tokens, start, stop)
        assert [page.content for page in pages] == contents[start : start + len(pages)]
        return len(pages)

    asked = [(0, 12), (0, 5), (7, 9), (10, 12), (11, 12)]
    assert [found(*one) for one in asked] == [10, 5, 2, 0, 1]
    tier.drop(tier.find("blocks", contents[7], tokens.parents[7]))
    assert (found(0, 12), found(8, 12)) == (7, 2)
    tier.drop(others.pages[1])
    assert (found(8, 12), found(11, 12)) == (2, 1)


def test_a_tier_of_several_processes_is_bounded_in_each():
    """What frees nothing where room is missing stays, and so does the oldest."""
    tier = HostTier(100, 2)

    def add(number, *bytes_at):
        rows = [leaving(number)]
        return tier.add("blocks", rows, max(bytes_at), bytes_at, bytes_at.index(max(bytes_at)))

    for number, bytes_at in enumerate([(60, 0), (0, 60), (30, 30)]):
        tier.let_go([add(number, *bytes_at)])
    assert (tier.bytes_at, tier.num_bytes) == ([90, 90], 90)
    assert add(3, 101, 0) is add(3, 0, 101) is None
    held = tier.slabs[:0:-1]  # in which order they stay
    tier.hold(held)
    assert add(3, 0, 60) is None
    tier.let_go(held)
    tier.gone = []
    assert add(4, 0, 60) is not None
    assert [slab.bytes_at for slab in tier.gone] == [(0, 60)]
    assert [slab.bytes_at for slab in tier.slabs] == [(60, 0), (30, 30), (0, 60)]
    assert (tier.bytes_at, tier.problems()) == ([90, 90], [])
    tier.bytes_at[1] += 1
    assert [str(one.where) for one in tier.problems()] == ["host"]


def test_a_run_has_slabs_of_one_data_shard():
    """Since another one's devices, and so other processes, have their rows."""
    tier, number = HostTier(10**4, 2), iter(range(99))
    slabs = [
        tier.add("blocks", [leaving(next(number)) for _ in range(2)], 10, (20, 20), shard)
        for shard in (0, 0, 1, 1, 0)
    ]
    runs = far_pages.runs_of("blocks", [page for slab in slabs for page in slab.pages], 10)
    assert [run.slabs for run in runs] == [slabs[:2], slabs[2:4], slabs[4:]]
    assert [run.places.tolist() for run in runs] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]


def test_runs_are_whole_slabs_in_order_within_the_size_of_a_copy(monkeypatch):
    monkeypatch.setattr(page_memory, "RUN_SIZES", (1, 4, 16))
    tier, number = HostTier(10**4), iter(range(99))
    slabs = [
        tier.add("blocks", [leaving(next(number)) for _ in range(size)], 10)
        for size in (16, 4, 4, 4, 1, 1)
    ]
    large, first, second, third, one, other = slabs
    file = far_pages.FilePage("blocks", leaving(98).content, 10, None)
    pages = [*large.pages[2:5], first.pages[3], second.pages[0], first.pages[0], *one.pages, file,
             *third.pages, *other.pages, large.pages[0], file]  # fmt: skip
    runs = far_pages.runs_of("blocks", pages, 10)
    assert [page for run in runs for page in run.pages] == pages
    assert [run.slabs for run in runs] == [
        [large], [first, second, one, third, other], [large], []
    ]  # fmt: skip
    assert [run.places.tolist() for run in runs] == [
        [2, 3, 4], [3, 4, 0, 8, 14, 9, 10, 11, 12, 13], [0], [0]
    ]  # fmt: skip
    assert far_pages.runs_of("blocks", [], 10) == []


def test_what_one_admission_pushes_out_the_next_one_finds_on_the_host():
    engine = limit(make_engine(host_cache_bytes=10**6), num_blocks=10)
    rng = np.random.default_rng(8)
    texts = [prompt(rng, 300) for _ in range(4)]
    wanted = alone(texts[0], OPTIONS)
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
    assert (engine.metrics.cached_blocks, engine.loop.host.tier.num_pages) == (8, 0)
    both = engine.submit(prompt(rng, 600), **OPTIONS), engine.submit(texts[0], **OPTIONS)
    done = run_to_end(engine, *both)[1]
    assert (done, done.hit_tokens) == (wanted, 256)


def test_blocks_that_give_way_to_a_fork_are_copied_before_it_writes_there():
    """A branch has a copy of its parent's open block, in the place of what was evicted for it."""
    # Beside a step in flight a branch would wait, and begin by computing what it has.
    engine = limit(make_engine(overlap=False, host_cache_bytes=10**6), num_blocks=3)
    rng = np.random.default_rng(8)
    text, other = prompt(rng, 300), prompt(rng, 20)
    options = OPTIONS | {"logprobs": 4}
    wanted = alone(text, options)
    run_to_end(engine, engine.submit(text, **options))
    parent = engine.submit(other, **OPTIONS | {"max_new_tokens": 30})
    while not engine.requests[parent].num_drawn:
        engine.step()
    branch = engine.fork(parent, seed=1)
    assert engine.metrics.evicted_blocks == 1
    engine.step()
    for request in (parent, branch):
        engine.cancel(request)
    done = run_to_end(engine, engine.submit(text, **options))[0]
    assert (done, done.hit_tokens, engine.metrics.host_hit_tokens > 0) == (wanted, 256, True)


def hold_back(engine, monkeypatch, name):
    """Copies one way begin and do not end until the event is set."""
    copy, may_come = getattr(engine.loop.host.moves.memory, name), threading.Event()

    def late(*arguments):
        may_come.wait()
        return copy(*arguments)

    monkeypatch.setattr(engine.loop.host.moves.memory, name, late)
    return may_come


@pytest.mark.slow
def test_what_more_blocks_push_out_than_can_be_copied_at_once_is_copied_in_portions(monkeypatch):
    """Who wants the blocks waits, who runs does not, and nothing is lost."""
    engine = limit(make_engine(host_cache_bytes=10**6), num_blocks=10)
    rng = np.random.default_rng(8)
    texts = [prompt(rng, 300) for _ in range(4)]
    wanted = [alone(text, OPTIONS) for text in texts]
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
    each = row_bytes(engine.cache.paged) + engine.plan.pools.bytes_per_snapshot
    monkeypatch.setattr(page_stores, "MOST_STORING_BYTES", 4 * each)
    may_go = hold_back(engine, monkeypatch, "to_host")
    runs = engine.submit(prompt(rng, 9), **(OPTIONS | {"max_new_tokens": 60}))
    engine.step()
    large = engine.submit(prompt(rng, 600), **OPTIONS)
    for _ in range(8):
        engine.step()
    request = engine.requests[large]
    assert (request.slot, engine.loop.host.tier.num_pages > 0) == (-1, True)
    assert engine.requests[runs].num_drawn > 6
    may_go.set()
    engine.cancel(runs)
    run_to_end(engine, large)
    assert engine.metrics.host_lost_bytes == 0
    for text, alone_got in zip(texts, wanted, strict=True):
        done = run_to_end(engine, engine.submit(text, **OPTIONS))[0]
        assert (done, done.hit_tokens) == (alone_got, 256)
    settle(engine)
    check(engine)


def test_a_request_whose_blocks_come_in_portions_keeps_what_it_hits(monkeypatch):
    """It was used least recently of all, and would give way first."""
    engine = limit(make_engine(host_cache_bytes=10**6), num_blocks=9)
    rng = np.random.default_rng(9)
    texts = [prompt(rng, 300) for _ in range(4)]
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
    each = row_bytes(engine.cache.paged) + engine.plan.pools.bytes_per_snapshot
    monkeypatch.setattr(page_stores, "MOST_STORING_BYTES", 2 * each)
    done = run_to_end(engine, engine.submit(texts[0] + prompt(rng, 300), **OPTIONS))[0]
    assert (done.hit_tokens, engine.metrics.host_loaded_bytes) == (256, 0)


@pytest.mark.slow
def test_what_leaves_beyond_all_room_is_lost_from_its_end_and_counted(monkeypatch):
    """Its end alone could never be used."""
    engine = make_engine(host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(7), 520)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    assert engine.metrics.cached_blocks == 4
    each = row_bytes(engine.cache.paged) + engine.plan.pools.bytes_per_snapshot
    with monkeypatch.context() as patch:
        patch.setattr(page_memory, "RUN_SIZES", (1, 2))
        patch.setattr(page_stores, "MOST_STORING_BYTES", 2 * each)
        evict(engine)
    assert engine.metrics.host_lost_bytes > 0
    again = run_to_end(engine, engine.submit(text, **OPTIONS))[0]
    assert (again, again.hit_tokens) == (wanted, 256)


def test_two_who_wait_for_one_prefix_bring_it_once(monkeypatch):
    engine = make_engine(host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(10), 300)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    evict(engine)
    may_come = hold_back(engine, monkeypatch, "to_devices")
    ids = [engine.submit(text, **OPTIONS) for _ in range(3)]
    runs = engine.submit(text[:9], **(OPTIONS | {"max_new_tokens": 60}))
    engine.step()
    assert engine.requests[runs].slot >= 0
    assert len(engine.loop.host.fetches) == 1
    engine.cancel(ids.pop(1))  # who waits for another's copies may go, too
    may_come.set()
    done = run_to_end(engine, *ids)
    assert done == [wanted] * 2
    assert [one.hit_tokens for one in done] == [256] * 2
    blocks, snapshot = 2 * row_bytes(engine.cache.paged), engine.plan.pools.bytes_per_snapshot
    assert engine.metrics.host_loaded_bytes == blocks + snapshot
    assert not engine.loop.host.followed


@pytest.mark.parametrize("is_needed", slow.all_but([False], [False, True]))
def test_what_has_come_stays_until_its_request_is_admitted(monkeypatch, is_needed):
    """Others push it out only if they could not run on without its blocks."""
    engine = limit(make_engine(host_cache_bytes=10**6), num_blocks=10)
    rng = np.random.default_rng(12)
    text = prompt(rng, 300)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    evict(engine)
    may_come = hold_back(engine, monkeypatch, "to_devices")
    ids = [engine.submit(prompt(rng, 9), **(OPTIONS | {"max_new_tokens": 620})) for _ in range(3)]
    engine.step()
    waits = engine.submit(text, **OPTIONS)
    engine.step()
    ids.append(engine.submit(prompt(rng, 9), **(OPTIONS | {"max_new_tokens": 620})))
    engine.step()
    assert [engine.requests[i].slot >= 0 for i in (*ids, waits)] == [True] * 4 + [False]
    may_come.set()
    until(lambda: engine.step() is not None and engine.loop.host.fetches[engine.requests[waits]]
          .resumes is not None)  # fmt: skip
    evict(engine)
    assert engine.metrics.cached_blocks == 0  # those that have come are used
    if is_needed:  # four requests grow to three blocks each
        while engine.loop.host.fetches:
            engine.step()
        assert engine.metrics.preempted == 0
    for request_id in ids:
        engine.cancel(request_id)
    done = run_to_end(engine, waits)[0]
    assert (done, done.hit_tokens) == (wanted, 0 if is_needed else 256)
    settle(engine)
    check(engine)


def test_a_page_of_other_bytes_than_it_left_with_is_a_miss(caplog):
    engine = make_engine(host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(4), 300)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    evict(engine)
    assert not engine.verify().problems
    pages = engine.loop.host.tier.pages
    assert {page.slab.data.sharding.memory_kind for page in pages} == {"pinned_host"}
    page = next(page for page in pages if page.of == "blocks")
    slab, place = page.slab, (page.row, 7)
    slab.data = slab.data.at[place].set(slab.data[place] ^ 16)
    (problem,) = engine.verify().problems
    assert (problem.kind, page.content.key.hex() in problem.where) == ("checksum", True)
    again = run_to_end(engine, engine.submit(text, **OPTIONS))[0]
    assert (again, again.hit_tokens, engine.metrics.damaged_pages) == (wanted, 0, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert page not in engine.loop.host.tier.pages
    check(engine)


def test_a_copy_that_fails_is_a_miss(monkeypatch):
    engine = make_engine(host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(4), 300)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))

    def fail(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.host.moves.memory, "to_host", fail)
        evict(engine)
    assert engine.loop.host.tier.num_pages == 0
    assert run_to_end(engine, engine.submit(text, **OPTIONS))[0] == wanted
    evict(engine)
    monkeypatch.setattr(page_moves, "gather_run", fail)
    again = run_to_end(engine, engine.submit(text, **OPTIONS))[0]
    assert (again, again.hit_tokens) == (wanted, 0)
    check(engine)


def test_after_a_call_that_raised_nothing_is_left_on_the_host(monkeypatch):
    engine = make_engine(host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(5), 300)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    evict(engine)
    request_id = engine.submit(text, **OPTIONS)

    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner.devices, "put_rows", fail)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(engine, request_id)
    assert run_to_end(engine, request_id)[0] == wanted
    assert engine.metrics.host_hit_tokens == 0


def leaving(number, of="blocks", parent=b""):
    content = BlockContent(bytes([number]), b"tokens%d" % number)
    return Leaving(of, number, content, parent, 128 * number)


def find(tier, number, of="blocks"):
    return tier.find(of, leaving(number).content, b"")


def test_slabs_give_way_within_the_bound_and_never_while_they_are_held():
    tier = HostTier(120)
    slabs = [tier.add("blocks", [leaving(n), leaving(n + 10)], 15) for n in range(3)]
    assert tier.num_bytes == 90
    assert tier.add("blocks", [leaving(9)], 31) is None  # all are held
    tier.let_go(slabs)
    tier.hold(slabs[:2])
    assert find(tier, 12) is slabs[2].pages[1]
    assert tier.add("snapshots", [leaving(2)], 121) is None
    assert tier.num_pages == 6
    new = tier.add("snapshots", [leaving(2)], 60)
    assert (find(tier, 2), find(tier, 12)) == (None, None)
    assert slabs[2].data is None
    assert (tier.num_bytes, tier.evicted_bytes) == (120, 30)
    tier.let_go([*slabs[:2], new])
    tier.add("blocks", [leaving(4)], 30)
    found = [find(tier, n) is not None for n in range(5)]
    assert found == [True, False, False, False, True]  # of a prefix its end goes first


def test_the_bytes_of_a_slab_count_until_its_last_page_has_gone():
    tier = HostTier(60)
    slab = tier.add("blocks", [leaving(1), leaving(2)], 20)
    slab.data = object()
    tier.let_go([slab])
    first, second = slab.pages
    tier.drop(first)
    tier.drop(first)
    assert (tier.num_bytes, tier.num_pages, find(tier, 1)) == (40, 1, None)
    assert find(tier, 2) is second
    tier.drop(second)
    assert (tier.num_bytes, tier.num_pages, slab.data) == (0, 0, None)


def test_a_page_that_is_used_keeps_its_slab_and_what_was_used_last_is_listed_first():
    tier = HostTier(80)
    slabs = [tier.add("blocks", [leaving(n), leaving(n + 10)], 20) for n in range(2)]
    tier.let_go(slabs)
    tier.use([("blocks", bytes([1])), ("blocks", bytes([10])), ("snapshots", bytes([1]))])
    assert [page.row for page in tier.latest(3)] == [0, 1, 0]
    assert tier.latest(1)[0].slab is slabs[0]
    tier.add("blocks", [leaving(5)], 20)
    assert [find(tier, n) is None for n in (0, 10, 1, 11)] == [False, False, True, True]
    tier.demote(slabs[0])
    tier.add("blocks", [leaving(6)], 40)
    assert (find(tier, 0), find(tier, 5) is None) == (None, False)


def test_a_page_of_other_tokens_or_another_parent_is_a_miss():
    tier = HostTier(100)
    (page,) = tier.add("blocks", [leaving(1, parent=b"parent")], 30).pages
    content = page.content
    assert tier.find("blocks", content, b"parent") is page
    assert tier.find("blocks", content._replace(tokens=b"others"), b"parent") is None
    assert tier.find("blocks", content, b"") is None
    assert tier.find("snapshots", content, b"parent") is None


def test_a_share_of_the_host_is_found_and_more_than_all_is_refused(monkeypatch):
    free = Memory("this machine", 10 * 2**20, 64 * 2**20)
    monkeypatch.setattr(sizing, "host_memory", lambda: free)
    config, params = serving.one_layer()
    sizes = {"max_requests": 1, "max_context_tokens": 8, "num_snapshots": 1}
    engine = ds.Engine(config, params, host_cache_bytes="auto", **sizes)
    assert engine.loop.host.tier.max_bytes == engine.plan.host_cache_bytes == 5 * 2**20
    with pytest.raises(MemoryError, match=r"the 10\.0 MiB of 64\.0 MiB that this machine has"):
        ds.Engine(config, params, host_cache_bytes="11MiB", **sizes)
    monkeypatch.setattr(sizing, "host_memory", lambda: None)
    with pytest.raises(ValueError, match="must be a number where nobody says how much memory is"):
        ds.Engine(config, params, host_cache_bytes="auto", **sizes)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="host_cache_bytes must be at least 0, got -1"):
        ds.Engine(*serving.one_layer(), host_cache_bytes=-1)
