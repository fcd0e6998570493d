"""The floor of a decode step on a mesh: no step of that model takes less time on those devices.

Each op of a device takes at least the larger of its bytes over the bandwidth and its operations
over their rate; each collective takes a latency, and what a device sends over the link's bandwidth.
Ops and collectives come one after the other.

Source: design/several_gpus.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from dsv4_jax.bench import roofline
from dsv4_jax.bench.gpus import H200, Rates
from dsv4_jax.bench.roofline import Work
from dsv4_jax.bench.routing_laws import expected_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.moe import ROUNDED_ROWS
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.weight_sizes import walk_weights, weight_family, weight_format
from pallas_kernels.common.weights import is_quantized, weight_bytes

LINK_BANDWIDTH = H200.link_bandwidth
"""Bytes per second that a GPU sends to its peers over NVLink, in one direction."""
COLLECTIVE_S = 6e-6
"""Seconds that a collective takes however few its bytes are."""

_BF16, _F32 = 2, 4
_HCA = AttentionType.HCA
_DRAWS = 64
_ALL_PICKED = 10
"""Picks an expert on average, from which on some device reads all of its experts: of 256 that are
picked so often one is missed in a hundredth of the steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of collective of a step.

    Attributes:
      name: what it moves.
      axis: axis of the mesh.
      count: how often a step runs it.
      sent_bytes: bytes that a device sends each time.
    """

    name: str
    axis: str
    count: int
    sent_bytes: float

    def seconds(self, latency_s: float, link_bandwidth: float = LINK_BANDWIDTH) -> float:
        """Of all of them in a step."""
        return self.count * (latency_s + self.sent_bytes / link_bandwidth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFloor:
    """The least time of one decode step.

    Attributes:
      batch: requests of the step, on all devices together.
      num_devices: devices of the mesh.
      op_s: {family of weights, or op: seconds}, of all layers.
      num_bytes: bytes that a device reads and writes.
      collectives: the collectives of the step.
      latency_s: seconds that each takes beside its bytes.
      link_bandwidth: bytes per second that a device sends.
    """

    batch: int
    num_devices: int
    op_s: dict[str, float]
    num_bytes: float
    collectives: tuple[Collective, ...]
    latency_s: float
    link_bandwidth: float = LINK_BANDWIDTH

    @property
    def device_s(self) -> float:
        """Seconds without collectives."""
        return sum(self.op_s.values())

    @property
    def collective_s(self) -> float:
        """Seconds of the collectives."""
        return sum(each.seconds(self.latency_s, self.link_bandwidth) for each in self.collectives)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.device_s + self.collective_s

    @property
    def tokens_per_device_s(self) -> float:
        """Tokens per second and device."""
        return self.batch / self.seconds / self.num_devices


def step_floor(
    config: DSV4Config,
    params: DSV4Params,
    *,
    data: int,
    model: int,
    batch: int,
    context: int,
    cache_format: str,
    activations: str = "fp8",
    collective_s: float = COLLECTIVE_S,
    busiest: bool = False,
    split_cache: bool = False,
    exponent: float = 0.0,
    rates: Rates = H200,
) -> StepFloor:
    """The floor of one decode step without drafts.

    Requests are spread evenly: the busiest data shard has batch / data of them, rounded up.

    Args:
      config: the model.
      params: shapes of what one device holds, layers stacked.
      data: data shards.
      model: devices of a data shard.
      batch: requests of the step, on all devices together.
      context: tokens of each request.
      cache_format: name of the storage format.
      activations: what multiplies quantised weights: "fp8" or "bfloat16".
      collective_s: seconds that a collective takes beside its bytes.
      busiest: whether all wait for the device that holds most of the experts picked
        (`busiest_experts`); if not, each holds its part of them.
      split_cache: blocks are dealt over `model`; else the cache is replicated over it.
      exponent: of the law by which tokens pick experts, of `routing_laws.LAWS`; of `busiest` it is
        0.
      rates: of a device.
    """
    rows = -(-batch // data)
    if busiest:
        experts = busiest_experts(config, batch=batch, num_devices=data * model)
    else:
        experts = expected_experts(config, rows=batch, exponent=exponent) / (data * model)
        experts = max(experts, float(-(-config.num_experts_per_token // (data * model))))
    pairs = batch * config.num_experts_per_token / (data * model)
    works = [
        *_weight_work(config, params, rows, experts, pairs, activations),
        *_stream_work(config, rows),
        *_cache_work(config, rows, model, context, cache_format, split_cache),
    ]
    op_s: dict[str, float] = {}
    for count, work in works:
        op_s[work.name] = op_s.get(work.name, 0.0) + count * work.seconds(rates)
    return StepFloor(
        batch=batch,
        num_devices=data * model,
        op_s=op_s,
        num_bytes=sum(count * work.num_bytes for count, work in works),
        collectives=(
            *step_collectives(
                config,
                data=data,
                model=model,
                rows=rows,
                rounds_rows=activations == "fp8" and has_quantised_experts(params),
            ),
            *(split_collectives(config, model=model, rows=rows, context=context) * split_cache),
        ),
        latency_s=collective_s,
        link_bandwidth=rates.link_bandwidth,
    )


def step_collectives(
    config: DSV4Config,
    *,
    data: int,
    model: int,
    rows: int,
    rounds_rows: bool = False,
    layers: int | None = None,
) -> tuple[Collective, ...]:
    """The collectives of a decode step with that many rows on each data shard.

    `layers` are those of the step; None is all of the trunk.

    A gather of N bytes over n devices sends (n - 1) / n * N of each, and so does a scatter of sums;
    a sum that all devices want is both. Where experts round rows to E4M3 (`rounds_rows`), many rows
    are sent so, with a scale for each 128 values.
    """
    layers, dim = config.num_layers if layers is None else layers, config.hidden_size
    collectives = []
    if model > 1:
        half = (model - 1) / model
        summed = 2 * half * rows * dim * _BF16
        collectives += [
            Collective(name="attention", axis="model", count=layers, sent_bytes=summed),
            Collective(name="experts", axis="model", count=layers, sent_bytes=summed),
            Collective(name="embedding", axis="model", count=1, sent_bytes=summed),
            Collective(
                name="best candidates",
                axis="model",
                count=1,
                sent_bytes=half * model * rows * (_F32 + _F32),
            ),
        ]
    if data > 1:
        share = (data - 1) / data * data * rows
        row = float(dim * _BF16)
        if rounds_rows and data * rows >= ROUNDED_ROWS:
            row = dim * (1 + 1 / config.weight_block)
        routes = config.num_experts_per_token * (_F32 + _F32)
        collectives += [
            Collective(
                name="rows and routes", axis="data", count=layers, sent_bytes=share * (row + routes)
            ),
            Collective(name="experts", axis="data", count=layers, sent_bytes=share * dim * _BF16),
        ]
    return tuple(collectives)


def split_collectives(
    config: DSV4Config, *, model: int, rows: int, context: int
) -> tuple[Collective, ...]:
    """What attention adds to `step_collectives` where blocks are dealt over `model`.

    Queries of all heads go to every device, in a layer that selects with what each device finds
    best, and every device's sums in f32 to the device of their heads.
    """
    if model == 1:
        return ()
    half, heads = (model - 1) / model, config.num_attention_heads
    layers = {attn: config.layer_types.count(attn) for attn in (AttentionType.CSA, _HCA)}
    entries = context // config.csa_compression_ratio
    best = 0
    if entries > config.indexer_top_k:
        best = min(config.indexer_top_k, -(-entries // model)) * model * (_F32 + _F32)
    queries = heads * config.head_dim * _BF16
    sums = heads * (config.head_dim + 2) * _F32
    exchanged = (
        ("queries and the best entries", layers[AttentionType.CSA], queries + best),
        ("queries", layers[_HCA], queries),
        ("sums of attention", sum(layers.values()), sums),
    )
    return tuple(
        Collective(name=name, axis="model", count=count, sent_bytes=half * rows * size)
        for name, count, size in exchanged
        if count
    )


@functools.cache
def busiest_experts(config: DSV4Config, *, batch: int, num_devices: int) -> float:
    """Experts of a layer that the busiest device reads, on average over tokens' random picks."""
    if num_devices == 1:
        return expected_experts(config, rows=batch)
    experts = config.num_routed_experts
    if batch * config.num_experts_per_token > _ALL_PICKED * experts:
        return float(np.bincount(np.arange(experts) * num_devices // experts).max())
    rng, most = np.random.default_rng(0), []
    for _ in range(_DRAWS):
        order = rng.random((batch, config.num_routed_experts), np.float32)
        picked = np.argpartition(order, config.num_experts_per_token - 1, axis=-1)
        picked = np.unique(picked[:, : config.num_experts_per_token])
        most.append(np.bincount(picked * num_devices // config.num_routed_experts).max())
    return float(np.mean(most))


def has_quantised_experts(params: DSV4Params) -> bool:
    """Whether routed experts are in a format whose products round rows."""
    return any(
        weight_family(path) == "routed experts" and is_quantized(weight)
        for path, weight in walk_weights(params)
    )


def _weight_work(
    config: DSV4Config,
    params: DSV4Params,
    rows: int,
    experts: float,
    pairs: float,
    activations: str,
) -> Iterator[tuple[int, Work]]:
    """(layers, work in each) of every weight; a device reads `experts` for `pairs` of a layer."""
    for path, weight in walk_weights(dataclasses.replace(params, mtp=None)):
        family, quantised = weight_family(path), weight_format(weight) in ("FP8", "MXFP4")
        stacked = path.startswith("layers.")
        layers, shape = (weight.shape[0], weight.shape[1:]) if stacked else (1, weight.shape)
        in_fp8 = quantised and activations == "fp8"
        num_bytes, tokens = weight_bytes(weight) / layers, float(rows)
        if family == "routed experts":
            num_bytes *= min(experts / shape[0], 1.0)
            tokens = pairs
        elif family in ("embedding", "hash tables"):  # a row for each token, not all of it
            num_bytes, tokens = rows * shape[-1] * 2.0 * _BF16, 0.0
        elif len(shape) < 2 or path.endswith(".ape"):
            tokens = 0.0
        out, into = (1, *shape)[-2:]
        flops, moved = 2.0 * tokens * out * into, tokens * (out + into) * _BF16
        yield layers, Work(family, num_bytes + moved, flops, in_fp8)


def _stream_work(config: DSV4Config, rows: int) -> Iterator[tuple[int, Work]]:
    """Hyper-connections: a sublayer reads and writes the streams, its output and its input."""
    streams = 2 * config.hc_mult + 2
    moved = rows * streams * config.hidden_size * _BF16
    yield 2 * config.num_layers, Work("hyper-connections", moved)


def with_heads_of_a_device(config: DSV4Config, model: int) -> DSV4Config:
    """The model with those heads that one of so many devices has."""
    heads = config.num_attention_heads // model
    groups = math.gcd(config.o_groups, heads)
    return dataclasses.replace(config, num_attention_heads=heads, o_groups=groups)


def _cache_work(
    config: DSV4Config,
    rows: int,
    model: int,
    context: int,
    cache_format: str,
    split_cache: bool,
) -> Iterator[tuple[int, Work]]:
    """Cache ops of a device: some of the heads and all of the cache of its requests.

    Where that is split: all heads and some of the entries, and sums in f32 that it writes and then
    reads.
    """
    local = with_heads_of_a_device(config, model)
    for spec in layer_schedule(config):
        sizes = {"batch": rows, "context": context, "cache_format": cache_format}
        works = roofline.cache_work(local, spec, **sizes)
        if split_cache and model > 1 and spec.attn != AttentionType.SWA:
            works[1:] = roofline.cache_work(config, spec, block_parts=model, **sizes)[1:]
            sums = 2.0 * rows * config.num_attention_heads * (config.head_dim + 2) * _F32
            works.append(Work("join", sums))
        for work in works:
            yield 1, dataclasses.replace(work, name=f"cache {work.name}")
