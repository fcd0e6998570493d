"""Parameters of a draft: pytrees named after the released checkpoint, its stages stacked."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.config.layer_schedule import draft_layer
from dsv4_jax.model.layer_params import (
    HyperConnectionParams,
    LayerParams,
    head_connection_shapes,
    layer_of,
    layer_shapes,
    stack_shapes,
)
from pallas_kernels.common.weights import Weight


@flax.struct.dataclass(kw_only=True)
class MTPParams:
    """An MTP block, a draft that shares the embedding and the head.

    Attributes:
      e_proj: [D, D], of the next token's embedding.
      h_proj: [D, D], of each stream.
      enorm: [D].
      hnorm: [D].
      block: one window layer with learned routing.
      hc_head: hyper-connections that collapse its streams, or None as of `DSV4Params`.
      norm: [D], its own final norm.
    """

    e_proj: Weight
    h_proj: Weight
    enorm: jax.Array
    hnorm: jax.Array
    block: LayerParams
    hc_head: HyperConnectionParams | None
    norm: jax.Array


@flax.struct.dataclass(kw_only=True)
class DSparkParams:
    """The stages of a DSpark draft, which shares the embedding and the head.

    Attributes:
      main_proj: [D, K * D], of the means of the K target layers beside each other.
      main_norm: [D].
      stages: window layers with learned routing, every leaf stacked over the stages; or, after
        `unstack_layers`, a tuple of them.
      hc_head: hyper-connections that collapse the streams of the last stage, or None as of
        `DSV4Params`.
      norm: [D], before the head.
      markov_w1: [V, r], what a token says of the one after it.
      markov_w2: [V, r], what each token makes of that.
      confidence: [D + r], of a row's hidden state and the token before it.
    """

    main_proj: Weight
    main_norm: jax.Array
    stages: LayerParams | tuple[LayerParams, ...]
    hc_head: HyperConnectionParams | None
    norm: jax.Array
    markov_w1: jax.Array
    markov_w2: jax.Array
    confidence: jax.Array

    @property
    def num_stages(self) -> int:
        """How many layers the draft has."""
        if isinstance(self.stages, tuple):
            return len(self.stages)
        return self.stages.attn_norm.shape[0]

    @property
    def layers(self) -> list[LayerParams]:
        """The stages, one by one."""
        return [layer_of(self.stages, stage) for stage in range(self.num_stages)]

    @property
    def stacked_stages(self) -> LayerParams:
        """`stages`, stacked.

        Raises:
          ValueError: `unstack_layers` has taken them apart.
        """
        if isinstance(self.stages, tuple):
            raise ValueError("params must have stacked layers; pass them before unstack_layers")
        return self.stages


DraftParams = MTPParams | DSparkParams
"""Of either kind of draft."""


def draft_shapes(config: DSV4Config, dtype: Any) -> DraftParams | None:
    """The shapes and dtypes of the parameters of the draft of a config, or None without one.

    Raises:
      ValueError: the config has DSpark stages, and does not say how many.
    """
    if config.dspark is not None:
        return dspark_shapes(config, config.dspark, dtype)
    return mtp_shapes(config, dtype) if config.num_mtp_layers else None


def mtp_shapes(config: DSV4Config, dtype: Any) -> MTPParams:
    """The shapes and dtypes of the parameters of an MTP block."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    d = config.hidden_size
    return MTPParams(
        e_proj=array(d, d),
        h_proj=array(d, d),
        enorm=array(d),
        hnorm=array(d),
        block=layer_shapes(config, draft_layer(config, 0), array),
        hc_head=head_connection_shapes(config),
        norm=array(d),
    )


def dspark_shapes(config: DSV4Config, spec: DSparkConfig, dtype: Any) -> DSparkParams:
    """The shapes and dtypes of the parameters of a DSpark draft.

    Raises:
      ValueError: the number of stages is not known.
    """

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    d, vocab, rank = config.hidden_size, config.vocab_size, spec.markov_rank
    stage = layer_shapes(config, draft_layer(config, 0), array, num_experts=spec.num_experts)
    return DSparkParams(
        main_proj=array(d, len(spec.target_layers) * d),
        main_norm=array(d),
        stages=stack_shapes(stage, spec.known_stages),
        hc_head=head_connection_shapes(config),
        norm=array(d),
        markov_w1=array(vocab, rank),
        markov_w2=array(vocab, rank),
        confidence=array(d + rank),
    )
