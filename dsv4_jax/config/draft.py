"""The draft that a `config.json` announces, of which the files have to be."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from dsv4_jax.config.images import text_part
from dsv4_jax.config.kinds import Fields, ListOf, Whole, show
from dsv4_jax.config.limits import MAX_LAYERS

MAX_STAGES = 64
_PREFIX = "dspark_"


class DraftKind(enum.StrEnum):
    """What lies under `mtp.` of a checkpoint."""

    MTP = "MTP block"
    """Embedding and hidden state of one token joined, and one layer."""
    DSPARK = "DSpark stages"
    """Layers over a block of noise tokens and over means of the trunk's streams."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Sizes of a DSpark draft.

    Attributes:
      block_size: tokens that one pass guesses.
      markov_rank: width of the table that corrects a guess by the token before.
      noise_token_id: token that stands for those that are guessed.
      target_layers: trunk layers whose streams the draft sees, ascending. Of a trunk that was cut,
        they may be beyond it.
      num_stages: layers of the draft; None where the config does not tell, and the files do.
      num_experts: routed experts of a stage; None is as many as a trunk layer has.
      num_experts_per_token: experts that a row picks of them; None is as many as in the trunk.

    Raises:
      ValueError: a value of a wrong type or out of range; the message names the field.
    """

    block_size: int
    markov_rank: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    num_stages: int | None = None
    num_experts: int | None = None
    num_experts_per_token: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no size."""
        for name in ("num_experts", "num_experts_per_token"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _EXPERTS.read(value, f"dspark.{name}"))
        for name, kind in _SIZES.items():
            object.__setattr__(self, name, kind.read(getattr(self, name), f"dspark.{name}"))
        targets = tuple(_TARGETS.read(self.target_layers, "dspark.target_layers"))
        if not targets or list(targets) != sorted(set(targets)):
            raise ValueError(
                f"dspark.target_layers must ascend, and name one layer, got {show(list(targets))}"
            )
        object.__setattr__(self, "target_layers", targets)
        if self.num_stages is not None:
            Whole(1, MAX_STAGES).read(self.num_stages, "dspark.num_stages")

    @property
    def known_stages(self) -> int:
        """`num_stages`.

        Raises:
          ValueError: it is not known.
        """
        if self.num_stages is None:
            raise ValueError(
                "dspark.num_stages must be known, got None; the files of the checkpoint tell it"
            )
        return self.num_stages

    def check_fits(
        self,
        *,
        num_layers: int,
        vocab_size: int,
        num_mtp_layers: int,
        num_experts: int,
        num_experts_per_token: int,
    ) -> None:
        """Refuses a draft that a model of those sizes cannot have.

        Raises:
          ValueError: it reads a layer or a token that there is not, picks more experts than there
            are, or there is an MTP block too.
        """
        experts = num_experts if self.num_experts is None else self.num_experts
        picked = self.num_experts_per_token
        if (num_experts_per_token if picked is None else picked) > experts:
            raise ValueError(
                f"dspark.num_experts_per_token must be at most the {experts} experts of a stage, "
                f"got {show(picked)}"
            )
        if num_mtp_layers:
            raise ValueError(
                f"num_mtp_layers must be 0 beside dspark, got {num_mtp_layers}; a model has one "
                "draft"
            )
        if self.noise_token_id >= vocab_size:
            raise ValueError(
                f"dspark.noise_token_id must be below vocab_size={vocab_size}, got "
                f"{self.noise_token_id}"
            )
        if self.target_layers[-1] >= num_layers:
            raise ValueError(
                f"dspark.target_layers must be of the {num_layers} layers of the trunk, got "
                f"{show(list(self.target_layers))}"
            )


_EXPERTS = Whole(1, 2**16)
_SIZES = {
    "block_size": Whole(1, 16),
    "markov_rank": Whole(1, 4096),
    "noise_token_id": Whole(0, 2**24 - 1),
}
EXPERT_FIELDS = {
    "dspark_n_routed_experts": "num_experts",
    "dspark_num_experts_per_tok": "num_experts_per_token",
}
_NO_OR_EXPERTS = Whole(0, _EXPERTS.most)
"""0 is as good as absent."""
_TARGETS = ListOf(Whole(0, MAX_LAYERS), MAX_LAYERS)


def has_dspark(contents: dict[str, Any]) -> bool:
    """Whether a config announces a DSpark draft: `num_nextn_predict_layers` does not tell."""
    return any(name.startswith(_PREFIX) and value is not None for name, value in contents.items())


