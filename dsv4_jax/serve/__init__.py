"""An HTTP server for an engine, in the protocols of OpenAI and Anthropic."""

from dsv4_jax.serve.app import build_app
from dsv4_jax.serve.server import Server
from dsv4_jax.serve.settings import ServeSettings

__all__ = ["ServeSettings", "Server", "build_app"]
