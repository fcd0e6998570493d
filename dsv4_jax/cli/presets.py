"""The models that commands know by name."""

from __future__ import annotations

import dataclasses
import pathlib

from dsv4_jax.checkpoint.find import ON_THE_HUB, SHIPPED, find_checkpoint, near_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DSparkConfig

PRESETS = {
    "flash": DSV4Config.flash,
    "pro": DSV4Config.pro,
    "flash-0731": lambda: _with_stages(DSV4Config.flash(), DSPARK["flash-0731"]),
    "pro-0813": lambda: _with_stages(DSV4Config.pro(), DSPARK["pro-0813"]),
    "v41-flash": DSV4Config.v41_flash,
    "flash_slim": DSV4Config.flash_slim,
    "pro_slim": DSV4Config.pro_slim,
    "tiny": DSV4Config.tiny,
}


DSPARK = {
    "flash-0731": DSparkConfig(
        block_size=5,
        markov_rank=256,
        noise_token_id=128_799,
        target_layers=(40, 41, 42),
        num_stages=3,
    ),
    "pro-0813": DSparkConfig(
        block_size=5,
        markov_rank=512,
        noise_token_id=128_799,
        target_layers=(58, 59, 60),
        num_stages=3,
    ),
}
"""The drafts of presets whose releases have DSpark stages."""


def _with_stages(config: DSV4Config, dspark: DSparkConfig) -> DSV4Config:
    return dataclasses.replace(config.without_draft(), dspark=dspark)


def preset_of(name: str) -> str | None:
    """The key of `PRESETS` that is meant by a name; None if that is a path, or nothing known."""
    if name in PRESETS:
        return name
    return None if pathlib.Path(name).exists() else ON_THE_HUB.get(name)


def read_config(name: str, *, drafts: bool = True, follow_links: bool = False) -> DSV4Config:
    """The preset of that name, or the config of a checkpoint directory.

    Args:
      name: a key of `PRESETS` or of `ON_THE_HUB`, "shipped" or a path.
      drafts: whether the draft is kept; if not, the config may say of it what it likes.
      follow_links: as in `DSV4Config.from_hf`.

    Raises:
      ValueError: it is neither.
    """
    if (preset := preset_of(name)) is not None:
        config = PRESETS[preset]()
    elif name == SHIPPED or pathlib.Path(name).exists():
        name = str(find_checkpoint(name))
        config = DSV4Config.from_hf(name, follow_links=follow_links, text_only=True, drafts=drafts)
    else:
        near = near_checkpoint(name, (*PRESETS, SHIPPED, *ON_THE_HUB))
        meant = f"; did you mean {near}?" if near else ""
        raise ValueError(
            f"config must be one of {[*PRESETS, SHIPPED]}, a directory, or one of these models of "
            f"the Hugging Face hub: {', '.join(ON_THE_HUB)}; got {name!r}{meant}"
        )
    return config if drafts else config.without_draft()
