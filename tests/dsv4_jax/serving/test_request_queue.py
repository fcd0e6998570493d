"""Who waits, who has a slot, and who gives way; no device."""

import numpy as np

import dsv4_jax as ds
from dsv4_jax.serving.calls import UndoLog
from dsv4_jax.serving.metrics import Metrics
from dsv4_jax.serving.request import Request
from dsv4_jax.serving.request_queue import RequestQueue

CONFIG = ds.DSV4Config.tiny()  # blocks of 128 tokens


def make_queue(num_requests, *, num_blocks):
    """Requests with prompts of 100 tokens and answers of 200, all of them waiting."""
    manager = ds.KVCacheManager(
        CONFIG, max_requests=4, max_context_tokens=512, num_blocks=num_blocks, num_snapshots=0
    )
    undo = UndoLog()
    undo.__enter__()  # all of a test is one change
    queue = RequestQueue(manager, draft_tokens=0, metrics=Metrics(), undo=undo)
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
    queue.manager.admit(512)  # somebody else has all of the rest but one
    assert queue.manager.num_free_blocks == 1
    queue.reserve()
    assert queue.by_age() == [oldest, middle]
    assert queue.waiting == [youngest]
    assert youngest.slot == -1
