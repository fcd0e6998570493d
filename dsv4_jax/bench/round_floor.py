"""The bytes that a round must read, part by part, and the least time that they take.

Of the routed experts, rows are counted to pick theirs independently. Caches and activations of a
few rows are little beside the weights: of the cache what one token of each request reads is
counted, once. On a mesh bytes are those of one device, and collectives take their time one after
the other, as in `floor.py`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from dsv4_jax.bench import roofline
from dsv4_jax.bench.floor import (
    COLLECTIVE_S,
    Collective,
    has_quantised_experts,
    step_collectives,
    with_heads_of_a_device,
)
from dsv4_jax.bench.routing_laws import expected_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.weight_sizes import walk_weights
from pallas_kernels.common.weights import weight_bytes

_EXPERTS = re.compile(r"\.ffn\.w[123]$").search


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundBytes:
    """Bytes that the parts of a round read, on each device.

    Attributes:
      plain: of a step of one token for each request.
      verify: of the trunk on all rows of a round.
      context: of what settled tokens leave.
      block_pass: of the pass over a block, with the head.
      chain: of what ties the guesses of a block together.
      experts: {rows: experts of a layer that are read} of a plain step, a round and a pass.
      expert: of one expert of every layer of the trunk.
      stage_expert: of one expert of every stage.
      block_rows: rows of a pass.
      collectives: {part: its collectives} on a mesh, of a plain step and a round.
    """

    plain: float
    verify: float
    context: float
    block_pass: float
    chain: float
    experts: dict[int, float]
    expert: float
    stage_expert: float
    block_rows: int
    collectives: dict[str, tuple[Collective, ...]] = dataclasses.field(default_factory=dict)

    @property
    def proposal(self) -> float:
        """Pass and chain."""
        return self.block_pass + self.chain

    @property
    def round(self) -> float:
        """All of a round."""
        return self.verify + self.context + self.proposal

    def floor_ms(self, part: str, more_bytes: float = 0.0) -> float:
        """Milliseconds of a part at the bandwidth of a copy on an H200, with its collectives.

        Args:
          part: name of an attribute.
          more_bytes: beyond those that independent picks read.
        """
        read_ms = (getattr(self, part) + more_bytes) / roofline.BANDWIDTH * 1e3
        return read_ms + self.collectives_ms(part)

    def collectives_ms(self, part: str) -> float:
        """Milliseconds of the collectives of a part."""
        return 1e3 * sum(each.seconds(COLLECTIVE_S) for each in self.collectives.get(part, ()))

    def num_collectives(self, part: str) -> int:
        """How many collectives a part runs."""
        return sum(each.count for each in self.collectives.get(part, ()))


def round_bytes(
    config: DSV4Config,
    params: DSV4Params,
    *,
    batch: int,
    draft_tokens: int,
    context: int,
    cache_format: str,
    exponent: float = 0.0,
    data: int = 1,
    model: int = 1,
    activations: str = "fp8",
) -> RoundBytes:
    """Counts the bytes.

    Args:
      config: the model, with `dspark`.
      params: its parameters, or their shapes, unstacked; on a mesh those of one device.
      batch: B, requests, on all devices together.
      draft_tokens: drafts that are checked of each.
      context: tokens of each.
      cache_format: name of the storage format.
      exponent: of the law by which tokens pick experts, of `routing_laws.LAWS`.
      data: data shards; the busiest has batch / data requests, rounded up.
      model: devices of a data shard, with the whole cache of its requests each.
      activations: what multiplies quantised weights: "fp8" or "bfloat16".
    """
    spec = config.dspark
    assert spec is not None
    devices, shard = data * model, -(-batch // data)
    sizes = {"batch": shard, "context": context, "cache_format": cache_format}
    local = with_heads_of_a_device(config, model)
    cache = sum(w.num_bytes for w in roofline.step_cache_work(local, **sizes).values())
    least = -(-config.num_experts_per_token // devices) * devices  # a device has whole experts

    rows, block_rows = batch * (draft_tokens + 1), batch * spec.block_size
    experts = {
        n: max(expected_experts(config, rows=n, exponent=exponent), float(least))
        for n in (batch, rows, block_rows)
    }

    def trunk(rows: int) -> float:
        own = shard * rows // batch
        read = roofline.step_weight_bytes(config, params, batch=own, experts=experts[rows])
        return cache + sum(read.values())

    in_context, in_pass, in_chain = _draft_bytes(
        config, params, spec.block_size, shard, experts[block_rows]
    )
    return RoundBytes(
        plain=trunk(batch),
        verify=trunk(rows),
        context=in_context,
        block_pass=in_pass,
        chain=in_chain,
        experts=experts,
        expert=devices * _routed(dataclasses.replace(params, mtp=None)) / config.num_routed_experts,
        block_rows=block_rows,
        stage_expert=devices * _routed(params.mtp) / config.num_routed_experts,
        collectives=_collectives(
            config,
            shard,
            draft_tokens + 1,
            data=data,
            model=model,
            rounds_rows=activations == "fp8" and has_quantised_experts(params),
        ),
    )


def _collectives(
    config: DSV4Config, shard: int, row_tokens: int, **mesh: Any
) -> dict[str, tuple[Collective, ...]]:
    """Those of a plain step and of a round, of so many requests on each data shard."""
    spec = config.dspark
    assert spec is not None
    assert spec.num_stages is not None
    plain, verify, proposal = (
        step_collectives(config, rows=shard * tokens, layers=layers, **mesh)
        for tokens, layers in (
            (1, None),
            (row_tokens, None),
            (spec.block_size, spec.num_stages),
        )
    )
    chained = (
        dataclasses.replace(
            each, count=spec.block_size, sent_bytes=each.sent_bytes / spec.block_size
        )
        if each.name == "best candidates"  # of a token of each block, for which the next one waits
        else each
        for each in proposal
    )
    return {"plain": plain, "round": (*verify, *chained)}


def _routed(params: Any) -> float:
    """Bytes of all routed experts."""
    return float(sum(weight_bytes(w) for path, w in walk_weights(params) if _EXPERTS(path)))


def _draft_bytes(
    config: DSV4Config, params: DSV4Params, block_size: int, batch: int, experts: float
) -> tuple[float, float, float]:
    """Weights of the context rows, of a pass and of a chain."""
    in_context = in_pass = in_chain = 0.0
    rows_read = batch * block_size / config.vocab_size
    for path, weight in walk_weights(params):
        size = float(weight_bytes(weight))
        if path == "embed":
            in_pass += size * rows_read
        elif path == "head":
            in_pass += size
        elif not path.startswith("mtp."):
            continue
        elif path in ("mtp.main_proj", "mtp.main_norm"):
            in_context += size
        elif path == "mtp.markov_w1":
            in_chain += size * rows_read
        elif path == "mtp.markov_w2":  # once for each token, which waits for the one before
            in_chain += size * block_size
        elif path == "mtp.confidence":
            in_chain += size
        elif _EXPERTS(path):
            in_pass += size * experts / config.num_routed_experts
        else:
            in_pass += size
            in_context += size * path.endswith(".attn.wkv")
    return in_context, in_pass, in_chain
