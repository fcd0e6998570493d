"""What `requests/grammars.py` has, where programs of others look for it."""

from dsv4_jax.serving.requests.grammars import Grammars

__all__ = ["Grammars"]
