"""What a config says about a model that reads images too, and the config of its text part."""

from __future__ import annotations

from typing import Any

from dsv4_jax.config.families import MODEL_TYPES, V4, with_one_name
from dsv4_jax.config.kinds import show

_TOWERS = ("vision_config", "vision_tower_config", "vit_config")


def text_part(contents: dict[str, Any]) -> dict[str, Any]:
    """The contents of `config.json` without what belongs to images, each field under one name.

    A config that nests its text model under `text_config` is made flat: what stands beside, such as
    `quantization_config`, holds for the text too where the text does not say otherwise.

    Raises:
      ValueError: `text_config` is no object, or two names of a field have different values.
    """
    nested = contents.get("text_config")
    if not isinstance(nested, dict | None):
        raise ValueError(f"text_config must be an object of fields, got {show(nested)}")
    if nested:
        given = {name: value for name, value in nested.items() if value is not None}
        contents = {name: contents[name] for name in contents if name != "text_config"} | given
    family = MODEL_TYPES.get(str(contents.get("model_type")))
    if family is not None and (nested or family != V4):
        contents = contents | {"model_type": family}
    kept = {name: value for name, value in contents.items() if not _is_of_images(name)}
    return with_one_name(kept)


def find_images(contents: dict[str, Any]) -> str | None:
    """The field of a config by which its model reads images, and its value; None without one."""
    if contents.get("vision_n_layers") == 0:
        return None
    for name in ("vision_n_layers", *_TOWERS, *sorted(contents)):
        if _is_of_images(name) and contents.get(name):
            return f"{name}={show(contents[name])}"
    return None


def _is_of_images(name: str) -> bool:
    return name in _TOWERS or name.startswith("vision_")
