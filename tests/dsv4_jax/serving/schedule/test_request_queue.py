"""Who waits, who has a slot, and who gives way; no device."""

import numpy as np

import dsv4_jax as ds
from dsv4_jax.allocator.data_shards import DataShards
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.requests.calls import UndoLog
from dsv4_jax.serving.requests.request import Request
from dsv4_jax.serving.schedule.request_queue import RequestQueue

CONFIG = ds.DSV4Config.tiny()  # blocks of 128 tokens


def make_queue(num_requests, *, num_blocks, shards=1, num_snapshots=0):
    """Requests with prompts of 100 tokens and answers of 200, all of them waiting.

    Slots, blocks and snapshots are those of each data shard.
    """
    sizes = {"num_blocks": num_blocks, "num_snapshots": num_snapshots}
    managers = [
        ds.KVCacheManager(CONFIG, max_requests=4, max_context_tokens=512, **sizes)
        for _ in range(shards)
    ]
    undo = UndoLog()
    undo.__enter__()  # all of a test is one change
    queue = RequestQueue(DataShards(managers), step_tokens=1, metrics=Metrics(), undo=undo)
    sampling = ds.SamplingParams(max_new_tokens=200)
    requests = [Request(i, np.zeros(100, np.int32), sampling, 0.0) for i in range(num_requests)]
    for request in reversed(requests):
        queue.enqueue(request)
    return queue, requests


def test_the_oldest_come_first_whenever_they_came():
    queue, requests = make_queue(3, num_blocks=2)
    assert queue.waiting == requests
    queue.admit()
    assert queue.by_age() == requests[:1]  # a second one would leave none for the first to go on
    assert queue.waiting == requests[1:]


def test_the_youngest_gives_way_when_blocks_run_out():
    queue, (oldest, middle, youngest) = make_queue(3, num_blocks=8)
    queue.admit()
    assert queue.by_age() == [oldest, middle, youngest]
    for request in (oldest, middle, youngest):  # whose answers now reach their second block
        request.num_known = 128
    (manager,) = queue.shards.managers
    manager.admit(512)  # somebody else has all of the rest but one
    assert manager.num_free_blocks == 1
    queue.reserve()
    assert queue.by_age() == [oldest, middle]
    assert queue.waiting == [youngest]
    assert youngest.slot == -1


def shards_of(queue, requests):
    return [queue.shards.shard_of(request.slot) for request in requests]


def test_a_request_goes_to_the_data_shard_with_most_room():
    queue, requests = make_queue(5, num_blocks=6, shards=2)
    queue.shards.managers[0].admit(128)
    queue.admit()
    assert shards_of(queue, requests[:3]) == [1, 0, 1]
    assert [request.slot for request in queue.by_age(1)] == [4, 5, 6]
    assert queue.by_age(0) == [requests[1], requests[3]]


def test_a_request_goes_to_the_data_shard_that_knows_its_prefix():
    queue, (first, second, third) = make_queue(3, num_blocks=6, shards=2, num_snapshots=2)
    known = np.arange(300, dtype=np.int32) % CONFIG.vocab_size
    other = queue.shards.managers[1]
    slot = other.admit(300, known)
    other.advance(slot, 256)
    other.share(slot, known)
    assert other.prefixes.keep_snapshot(slot, 256, other.prefixes.begin_snapshot())
    for request in (first, third):
        request.token_ids, request.num_known = known.copy(), 290
    queue.admit()
    assert shards_of(queue, (first, second, third)) == [1, 0, 1]
    assert queue.shards.length_of(first.slot) == 256
    assert queue.shards.length_of(second.slot) == 0


def test_a_data_shard_that_is_full_makes_its_own_youngest_give_way():
    queue, (oldest, other, young, last) = make_queue(4, num_blocks=3, shards=2)
    queue.admit()
    assert shards_of(queue, (oldest, other, young, last)) == [0, 1, 0, 1]
    oldest.num_known = 299  # three blocks, all that its shard has
    queue.reserve()
    assert queue.waiting == [young]
    assert queue.by_age() == [oldest, other, last]


def test_a_fork_stays_on_its_data_shard():
    queue, (request, *_) = make_queue(1, num_blocks=4, shards=2)
    queue.shards.managers[0].admit(256)
    queue.admit()
    new = request.branch(1, seed=1, now_s=0.0)
    queue.shards.of(request.slot)[0].advance(0, 100)
    queue.fork(request, new)
    assert shards_of(queue, (request, new)) == [1, 1]
    queue.shards.managers[1].admit(256)
    late = request.branch(2, seed=1, now_s=0.0)
    queue.fork(request, late)
    assert queue.waiting == [late]  # its parent's shard has no room, and the other no tokens of it
