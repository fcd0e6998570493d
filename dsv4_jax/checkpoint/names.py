"""The three namings of a checkpoint's tensors, and where each tensor goes.

DeepSeek's own names are the canonical ones. transformers has other names in memory, and its
`save_pretrained` writes a third set, half way between.

Source: deepseek_v4.md section 6.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_schedule import layer_schedule
from dsv4_jax.model.draft_params import DraftParams, DSparkParams, MTPParams
from dsv4_jax.model.layer_params import LayerParams
from dsv4_jax.model.params import DSV4Params

# Applied in order; what is already canonical matches none of them.
_TO_CANONICAL = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"^(model\.)?(language_model\.)?(model\.)?", ""),  # the middle one beside a vision model
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
        (r"\.attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
        (r"\.attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
        (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.compressor\.position_bias$", ".compressor.ape"),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.(q|o)_(a|b)_proj\.", r".attn.w\1_\2."),
        (r"\.attn\.kv_proj\.", ".attn.wkv."),
        (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.(shared_experts|experts\.\d+)\.gate_proj\.", r".\1.w1."),
        (r"\.(shared_experts|experts\.\d+)\.up_proj\.", r".\1.w3."),
        (r"\.(shared_experts|experts\.\d+)\.down_proj\.", r".\1.w2."),
        (r"\.weight_scale_inv$", ".scale"),
        (r"\.experts\.(gate_up|down)_proj[._]scale(_inv)?$", r".experts.\1_proj.scale"),
    ]
]
_NOT_CANONICAL = re.compile(
    r"^(?:model|language_model|embed_tokens|lm_head|hc_head)\.|"
    + "|".join(pattern.pattern for pattern, _ in _TO_CANONICAL if pattern.pattern[0] == "\\")
)
"""What some pattern changes: the beginnings above, or what one of the others matches."""

_STREAM_MIX = ("fn", "base", "scale")
_LAYER = {
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "ffn_norm",
    **{f"hc_{sub}_{leaf}": f"hc_{sub}.{leaf}" for sub in ("attn", "ffn") for leaf in _STREAM_MIX},
    "attn.attn_sink": "attn.attn_sink",
    **{
        f"attn.{leaf}.weight": f"attn.{leaf}"
        for leaf in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")
    },
    **{
        f"attn.{owner}compressor.{name}": f"attn.{owner}compressor.{leaf}"
        for owner in ("", "indexer.")
        for name, leaf in (
            ("wkv.weight", "wkv"),
            ("wgate.weight", "wgate"),
            ("ape", "ape"),
            ("norm.weight", "norm"),
        )
    },
    "attn.indexer.wq_b.weight": "attn.indexer.wq_b",
    "attn.indexer.weights_proj.weight": "attn.indexer.weights_proj",
    "ffn.gate.weight": "ffn.gate",
    "ffn.gate.bias": "ffn.bias",
    "ffn.gate.tid2eid": "ffn.tid2eid",
    **{f"ffn.shared_experts.{w}.weight": f"ffn.shared_{w}" for w in ("w1", "w2", "w3")},
}
_SHARED_LAYER = {
    **{
        name: leaf
        for name, leaf in _LAYER.items()
        if "compressor" not in name and "tid2eid" not in name
    },
    **{f"attn.compressor.{w}.weight": f"attn.source.{w}" for w in ("wkv", "wgate", "norm")},
    **{f"attn.indexer.{w}.weight": f"attn.source.{w}" for w in ("wk", "k_norm")},
    "engram.wkv.weight": "engram.wkv",
    "engram.q_weight": "engram.q_weight",
    "engram.k_weight": "engram.k_weight",
}
"""Of a layer of DeepSeek-V4.1, in which what makes entries is read by other layers too."""
_MODEL = {
    "embed.weight": "embed",
    "head.weight": "head",
    "norm.weight": "norm",
    **{f"hc_head_{leaf}": f"hc_head.{leaf}" for leaf in _STREAM_MIX},
}
_COLLAPSE = {
    "norm.weight": "norm",
    **{f"hc_head_{leaf}": f"hc_head.{leaf}" for leaf in _STREAM_MIX},
}
"""What the last layer of a draft has before the head."""
_MTP = {f"{leaf}.weight": leaf for leaf in ("e_proj", "h_proj", "enorm", "hnorm")} | _COLLAPSE
_FIRST_STAGE = {f"{leaf}.weight": leaf for leaf in ("main_proj", "main_norm")}
_LAST_STAGE = _COLLAPSE | {
    **{f"markov_head.{leaf}.weight": leaf for leaf in ("markov_w1", "markov_w2")},
    "confidence_head.proj.weight": "confidence",
}
_SHARED_LAST_STAGE = {
    name: leaf for name, leaf in _LAST_STAGE.items() if not leaf.startswith("markov")
} | {"markov_head.embed.weight": "markov_w1", "markov_head.head.weight": "markov_w2"}
"""Of DeepSeek-V4.1."""
_ROWS = frozenset({"confidence"})
"""Leaves of one axis that files hold as a matrix of one row."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a canonical tensor goes.

    Attributes:
      leaf: dotted path in `DSV4Params`.
      index: the tensor's index in the stacked leaf.
      shape: the tensor's shape in a file; axes of 1 before that of its part of the leaf are not
        the leaf's.
    """

    leaf: str
    index: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_hash_table(self) -> bool:
        """Whether it is a hash layer's table of token ids to experts."""
        return self.leaf.endswith("tid2eid")


