"""The models that commands know by name."""

from __future__ import annotations

import dataclasses
import pathlib

from dsv4_jax.config import DSV4Config

PRESETS = {
    "flash": DSV4Config.flash,
    "pro": DSV4Config.pro,
    "flash_slim": DSV4Config.flash_slim,
    "pro_slim": DSV4Config.pro_slim,
    "tiny": DSV4Config.tiny,
}


def read_config(name: str, *, draft: bool = True, follow_links: bool = False) -> DSV4Config:
    """The preset of that name, or the config of a checkpoint directory.

    Args:
      name: a key of `PRESETS` or a path.
      draft: whether the draft block is kept.
      follow_links: as in `DSV4Config.from_hf`.

    Raises:
      ValueError: it is neither.
    """
    if name in PRESETS:
        config = PRESETS[name]()
    elif pathlib.Path(name).exists():
        config = DSV4Config.from_hf(name, follow_links=follow_links)
    else:
        raise ValueError(f"config must be one of {list(PRESETS)} or a directory, got {name!r}")
    return config if draft else dataclasses.replace(config, num_mtp_layers=0)
