"""What `dsv4-jax plan` prints of a model's files: what they hold, what is loaded, what is not."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

from dsv4_jax.checkpoint.find import SHIPPED, find_checkpoint
from dsv4_jax.checkpoint.inventory import (
    V41_IMAGES,
    Inventory,
    Size,
    list_release,
    read_inventory,
    size_of,
)
from dsv4_jax.checkpoint.left_out import describe_config, is_of_images, warn_of_left_out
from dsv4_jax.checkpoint.names import canonical_name
from dsv4_jax.cli.presets import preset_of, read_config
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DraftKind
from dsv4_jax.config.layer_schedule import draft_layers
from dsv4_jax.config.read_json import read_contents
from dsv4_jax.standard_streams import say


@dataclasses.dataclass(frozen=True)
class Files:
    """What the files of a model hold.

    Attributes:
      loaded: of it, what is loaded.
      draft: the draft that is loaded, and its part of that.
      left_out: of the files, what is not loaded, by what it is.
      is_decoded: they have no weight in FP8 or FP4.
    """

    loaded: Size
    draft: dict[str, Size]
    left_out: dict[str, Size]
    is_decoded: bool = False

    def lines(self) -> list[str]:
        """One for all, one for what is loaded, one for its draft, one for each part that is not."""
        parts = [self.loaded, *self.left_out.values()]
        total = Size(sum(p.tensors for p in parts), sum(p.num_bytes for p in parts))
        lines = [_line("files", total), _line("loaded", self.loaded)]
        lines += [_line(f"of that, {name}", size) for name, size in self.draft.items()]
        return lines + [_line(f"left out: {name}", size) for name, size in self.left_out.items()]


def count_files(
    name: str, *, follow_links: bool, drafts: bool = True
) -> tuple[DSV4Config, Files | None]:
    """The config of what is loaded of a model, and its files.

    Args:
      name: of a preset, or a checkpoint directory; what is not loaded of that is warned of.
      follow_links: as in `load_checkpoint`.
      drafts: as there.

    Returns:
      The config, with the draft that the files have, and what there is; None of a preset without
      DSpark stages, and of a directory without its weights. If it has some, or their index, stderr
      says what is missing.

    Raises:
      ValueError: there is no such preset or directory, or a file of the directory cannot be read,
        or does not agree with its config.
    """
    directory = find_checkpoint(name) if name == SHIPPED else pathlib.Path(name)
    is_preset = preset_of(name) is not None
    if is_preset or not directory.is_dir():
        config = read_config(name, drafts=drafts, follow_links=follow_links)
        whole = read_config(name, follow_links=follow_links) if is_preset else config
        return config, _count_release(config, whole)
    try:
        inventory = read_inventory(directory, follow_links=follow_links, drafts=drafts)
    except FileNotFoundError as error:
        if any(directory.glob("*.safetensors*")):  # else a config alone, which is enough
            say(f"[files are not counted: {error}]")
        config = read_config(name, drafts=drafts, follow_links=follow_links)
        _, contents = read_contents(directory, follow_links=follow_links)
        if drafts:
            warn_of_left_out(describe_config(contents, config, directory))
        return config, None
    warn_of_left_out(inventory.left_out.describe(directory))
    return inventory.config, _count(inventory)


@functools.cache
def _count_release(config: DSV4Config, whole: DSV4Config) -> Files | None:
    """The files of a release with DSpark stages, of which those of `config` are loaded."""
    if whole.dspark is None:
        return None
    entries = list(list_release(whole))
    images = {}
    if whole.sources is not None:
        routing = size_of(entry for entry in entries if is_of_images(entry.name))
        images["images"] = Size(*(sum(pair) for pair in zip(routing, V41_IMAGES, strict=True)))
        entries = [entry for entry in entries if not is_of_images(entry.name)]
    stages = size_of(entry for entry in entries if entry.name.startswith("mtp."))
    trunk = size_of(entry for entry in entries if not entry.name.startswith("mtp."))
    named = {f"draft ({whole.dspark.num_stages} {DraftKind.DSPARK})": stages}
    if config.dspark is None:
        return Files(trunk, {}, named | images)
    return Files(size_of(entries), named, images)


def _count(inventory: Inventory) -> Files:
    names, loaded = inventory.left_out, inventory.loaded
    left_out = {
        f"draft ({names.stages} {names.draft or 'of an unknown kind'})": inventory.size_of(
            names.draft_names
        ),
        "images": inventory.size_of(names.image_names),
    }
    draft = {}
    if inventory.config.has_draft:
        stages = len(draft_layers(inventory.config))
        kind = DraftKind.MTP if inventory.config.dspark is None else DraftKind.DSPARK
        draft[f"draft ({stages} {kind})"] = size_of(
            tensor for name, tensor in loaded.items() if canonical_name(name).startswith("mtp.")
        )
    return Files(
        size_of(loaded.values()),
        draft,
        {name: size for name, size in left_out.items() if size.tensors},
        # A byte or half of one an element is a code.
        is_decoded=all(tensor.dtype.itemsize > 1 for tensor in loaded.values()),
    )


def _line(label: str, size: Size) -> str:
    return f"{label}: {size.tensors:,} tensors, {size.num_bytes:,} bytes"
