"""find_checkpoint: the directory of a checkpoint, downloaded first if a hub has it.

What downloads is `huggingface_hub`, with its cache, its token and its environment variables
(`HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import constants

from dsv4_jax import checks
from dsv4_jax.checkpoint.before_weights import check_before_weights
from dsv4_jax.progress import Progress
from dsv4_jax.regular_files import show_path
from dsv4_jax.runtime import shown_bytes

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

SHIPPED_CHECKPOINT = pathlib.Path(__file__).parents[1] / "data" / "checkpoint"
"""A small trained model that comes with the package: bytes as tokens, every type of layer."""

SHIPPED = "shipped"
"""Its name, unless a directory has it."""

ON_THE_HUB = {
    "deepseek-ai/DeepSeek-V4-Flash": "flash",
    "deepseek-ai/DeepSeek-V4-Pro": "pro",
    "deepseek-ai/DeepSeek-V4-Flash-0731": "flash-0731",
    "deepseek-ai/DeepSeek-V4-Pro-0813": "pro-0813",
    "deepseek-ai/DeepSeek-V4.1-Flash": "v41-flash",
}
"""Released models by their names on the hub, and their short names, by which no file is found."""

_MODEL = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_NAME = re.compile(_MODEL)
_ADDRESS = re.compile(rf"(?:https?://[^/]+/|hf://)?({_MODEL})(?:(?:@|/tree/)([^@]+?))?/?")
"""Other ways to write a model's name, which are no directories either."""
_LONGEST_NAME = 200
_SUFFIXES = (".json", ".safetensors")
_MIB = 2**20


def find_checkpoint(
    name: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    progress: bool = True,
    needs_tokenizer: bool = False,
    drafts: bool = True,
) -> pathlib.Path:
    """The directory of a checkpoint.

    A directory that is there is taken as it is, and no network is asked. Of a model on the hub the
    config is downloaded first, and refused if it is no DeepSeek-V4 or names a format of weights
    that is not supported; then the index of its tensors, if there is one, which has to agree with
    the config on a draft; then the size of all files is compared with the disk; then the other JSON
    files are downloaded, which are small, and last the weights. What the hub's cache has is not
    downloaded again, and a cache that has the config and the weights is enough where the hub cannot
    be asked.

    Args:
      name: a directory, or a model's name on the hub, `owner/model`; None is
        `SHIPPED_CHECKPOINT`, and so is "shipped" where no directory has that name. A
        `pathlib.Path` is a directory always.
      revision: branch, tag or commit on the hub; None is the main branch.
      progress: shows a bar on stderr, or where that is no terminal a line now and then.
      needs_tokenizer: refuses a model on the hub that has no `tokenizer.json`.
      drafts: as of `load_checkpoint`; False asks nothing of a draft.

    Returns:
      The directory, which need not exist where the name is a path of several parts.

    Raises:
      ValueError: there is neither such a directory nor such a model, the hub does not give it, the
        model is no DeepSeek-V4, has no safetensors, no tokenizer that is needed, or weights in a
        format that is not supported, or a revision is given for a directory; what was tried is
        said.
      OSError: the disk has too little space, or the download broke off.
    """
    if name is not None and not isinstance(name, str | os.PathLike):
        checks.refuse("checkpoint", "a directory or a name on the hub (owner/model)", name)
    path = SHIPPED_CHECKPOINT if name is None else pathlib.Path(name)
    try:
        is_there = path.exists()
        if name == SHIPPED and not is_there:
            path, is_there = SHIPPED_CHECKPOINT, True
    except OSError as error:
        told = f"got {show_path(path)} ({error.strerror})"
        raise ValueError(f"checkpoint must be a directory that can be found, {told}") from None
    if is_there or not isinstance(name, str) or not is_on_hub(name):
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} is for a model on the hub (owner/model), and {path} is a "
                "directory; leave it out"
            )
        if isinstance(name, str) and not is_there:
            _refuse_address(name)
            _refuse_word(name)
        return path
    wanted = None if revision is None else checks.text("revision", revision)
    asks = functools.partial(check_before_weights, needs_tokenizer=needs_tokenizer, drafts=drafts)
    return _download(name, wanted, progress, asks)


def is_on_hub(name: str | None) -> bool:
    """Whether that is no directory, and written as a model's name on the hub is."""
    return name is not None and bool(_NAME.fullmatch(name)) and not pathlib.Path(name).exists()


def may_be_checkpoint(text: str) -> bool:
    """Whether a text names a checkpoint: one that is there, a path, or a name as on the hub."""
    if text == SHIPPED or _ADDRESS.fullmatch(text) or text.startswith(("/", "./", "../", "~/")):
        return True
    if text.endswith("/") and len(text.split()) == 1:
        return True
    try:
        return pathlib.Path(text).is_dir()
    except OSError:  # too long for a path
        return False


def near_checkpoint(text: str, known: Sequence[str] = (SHIPPED,)) -> str | None:
    """The known name of a checkpoint that a word is near; None of a text of several words.

    A name on the hub is near by its last part too, with or without `DeepSeek-`.
    """
    if len(text.split()) != 1 or len(text) > _LONGEST_NAME:
        return None
    spelt = {}
    for name in known:
        model = name.rpartition("/")[2]
        for spelling in (model.removeprefix("DeepSeek-"), model, name):
            spelt.setdefault(spelling.lower(), name)
    near = difflib.get_close_matches(text.lower(), spelt, n=1)
    return spelt[near[0]] if near else None


