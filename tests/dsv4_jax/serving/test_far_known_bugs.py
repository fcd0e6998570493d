"""Bugs that other projects' host and disk tiers of a cache shipped; each is a test here."""

import threading

import numpy as np
import pytest

from dsv4_jax.serving.device import disk_shape, page_moves
from helpers.engine_life import alone
from helpers.serving import limit, make_engine, prompt, run_to_end, until

OPTIONS = {"max_new_tokens": 6, "stop_token_ids": ()}


def leave(engine):
    """Nothing that no request uses stays on the devices."""
    for manager in engine.loop.shards.managers:
        manager.evict(manager.num_blocks)
    host = engine.loop.host
    host.keep()
    until(lambda: host.keep() is None and not host.stores.begun)


def to_disk_alone(engine):
    """The same of the host."""
    leave(engine)
    host = engine.loop.host
    host.settle(20.0)
    until(lambda: host.keep() is None and not host.stores.writes.begun)
    for page in host.tier.pages:
        host.tier.drop(page)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    # Each size of a weight would compile a program; `test_disk_cache.py` looks at digests.
    monkeypatch.setattr(disk_shape, "weights_digest", lambda params: "the same weights")
    engine = make_engine(
        host_cache_bytes=10**6, disk_cache_dir=tmp_path / "cache", disk_cache_bytes=10**7
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_pages_before_one_that_cannot_be_read_are_no_hit_without_their_bytes(engine, damage):
    """LMCache 3022: of a batch that ended early those before it were used, and held anything.

    Here it is the third of four blocks.
    """
    text = prompt(np.random.default_rng(1), 600)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    to_disk_alone(engine)
    disk = engine.loop.host.disk
    blocks = [page for page in disk.latest() if page.of == "blocks"]
    assert len(blocks) == 4
    by_parent = {page.parent: page for page in blocks}
    third = by_parent[bytes(16)]
    for _ in range(2):
        third = by_parent[third.key]
    damage(third.path)
    done = run_to_end(engine, engine.submit(text, **OPTIONS))[0]
    assert done == wanted
    assert not engine.loop.host.fetches
    host = engine.loop.host
    until(lambda: host.keep() is None and not any(slab.holders for slab in host.tier.slabs))


def test_files_that_somebody_else_removed_are_not_counted_for_ever(engine):
    """LMCache 4546: what had gone stayed counted, until nothing was written any more."""
    rng, disk = np.random.default_rng(2), engine.loop.host.disk
    texts = [prompt(rng, 300) for _ in range(3)]
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
        to_disk_alone(engine)
    counted = disk.num_bytes
    for page in disk.pages:
        page.path.unlink()
    run_to_end(engine, engine.submit(texts[0], **OPTIONS))
    # One that is missing is a reason to look for all.
    until(lambda: all(page.path.exists() for page in disk.pages))
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
        to_disk_alone(engine)
    files = [path for path in disk.folder.glob("*/*") if path.is_file()]
    assert len(files) == disk.num_pages > 0
    assert disk.num_bytes == sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    assert disk.num_bytes <= counted


@pytest.mark.slow
def test_a_prefix_never_comes_back_with_what_another_one_holds(engine):
    """LMCache 4385: sessions that came back from a disk went on with others' pages."""
    rng = np.random.default_rng(3)
    stem = prompt(rng, 260)
    texts = [(stem[:length] + prompt(rng, 300), salt) for length in (0, 128, 256) for salt in "ab"]
    wanted = [alone(text, OPTIONS) for text, _ in texts]
    for text, salt in texts:
        run_to_end(engine, engine.submit(text, salt=salt, **OPTIONS))
    for _ in range(2):
        to_disk_alone(engine)
        ids = [engine.submit(text, salt=salt, **OPTIONS) for text, salt in texts]
        assert run_to_end(engine, *ids) == wanted
    assert engine.metrics.disk_hit_tokens > 0


@pytest.mark.slow
def test_those_who_wait_for_copies_and_those_who_wait_for_blocks_never_wait_for_each_other():
    """vLLM 45387: nobody ran, everybody waited, and what had come kept all blocks."""
    engine = limit(make_engine(host_cache_bytes=10**6), num_blocks=7)
    rng = np.random.default_rng(4)
    texts = [prompt(rng, 300) for _ in range(5)]
    wanted = [alone(text, OPTIONS) for text in texts]
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
    for _ in range(3):
        leave(engine)
        ids = [engine.submit(text, **OPTIONS) for text in texts]
        assert run_to_end(engine, *ids) == wanted
    assert engine.metrics.host_hit_tokens > 0


def test_what_was_written_to_the_host_is_found_again_on_its_return():
    """SGLang 33713: pages were backed up, kept, and never matched."""
    engine = limit(make_engine(host_cache_bytes=10**6), num_blocks=8)
    rng = np.random.default_rng(5)
    texts = [prompt(rng, 300) for _ in range(6)]
    for text in texts:
        run_to_end(engine, engine.submit(text, **OPTIONS))
    hits = [run_to_end(engine, engine.submit(text, **OPTIONS))[0].hit_tokens for text in texts]
    assert hits == [256] * 6
    assert engine.metrics.host_hit_tokens >= 4 * 256


@pytest.mark.slow
def test_a_request_that_is_cancelled_while_its_copies_come_leaves_nothing_held(monkeypatch):
    """LMCache 2559 and SGLang 37103: an aborted load kept its pages, or let them go twice."""
    engine = make_engine(host_cache_bytes=10**6)
    text = prompt(np.random.default_rng(6), 600)
    wanted = alone(text, OPTIONS)
    run_to_end(engine, engine.submit(text, **OPTIONS))
    leave(engine)
    host, gather, may_come = engine.loop.host, page_moves.gather_run, threading.Event()
    monkeypatch.setattr(
        page_moves, "gather_run", lambda *arguments: (may_come.wait(), gather(*arguments))[1]
    )
    runs = engine.submit(text[:9], **(OPTIONS | {"max_new_tokens": 200}))
    for is_early in (True, False):
        engine.step()
        waits = engine.submit(text, **OPTIONS)
        engine.step()
        if not is_early:
            may_come.set()
            until(lambda: all(run.packed.done() for f in host.fetches.values() for run in f.runs))
        assert engine.cancel(waits)
        assert not host.fetches
        assert not any(slab.holders for slab in host.tier.slabs)
        tree = engine.loop.shards.managers[0].prefixes.tree
        assert {node.users for node in tree.nodes} <= {0, 1}
        assert all(not node.snapshot_holds for node in tree.nodes)
    done = run_to_end(engine, engine.submit(text, **OPTIONS))[0]
    assert (done, done.hit_tokens) == (wanted, 512)
    engine.cancel(runs)
