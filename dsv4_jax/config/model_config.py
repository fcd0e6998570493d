"""DSV4Config: every size of the model, and its presets."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from dsv4_jax import checks
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.config.engram import EngramConfig
from dsv4_jax.config.idea import NO_IDEA, Idea
from dsv4_jax.config.kinds import ListOf, Whole, Word, show
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.limits import (
    KINDS,
    MAX_END_TOKENS,
    MAX_LAYERS,
    MAX_MTP_DRAFT_TOKENS,
)
from dsv4_jax.config.model_checks import check_sizes
from dsv4_jax.config.read_json import read_fields
from dsv4_jax.config.sources import EntrySources
from dsv4_jax.config.v41 import v41_flash_fields
from dsv4_jax.config.yarn import YarnScaling

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSV4Config:
    """Sizes of a DeepSeek-V4 model; hashable, so it can be a static argument of `jit`.

    Attributes:
      vocab_size: V.
      hidden_size: D.
      layer_types: attention type of each trunk layer.
      router_types: router type of each trunk layer.
      num_attention_heads: H.
      head_dim: C, of which the last `rope_dim` dims rotate; one KV head serves as K and V.
      rope_dim: R, shared by the indexer.
      q_lora_rank: width of the query latent.
      o_groups: groups of heads in the output projection.
      o_lora_rank: output width of each group.
      sliding_window: W, tokens a query sees raw, itself included.
      csa_compression_ratio: tokens per CSA entry.
      hca_compression_ratio: tokens per HCA entry.
      indexer_num_heads: IH.
      indexer_head_dim: IC.
      indexer_top_k: K, entries a CSA query attends to.
      num_routed_experts: E.
      num_experts_per_token: experts picked for a token.
      moe_intermediate_size: I, of routed and shared experts alike.
      routed_scaling_factor: scale of the routed experts' weights.
      swiglu_limit: clamp of gate and up pre-activations.
      index_reuse: CSA layers, by place in the model, that select no entries themselves and attend
        to those that the last CSA layer before them selected (IndexCache); not part of a
        `config.json`.
      sources: which layers make entries and selections that others read, of DeepSeek-V4.1; None
        is of DeepSeek-V4, whose layers make their own.
      engram: sizes of the Engram tables, or None.
      query_norm: each query head is normed before it rotates.
      shifted_streams: a sublayer collapses the streams with the weights that the sublayer before it
        computed, and no hyper-connection stands before the head.
      weight_block: outputs and inputs that share a scale of FP8 weights as stored, and inputs of a
        row of activations that share one.
      num_mtp_layers: draft (MTP) blocks after the trunk, 0 or 1; not counted in `layer_types`.
      dspark: sizes of a DSpark draft, whose stages come after the trunk; None has none.
      hc_mult: S, residual streams.
      hc_sinkhorn_iters: Sinkhorn iterations of the hyper-connections' mixing matrix.
      hc_eps: floor inside the hyper-connections.
      rms_norm_eps: floor inside every norm.
      rope_theta: base of the main table (SWA layers and the draft block).
      compress_rope_theta: base of the compress table (all of CSA and HCA).
      rope_scaling: YaRN of the compress table, or None.
      max_position_embeddings: longest context the model is meant for, in tokens.
      bos_token_id: first token of a text, or None.
      eos_token_ids: tokens that end a text.
      idea: what stands in the place of parts of the model, as `Idea.applied_to` sets it; not part
        of a `config.json`.

    Raises:
      ValueError: a value of a wrong type or out of range (`config/limits.py`), or sizes that
        contradict each other; the message names the field.

    Source: deepseek_v4.md section 5.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[AttentionType, ...]
    router_types: tuple[RouterType, ...]
    num_attention_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    csa_compression_ratio: int = 4
    hca_compression_ratio: int = 128
    indexer_num_heads: int
    indexer_head_dim: int
    indexer_top_k: int
    num_routed_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    index_reuse: tuple[int, ...] = ()
    sources: EntrySources | None = None
    engram: EngramConfig | None = None
    query_norm: bool = True
    shifted_streams: bool = False
    weight_block: int = 128
    num_mtp_layers: int = 0
    dspark: DSparkConfig | None = None
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_scaling: YarnScaling | None = None
    max_position_embeddings: int = 1_048_576
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    idea: Idea = NO_IDEA

    def __post_init__(self) -> None:
        """Refuses what is no size, and sizes that contradict each other."""
        for name, kind in KINDS.items():
            self._set(name, kind.read(getattr(self, name), name))
        for name, enum_type in (("layer_types", AttentionType), ("router_types", RouterType)):
            words = ListOf(Word(tuple(enum_type)), MAX_LAYERS).read(getattr(self, name), name)
            self._set(name, tuple(map(enum_type, words)))
        token = Whole(0, self.vocab_size - 1, f"vocab_size={self.vocab_size}")
        if self.bos_token_id is not None:
            self._set("bos_token_id", token.read(self.bos_token_id, "bos_token_id"))
        ends = ListOf(token, MAX_END_TOKENS).read(self.eos_token_ids, "eos_token_ids")
        self._set("eos_token_ids", tuple(ends))
        layers = ListOf(Whole(0, MAX_LAYERS), MAX_LAYERS).read(self.index_reuse, "index_reuse")
        self._set("index_reuse", tuple(layers))
        wanted = checks.instance("idea", self.idea, Idea).index_reuse
        if wanted is not None and wanted != self.index_reuse:
            raise ValueError(
                f"index_reuse must be {wanted} of the idea, got {self.index_reuse}; use "
                "idea.applied_to(config)"
            )
        for name, kind in _PARTS.items():
            if not isinstance(given := getattr(self, name), kind | None):
                raise ValueError(f"{name} must be a {kind.__name__} or None, got {show(given)}")
        if self.dspark is not None:
            self.dspark.check_fits(
                num_layers=len(self.layer_types),
                vocab_size=self.vocab_size,
                num_mtp_layers=self.num_mtp_layers,
                num_experts=self.num_routed_experts,
                num_experts_per_token=self.num_experts_per_token,
            )
        check_sizes(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # while it is being made; frozen from then on

    @property
    def num_layers(self) -> int:
        """Trunk layers, without those of the draft."""
        return len(self.layer_types)

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft, of either kind."""
        return self.num_mtp_layers > 0 or self.dspark is not None

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that the draft guesses ahead; 0 without one."""
        if self.dspark is not None:
            return self.dspark.block_size
        return MAX_MTP_DRAFT_TOKENS if self.num_mtp_layers else 0

    def without_draft(self) -> DSV4Config:
        """The trunk alone."""
        return dataclasses.replace(self, num_mtp_layers=0, dspark=None)

    @property
    def nope_dim(self) -> int:
        """N, the dims of a head that do not rotate."""
        return self.head_dim - self.rope_dim

    @property
    def block_tokens(self) -> int:
        """Tokens that one cache block stands for: the least common multiple of 128 and the ratios.

        The compression ratio of a type without layers does not count.
        """
        if self.sources is not None:
            return math.lcm(128, *filter(None, self.sources.ratios))
        return math.lcm(128, *(self.compression_ratio(attn) for attn in set(self.layer_types)))

    def compression_ratio(self, attn: AttentionType) -> int:
        """Tokens per entry of an attention type; 1 for SWA, which has none.

        Raises:
          NotImplementedError: layers of the type have ratios of their own, `sources.ratios`.
        """
        if self.sources is not None and attn == CSA:
            raise NotImplementedError(
                "compression_ratio must be asked of a layer where entries are shared; "
                "sources.ratios has that of each"
            )
        return {SWA: 1, CSA: self.csa_compression_ratio, HCA: self.hca_compression_ratio}[attn]

    @classmethod
    def flash(cls) -> DSV4Config:
        """DeepSeek-V4-Flash: 43 layers, 284 B parameters."""
        return cls(
            vocab_size=129_280,
            hidden_size=4096,
            layer_types=(SWA, SWA, CSA) + (HCA, CSA) * 20,
            router_types=_routers(43, num_hash=3),
            num_attention_heads=64,
            head_dim=512,
            rope_dim=64,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            sliding_window=128,
            indexer_num_heads=64,
            indexer_head_dim=128,
            indexer_top_k=512,
            num_routed_experts=256,
            num_experts_per_token=6,
            moe_intermediate_size=2048,
            routed_scaling_factor=1.5,
            swiglu_limit=10.0,
            num_mtp_layers=1,
            rope_scaling=YarnScaling(factor=16.0, original_max_positions=65_536),
            bos_token_id=0,
            eos_token_ids=(1,),
        )

    @classmethod
    def pro(cls) -> DSV4Config:
        """DeepSeek-V4-Pro: 61 layers, 1.57 T parameters."""
        return dataclasses.replace(
            cls.flash(),
            hidden_size=7168,
            layer_types=(HCA, HCA, CSA) + (HCA, CSA) * 29,
            router_types=_routers(61, num_hash=3),
            num_attention_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            indexer_top_k=1024,
            num_routed_experts=384,
            moe_intermediate_size=3072,
            routed_scaling_factor=2.5,
        )

    @classmethod
    def v41_flash(cls) -> DSV4Config:
        """DeepSeek-V4.1-Flash, its text model: 40 layers, 384 experts, two Engram tables."""
        return dataclasses.replace(cls.flash(), **v41_flash_fields())

    @classmethod
    def flash_slim(cls) -> DSV4Config:
        """Flash in every layer and shape, but 8 routed experts: one GPU holds it in bf16, 32 GB."""
        return dataclasses.replace(cls.flash(), num_routed_experts=8)

    @classmethod
    def pro_slim(cls) -> DSV4Config:
        """Pro in every layer and shape, but 8 routed experts: one GPU holds it in bf16, 115 GB."""
        return dataclasses.replace(cls.pro(), num_routed_experts=8)

    @classmethod
    def tiny(cls) -> DSV4Config:
        """Every part of the model at sizes for a laptop and CI: 7 layers, 1 M parameters."""
        return dataclasses.replace(
            cls.flash(),
            vocab_size=96,
            hidden_size=64,
            layer_types=(SWA, CSA, HCA, CSA, HCA, CSA, SWA),
            router_types=_routers(7, num_hash=2),
            num_attention_heads=4,
            head_dim=32,
            rope_dim=8,
            q_lora_rank=24,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=16,
            csa_compression_ratio=4,
            hca_compression_ratio=32,
            indexer_num_heads=32,
            indexer_head_dim=16,
            indexer_top_k=8,
            num_routed_experts=8,
            num_experts_per_token=3,
            moe_intermediate_size=48,
        )

    @classmethod
    def from_hf(
        cls,
        source: str | os.PathLike[str] | dict[str, Any],
        *,
        follow_links: bool = False,
        text_only: bool = False,
        drafts: bool = True,
    ) -> DSV4Config:
        """Reads a `config.json`, the released form or the one that transformers writes.

        Args:
          source: a `config.json`, a directory that holds one, or its parsed contents.
          follow_links: of a directory, reads a `config.json` that is a link out of it; links of a
            Hugging Face cache are followed anyway.
          text_only: of a model that reads images too, reads the text part; it is refused otherwise.
          drafts: reads what the file says of a draft, which must be whole and fit; False gives the
            trunk alone, as of a small copy whose fields of a draft no longer fit.

        Returns:
          The config; draft layers listed in the schedule are not trunk layers, and of a model that
          was cut by `num_hidden_layers` alone, lists name more. Where the file announces DSpark
          stages (`dspark_block_size` and others) it has those, unless the trunk was cut below the
          layers that they read; the files tell how many stages there are where it does not.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is no JSON or a link that is not followed; or a field is missing, of
            a wrong type, out of range or unsupported, or contradicts another; or weights are stored
            in a format that is not supported, by this file or by a `hf_quant_config.json` in the
            same directory. File and field are named.
        """
        where, fields = read_fields(
            source, follow_links=follow_links, text_only=text_only, drafts=drafts
        )
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


_PARTS = {
    "rope_scaling": YarnScaling,
    "dspark": DSparkConfig,
    "sources": EntrySources,
    "engram": EngramConfig,
}


def _routers(num_layers: int, *, num_hash: int) -> tuple[RouterType, ...]:
    hashed = min(num_hash, num_layers)
    return (RouterType.HASH,) * hashed + (RouterType.LEARNED,) * (num_layers - hashed)
