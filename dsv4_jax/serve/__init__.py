"""An HTTP server for an engine, in the protocols of OpenAI and Anthropic.

Names are imported when they are first used: `settings.py` needs none of the server's libraries, and
the command line takes its options from there before it knows whether they are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_jax.serve.app import build_app
    from dsv4_jax.serve.server import Server
    from dsv4_jax.serve.settings import ServeSettings

__all__ = ["ServeSettings", "Server", "build_app"]

_MODULES = {"ServeSettings": "settings", "Server": "server", "build_app": "app"}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562)."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
