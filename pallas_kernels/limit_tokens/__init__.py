"""Where top-k and top-p end in each row of logits."""

from pallas_kernels.limit_tokens.op import limit_tokens

__all__ = ["limit_tokens"]
