"""Parameters of a DSpark draft: pytrees named after the released checkpoint, its stages stacked."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.model.params import (
    HyperConnectionParams,
    LayerParams,
    head_connection_shapes,
    layer_shapes,
    stack_shapes,
)
from pallas_kernels.common.weights import Weight


@flax.struct.dataclass(kw_only=True)
class DSparkParams:
    """The stages of a DSpark draft, which shares the embedding and the head.

    Attributes:
      main_proj: [D, K * D], of the means of the K target layers beside each other.
      main_norm: [D].
      stages: window layers with learned routing, every leaf stacked over the stages.
      hc_head: hyper-connections that collapse the streams of the last stage.
      norm: [D], before the head.
      markov_w1: [V, r], what a token says of the one after it.
      markov_w2: [V, r], what each token makes of that.
      confidence: [D + r], of a row's hidden state and the token before it.
    """

    main_proj: Weight
    main_norm: jax.Array
    stages: LayerParams
    hc_head: HyperConnectionParams
    norm: jax.Array
    markov_w1: jax.Array
    markov_w2: jax.Array
    confidence: jax.Array

    @property
    def num_stages(self) -> int:
        """How many layers the draft has."""
        return self.stages.attn_norm.shape[0]


def dspark_shapes(config: DSV4Config, spec: DSparkConfig, dtype: Any) -> DSparkParams:
    """The shapes and dtypes of a draft's parameters, as `param_shapes` has those of the model.

    Raises:
      ValueError: the number of stages is not known.
    """
    if spec.num_stages is None:
        raise ValueError("spec must have num_stages, got None")

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    d, vocab, rank = config.hidden_size, config.vocab_size, spec.markov_rank
    stage = layer_shapes(config, AttentionType.SWA, RouterType.LEARNED, array)
    return DSparkParams(
        main_proj=array(d, len(spec.target_layers) * d),
        main_norm=array(d),
        stages=stack_shapes(stage, spec.num_stages),
        hc_head=head_connection_shapes(config),
        norm=array(d),
        markov_w1=array(vocab, rank),
        markov_w2=array(vocab, rank),
        confidence=array(d + rank),
    )
