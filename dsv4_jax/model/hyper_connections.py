"""Hyper-connections (mHC): how a sublayer reads the residual streams and writes to them.

Source: deepseek_v4.md section 1.2, deepseek_v41.md section 5.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv4_jax.config import DSV4Config
from dsv4_jax.model.layer_params import HyperConnectionParams
from pallas_kernels import Backend, hyper_connections, write_streams
from pallas_kernels.common.pending import Output, finish
from pallas_kernels.hyper_connections.reference import collapse, inverse_rms
from pallas_kernels.write_streams.reference import mix, products


class Residual(NamedTuple):
    """The residual streams, and what a sublayer has still to write to them.

    The next sublayer's hyper-connection writes it: on a GPU one kernel does that and the matrix
    product that follows.

    Attributes:
      streams: [..., S, D] that the sublayer read.
      output: [..., D], what it gave, in parts where a product left it so.
      post: f32[..., S], weight of the output in each stream.
      comb: f32[..., S, S], from stream to stream; summed over its first index.
      pre: f32[..., S], weights with which the next sublayer collapses the streams, where those of
        the sublayer before it do (`DSV4Config.shifted_streams`); else None.
    """

    streams: jax.Array
    output: Output
    post: jax.Array
    comb: jax.Array
    pre: jax.Array | None = None

    @classmethod
    def start(cls, streams: jax.Array, *, shifted: bool = False) -> Residual:
        """Streams [..., S, D] to which nothing is to be written: comb is the identity.

        `shifted` has the first sublayer read the first stream; all are equal then.
        """
        num = streams.shape[-2]
        first = jnp.zeros(streams.shape[:-1], jnp.float32).at[..., 0].set(1) if shifted else None
        return cls(
            streams=streams,
            output=jnp.zeros_like(streams[..., 0, :]),
            post=jnp.zeros(streams.shape[:-1], jnp.float32),
            comb=jnp.broadcast_to(jnp.eye(num), (*streams.shape[:-1], num)),
            pre=first,
        )

    def with_streams(self, streams: jax.Array) -> Residual:
        """These streams in the place of the written ones, to be collapsed with the same weights."""
        return Residual.start(streams)._replace(pre=self.pre)

    def collapsed(self) -> jax.Array:
        """[..., D]: what the last sublayer's weights make of the streams, for the head."""
        assert self.pre is not None
        return _collapse(self.pre, self.written())

    def before_head(self) -> jax.Array:
        """[..., S, D], the written streams; [..., 1, D], `collapsed`, where that is not left."""
        return self.written() if self.pre is None else self.collapsed()[..., None, :]

    def written(self) -> jax.Array:
        """[..., S, D]: the streams with the output in them."""
        return mix(self.streams, finish(self.output), self.post, self.comb)


class Reading(NamedTuple):
    """What a sublayer reads, and how it will write.

    Attributes:
      normed: [..., D], the sublayer's input.
      streams: [..., S, D] that it was read from.
      post: as in `Residual`.
      comb: as in `Residual`.
      pre: as in `Residual`, for the sublayer after this one.
    """

    normed: jax.Array
    streams: jax.Array
    post: jax.Array
    comb: jax.Array
    pre: jax.Array | None = None

    def write(self, output: Output) -> Residual:
        """Step 9, to be done by who reads next: the sublayer's output [..., D]."""
        return Residual(self.streams, output, self.post, self.comb, self.pre)


def read_streams(
    params: HyperConnectionParams,
    norm: jax.Array,
    residual: Residual,
    config: DSV4Config,
    name: str,
    *,
    backend: Backend | None = None,
) -> Reading:
    """Step 9 of the sublayer before, steps 1 to 8, and the sublayer's norm.

    Args:
      params: parameters of the hyper-connection.
      norm: [D], norm weight of the sublayer.
      residual: the streams, and what is still to be written to them.
      config: the model.
      name: name of the connection in a capture of intermediates.
      backend: route of the ops; only the reference can be differentiated.
    """
    lead, (num, dim) = residual.streams.shape[:-2], residual.streams.shape[-2:]
    streams, products = write_streams(
        residual.streams.reshape(-1, num, dim),
        residual.output.reshape(-1, dim),
        residual.post.reshape(-1, num),
        residual.comb.reshape(-1, num, num),
        params.fn,
        backend=backend,
    )
    given = residual.pre
    reading = hyper_connections(
        products,
        params.scale,
        params.base,
        streams,
        norm,
        iters=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        weights=None if given is None else given.reshape(-1, num),
        backend=backend,
    )
    checkpoint_name(reading.collapsed.reshape(*lead, dim), f"{name}/collapsed")
    own = reading.pre
    if own is not None:
        own = checkpoint_name(own.reshape(*lead, num), f"{name}/pre")
    return Reading(
        normed=reading.normed.reshape(*lead, dim),
        streams=streams.reshape(*lead, num, dim),
        post=checkpoint_name(reading.post.reshape(*lead, num), f"{name}/post"),
        comb=checkpoint_name(reading.comb.reshape(*lead, num, num), f"{name}/comb"),
        pre=own,
    )


def _collapse(weights: jax.Array, streams: jax.Array) -> jax.Array:
    """f32[..., S] and [..., S, D] -> [..., D]."""
    *lead, num, dim = streams.shape
    return collapse(weights.reshape(-1, num), streams.reshape(-1, num, dim)).reshape(*lead, dim)


def collapse_streams(
    params: HyperConnectionParams, streams: jax.Array, config: DSV4Config
) -> jax.Array:
    """The collapse before a head: [..., S, D] -> [..., D], without Sinkhorn."""
    lead, (num, dim) = streams.shape[:-2], streams.shape[-2:]
    rows = streams.reshape(-1, num, dim)
    logits = jnp.sum(products(params.fn, rows), axis=1) * inverse_rms(rows, config.rms_norm_eps)
    weights = jax.nn.sigmoid(logits * params.scale[0] + params.base[None]) + config.hc_eps
    return collapse(weights, rows).reshape(*lead, dim)