def draft_kind(contents: dict[str, Any]) -> DraftKind | None:
    """The kind of draft that the contents of a `config.json` announce."""
    contents = text_part(contents)
    if has_dspark(contents):
        return DraftKind.DSPARK
    return DraftKind.MTP if contents.get("num_nextn_predict_layers") == 1 else None


def read_dspark(contents: dict[str, Any]) -> DSparkConfig | None:
    """The DSpark draft of the contents of a `config.json` of which a `DSV4Config` was read.

    Raises:
      ValueError: a field is missing beside others, of a wrong type or out of range, or contradicts
        another; the message names it.
    """
    contents = text_part(contents)
    if not has_dspark(contents):
        return None
    num_layers, vocab_size = contents["num_hidden_layers"], contents["vocab_size"]
    kinds = {
        "dspark_block_size": _SIZES["block_size"],
        "dspark_markov_rank": _SIZES["markov_rank"],
        "dspark_noise_token_id": Whole(0, vocab_size - 1, f"vocab_size={vocab_size}"),
        "dspark_target_layer_ids": _TARGETS,
    }
    others = {"n_mtp_layers": Whole(1, MAX_STAGES), **dict.fromkeys(EXPERT_FIELDS, _NO_OR_EXPERTS)}
    data = Fields(kinds | others).read(contents, "")
    given = next(name for name in contents if name.startswith(_PREFIX))
    for name in kinds:
        if name not in data:
            raise ValueError(f"{name} is missing beside {given}; a DSpark draft needs both")
    targets = tuple(data["dspark_target_layer_ids"])
    if not targets or list(targets) != sorted(set(targets)):
        raise ValueError(
            f"dspark_target_layer_ids must ascend, and name one layer, got {show(list(targets))}"
        )
    listed = _beyond(contents, num_layers)
    is_cut = targets[-1] >= num_layers and any(listed) and targets[-1] < num_layers + len(listed)
    if not is_cut and targets[-1] >= num_layers:
        raise ValueError(
            f"dspark_target_layer_ids must be below num_hidden_layers={num_layers}, got "
            f"{show(list(targets))}"
        )
    if not is_cut and any(listed):
        raise ValueError(
            "compress_ratios (or layer_types) must have window layers alone, ratio 0, for the "
            f"stages of a DSpark draft after num_hidden_layers={num_layers}"
        )
    num_stages = data.get("n_mtp_layers")
    if listed and not is_cut:
        if num_stages not in (None, len(listed)):
            raise ValueError(
                f"n_mtp_layers and the layers after num_hidden_layers={num_layers} contradict each "
                f"other: {num_stages} and {len(listed)}"
            )
        num_stages = len(listed)
    nextn = contents.get("num_nextn_predict_layers") or 0
    if nextn > 1 and num_stages not in (None, nextn):
        raise ValueError(
            f"num_nextn_predict_layers must be 0, 1 or the {num_stages} stages that are listed "
            f"after num_hidden_layers={num_layers}, got {nextn}"
        )
    return DSparkConfig(
        block_size=data["dspark_block_size"],
        markov_rank=data["dspark_markov_rank"],
        noise_token_id=data["dspark_noise_token_id"],
        target_layers=targets,
        num_stages=num_stages or (nextn if nextn > 1 else None),
        **{ours: data.get(theirs) or None for theirs, ours in EXPERT_FIELDS.items()},
    )


def without_draft(contents: dict[str, Any]) -> dict[str, Any]:
    """The contents of a `config.json` of a model whose files hold no draft."""
    contents = text_part(contents)
    kept = {name: value for name, value in contents.items() if not name.startswith(_PREFIX)}
    kept.pop("n_mtp_layers", None)
    for name in ("compress_ratios", "layer_types", "mlp_layer_types"):
        if kept.get(name) is not None:
            kept[name] = kept[name][: kept["num_hidden_layers"]]
    return kept | {"num_nextn_predict_layers": 0}


def _beyond(contents: dict[str, Any], num_layers: int) -> list[bool]:
    """Whether each layer that is listed after the trunk is other than a window layer."""
    if contents.get("compress_ratios") is not None:
        return [ratio != 0 for ratio in contents["compress_ratios"][num_layers:]]
    types = contents.get("layer_types") or []
    return [name != "sliding_attention" for name in types[num_layers:]]
