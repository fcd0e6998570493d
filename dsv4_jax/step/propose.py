"""DSpark stages in a step: what settled tokens leave in the rings, and the next block of drafts."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from dsv4_jax.cache.draft_blocks import Blocks
from dsv4_jax.cache.model_cache import ModelCache
from dsv4_jax.cache.new_tokens import Family, put_layer
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.config.layer_types import AttentionType
from dsv4_jax.model.dspark import Drafts, chain, context_tokens, run_blocks
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.step.draws import DrawnCounts, guess
from dsv4_jax.step.sampling import Sampling
from pallas_kernels.common.call import CallIndices

_SWA = AttentionType.SWA.value


def stage_context(
    params: DSV4Params,
    cache: ModelCache,
    new_tokens: Mapping[str, Family],
    call: CallIndices,
    means: jax.Array,
    config: DSV4Config,
) -> Mapping[str, Family]:
    """Joins what the stages keep of a call's tokens to what the trunk staged.

    Which of them are kept is not known yet, and does not matter: an entry depends on its own token.

    Args:
      params: model parameters, with DSpark stages.
      cache: the cache before the step's tokens are committed.
      new_tokens: staged tokens, by attention type.
      call: the call's indices.
      means: [T, K, D], of the trunk.
      config: the model, with `dspark`.

    Source: dspark.md section 3.
    """
    family = new_tokens[_SWA]
    own = context_tokens(params, means, call.positions, cache.state[_SWA], config)
    for layer, new in zip(draft_layers(config), own, strict=True):
        family = put_layer(family, layer.family_idx, new)
    return {**new_tokens, _SWA: family}


def propose(
    params: DSV4Params,
    cache: ModelCache,
    slots: jax.Array,
    lengths: jax.Array,
    anchor_ids: jax.Array,
    sampling: Sampling,
    counts: DrawnCounts | None,
    *,
    config: DSV4Config,
) -> Drafts:
    """Guesses the tokens that follow each row's last drawn one.

    They are drawn with the noise of the position that they guess at, the same that the token there
    will be drawn with, so that sampled rows keep as many as they can.

    Args:
      params: model parameters, with DSpark stages.
      cache: the cache with the step's tokens committed.
      slots: i32[B], slot of each row; -1 for one that wants no guess.
      lengths: i32[B], tokens of each row in the cache; the anchor is the one after them.
      anchor_ids: i32[B], the last drawn tokens.
      sampling: settings of each row.
      counts: what rows had drawn before the step; what they draw in it changes no guess.
      config: the model, with `dspark`.

    Returns:
      The chain of a whole block; of rows that want no guess it means nothing.

    Source: dspark.md sections 4 and 5.
    """
    spec = config.dspark
    assert spec is not None
    blocks = Blocks(slots=slots, lengths=lengths, size=spec.block_size)
    guesses = run_blocks(params, anchor_ids, blocks, cache.state[_SWA], config)

    def choose(logits: jax.Array, row: int) -> jax.Array:
        return guess(logits, sampling, lengths + row + 1, counts, config.idea.sampler)

    return chain(params, anchor_ids, guesses, choose)
