"""The bytes that a round must read, part by part, and the least time that they take.

Of the routed experts, rows are counted to pick theirs independently. Caches and activations of a
few rows are little beside the weights: of the cache what one token of each request reads is
counted, once.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from dsv4_jax.bench import roofline
from dsv4_jax.bench.routing_laws import expected_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.weight_sizes import walk_weights
from pallas_kernels.common.weights import weight_bytes

_EXPERTS = re.compile(r"\.ffn\.w[123]$").search


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundBytes:
    """Bytes that the parts of a round read.

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

    @property
    def proposal(self) -> float:
        """Pass and chain."""
        return self.block_pass + self.chain

    @property
    def round(self) -> float:
        """All of a round."""
        return self.verify + self.context + self.proposal

    def floor_ms(self, part: str, more_bytes: float = 0.0) -> float:
        """Milliseconds of a part at the bandwidth of a copy on an H200.

        Args:
          part: name of an attribute.
          more_bytes: beyond those that independent picks read.
        """
        return (getattr(self, part) + more_bytes) / roofline.BANDWIDTH * 1e3


def round_bytes(
    config: DSV4Config,
    params: DSV4Params,
    *,
    batch: int,
    draft_tokens: int,
    context: int,
    cache_format: str,
    exponent: float = 0.0,
) -> RoundBytes:
    """Counts the bytes.

    Args:
      config: the model, with `dspark`.
      params: its parameters, or their shapes, unstacked.
      batch: B, requests.
      draft_tokens: drafts that are checked of each.
      context: tokens of each.
      cache_format: name of the storage format.
      exponent: of the law by which tokens pick experts, of `routing_laws.LAWS`.
    """
    spec = config.dspark
    assert spec is not None
    sizes = {"batch": batch, "context": context, "cache_format": cache_format}
    cache = sum(w.num_bytes for w in roofline.step_cache_work(config, **sizes).values())

    rows, block_rows = batch * (draft_tokens + 1), batch * spec.block_size
    experts = {
        n: expected_experts(config, rows=n, exponent=exponent) for n in (batch, rows, block_rows)
    }

    def trunk(rows: int) -> float:
        read = roofline.step_weight_bytes(config, params, batch=rows, experts=experts[rows])
        return cache + sum(read.values())

    in_context, in_pass, in_chain = _draft_bytes(
        config, params, spec.block_size, batch, experts[block_rows]
    )
    return RoundBytes(
        plain=trunk(batch),
        verify=trunk(rows),
        context=in_context,
        block_pass=in_pass,
        chain=in_chain,
        experts=experts,
        expert=_routed(dataclasses.replace(params, mtp=None)) / config.num_routed_experts,
        block_rows=block_rows,
        stage_expert=_routed(params.mtp) / config.num_routed_experts,
    )


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
