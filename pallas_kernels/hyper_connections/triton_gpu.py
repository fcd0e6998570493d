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
    (_, num, dim), dtype = inputs.streams.shape, inputs.streams.dtype
    width = pl.next_power_of_2(dim)
    token = pl.program_id(0)

    def ask(first: int, count: int, kind: int | None) -> Logits:
        """`count` logits from a place on, all of one kind or, if None, of any."""
        parts = inputs.products.shape[1]
        part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)[:, None]
        lane = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
        number, live = first + lane, lane < count
        # f32[parts, n]; absent parts and lanes are zeros, and add nothing.
        loaded = triton.load_where(
            inputs.products, (token, part, number[None]), (part < parts) & live[None]
        )
        # Of all logits the first S are pre's, the next S post's, and the rest comb's, with a scale
        # each.
        if kind is None:
            factor = triton.load_where(inputs.scale, (jnp.minimum(number // num, 2),), live)
        else:
            factor = inputs.scale[kind]
        return Logits(loaded, factor, triton.load_where(inputs.base, (number,), live), live)

    def load_streams() -> tuple[list[jax.Array], jax.Array]:
        """Each stream, and one over the RMS of all."""
        # Each stream [width], a lane for each column; those beyond the last are zeros.
        rows = [
            triton.load_row(inputs.streams, (token, j), start=0, count=dim, width=width)
            for j in range(num)
        ]
        squares = functools.reduce(jnp.add, (jnp.square(row.astype(jnp.float32)) for row in rows))
        # Over all threads of the program: the one sum that everything after it waits for.
        mean_square = jnp.sum(squares) / (num * dim)
        return rows, jax.lax.rsqrt(mean_square + arguments.norm_eps)

    def read(pre: jax.Array, rows: list[jax.Array]) -> None:
        weight = triton.load_row(inputs.norm, (), start=0, count=dim, width=width)
        lane = jnp.arange(pre.shape[0])
        collapsed = jnp.zeros(width, jnp.float32)
        for j, row in enumerate(rows):
            # A lane's value for all threads.
            share = jnp.sum(jnp.where(lane == j, pre, 0.0))
            collapsed = collapsed + row.astype(jnp.float32) * share
        collapsed = round_to_dtype(collapsed, dtype)
        # The second sum over all threads, of the row as rounded.
        mean_square = jnp.sum(collapsed * collapsed) / dim
        inverse = jax.lax.rsqrt(mean_square + arguments.norm_eps)
        normed = round_to_dtype(collapsed * inverse * weight.astype(jnp.float32), dtype)
        if not is_many:
            collapsed_row = collapsed.astype(dtype)
            triton.store_row(outputs.collapsed, (token,), collapsed_row, first=0, count=dim)
        triton.store_row(outputs.normed, (token,), normed.astype(dtype), first=0, count=dim)

    def own_weights(found: jax.Array) -> jax.Array:
        """Logits of pre, and others behind them, as weights."""
        return jax.nn.sigmoid(found) + arguments.eps

    def given_weights() -> jax.Array:
        lane = jnp.arange(pl.next_power_of_2(num), dtype=jnp.int32)
        return triton.load_where(inputs.weights, (token, lane), lane < num)

    def read_alone() -> None:
        if inputs.weights is not None:
            given = given_weights()
            read(given, load_streams()[0])
            return
        asked = ask(0, num, 0)
        rows, inverse_rms = load_streams()
        read(own_weights(asked.finish(inverse_rms)), rows)

    def connect() -> None:
        # All loads before the sum of squares, which has the threads wait for each other.
        of_post, of_comb = ask(num, num, 1), ask(2 * num, num * num, 2)
        of_pre = None if inputs.weights is None else ask(0, num, 0)
        _, inverse_rms = load_streams()
        post_ref, comb_ref, pre_ref = outputs.connections
        if of_pre is not None:
            own = own_weights(of_pre.finish(inverse_rms))
            lane = jnp.arange(own.shape[0], dtype=jnp.int32)
            triton.store_where(pre_ref, (token, lane), own, of_pre.live)
        found = of_post.finish(inverse_rms)
        lane = jnp.arange(found.shape[0], dtype=jnp.int32)
        triton.store_where(post_ref, (token, lane), 2 * jax.nn.sigmoid(found), of_post.live)
        flat = of_comb.finish(inverse_rms)
        lane_of_comb = jnp.arange(flat.shape[0], dtype=jnp.int32)
        # From a lane each to scalars that every thread has: Sinkhorn then needs no other thread.
        values = [
            [flat_value(flat, lane_of_comb, j * num + k) for k in range(num)] for j in range(num)
        ]
        stored = jnp.ones(1, jnp.bool_)
        for j, row in enumerate(_sinkhorn(values, iters=arguments.iters, eps=arguments.eps)):
            for k, value in enumerate(row):
                to = token, jnp.full(1, j * num + k, jnp.int32)
                triton.store_where(comb_ref, to, value, stored)

    def flat_value(flat: jax.Array, lane: jax.Array, number: int) -> jax.Array:
        """f32[1], which every thread has."""
        return jnp.sum(jnp.where(lane == number, flat, 0.0)).reshape(1)

    if not is_many:
        pl.when(pl.program_id(1) == 0)(read_alone)
        pl.when(pl.program_id(1) == 1)(connect)
        return
    # Of many tokens one program reads, and leaves logits for `_connect_many`.
    asked = ask(0, (2 + num) * num, None)
    rows, inverse_rms = load_streams()
    found = asked.finish(inverse_rms)
    number = jnp.arange(found.shape[0], dtype=jnp.int32)
    triton.store_where(outputs.logits, (token, number), found, asked.live)
    read(own_weights(found) if inputs.weights is None else given_weights(), rows)


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
