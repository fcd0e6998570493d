"""Serving on the host: requests come, wait, run in steps and end."""

from dsv4_jax.serving.engine import Engine
from dsv4_jax.serving.loop import CacheError
from dsv4_jax.serving.metrics import Histogram, Metrics
from dsv4_jax.serving.prometheus import MetricsCollector
from dsv4_jax.serving.request import Completion, Token
from dsv4_jax.serving.token_stream import TokenStream

__all__ = [
    "CacheError",
    "Completion",
    "Engine",
    "Histogram",
    "Metrics",
    "MetricsCollector",
    "Token",
    "TokenStream",
]
