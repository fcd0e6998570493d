"""New tokens into rings and running pools."""

from pallas_kernels.append_window.op import append_tokens, encode_tokens

__all__ = ["append_tokens", "encode_tokens"]
