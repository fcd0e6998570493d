"""New tokens into rings and running pools."""

from pallas_kernels.append_tokens.op import append_tokens

__all__ = ["append_tokens"]
