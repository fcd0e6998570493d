"""From token ids to logits over whole sequences, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dsv4_jax import checks
from dsv4_jax.attention.full_sequence import NOTHING, attend_full_sequence
from dsv4_jax.attention.params import AttentionParams
from dsv4_jax.attention.projections import Output
from dsv4_jax.attention.selection import Selector, select_by_score
from dsv4_jax.attention.shared_entries import Shared
from dsv4_jax.cache.schema import FormatName, choose_cache_format
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import LayerSpec, layer_schedule
from dsv4_jax.model.activations import DEFAULT_ACTIVATIONS
from dsv4_jax.model.block import block
from dsv4_jax.model.check_params import check_params
from dsv4_jax.model.engram import look_up_rows, tables_of, write_engram
from dsv4_jax.model.hyper_connections import Residual
from dsv4_jax.model.params import DSV4Params
from dsv4_jax.model.trunk import embed, head, head_of_collapsed, mean_of_streams
from pallas_kernels.common.backend import Backend
from pallas_kernels.common.formats import get_cache_format
from pallas_kernels.common.weights import ACTIVATIONS, with_activations


def forward(
    params: DSV4Params,
    token_ids: jax.Array,
    *,
    config: DSV4Config,
    cache_format: FormatName | None = None,
    selector: Selector | None = None,
    activations: str = DEFAULT_ACTIVATIONS,
) -> jax.Array:
    """Logits of whole sequences, without a cache.

    Args:
      params: model parameters.
      token_ids: i32[B, T].
      config: the model.
      cache_format: rounds what a cache of that format would round; None is the format of the
        config's idea, or `f32`.
      selector: picks the entries that CSA layers attend to; None is that of the config's idea, or
        the indexer's choice.
      activations: what multiplies quantised weights: "fp8" rounds rows to E4M3 first, as the
        release does, "bfloat16" takes them as they are; static. Dense weights ignore it.

    Returns:
      f32[B, T, V].

    Raises:
      ValueError: `token_ids` has another rank or dtype or, outside jit, an id is out of range; an
        argument is of another type; `params` are of another model or lack its Engram tables; or
        there is no such format or form.
      NotImplementedError: entries are shared, and the format rotates index keys.

    Source: deepseek_v4.md section 1.1, deepseek_v41.md section 5.
    """
    residual, _ = _run(params, token_ids, config, cache_format, selector, activations)
    params = with_activations(params, activations)
    if config.shifted_streams:
        return head_of_collapsed(params.norm, params.head, residual.collapsed(), config)
    return head(params.hc_head, params.norm, params.head, residual.written(), config)


def forward_streams(
    params: DSV4Params,
    token_ids: jax.Array,
    *,
    config: DSV4Config,
    cache_format: FormatName | None = None,
    selector: Selector | None = None,
    activations: str = DEFAULT_ACTIVATIONS,
) -> jax.Array:
    """The residual streams [B, T, S, D] before the head; arguments as in `forward`."""
    return _run(params, token_ids, config, cache_format, selector, activations)[0].written()


def forward_means(
    params: DSV4Params,
    token_ids: jax.Array,
    target_layers: Sequence[int],
    *,
    config: DSV4Config,
    cache_format: FormatName | None = None,
    activations: str = DEFAULT_ACTIVATIONS,
) -> tuple[jax.Array, jax.Array]:
    """What a DSpark draft reads of the trunk (`context_entries`).

    Args:
      params: as in `forward`.
      token_ids: as in `forward`.
      target_layers: layers, ascending, after each of which the streams are averaged; before each
        of them, after an Engram write, where `config.shifted_streams`.
      config: as in `forward`.
      cache_format: as in `forward`.
      activations: as in `forward`.

    Returns:
      The residual streams [B, T, S, D] before the head, and [B, T, K, D], their means after each
      target layer, summed in f32.

    Raises:
      ValueError: as `forward`; or a target is no layer of the trunk, or they do not ascend.

    Source: dspark.md section 3.
    """
    targets = tuple(target_layers)
    checks.instance("config", config, DSV4Config)
    layers = range(config.num_layers)
    if not targets or list(targets) != sorted(set(targets)) or not set(targets) <= set(layers):
        rule = f"layers of the trunk, 0 to {config.num_layers - 1}, ascending"
        checks.refuse("target_layers", rule, target_layers)
    residual, means = _run(params, token_ids, config, cache_format, None, activations, targets)
    return residual.written(), jnp.stack(means, axis=-2)


def _run(
    params: DSV4Params,
    token_ids: jax.Array,
    config: DSV4Config,
    cache_format: FormatName | None,
    selector: Selector | None,
    activations: str,
    targets: tuple[int, ...] = (),
) -> tuple[Residual, list[jax.Array]]:
    """The streams after all layers, and their means for each target."""
    checks.instance("config", config, DSV4Config)
    check_params(config, checks.instance("params", params, DSV4Params))
    if getattr(token_ids, "ndim", 2) != 2:
        checks.refuse("token_ids", "i32[B, T]", token_ids, "add a batch axis")
    checks.array("token_ids", token_ids, (None, None), "iu")
    checks.in_range("token_ids", token_ids, 0, config.vocab_size)
    checks.choice("activations", activations, ACTIVATIONS)
    chosen = choose_cache_format(config, cache_format, "f32")
    fmt = get_cache_format(chosen)
    if selector is not None and not callable(selector):
        checks.refuse("selector", "a function or None", selector)
    choose = selector or config.idea.selector or select_by_score
    params = with_activations(params, activations)
    residual = Residual.start(embed(params, token_ids, config), shifted=config.shifted_streams)
    rows = _engram_rows(params, token_ids, config)
    shared, means = NOTHING, []
    for spec in layer_schedule(config):
        layer = params.layer(spec)
        if layer.engram is not None:
            assert config.engram is not None
            own = rows[:, :, config.engram.layers.index(spec.layer_idx)]
            name = f"L{spec.layer_idx}/engram"
            written = write_engram(layer.engram, residual.written(), own, config, name)
            residual = residual.with_streams(written)
        if spec.layer_idx in targets and config.shifted_streams:
            means.append(mean_of_streams(residual.written()))

        def attention(
            layer: AttentionParams, x: jax.Array, spec: LayerSpec = spec, shared: Shared = shared
        ) -> tuple[Shared, Output]:
            return attend_full_sequence(layer, x, spec, config, fmt, choose, shared)

        shared, residual = block(
            layer, residual, token_ids, config, attention, backend=Backend.REFERENCE
        )
        if spec.layer_idx in targets and not config.shifted_streams:
            means.append(mean_of_streams(residual.written()))
    return residual, means


def _engram_rows(params: DSV4Params, token_ids: jax.Array, config: DSV4Config) -> jax.Array:
    """f32[B, T, L, width], what every token reads of the Engram tables; L is 0 without any.

    Raises:
      ValueError: the model has tables, and the parameters do not.
    """
    if config.engram is None:
        return jnp.zeros((*token_ids.shape, 0, 0), jnp.float32)
    return look_up_rows(tables_of(params, config), token_ids)
