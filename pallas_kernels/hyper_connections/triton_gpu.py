"""Triton kernels of `hyper_connections`.

Few tokens take two programs each, which both sum its squares:

    program 0    weighs the streams, stores the collapsed and the normed row
    program 1    post, and the Sinkhorn of comb: sixteen scalars, some forty times four sums

Many tokens take two launches, as a program for each would wait for its sums:

    read         what program 0 does, but stores the logits in place of the collapsed row
    connect      what program 1 does, a token a thread

Their collapsed row, which a model does not read, is XLA's, who leaves it out where nobody asks.
Shifted, program 0 takes weights that are given, and waits for no sum before it weighs; program 1,
or `connect`, has pre for the next connection.

Bytes: the streams in, of few tokens twice; the normed row out, and of few the collapsed one. The
launch and the chain of sums bound few tokens. It compiles for Blackwell and has not run there.
Measurements and roads not taken: docs/kernels/hyper_connections.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.gpu.triton_rope import round_to_dtype
from pallas_kernels.hyper_connections import reference
from pallas_kernels.hyper_connections.reference import Arguments, Reading

Ref = Any
_NUM_WARPS = 4
_MANY_TOKENS = 512
"""Where two launches take over; with 256 both forms take as long."""
_CONNECTED = 128
"""Tokens of a program that connects many, one for each of its threads."""


def hyper_connections(arguments: Arguments, *, is_many: bool | None = None) -> Reading:
    """See `op.hyper_connections`."""
    streams = arguments.streams
    (count, num, dim), dtype = streams.shape, streams.dtype
    is_many = count >= _MANY_TOKENS if is_many is None else is_many
    row = jax.ShapeDtypeStruct((count, dim), dtype)
    logits = jax.ShapeDtypeStruct((count, arguments.products.shape[2]), jnp.float32)
    of_streams = jax.ShapeDtypeStruct((count, num), jnp.float32)
    weights = arguments.weights
    connections = _Connections(
        post=of_streams,
        comb=jax.ShapeDtypeStruct((count, num * num), jnp.float32),
        pre=None if weights is None else of_streams,
    )
    read: _Outputs = triton.launch(
        functools.partial(_read, arguments=arguments, is_many=is_many),
        grid=(count, 1 if is_many else 2),
        inputs=_Operands(
            arguments.products, arguments.scale, arguments.base, streams, arguments.norm, weights
        ),
        outputs=_Outputs(normed=row, logits=logits)
        if is_many
        else _Outputs(normed=row, collapsed=row, connections=connections),
        num_warps=_NUM_WARPS,
        name="hyper_connections",
    )
    collapsed, connections_found = read.collapsed, read.connections
    if is_many:
        # XLA's own, for the collapsed row alone; where nobody reads that, neither is computed.
        pre = jax.nn.sigmoid(read.logits[:, :num]) + arguments.eps
        collapsed = reference.collapse(pre if weights is None else weights, streams)
        connections_found = triton.launch(
            functools.partial(_connect_many, arguments=arguments),
            grid=(pl.cdiv(count, _CONNECTED),),
            inputs=read.logits,
            outputs=connections,
            num_warps=_CONNECTED // 32,
            name="hyper_connections_many",
        )
    comb = connections_found.comb.reshape(count, num, num)
    post, own = connections_found.post, connections_found.pre
    return Reading(collapsed, read.normed, post, comb, own)


class _Operands(NamedTuple):
    """Arrays that the kernel reads, and in it their refs; see `op.hyper_connections`."""

    products: Any
    scale: Any
    base: Any
    streams: Any
    norm: Any
    weights: Any = None


class _Connections(NamedTuple):
    """How the sublayer will write: post f32[T, S] and comb f32[T, S * S], or refs of them.

    And, shifted, pre f32[T, S] for the next one.
    """

    post: Any
    comb: Any
    pre: Any = None


class _Outputs(NamedTuple):
    """Arrays that the first kernel writes, and in it their refs.

    Attributes:
      normed: [T, D].
      logits: f32[T, (2 + S) * S] of many tokens.
      collapsed: [T, D] of few.
      connections: of few.
    """

    normed: Any
    logits: Any = None
    collapsed: Any = None
    connections: Any = None


def _read(inputs: _Operands, outputs: _Outputs, *, arguments: Arguments, is_many: bool) -> None:
    """Reads a token's streams, as one of its two programs, or as its only one of many tokens.

    All that is loaded is asked for before threads wait for each other.
    """
    program = _Program(inputs, outputs, arguments, pl.program_id(0))
    if is_many:
        program.read_one_of_many()
        return
    pl.when(pl.program_id(1) == 0)(program.read_alone)
    pl.when(pl.program_id(1) == 1)(program.connect)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program of the first kernel.

    Attributes:
      inputs: what it reads.
      outputs: what it writes.
      arguments: of the call.
      token: i32[], its token.
    """

    inputs: _Operands
    outputs: _Outputs
    arguments: Arguments
    token: jax.Array

    @property
    def num(self) -> int:
        """Streams of a token."""
        return self.inputs.streams.shape[1]

    @property
    def dim(self) -> int:
        """Columns of a stream."""
        return self.inputs.streams.shape[2]

    @property
    def width(self) -> int:
        """Lanes of a stream; those beyond its columns are zeros."""
        return pl.next_power_of_2(self.dim)

    def read_alone(self) -> None:
        """Program 0 of few tokens: weighs the streams."""
        if self.inputs.weights is not None:
            given = self.given_weights()
            self.store_read(given, self.load_streams()[0])
            return
        asked = self.ask(0, self.num, 0)
        rows, inverse_rms = self.load_streams()
        self.store_read(self.own_weights(asked.finish(inverse_rms)), rows)

    def connect(self) -> None:
        """Program 1 of few tokens: stores post and comb and, shifted, pre."""
        num, is_shifted = self.num, self.inputs.weights is not None
        # All loads before the sum of squares, which has the threads wait for each other.
        of_post, of_comb = self.ask(num, num, 1), self.ask(2 * num, num * num, 2)
        of_pre = self.ask(0, num, 0) if is_shifted else None
        _, inverse_rms = self.load_streams()
        post_ref, comb_ref, pre_ref = self.outputs.connections
        if of_pre is not None:
            own = self.own_weights(of_pre.finish(inverse_rms))
            lane = jnp.arange(own.shape[0], dtype=jnp.int32)
            triton.store_where(pre_ref, (self.token, lane), own, of_pre.live)
        found = of_post.finish(inverse_rms)
        lane = jnp.arange(found.shape[0], dtype=jnp.int32)
        triton.store_where(post_ref, (self.token, lane), 2 * jax.nn.sigmoid(found), of_post.live)
        self.store_comb(comb_ref, of_comb.finish(inverse_rms))

    def read_one_of_many(self) -> None:
        """The only program of a token: reads, and leaves its logits for `_connect_many`."""
        asked = self.ask(0, (2 + self.num) * self.num, None)
        rows, inverse_rms = self.load_streams()
        found = asked.finish(inverse_rms)
        number = jnp.arange(found.shape[0], dtype=jnp.int32)
        triton.store_where(self.outputs.logits, (self.token, number), found, asked.live)
        own = self.inputs.weights is None
        self.store_read(self.own_weights(found) if own else self.given_weights(), rows)

    def ask(self, first: int, count: int, kind: int | None) -> Logits:
        """`count` logits from a place on, all of one kind or, if None, of any."""
        inputs = self.inputs
        parts = inputs.products.shape[1]
        part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)[:, None]
        lane = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
        number, live = first + lane, lane < count
        # f32[parts, n]; absent parts and lanes are zeros, and add nothing.
        loaded = triton.load_where(
            inputs.products, (self.token, part, number[None]), (part < parts) & live[None]
        )
        # Of all logits the first S are pre's, the next S post's, and the rest comb's, with a scale
        # each.
        if kind is None:
            factor = triton.load_where(inputs.scale, (jnp.minimum(number // self.num, 2),), live)
        else:
            factor = inputs.scale[kind]
        return Logits(loaded, factor, triton.load_where(inputs.base, (number,), live), live)

    def load_streams(self) -> tuple[list[jax.Array], jax.Array]:
        """Each stream [width], a lane for each column; and one over the RMS of all."""
        rows = [
            triton.load_row(
                self.inputs.streams, (self.token, j), start=0, count=self.dim, width=self.width
            )
            for j in range(self.num)
        ]
        squares = functools.reduce(jnp.add, (jnp.square(row.astype(jnp.float32)) for row in rows))
        # Over all threads of the program: the one sum that everything after it waits for.
        mean_square = jnp.sum(squares) / (self.num * self.dim)
        return rows, jax.lax.rsqrt(mean_square + self.arguments.norm_eps)

    def store_read(self, pre: jax.Array, rows: list[jax.Array]) -> None:
        """Stores the collapsed row, of few tokens, and the normed one, given f32[S] weights."""
        dtype, dim = self.inputs.streams.dtype, self.dim
        weight = triton.load_row(self.inputs.norm, (), start=0, count=dim, width=self.width)
        lane = jnp.arange(pre.shape[0])
        collapsed = jnp.zeros(self.width, jnp.float32)
        for j, row in enumerate(rows):
            # A lane's value for all threads.
            share = jnp.sum(jnp.where(lane == j, pre, 0.0))
            collapsed = collapsed + row.astype(jnp.float32) * share
        collapsed = round_to_dtype(collapsed, dtype)
        # The second sum over all threads, of the row as rounded.
        mean_square = jnp.sum(collapsed * collapsed) / dim
        inverse = jax.lax.rsqrt(mean_square + self.arguments.norm_eps)
        normed = round_to_dtype(collapsed * inverse * weight.astype(jnp.float32), dtype)
        at = (self.token,)
        if self.outputs.collapsed is not None:
            collapsed_row = collapsed.astype(dtype)
            triton.store_row(self.outputs.collapsed, at, collapsed_row, first=0, count=dim)
        triton.store_row(self.outputs.normed, at, normed.astype(dtype), first=0, count=dim)

    def own_weights(self, found: jax.Array) -> jax.Array:
        """Logits of pre, and others behind them, as weights."""
        return jax.nn.sigmoid(found) + self.arguments.eps

    def given_weights(self) -> jax.Array:
        """Those of a shifted connection, f32[S] and zeros behind them."""
        lane = jnp.arange(pl.next_power_of_2(self.num), dtype=jnp.int32)
        return triton.load_where(self.inputs.weights, (self.token, lane), lane < self.num)

    def store_comb(self, comb_ref: Ref, logits: jax.Array) -> None:
        """Stores the Sinkhorn of comb's logits, f32[S * S] and zeros behind them."""
        num, arguments = self.num, self.arguments
        lane = jnp.arange(logits.shape[0], dtype=jnp.int32)
        # From a lane each to scalars that every thread has: Sinkhorn then needs no other thread.
        values = [[_value_of(logits, lane, j * num + k) for k in range(num)] for j in range(num)]
        stored = jnp.ones(1, jnp.bool_)
        for j, row in enumerate(_sinkhorn(values, iters=arguments.iters, eps=arguments.eps)):
            for k, value in enumerate(row):
                to = self.token, jnp.full(1, j * num + k, jnp.int32)
                triton.store_where(comb_ref, to, value, stored)


def _value_of(flat: jax.Array, lane: jax.Array, number: int) -> jax.Array:
    """f32[1], the lane's of that number, which every thread has."""
    return jnp.sum(jnp.where(lane == number, flat, 0.0)).reshape(1)


class Logits(NamedTuple):
    """What some logits are made of.

    Attributes:
      products: f32[P, n], parts of each.
      factor: f32[n] or f32[].
      base: f32[n].
      live: bool[n], whether each is one; the others are zeros.
    """

    products: jax.Array
    factor: jax.Array
    base: jax.Array
    live: jax.Array

    def finish(self, inverse_rms: jax.Array) -> jax.Array:
        """f32[n]."""
        return jnp.sum(self.products, axis=0) * inverse_rms * self.factor + self.base


def _connect_many(logits: Ref, outputs: _Connections, *, arguments: Arguments) -> None:
    """Stores post and comb of some tokens, given their logits, f32[T, (2 + S) * S]."""
    post_ref, comb_ref, pre_ref = outputs
    count, num = post_ref.shape
    token = pl.program_id(0) * _CONNECTED + jnp.arange(_CONNECTED, dtype=jnp.int32)
    # A thread has a token's numbers to itself, so that no sum crosses threads.
    live = token < count

    def logit(number: int) -> jax.Array:
        return triton.load_where(logits, (token, jnp.int32(number)), live)

    for k in range(num):
        if pre_ref is not None:
            pre = jax.nn.sigmoid(logit(k)) + arguments.eps
            triton.store_where(pre_ref, (token, jnp.int32(k)), pre, live)
        post = 2 * jax.nn.sigmoid(logit(num + k))
        triton.store_where(post_ref, (token, jnp.int32(k)), post, live)
    values = [[logit((2 + j) * num + k) for k in range(num)] for j in range(num)]
    for j, row in enumerate(_sinkhorn(values, iters=arguments.iters, eps=arguments.eps)):
        for k, value in enumerate(row):
            triton.store_where(comb_ref, (token, jnp.int32(j * num + k)), value, live)


Square = list[list[jax.Array]]


def _sinkhorn(logits: Square, *, iters: int, eps: float) -> Square:
    """`reference.sinkhorn` of a matrix of scalars, or of one in each thread.

    No sum needs another thread. Each is added up in pairs and inverted once, where the definition
    divides: a few units in the last place apart. The way from one sum to the next is what an
    iteration takes.
    """

    def columns(p: Square) -> Square:
        return _transposed(rows(_transposed(p)))

    def rows(p: Square) -> Square:
        inverse = [triton.reciprocal(_sum_of_pairs(row) + eps) for row in p]
        return [[x * i for x in row] for row, i in zip(p, inverse, strict=True)]

    def rows_then_columns(_: jax.Array, p: Square) -> Square:
        return columns(rows(p))

    weights = []
    for row in logits:
        # A softmax of each row, whose largest exponent is 0.
        largest = functools.reduce(jnp.maximum, row)
        shifted = [jnp.exp(x - largest) for x in row]
        total = functools.reduce(jnp.add, shifted)
        weights.append([x / total + eps for x in shifted])
    return jax.lax.fori_loop(0, iters - 1, rows_then_columns, columns(weights))


def _sum_of_pairs(terms: list[jax.Array]) -> jax.Array:
    """The sum of the sums of both halves."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return _sum_of_pairs(terms[:half]) + _sum_of_pairs(terms[half:])


def _transposed(p: Square) -> Square:
    return [list(column) for column in zip(*p, strict=True)]
