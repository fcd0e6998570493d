"""What a model on a hub is asked before its weights are downloaded."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Collection
from typing import Any

from dsv4_jax.checkpoint.files import INDEX
from dsv4_jax.checkpoint.left_out import describe_config, warn_of_left_out
from dsv4_jax.checkpoint.names import canonical_name
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import read_dspark
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
) -> None:
    """Refuses a model that cannot be loaded, by its small files and by what files it has.

    A `LeftOutWarning` names parts that will not be loaded. Of a draft that is known where an index
    lists the tensors; the config of a small copy may still announce one that its files do not have.

    Args:
      name: of the model.
      folder: of its snapshot, which has its `config.json`.
      files: of the model on the hub.
      fetch: downloads one of them into the folder.
      needs_tokenizer: whether text is to be encoded.

    Raises:
      ValueError: it is no DeepSeek-V4, its weights are in a format that is not supported, or what
        its config says of its draft contradicts itself; or a tokenizer is needed, and it has none.
    """
    if HF_QUANT_CONFIG in files:
        fetch(HF_QUANT_CONFIG)
    DSV4Config.from_hf(folder, text_only=True)
    if needs_tokenizer and "tokenizer.json" not in files:
        raise ValueError(
            f"{name} has no tokenizer.json, so text cannot be encoded; take a model that has one"
        )
    where, contents = read_contents(folder)
    if INDEX in files:
        fetch(INDEX)
    has_draft = INDEX in files and _lists_draft(folder / INDEX)
    if has_draft:
        try:
            read_dspark(contents)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    warn_of_left_out(describe_config(contents, folder, has_draft=has_draft))


def _lists_draft(index: pathlib.Path) -> bool:
    """Whether an index names tensors of a draft; one that is broken is refused when it is read."""
    names = read_json_object(index).get("weight_map")
    return isinstance(names, dict) and any(canonical_name(n).startswith("mtp.") for n in names)
