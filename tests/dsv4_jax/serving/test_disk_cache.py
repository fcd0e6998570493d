"""The disk tier: what one engine has written another one goes on with, to the bit."""

import contextlib
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.serving import engine_state, sizing
from dsv4_jax.serving.device import disk_shape, far_pages
from dsv4_jax.serving.engine_state import read_state
from dsv4_jax.serving.options import EngineOptions
from helpers import serving
from helpers.arrays import on_device
from helpers.engine_life import Life, alone
from helpers.serving import limit, make_engine, prompt, run_to_end, until

OPTIONS = {"max_new_tokens": 6, "stop_token_ids": ()}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds engines with one directory; each begins where the one before has been closed.

    All of one model, so that no checksums of its weights are compiled.
    """
    monkeypatch.setattr(disk_shape, "weights_digest", lambda params: "the same weights")
    with contextlib.ExitStack() as stack:

        def one(**changes):
            stack.close()
            sizes = {"disk_cache_dir": tmp_path / "cache", "disk_cache_bytes": 10**7} | changes
            engine = make_engine(**sizes)
            stack.callback(engine.close)
            return engine

        yield one


def test_a_prefix_outlives_its_engine_for_the_same_salt(build):
    text = prompt(np.random.default_rng(2), 300)
    wanted = alone(text, OPTIONS)
    first = build()
    assert run_to_end(first, first.submit(text, salt="a", **OPTIONS))[0] == wanted
    first.close()  # it was never evicted
    written = first.metrics.disk_stored_bytes
    assert written == 2 * (
        first.loop.runner.devices.bytes_of_row("blocks") + first.plan.pools.bytes_per_snapshot
    )
    second = build()
    other = run_to_end(second, second.submit(text, salt="b", **OPTIONS))[0]
    assert (other, other.hit_tokens) == (wanted, 0)
    again = run_to_end(second, second.submit(text, salt="a", **OPTIONS))[0]
    assert (again, again.hit_tokens, second.metrics.disk_hit_tokens) == (wanted, 256, 256)
    assert 0 < second.metrics.disk_loaded_bytes < written
    assert not second.verify().problems
    third = build(disk_cache_bytes=0)  # which only reads
    run_to_end(third, third.submit(prompt(np.random.default_rng(3), 300), **OPTIONS))
    assert run_to_end(third, third.submit(text, salt="a", **OPTIONS))[0].hit_tokens == 256
    third.close()
    assert third.metrics.disk_stored_bytes == 0


def test_others_run_while_a_file_is_read_and_a_damaged_one_is_computed_again(
    build, monkeypatch, caplog
):
    text = prompt(np.random.default_rng(4), 300)
    wanted = alone(text, OPTIONS)
    first = build()
    run_to_end(first, first.submit(text, **OPTIONS))
    second = build(host_cache_bytes=10**6)
    gather, may_come = far_pages.gather_run, threading.Event()
    monkeypatch.setattr(
        "dsv4_jax.serving.device.page_moves.gather_run",
        lambda *arguments: (may_come.wait(), gather(*arguments))[1],
    )
    waits = second.submit(text, **OPTIONS)
    later = second.submit(text[:9], **OPTIONS)
    run_to_end(second, later)
    assert second.requests[waits].slot < 0
    disk = second.loop.host.disk
    path = next(page.path for page in disk.pages if page.of == "blocks")
    path.write_bytes(path.read_bytes()[:-1])
    assert [problem.where for problem in second.verify().problems] == ["disk"]
    may_come.set()
    done = run_to_end(second, waits)[0]
    assert (done, done.hit_tokens, second.metrics.damaged_pages) == (wanted, 0, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    second.close()
    third = build()
    assert run_to_end(third, third.submit(text, **OPTIONS))[0].hit_tokens == 256  # written anew


def test_what_goes_to_the_disk_needs_room_for_one_page_of_the_host(build):
    """Snapshots, which are larger than all of it here, are left out."""
    first = build(host_cache_bytes=2100)
    assert first.loop.runner.devices.bytes_of_row("blocks") < 2100
    run_to_end(first, first.submit(prompt(np.random.default_rng(6), 300), **OPTIONS))
    first.close()
    assert [page.of for page in first.loop.host.disk.pages] == ["blocks"] * 2
    assert not first.loop.host.stores.begun


def test_the_state_of_an_engine_lists_what_lies_on_the_disk_alone(build, monkeypatch):
    """After a restart too, when only the files say what comes before what; it is bounded."""
    first, rng = build(), np.random.default_rng(8)
    text = prompt(rng, 520)
    run_to_end(first, first.submit(text, **OPTIONS))
    for restarted in (False, True):
        engine = build() if restarted else first
        if not restarted:
            engine.loop.host.settle(5.0)
            engine.loop.shards.managers[0].evict(2)
            host = engine.loop.host
            until(lambda host=host: host.keep() is None and host.disk.num_pages == 8)
            for page in engine.loop.host.tier.pages:
                engine.loop.host.tier.drop(page)
        shown = [
            (one["where"], one["parent"], one["tokens"], one["resumes"], one["block"] >= 0)
            for one in read_state(engine)["prefixes"]
        ]
        near = [["disk"], False] if restarted else [["device", "disk"], True]
        assert shown == [
            (near[0], -1, 128, True, near[1]), (near[0], 0, 256, True, near[1]),
            (["disk"], 1, 384, True, False), (["disk"], 2, 512, True, False),
        ]  # fmt: skip
    monkeypatch.setattr(engine_state, "MAX_NODES", 3)
    assert [one["tokens"] for one in read_state(engine)["prefixes"]] == [128, 256, 384]


def test_after_a_call_that_raised_the_disk_is_what_it_was(build, monkeypatch):
    text = prompt(np.random.default_rng(5), 300)
    wanted = alone(text, OPTIONS)
    engine = build()
    run_to_end(engine, engine.submit(text, **OPTIONS))
    engine.close()
    request_id = engine.submit(text, **OPTIONS)

    def fail(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.runner.devices, "launch", fail)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(engine, request_id)
    done = run_to_end(engine, request_id)[0]
    assert (done, engine.metrics.disk_hit_tokens) == (wanted, 256)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["one", "other"], meta_fields=["peers", "engram"]
)
@dataclasses.dataclass
class Weights:
    """As parameters are, to a digest."""

    one: jax.Array
    other: jax.Array
    peers: None = None
    engram: None = None


def test_a_digest_tells_bits_places_and_names_of_weights():
    ones, other = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 2, 3], [4, 5, 7]])
    swapped = np.float32([[2, 1, 3], [4, 5, 6]])
    pairs = [(ones, ones), (ones, other), (other, ones), (swapped, ones), (ones, swapped)]
    arrays = [Weights(*(on_device(part, np.float32) for part in pair)) for pair in pairs]
    digests = [disk_shape.weights_digest(weights) for weights in arrays]
    assert len(set(digests)) == len(pairs)
    assert disk_shape.weights_digest(arrays[0]) == digests[0]


@pytest.mark.slow
def test_engines_of_other_weights_models_and_formats_find_nothing():
    config, params = serving.one_layer()
    sizes = {"max_requests": 1, "max_context_tokens": 8}

    def shape(config=config, params=params, **options):
        fields = EngineOptions(**sizes | options)
        plan = sizing.plan_engine(config, fields, params=params, has_tokenizer=False)
        return dict(disk_shape.disk_shape(plan, params))

    own = shape()
    assert own == shape()
    leaves, tree = jax.tree.flatten(params)
    digests = {own["weights"]}
    for number, leaf in enumerate(leaves):
        flipped = leaf.at[(0,) * leaf.ndim].add(1)
        others = [*leaves[:number], flipped, *leaves[number + 1 :]]
        digests.add(disk_shape.weights_digest(jax.tree.unflatten(tree, others)))
    assert len(digests) == len(leaves) + 1
    assert shape(params=jax.tree.unflatten(tree, others))["weights"] in digests - {own["weights"]}
    assert shape(dataclasses.replace(config, rope_theta=7.0)) != own
    assert shape(cache_format="f32") != own
    assert {"version", "jax", "device", "mesh"} <= own.keys()


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="disk_cache_bytes=7 needs disk_cache_dir"):
        ds.Engine(*serving.one_layer(), disk_cache_bytes=7)
    with pytest.raises(ValueError, match="disk_cache_dir must be the path of a directory"):
        ds.Engine(*serving.one_layer(), disk_cache_dir="")


class MovedLife(Life):
    """A life in which all leaves devices and host after many events, and files are lost."""

    def event(self):
        super().event()
        if self.rng.random() < 0.5:
            for manager in self.engine.loop.shards.managers:
                manager.evict(manager.num_blocks)
        disk, tier = self.engine.loop.host.disk, self.engine.loop.host.tier
        for page in tier.pages if self.rng.random() < 0.3 else ():
            if not page.slab.holders:
                tier.drop(page)
        if self.rng.random() < 0.01 and (pages := disk.pages):
            path = pages[self.rng.integers(0, len(pages))].path
            damage = (path.unlink, lambda: path.write_bytes(path.read_bytes()[:-1]))
            with contextlib.suppress(FileNotFoundError):
                damage[self.rng.integers(0, 2)]()


@pytest.mark.slow
@pytest.mark.parametrize("host_bytes", [0, 7_000])
def test_lives_that_go_on_in_the_next_engine(build, host_bytes):
    hits = 0
    for seed in range(3):
        sizes = {"host_cache_bytes": host_bytes, "disk_cache_bytes": 300_000}
        engine = limit(build(**sizes), num_blocks=8, num_snapshots=4)
        life = MovedLife(engine, 7 + seed // 2)  # of which two have the same prompts
        for _ in range(150):
            life.event()
        while engine.num_unfinished:
            engine.step()
        engine.close()
        disk = engine.loop.host.disk
        assert disk.num_bytes <= disk.max_bytes
        disk.look()
        for problem in engine.verify().problems:
            assert problem.where == "disk"
        life.finish_requests()
        hits += engine.metrics.disk_hit_tokens
    assert hits > 0


def test_a_mesh_of_several_processes_has_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("dsv4_jax.serving.sizing.hosts_of", lambda mesh: object())
    with pytest.raises(ValueError, match="disk_cache_dir needs all devices of the mesh in one"):
        make_engine(disk_cache_dir=str(tmp_path / "pages"))
    assert not (tmp_path / "pages").exists()
