"""Which tensors a checkpoint's files hold, which of them are loaded, and which a release has."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv4_jax.checkpoint.files import StoredTensor, list_by_file
from dsv4_jax.checkpoint.layout import Entry, list_entries
from dsv4_jax.checkpoint.left_out import LeftOut, find_left_out
from dsv4_jax.checkpoint.names import all_targets, canonical_name, get_leaf
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.draft import DSparkConfig
from dsv4_jax.config.layer_types import AttentionType, RouterType
from dsv4_jax.config.read_json import read_contents
from dsv4_jax.model.params import param_shapes
from pallas_kernels.common.weights import FP8_BLOCK

_BF16 = np.dtype(ml_dtypes.bfloat16)
_E4M3, _UE8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)


class Size(NamedTuple):
    """How many tensors there are, and their bytes."""

    tensors: int
    num_bytes: int


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


def read_inventory(directory: pathlib.Path, *, follow_links: bool = False) -> Inventory:
    """Reads the config and the headers of all files.

    Raises:
      FileNotFoundError: as in `load_checkpoint`.
      ValueError: a file cannot be read, or config and files hold drafts of different kinds.
    """
    config = DSV4Config.from_hf(directory, follow_links=follow_links, text_only=True)
    where, contents = read_contents(directory, follow_links=follow_links)
    stored: dict[str, StoredTensor] = {}
    for tensors in list_by_file(directory, follow_links=follow_links):
        stored |= tensors
    try:
        config, left_out = find_left_out(contents, config, map(canonical_name, stored))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Inventory(config, stored, left_out)


def size_of(tensors: Iterable[StoredTensor | Entry]) -> Size:
    """How many there are, and their bytes in the files."""
    sizes = [math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors]
    return Size(len(sizes), sum(sizes))


def list_release(config: DSV4Config) -> Iterator[Entry]:
    """The tensors of the model and of its MTP block as DeepSeek releases them."""
    shapes = param_shapes(config, jnp.bfloat16, weights="released")
    for name, target in all_targets(config, shapes).items():
        yield from list_entries(name, target, get_leaf(shapes, target.leaf))


def list_dspark(config: DSV4Config, draft: DSparkConfig) -> Iterator[Entry]:
    """The tensors of the DSpark stages of a model as DeepSeek releases them.

    Args:
      config: of the trunk.
      draft: its draft, whose stages are known.

    Raises:
      ValueError: `num_stages` is None.

    Source: the published headers of V4-Flash-0731 and V4-Pro-0813.
    """
    if draft.num_stages is None:
        raise ValueError("draft must have num_stages to list the tensors of its stages, got None")
    # A stage has the layer of an MTP block, and none of what else such a block has.
    width, wide = config.hidden_size, len(draft.target_layers) * config.hidden_size
    last = draft.num_stages - 1
    small = dataclasses.replace(
        config,
        num_mtp_layers=1,
        layer_types=(AttentionType.SWA,),
        router_types=(RouterType.LEARNED,),
    )
    layer = list(list_release(small))
    own = {f"{name}_proj" for name in "eh"} | {f"{name}norm" for name in "eh"} | {"norm"}
    for stage in range(draft.num_stages):
        for name, dtype, shape in ((e.name, e.dtype, e.shape) for e in layer):
            rest = name.removeprefix("mtp.0.")
            is_head = rest.startswith("hc_head_")
            if rest == name or rest.split(".")[0] in own or (is_head and stage < last):
                continue
            yield Entry(f"mtp.{stage}.{rest}", dtype, shape)
    blocks = -(-width // FP8_BLOCK), -(-wide // FP8_BLOCK)
    yield Entry("mtp.0.main_proj.weight", _E4M3, (width, wide))
    yield Entry("mtp.0.main_proj.scale", _UE8M0, blocks)
    yield Entry("mtp.0.main_norm.weight", _BF16, (width,))
    yield Entry(f"mtp.{last}.norm.weight", _BF16, (width,))
    for table in ("markov_w1", "markov_w2"):
        shape = (config.vocab_size, draft.markov_rank)
        yield Entry(f"mtp.{last}.markov_head.{table}.weight", _BF16, shape)
    shape = (1, width + draft.markov_rank)
    yield Entry(f"mtp.{last}.confidence_head.proj.weight", _BF16, shape)
