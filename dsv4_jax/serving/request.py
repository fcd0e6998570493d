"""What `requests/request.py` has, where programs of others look for it."""

from dsv4_jax.serving.requests.request import Completion, Request, Token, TokenLogprobs

__all__ = ["Completion", "Request", "Token", "TokenLogprobs"]
