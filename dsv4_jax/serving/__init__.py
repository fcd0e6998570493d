"""Serving on the host: requests come, wait, run in steps and end.

A request on its way, and the room or file that does it:

1. `engine.py` takes the prompt, `requests/prompts.py` checks it, `requests/grammars.py` compiles
   its grammar, and `engine_core.py` queues a `Request`, in one change (`requests/calls.py`).
2. `schedule/request_queue.py` gives it a slot and blocks, or lets it wait.
3. `loop.py` makes a step: `schedule/flight.py` says what each request holds when the step in flight
   has ended, `schedule/step_plans.py` what the next one runs, and `schedule/step_boundaries.py` at
   which block boundaries it writes snapshots.
4. `device/runner.py` turns the plan into arrays, and `device/engine_arrays.py` launches the step.
5. While that runs, `loop.py` reads the step before it, and `device/hand_out.py` gives each request
   its tokens, their text (`requests/token_texts.py`) and the reason if it ends.
6. `Engine.step` returns the tokens (`requests/step_tokens.py`), a `TokenStream` gives those of some
   requests, and `asynchronous/` those of each to its own coroutine.

`hand_over.py` takes a request with its cache out of an engine, as a value, and brings it to one.

Beside that, `metrics/` counts, `engine_state.py` shows what an engine holds, `options.py` has what
it is built with, `step_sizes.py` the shapes that its steps have, and `sizing.py` all that options
come to. Each imports only what stands to its left, as `tests/test_layout.py` holds:

    options  <-  step_sizes  <-  sizing
    metrics, sizing, requests  <-  schedule  <-  device  <-  loop  <-  engine_core
    loop  <-  hand_over  <-  engine
    engine_core  <-  engine_state, engine  <-  asynchronous
"""

from dsv4_jax.serving.asynchronous.async_engine import AsyncEngine, AsyncStream, read_batches
from dsv4_jax.serving.asynchronous.feed import (
    EngineClosedError,
    QueueFullError,
    RequestFailedError,
    SlowReaderError,
)
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.metrics.histogram import Histogram
from dsv4_jax.serving.metrics.metrics import Metrics
from dsv4_jax.serving.metrics.prometheus import MetricsCollector
from dsv4_jax.serving.options import EngineOptions
from dsv4_jax.serving.requests.cached_request import CachedRequest
from dsv4_jax.serving.requests.calls import CacheError
from dsv4_jax.serving.requests.request import Completion, Token, TokenLogprobs
from dsv4_jax.serving.requests.token_stream import TokenStream
from dsv4_jax.step.grammar import Grammar

__all__ = [
    "AsyncEngine",
    "AsyncStream",
    "CacheError",
    "CachedRequest",
    "Completion",
    "Engine",
    "EngineClosedError",
    "EngineOptions",
    "Grammar",
    "Histogram",
    "Metrics",
    "MetricsCollector",
    "QueueFullError",
    "RequestFailedError",
    "SlowReaderError",
    "Token",
    "TokenLogprobs",
    "TokenStream",
    "read_batches",
]
