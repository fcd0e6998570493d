"""Clients that people use, of which each is imported where something of it is first asked for.

Every worker of a run imports all test files, and the two clients take it four seconds.
"""

import importlib


class Late:
    """A module by its name; names that begin with an underscore are none of it."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("_") or name == "pytestmark":  # pytest asks every global for these
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic, openai = Late("anthropic"), Late("openai")
