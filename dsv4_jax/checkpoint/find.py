"""find_checkpoint: the directory of a checkpoint, downloaded first if a hub has it.

What downloads is `huggingface_hub`, with its cache, its token and its environment variables
(`HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import utils as hub_utils

from dsv4_jax import checks
from dsv4_jax.checkpoint.before_weights import check_before_weights
from dsv4_jax.checkpoint.files import find_weight_files
from dsv4_jax.progress import Progress

SHIPPED_CHECKPOINT = pathlib.Path(__file__).parents[1] / "data" / "checkpoint"
"""A small trained model that comes with the package: bytes as tokens, every type of layer."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SUFFIXES = (".json", ".safetensors")
_MIB = 2**20


def find_checkpoint(
    name: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    progress: bool = True,
    needs_tokenizer: bool = False,
) -> pathlib.Path:
    """The directory of a checkpoint.

    A directory that is there is taken as it is, and no network is asked. Of a model on the hub the
    config is downloaded first, and refused if it is no DeepSeek-V4 or names a format of weights
    that is not supported; then it is compared with the disk; then weights and tokenizer are
    downloaded, or found in the hub's cache.

    Args:
      name: a directory, or a model's name on the hub, `owner/model`; None is
        `SHIPPED_CHECKPOINT`. A `pathlib.Path` is a directory always.
      revision: branch, tag or commit on the hub; None is the main branch.
      progress: shows a bar on stderr, or where that is no terminal a line now and then.
      needs_tokenizer: refuses a model on the hub that has no `tokenizer.json`.

    Returns:
      The directory, which need not exist where nothing could be a name on the hub.

    Raises:
      ValueError: there is neither such a directory nor such a model, the model is no DeepSeek-V4,
        has no safetensors, no tokenizer that is needed, or weights in a format that is not
        supported, or a revision is given for a directory; what was tried is said.
      OSError: the disk has too little space.
    """
    if name is not None and not isinstance(name, str | os.PathLike):
        checks.refuse("checkpoint", "a directory or a name on the hub (owner/model)", name)
    path = SHIPPED_CHECKPOINT if name is None else pathlib.Path(name)
    if path.exists() or not isinstance(name, str) or not _NAME.fullmatch(name):
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} is for a model on the hub (owner/model), and {path} is a "
                "directory; leave it out"
            )
        return path
    wanted = None if revision is None else checks.text("revision", revision)
    return _download(name, wanted, progress, needs_tokenizer)


def _download(
    name: str, revision: str | None, progress: bool, needs_tokenizer: bool
) -> pathlib.Path:
    """The directory of a model's snapshot in the hub's cache."""
    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    fetch = functools.partial(
        huggingface_hub.hf_hub_download, name, cache_dir=cache, endpoint=endpoint
    )
    try:
        info = huggingface_hub.HfApi(endpoint=endpoint).model_info(
            name, revision=revision, files_metadata=True
        )
    except Exception as error:  # of requests or of httpx, by the version of huggingface_hub
        return _find_cached(name, revision, error)
    sizes = {
        file.rfilename: file.size or 0
        for file in info.siblings or ()
        if "/" not in file.rfilename and file.rfilename.endswith(_SUFFIXES)
    }
    if "config.json" not in sizes or not any(file.endswith(".safetensors") for file in sizes):
        raise ValueError(f"{name} at {endpoint} must have a config.json and *.safetensors")
    # By its branch, which the cache then knows offline; all else is of the same commit.
    folder = pathlib.Path(fetch("config.json", revision=revision)).parent
    commit = folder.name
    check_before_weights(
        name,
        folder,
        sizes,
        functools.partial(fetch, revision=commit),
        needs_tokenizer=needs_tokenizer,
    )
    missing = {
        file: size
        for file, size in sizes.items()
        if not isinstance(
            huggingface_hub.try_to_load_from_cache(name, file, cache_dir=cache, revision=commit),
            str,
        )
    }
    _check_disk(name, pathlib.Path(cache), sum(missing.values()))
    total = sum(missing.values()) // _MIB
    with (
        _bars_shown(progress),
        Progress(
            total, unit=" MiB", doing=f"downloading {name}", shown=progress and not _has_bars()
        ) as lines,
    ):
        for file, size in missing.items():
            fetch(file, revision=commit)
            lines.add(size // _MIB)
    return folder


def _find_cached(name: str, revision: str | None, error: Exception) -> pathlib.Path:
    """What an earlier download left in the cache, where the hub gave an error instead.

    Raises:
      ValueError: that is nothing; what was tried is said.
    """
    endpoint = constants.ENDPOINT
    wanted = name if revision is None else f"{name} of revision {revision!r}"
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    tried = f"no directory {pathlib.Path(name).absolute()}; {endpoint}: {reason}"
    if not isinstance(error, hub_utils.RepositoryNotFoundError | hub_utils.RevisionNotFoundError):
        with contextlib.suppress(OSError):  # not there, or without some of its files
            folder = pathlib.Path(
                huggingface_hub.snapshot_download(
                    name, revision=revision, cache_dir=constants.HF_HUB_CACHE, local_files_only=True
                )
            )
            find_weight_files(folder)
            return folder
        tried += f"; nothing complete in the cache {constants.HF_HUB_CACHE}"
    raise ValueError(f"found no checkpoint {wanted}; tried: {tried}") from error


def _check_disk(name: str, cache: pathlib.Path, num_bytes: int) -> None:
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise OSError(
            f"{name} takes {num_bytes / 2**30:,.2f} GiB more, and the disk of {cache} has "
            f"{free / 2**30:,.2f} GiB free; make room, or set HF_HOME to a folder of another disk"
        )


def _has_bars() -> bool:
    """Whether the hub's own bars show a file's bytes as they come."""
    return Progress.has_terminal() and not hub_utils.are_progress_bars_disabled()


@contextlib.contextmanager
def _bars_shown(shown: bool) -> Iterator[None]:
    """The hub's own bars, which a terminal shows, or none."""
    if shown or hub_utils.are_progress_bars_disabled():
        yield
        return
    hub_utils.disable_progress_bars()
    try:
        yield
    finally:
        hub_utils.enable_progress_bars()
