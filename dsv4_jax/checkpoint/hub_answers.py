"""What is done where a hub gives an error: say why, and look for the model in the hub's cache."""

from __future__ import annotations

import contextlib
import pathlib
import re

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import utils as hub_utils

from dsv4_jax.checkpoint.files import INDEX, MAX_FILES, find_weight_files, show_some

_SHARD = re.compile(r"(.+)-([0-9]+)-of-([0-9]{1,6})\.safetensors")
_LOG_IN = "log in (`hf auth login`, or a token in HF_TOKEN)"


def explain(name: str, error: BaseException) -> str:
    """Why a hub gave no file of a model, and what can be done.

    Args:
      name: of the model.
      error: of `huggingface_hub`, or of the library by which it sends requests.
    """
    if isinstance(error, hub_utils.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub_utils.OfflineModeIsEnabled):
        return "not asked, since HF_HUB_OFFLINE is set"
    if isinstance(error, hub_utils.GatedRepoError):
        return f"gated; accept its terms at {constants.ENDPOINT}/{name} and {_LOG_IN}"
    if isinstance(error, hub_utils.RevisionNotFoundError):
        return "the model is there, this revision is not"
    if isinstance(error, hub_utils.RepositoryNotFoundError) or status in (401, 403):
        said = getattr(error, "server_message", None)  # such as that the token is no valid one
        told = f" ({said})" if said else ""
        return f"no such model, or none that you may read{told}; check its name, or {_LOG_IN}"
    line = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    return f"no answer that helps ({type(error).__name__}: {line})"


def find_cached(name: str, revision: str | None, error: Exception) -> pathlib.Path:
    """What an earlier download left in the cache, where the hub gave an error instead.

    The config and the weights are needed; what else lies beside them on the hub may be absent.

    Args:
      name: of the model.
      revision: branch, tag or commit; None is the main branch.
      error: what the hub gave.

    Raises:
      ValueError: that is nothing, or not all; what was tried is said.
    """
    wanted = name if revision is None else f"{name} of revision {revision!r}"
    tried = [
        f"no directory {pathlib.Path(name).absolute()}",
        f"{constants.ENDPOINT}: {explain(name, error)}",
    ]
    if not isinstance(error, hub_utils.RevisionNotFoundError):
        cache = constants.HF_HUB_CACHE
        config = huggingface_hub.try_to_load_from_cache(
            name, "config.json", cache_dir=cache, revision=revision
        )
        if isinstance(config, str):
            folder = pathlib.Path(config).parent
            if not (lacking := _find_lacking(folder)):
                return folder
            tried.append(f"the cache: {lacking}")
        else:
            tried.append(f"the cache {cache} has no config.json of it")
        if whole := _list_whole(pathlib.Path(cache), name):
            tried.append(f"it has all of revision {' and of '.join(whole)}, which can be asked for")
    raise ValueError(f"found no checkpoint {wanted}; tried: {'; '.join(tried)}") from error


def _list_whole(cache: pathlib.Path, name: str) -> list[str]:
    """Commits of a model that lie in the cache with all their weights."""
    whole = []
    for config in cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"):
        with contextlib.suppress(ValueError):
            if not _find_lacking(config.parent):
                whole.append(config.parent.name)
    return sorted(whole)


def _find_lacking(folder: pathlib.Path) -> str | None:
    """Which weights a snapshot lacks, by its index or by the numbers of those that it has."""
    try:
        files = find_weight_files(folder)
    except FileNotFoundError as error:
        return str(error)
    if (folder / INDEX).is_file():
        return None
    names = {file.name for file in files}
    # As DeepSeek names them, model-00001-of-000163: the number may have other digits than the last.
    series = {
        (match[1], len(match[2]), match[3]) for name in names if (match := _SHARD.fullmatch(name))
    }
    shards = {
        f"{stem}-{number + 1:0{digits}}-of-{last}.safetensors"
        for stem, digits, last in series
        for number in range(min(int(last), MAX_FILES))
    }
    lacking = sorted(shards - names)
    return f"{folder} lacks {show_some(lacking)}" if lacking else None