@functools.lru_cache(maxsize=2**18)  # all names of a checkpoint, each of which is asked for often
def canonical_name(name: str) -> str:
    """DeepSeek's own name of a tensor in any of the three namings."""
    if not _NOT_CANONICAL.search(name):
        return name
    for pattern, replacement in _TO_CANONICAL:
        name = pattern.sub(replacement, name)
    return name


def saved_name(name: str) -> str:
    """What transformers' `save_pretrained` calls a canonical tensor."""
    if name.startswith(("mtp.", "head.")):
        return name
    name = re.sub(r"^embed\.", "embed_tokens.", name)
    name = re.sub(r"^hc_head_", "hc_head.hc_", name)
    return "model." + re.sub(r"\.attn\.kv_norm\.", ".attn.norm.", name)


def all_targets(config: DSV4Config, shapes: DSV4Params) -> dict[str, Target]:
    """Every canonical tensor of a model, in a stable order; draft tensors start with `mtp.`."""
    targets = {}
    for name, leaf in _MODEL.items():
        if (array := get_leaf(shapes, leaf)) is not None:
            targets[name] = Target(leaf, (), array.shape)
    names = _LAYER if config.sources is None else _SHARED_LAYER
    last_stage = _LAST_STAGE if config.sources is None else _SHARED_LAST_STAGE
    for spec in layer_schedule(config):
        prefix = f"layers.{spec.layer_idx}."
        root, layer = f"layers.{spec.kind}.", shapes.stacked_layers[spec.kind]
        for name, leaf, index, shape in _layer_targets(layer, (spec.kind_idx,), names):
            targets[prefix + name] = Target(root + leaf, index, shape)
    if isinstance(shapes.mtp, MTPParams):
        targets |= _draft_targets(shapes.mtp, "mtp.0.", _MTP)
        for name, leaf, index, shape in _layer_targets(shapes.mtp.block, (), names):
            targets[f"mtp.0.{name}"] = Target(f"mtp.block.{leaf}", index, shape)
    if isinstance(shapes.mtp, DSparkParams):
        last = shapes.mtp.num_stages - 1
        targets |= _draft_targets(shapes.mtp, "mtp.0.", _FIRST_STAGE)
        for stage in range(shapes.mtp.num_stages):
            stages = shapes.mtp.stacked_stages
            for name, leaf, index, shape in _layer_targets(stages, (stage,), names):
                targets[f"mtp.{stage}.{name}"] = Target(f"mtp.stages.{leaf}", index, shape)
        targets |= _draft_targets(shapes.mtp, f"mtp.{last}.", last_stage)
    return targets


def _draft_targets(draft: DraftParams, prefix: str, names: dict[str, str]) -> dict[str, Target]:
    """Of what a draft has once, beside its layers."""
    found = {}
    for name, leaf in names.items():
        if (array := get_leaf(draft, leaf)) is None:
            continue
        shape = array.shape
        found[prefix + name] = Target(f"mtp.{leaf}", (), (1, *shape) if leaf in _ROWS else shape)
    return found


def get_leaf(tree: Any, path: str) -> Any:
    """The leaf at a dotted path of attributes and dict keys; None where a part is absent."""
    for part in path.split("."):
        tree = tree[part] if isinstance(tree, dict) else getattr(tree, part)
        if tree is None:
            return None
    return tree


def _layer_targets(
    layer: LayerParams, index: tuple[int, ...], names: dict[str, str]
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    """Name, leaf, index and shape of every tensor of a layer whose leaves are stacked by index."""
    for name, leaf in names.items():
        array = get_leaf(layer, leaf)
        if array is not None:
            yield name, leaf, index, array.shape[len(index) :]
    for w in ("w1", "w2", "w3"):
        num_experts, *shape = get_leaf(layer, f"ffn.{w}").shape[len(index) :]
        for expert in range(num_experts):
            yield f"ffn.experts.{expert}.{w}.weight", f"ffn.{w}", (*index, expert), tuple(shape)


def dotted_path(path: tuple[Any, ...]) -> str:
    """The path of a leaf of a pytree, as `Target.leaf` has it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
