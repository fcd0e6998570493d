"""What an implementation of `write_streams` is called with."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.common.pending import SplitSums


class Arguments(NamedTuple):
    """The checked arguments of `op.write_streams`, in its order."""

    streams: jax.Array
    output: jax.Array | SplitSums
    post: jax.Array
    comb: jax.Array
    fn: jax.Array