def _refuse_address(name: str) -> None:
    """Refuses a name of a model that is written in another way, which would be no directory."""
    if (match := _ADDRESS.fullmatch(name)) and name != match[1]:
        model, revision = match.groups()
        given = f"{model!r} and revision={revision!r} (--revision)" if revision else repr(model)
        raise ValueError(
            f"checkpoint must be a directory or a name on the hub (owner/model), got {name!r}, "
            f"which is no directory; pass {given}"
        )


def _refuse_word(name: str) -> None:
    """Refuses a word that is no directory; models on the hub have an owner before their name."""
    if not name.strip() or pathlib.PurePath(name).name != name:
        return
    short = {short: name for name, short in ON_THE_HUB.items()}
    near = short.get(name) or near_checkpoint(name, (SHIPPED, *ON_THE_HUB))
    meant = f"; did you mean {near}?" if near else ""
    raise ValueError(
        f"checkpoint must be a directory that is there, a name on the hub (owner/model), or "
        f"{SHIPPED}, got {name!r}{meant}"
    )


def _download(
    name: str, revision: str | None, progress: bool, check: Callable[..., None]
) -> pathlib.Path:
    """The directory of a model's snapshot in the hub's cache."""
    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    try:
        info = huggingface_hub.HfApi(endpoint=endpoint).model_info(
            name, revision=revision, files_metadata=True
        )
        files = {file.rfilename: file for file in info.siblings or () if _is_taken(file.rfilename)}
        if "config.json" not in files or not any(file.endswith(".safetensors") for file in files):
            raise ValueError(f"{name} at {endpoint} must have a config.json and *.safetensors")
        # By its branch, which the cache then knows offline; all else is of the same commit.
        folder = _fetch(name, "config.json", revision).parent
    except Exception as error:  # of requests, httpx or httpx2, by the version of huggingface_hub
        if _is_our_own(error):
            raise
        from dsv4_jax.checkpoint.hub_answers import find_cached

        return find_cached(name, revision, error)
    commit = folder.name
    fetch = functools.partial(_fetch_or_say, name, revision=commit)
    check(name, folder, files, fetch)
    missing = {
        file: facts.size or 0
        for file, facts in files.items()
        if not isinstance(
            huggingface_hub.try_to_load_from_cache(name, file, cache_dir=cache, revision=commit),
            str,
        )
    }
    blobs = folder.parents[1] / "blobs"
    absent = sum(size for file, size in missing.items() if not _has_blob(blobs, files[file]))
    _check_disk(name, pathlib.Path(cache), absent)
    total = sum(missing.values()) // _MIB
    with (
        _bars_shown(progress),
        Progress(
            total, unit=" MiB", doing=f"downloading {name}", shown=progress and not _has_bars()
        ) as lines,
    ):

        def fetch_all(suffix: str) -> None:
            for file in (file for file in missing if file.endswith(suffix)):
                fetch(file)
                lines.add(missing[file] // _MIB)

        fetch_all(".json")  # the tokenizer among them
        fetch_all(".safetensors")
    return folder


def _fetch(name: str, file: str, revision: str | None) -> pathlib.Path:
    return pathlib.Path(
        huggingface_hub.hf_hub_download(
            name,
            file,
            revision=revision,
            cache_dir=constants.HF_HUB_CACHE,
            endpoint=constants.ENDPOINT,
        )
    )


def _fetch_or_say(name: str, file: str, revision: str) -> None:
    """Downloads a file of a model that has been found, or says what broke off."""
    try:
        _fetch(name, file, revision)
    except Exception as error:  # as in `_download`
        if _is_our_own(error):
            raise
        from dsv4_jax.checkpoint.hub_answers import explain

        raise OSError(
            f"the download of {name} broke off at {file}: {explain(name, error)}; what has come is "
            "kept, so try again"
        ) from error


def _is_taken(file: str) -> bool:
    """Whether a file of a model is downloaded: configs, tokenizer and weights beside each other."""
    return "/" not in file and file.endswith(_SUFFIXES)


def _is_our_own(error: Exception) -> bool:
    """Whether an error is said as it is: of a wrong argument, or of this machine's disk.

    The hub's are `ValueError` and `OSError` too, by its version; the latter have no number.
    """
    of_disk = isinstance(error, OSError) and error.errno is not None
    refused = huggingface_hub.utils.HFValidationError
    of_argument = type(error) is ValueError or isinstance(error, refused)
    return of_argument or (of_disk and not isinstance(error, ConnectionError | TimeoutError))


def _has_blob(blobs: pathlib.Path, file: RepoSibling) -> bool:
    """Whether the cache has the contents of a file, as another revision's."""
    digest = file.lfs.sha256 if file.lfs else file.blob_id
    return digest is not None and (blobs / digest).is_file()


def _check_disk(name: str, cache: pathlib.Path, num_bytes: int) -> None:
    there = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise OSError(
            f"{name} takes {shown_bytes(num_bytes)} more, and the disk of {cache} has "
            f"{shown_bytes(free)} free; make room, or set HF_HOME to a folder of another "
            "disk"
        )


def _has_bars() -> bool:
    """Whether the hub's own bars show a file's bytes as they come."""
    return Progress.has_terminal() and not huggingface_hub.utils.are_progress_bars_disabled()


@contextlib.contextmanager
def _bars_shown(shown: bool) -> Iterator[None]:
    """The hub's own bars, which a terminal shows, or none."""
    if shown or huggingface_hub.utils.are_progress_bars_disabled():
        yield
        return
    huggingface_hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        huggingface_hub.utils.enable_progress_bars()
