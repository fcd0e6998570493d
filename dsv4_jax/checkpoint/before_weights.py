"""What a model on a hub is asked before its weights are downloaded."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Collection
from typing import Any

from dsv4_jax.checkpoint.left_out import describe_config, warn_of_left_out
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import read_dspark
from dsv4_jax.config.formats import HF_QUANT_CONFIG
from dsv4_jax.config.read_json import read_contents


def check_before_weights(
    name: str,
    folder: pathlib.Path,
    files: Collection[str],
    fetch: Callable[[str], Any],
    *,
    needs_tokenizer: bool,
) -> None:
    """Refuses a model that cannot be loaded, by its small files and by what files it has.

    A `LeftOutWarning` names parts that will not be loaded.

    Args:
      name: of the model.
      folder: of its snapshot, which has its `config.json`.
      files: of the model on the hub.
      fetch: downloads one of them into the folder.
      needs_tokenizer: whether text is to be encoded.

    Raises:
      ValueError: it is no DeepSeek-V4, or its weights are in a format that is not supported; or a
        tokenizer is needed, and it has none.
    """
    if HF_QUANT_CONFIG in files:
        fetch(HF_QUANT_CONFIG)
    DSV4Config.from_hf(folder, text_only=True)
    where, contents = read_contents(folder)
    try:
        read_dspark(contents)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if needs_tokenizer and "tokenizer.json" not in files:
        raise ValueError(
            f"{name} has no tokenizer.json, so text cannot be encoded; take a model that has one"
        )
    warn_of_left_out(describe_config(contents, folder))
