"""An HTTP server for an engine, in the protocols of OpenAI and Anthropic.

A request on its way, and the file that does it:

1. `server.py` listens, `connection.py` and `parser.py` read a request, and `guard.py` says whether
   it may pass.
2. `app.py` has what answers at each path. `body.py` reads the body; `bodies.py` says who finds
   what it asks for, a process beside the server if it is large (`read_apart.py`).
3. `reading.py` finds that: `fields.py` checks its fields, `drawing.py` reads how the request
   draws, and `completions.py` and `conversations.py` the rest, with `turns/`, `tools.py` and
   `constraints.py`.
4. `intake.py` submits it to the `AsyncEngine`.
5. `answer.py` reads its streams, and sends what `completions.py` or `conversation_renderer.py`
   makes of their tokens.

`settings.py` is what a server is told when it starts, and `batch.py` answers files without HTTP.

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
