"""How conversations of a model are rendered: by the rules of DeepSeek-V4, or of DeepSeek-V4.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import deepseek_recipe as recipe

from dsv4_jax.serve.forms.tags import V4_TAGS, V41_TAGS, Tags
from dsv4_jax.serve.settings import EFFORTS


class Rendering(NamedTuple):
    """What differs between models.

    Attributes:
      version: the model, as the library that renders and parses calls it.
      encoding: the library's, without a tokenizer.
      efforts: how it calls each effort of reasoning.
      tags: of calls of tools.
    """

    version: recipe.ModelVersion
    encoding: Any
    efforts: Mapping[str, str]
    tags: Tags


def rendering_of(release: str, *, is_v41: bool) -> Rendering:
    """Of a model; V4.1 writes efforts as numbers, and the release, a key of `EFFORTS`, is V4's."""
    version = recipe.ModelVersion
    if is_v41:
        encoding, efforts = recipe.DeepseekV41Encoding(), {name: name for name in EFFORTS["later"]}
        return Rendering(version.DeepseekV41Flash, encoding, efforts, V41_TAGS)
    return Rendering(version.DeepseekV4Pro, recipe.DeepseekV4Encoding(), EFFORTS[release], V4_TAGS)
