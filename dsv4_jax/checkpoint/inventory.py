"""Which tensors a checkpoint's files hold, which of them are loaded, and which a release has."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dsv4_jax.checkpoint.engram_tables import list_tables
from dsv4_jax.checkpoint.files import StoredTensor, list_by_file
from dsv4_jax.checkpoint.layout import Entry, list_entries
from dsv4_jax.checkpoint.left_out import LeftOut, find_left_out
from dsv4_jax.checkpoint.names import all_targets, canonical_name, get_leaf
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.read_json import read_contents
from dsv4_jax.model.params import param_shapes
from dsv4_jax.model.weight_forms import STORED


class Size(NamedTuple):
    """How many tensors there are, and their bytes."""

    tensors: int
    num_bytes: int


V41_IMAGES = Size(266, 970_536_960)
"""What reads images in DeepSeek-V4.1-Flash: `vision.`, `aligner.` and three rows of `image_`."""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint's files.

    Attributes:
      config: of what is loaded.
      stored: all tensors, by their names in the files.
      left_out: which are not loaded.
    """

    config: DSV4Config
    stored: dict[str, StoredTensor]
    left_out: LeftOut

    @property
    def loaded(self) -> dict[str, StoredTensor]:
        """Those that are loaded."""
        names = self.left_out.names
        return {n: tensor for n, tensor in self.stored.items() if canonical_name(n) not in names}

    def size_of(self, canonical_names: frozenset[str]) -> Size:
        """Of those among the tensors that have such names."""
        return size_of(t for n, t in self.stored.items() if canonical_name(n) in canonical_names)


def read_inventory(
    directory: pathlib.Path, *, follow_links: bool = False, drafts: bool = True
) -> Inventory:
    """Reads the config and the headers of all files.

    Args:
      directory: of the checkpoint.
      follow_links: as in `load_checkpoint`.
      drafts: as there.

    Raises:
      FileNotFoundError: as in `load_checkpoint`.
      ValueError: a file cannot be read, or config and files hold drafts of different kinds.
    """
    config = DSV4Config.from_hf(directory, follow_links=follow_links, text_only=True, drafts=False)
    where, contents = read_contents(directory, follow_links=follow_links)
    stored: dict[str, StoredTensor] = {}
    for tensors in list_by_file(directory, follow_links=follow_links):
        stored |= tensors
    try:
        names = map(canonical_name, stored)
        config, left_out = find_left_out(contents, config, names, drafts=drafts)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Inventory(config, stored, left_out)


def size_of(tensors: Iterable[StoredTensor | Entry]) -> Size:
    """How many there are, and their bytes in the files."""
    sizes = [math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors]
    return Size(len(sizes), sum(sizes))


def list_release(config: DSV4Config) -> Iterator[Entry]:
    """The tensors of the model and of its draft as DeepSeek releases them.

    Engram tables are among them, which lie on the host, and what routes tokens of images, which is
    not loaded (`is_of_images`). What reads images is not.

    Raises:
      ValueError: the config has DSpark stages, and does not say how many.
    """
    shapes = param_shapes(config, weights=STORED)
    for name, target in all_targets(config, shapes).items():
        leaf = get_leaf(shapes, target.leaf)
        yield from list_entries(name, target, leaf)
        if config.sources is not None and target.leaf.endswith(".ffn.bias"):
            yield Entry(f"{name}_vl", np.dtype(np.float32), target.shape)
    yield from list_tables(config)
