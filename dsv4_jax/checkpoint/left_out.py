"""Which draft a checkpoint has, and what it holds beside the model that is loaded.

DSpark stages under `mtp.` are told from an MTP block by the config and by the files, which have to
agree. A draft that the model cannot have, or that is not wanted, and what reads images are left
out.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import warnings
from collections.abc import Collection, Iterable
from typing import Any

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DraftKind, draft_kind, read_dspark
from dsv4_jax.config.images import find_images
from dsv4_jax.config.kinds import show
from dsv4_jax.config.layer_types import RouterType

_STAGE = re.compile(r"mtp\.(\d+)\.")
_IMAGES = re.compile(
    r"(vision|visual|vit|image|img|aligner|projector|connector|merger|mm|multi_modal)[._]"
)
_IMAGE_ROUTING = re.compile(r"(layers|mtp)\.(\d+)\.ffn\.gate\.(e_score_correction_)?bias_vl")
_TEXT_BIAS = re.compile(r"layers\.(\d+)\.ffn\.gate\.bias")
_RELEASED_FAMILIES = ("vision", "aligner", "image", "gate.bias_vl", "gate.bias of hash layers")
"""As `_family` names the tensors of V4-Flash-Vision-Exp that belong to images."""

_MARKS = {DraftKind.DSPARK: "mtp.0.main_proj.weight", DraftKind.MTP: "mtp.0.e_proj.weight"}
_WITHOUT = "drafts=False, on the command line --drafts off, loads the model without its draft"


class LeftOutWarning(UserWarning):
    """A checkpoint holds parts of a model that are not loaded."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Names of a checkpoint's tensors that are not loaded, by why.

    Attributes:
      draft: kind of the draft under `mtp.` that is left out; None is none.
      stages: how many there are of it.
      draft_names: its tensors.
      image_names: tensors that belong to images.
      is_asked: the draft was not wanted, so that nobody is told that it is left out.
    """

    draft: DraftKind | None
    stages: int
    draft_names: frozenset[str]
    image_names: frozenset[str]
    is_asked: bool = False

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.draft_names | self.image_names

    def describe(self, where: str | pathlib.Path) -> str:
        """One line about what is left out, or the empty text."""
        is_told = self.draft_names and not self.is_asked
        draft = str(self.draft or "of an unknown kind") if is_told else None
        return _describe(where, draft, {_family(name) for name in self.image_names})


def find_left_out(
    contents: dict[str, Any], config: DSV4Config, names: Iterable[str], *, drafts: bool = True
) -> tuple[DSV4Config, LeftOut]:
    """The config of what is loaded, and what is not.

    Args:
      contents: of `config.json`.
      config: what was read of it; its draft is not looked at.
      names: of the tensors of the files, canonical. If they hold no draft, what the config says of
        one is not read: small copies keep fields that no longer fit.
      drafts: whether a draft is wanted; if not, nothing is read of one.

    Returns:
      The config with the draft of the files, or without one; of DSpark stages their number is that
      of the files.

    Raises:
      ValueError: config and files do not agree on the kind of draft, or on its stages, or the
        config lacks a field of it; the message has the way to load the model without it.
    """
    names = set(names)
    draft = frozenset(name for name in names if name.startswith("mtp."))
    images = frozenset(filter(_IMAGES.match, names))
    if find_images(contents) is not None or config.sources is not None:
        images |= {name for name in names if _IMAGE_ROUTING.fullmatch(name)}
        images |= {name for name in names if _is_unused_bias(name, config)}
    config = config.without_draft()
    if not draft:
        return config, LeftOut(None, 0, frozenset(), images)
    found = [kind for kind, mark in _MARKS.items() if mark in names]
    stages = len({match[1] for match in map(_STAGE.match, draft) if match is not None})
    if drafts:
        try:
            _check_stages(draft)
            _check_kind(draft_kind(contents), found, stages)
            config = _with_draft(contents, config, stages)
        except ValueError as error:
            raise ValueError(f"{error}; {_WITHOUT}") from error
    if config.has_draft:
        return config, LeftOut(None, 0, frozenset(), images)
    kind = found[0] if len(found) == 1 else None
    return config, LeftOut(kind, stages, draft, images - draft, is_asked=not drafts)


def is_of_images(name: str) -> bool:
    """Whether a tensor of a release routes tokens of images alone."""
    return _IMAGE_ROUTING.fullmatch(name) is not None


def describe_config(contents: dict[str, Any], config: DSV4Config, where: str | pathlib.Path) -> str:
    """What `LeftOut.describe` says of a release, by its config alone; else the empty text.

    Args:
      contents: of `config.json`.
      config: what was read of it, its draft too.
      where: the directory.
    """
    is_cut = draft_kind(contents) == DraftKind.DSPARK and not config.has_draft
    draft = str(DraftKind.DSPARK) if is_cut else None
    return _describe(where, draft, _RELEASED_FAMILIES if find_images(contents) else ())


def warn_of_left_out(text: str) -> None:
    """Warns by a line that is not empty; of the same text Python shows one."""
    if text:
        warnings.warn(text, LeftOutWarning, stacklevel=1)


def _describe(where: str | pathlib.Path, draft: str | None, families: Collection[str]) -> str:
    parts = [] if draft is None else [f"its draft ({draft}, mtp.)"]
    if families:
        parts.append(f"what belongs to images ({', '.join(sorted(families))})")
    if not parts:
        return ""
    verb = "is" if len(parts) == 1 else "are"
    rest = "the text model is loaded" + ("" if draft is None else ", without a draft")
    return f"{where}: {' and '.join(parts)} {verb} left out; {rest}"


def _with_draft(contents: dict[str, Any], config: DSV4Config, stages: int) -> DSV4Config:
    """The config with the draft that the contents have, unless the layers that it reads are cut.

    Raises:
      ValueError: a field of the draft is missing or does not fit, or the files hold other stages.
    """
    dspark = read_dspark(contents)
    if dspark is None:
        is_block = draft_kind(contents) == DraftKind.MTP
        return dataclasses.replace(config, num_mtp_layers=int(is_block))
    if dspark.num_stages not in (None, stages):
        raise ValueError(
            f"config.json lists {dspark.num_stages} DSpark stages, and the files hold {stages} "
            f"(mtp.0 to mtp.{stages - 1})"
        )
    if dspark.target_layers[-1] >= config.num_layers:
        return config
    return dataclasses.replace(config, dspark=dataclasses.replace(dspark, num_stages=stages))


def _check_kind(wanted: DraftKind | None, found: list[DraftKind], stages: int) -> None:
    """Refuses files that hold another kind of draft than the config announces."""
    if len(found) > 1:
        marks = " and ".join(_MARKS.values())
        raise ValueError(f"the files must hold one kind of draft under mtp., got {marks}")
    if wanted == DraftKind.MTP and DraftKind.DSPARK in found:
        raise ValueError(
            f"the files hold DSpark stages ({_MARKS[DraftKind.DSPARK]}), and config.json has no "
            "dspark_* fields, as of a draft of another kind; take the config.json of these files"
        )
    if wanted == DraftKind.MTP and stages > 1:
        raise ValueError(
            f"config.json announces one MTP block, and the files hold {stages} under mtp."
        )
    if wanted == DraftKind.DSPARK and DraftKind.DSPARK not in found:
        held = f"an MTP block ({_MARKS[DraftKind.MTP]})" if found else "no stages of that kind"
        raise ValueError(
            f"config.json has dspark_* fields, and the files hold {held} under mtp., without "
            f"{_MARKS[DraftKind.DSPARK]}; take the config.json of these files"
        )


def _check_stages(draft: frozenset[str]) -> None:
    """Refuses stages under `mtp.` that are not numbered from 0.

    Raises:
      ValueError: one is missing before others, or a name has no number.
    """
    found = {name: _STAGE.match(name) for name in draft}
    if bad := sorted(name for name, match in found.items() if match is None):
        raise ValueError(f"tensors under mtp. must name a stage, as mtp.0., got {show(bad[0])}")
    numbers = sorted({int(match[1]) for match in found.values() if match is not None})
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"stages under mtp. must be numbered from 0 without a gap, got {show(numbers)}"
        )


def _is_unused_bias(name: str, config: DSV4Config) -> bool:
    """Whether it is a selection bias of a hash layer, which picks experts of text by its table."""
    match = _TEXT_BIAS.fullmatch(name)
    if match is None or int(match[1]) >= config.num_layers:
        return False
    return config.router_types[int(match[1])] == RouterType.HASH


def _family(name: str) -> str:
    if _IMAGE_ROUTING.fullmatch(name):
        return "gate.bias_vl"
    return "gate.bias of hash layers" if _TEXT_BIAS.fullmatch(name) else re.split(r"[._]", name)[0]
