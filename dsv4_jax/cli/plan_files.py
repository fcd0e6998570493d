"""What `dsv4-jax plan` prints of a model's files: what they hold, what is loaded, what is not."""

from __future__ import annotations

import dataclasses
import pathlib

from dsv4_jax.checkpoint.inventory import (
    Inventory,
    Size,
    list_dspark,
    list_release,
    read_inventory,
    size_of,
)
from dsv4_jax.checkpoint.left_out import describe_config, warn_of_left_out
from dsv4_jax.cli.presets import DSPARK, PRESETS
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DraftKind
from dsv4_jax.config.read_json import read_contents
from dsv4_jax.standard_streams import say


@dataclasses.dataclass(frozen=True)
class Files:
    """What the files of a model hold.

    Attributes:
      loaded: of it, what is loaded.
      left_out: of it, what is not, by what it is.
    """

    loaded: Size
    left_out: dict[str, Size]

    def lines(self) -> list[str]:
        """A line for all, one for what is loaded, and one for each part that is not."""
        parts = [self.loaded, *self.left_out.values()]
        total = Size(sum(p.tensors for p in parts), sum(p.num_bytes for p in parts))
        lines = [_line("files", total), _line("loaded", self.loaded)]
        return lines + [_line(f"left out: {name}", size) for name, size in self.left_out.items()]


def count_files(
    name: str, config: DSV4Config, *, follow_links: bool
) -> tuple[DSV4Config, Files | None]:
    """The config of what is loaded of a model, and its files.

    Args:
      name: of a preset, or a checkpoint directory; what is not loaded of that is warned of.
      config: of it.
      follow_links: as in `load_checkpoint`.

    Returns:
      The config without a draft block that the files do not have, and what there is; None of a
      preset that is loaded whole, and of a directory without its weights. If it has some, or their
      index, stderr says what is missing.

    Raises:
      ValueError: a file of the directory cannot be read, or does not agree with its config.
    """
    if name in PRESETS:
        draft = DSPARK.get(name)
        if draft is None:
            return config, None
        left_out = {
            f"draft ({draft.num_stages} {DraftKind.DSPARK})": size_of(list_dspark(config, draft))
        }
        return config, Files(size_of(list_release(config)), left_out)
    directory = pathlib.Path(name)
    if not directory.is_dir():
        return config, None
    try:
        found = read_inventory(directory, follow_links=follow_links)
    except FileNotFoundError as error:
        if any(directory.glob("*.safetensors*")):  # else a config alone, which is enough
            say(f"[files are not counted: {error}]")
        _, contents = read_contents(directory, follow_links=follow_links)
        warn_of_left_out(describe_config(contents, directory))
        return config, None
    warn_of_left_out(found.left_out.describe(directory))
    return found.config, _count(found)


def _count(found: Inventory) -> Files:
    names = found.left_out
    left_out = {
        f"draft ({names.stages} {names.draft or 'of an unknown kind'})": found.size_of(
            names.draft_names
        ),
        "images": found.size_of(names.image_names),
    }
    return Files(
        size_of(found.loaded.values()),
        {name: size for name, size in left_out.items() if size.tensors},
    )


def _line(label: str, size: Size) -> str:
    return f"{label}: {size.tensors:,} tensors, {size.num_bytes:,} bytes"
