"""Serving on the host: requests come, wait, run in steps and end."""

from dsv4_jax.serving.async_engine import AsyncEngine, AsyncStream, read_batches
from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.feed import (
    EngineClosedError,
    QueueFullError,
    RequestFailedError,
    SlowReaderError,
)
from dsv4_jax.serving.loop import CacheError
from dsv4_jax.serving.metrics import Histogram, Metrics
from dsv4_jax.serving.prometheus import MetricsCollector
from dsv4_jax.serving.request import Completion, Token, TokenLogprobs
from dsv4_jax.serving.token_stream import TokenStream
from dsv4_jax.step.grammar import Grammar

__all__ = [
    "AsyncEngine",
    "AsyncStream",
    "CacheError",
    "Completion",
    "Engine",
    "EngineClosedError",
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
