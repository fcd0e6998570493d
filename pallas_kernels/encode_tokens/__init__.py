"""Queries and window entries as projected into what attention and ring take."""

from pallas_kernels.encode_tokens.op import encode_tokens

__all__ = ["encode_tokens"]
