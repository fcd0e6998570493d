"""What a model on a hub is asked before its weights are downloaded."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Collection
from typing import Any

from dsv4_jax.checkpoint.files import INDEX
from dsv4_jax.checkpoint.left_out import find_left_out, warn_of_left_out
from dsv4_jax.checkpoint.names import canonical_name
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.formats import HF_QUANT_CONFIG
from dsv4_jax.config.json_file import read_json_object
from dsv4_jax.config.read_json import read_contents


def check_before_weights(
    name: str,
    folder: pathlib.Path,
    files: Collection[str],
    fetch: Callable[[str], Any],
    *,
    needs_tokenizer: bool,
    drafts: bool = True,
) -> None:
    """Refuses a model that cannot be loaded, by its small files and by what files it has.

    Where an index lists the tensors, a `LeftOutWarning` names parts that will not be loaded, in the
    words that `load_checkpoint` has for it. A model without an index is one file, which tells.

    Args:
      name: of the model.
      folder: of its snapshot, which has its `config.json`.
      files: of the model on the hub.
      fetch: downloads one of them into the folder.
      needs_tokenizer: whether text is to be encoded.
      drafts: as of `load_checkpoint`.

    Raises:
      ValueError: it is no DeepSeek-V4, its weights are in a format that is not supported, or config
        and index do not agree on its draft; or a tokenizer is needed, and it has none.
    """
    if HF_QUANT_CONFIG in files:
        fetch(HF_QUANT_CONFIG)
    config = DSV4Config.from_hf(folder, text_only=True, drafts=False)
    if needs_tokenizer and "tokenizer.json" not in files:
        raise ValueError(
            f"{name} has no tokenizer.json, so text cannot be encoded; take a model that has one"
        )
    if INDEX not in files:
        return
    fetch(INDEX)
    names = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict):
        return  # to be refused when the files are looked for
    where, contents = read_contents(folder)
    try:
        _, left_out = find_left_out(contents, config, map(canonical_name, names), drafts=drafts)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    warn_of_left_out(left_out.describe(folder))
