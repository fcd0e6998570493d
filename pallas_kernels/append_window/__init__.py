"""New tokens into rings and running pools."""

from pallas_kernels.append_window.op import (
    append_ring,
    append_running,
    append_tokens,
    encode_window,
)

__all__ = ["append_ring", "append_running", "append_tokens", "encode_window"]
