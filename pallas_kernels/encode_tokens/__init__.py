"""Norm and RoPE of queries and window entries, and the encoding of the latter."""

from pallas_kernels.encode_tokens.op import encode_tokens

__all__ = ["encode_tokens"]
