"""The files of a checkpoint directory, and the symbolic links among them that may be followed."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Iterator

from dsv4_jax.config.kinds import show
from dsv4_jax.regular_files import has_regular_file, open_regular, show_path

_MAX_PATH, _MAX_PART = 1024, 255
_MAX_LINKS = 40
"""Of one path, as in Linux."""
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
"""How a file begins that Git LFS leaves in the place of a large one, and less than it takes."""


def find_file(directory: pathlib.Path, name: str, *, follow_links: bool = False) -> pathlib.Path:
    """The path of a file of a checkpoint directory, which need not exist.

    The directory itself may be a link. A file in it may be a link to another place in it or, in a
    snapshot of a Hugging Face cache, to where such caches keep contents: the blobs of that model,
    and the blobs that models share, which files of Xet storage are put into.

        models--owner--name/snapshots/<revision>/config.json -> ../../blobs/<hash>
        models--owner--name/blobs/<hash> -> ../../blobs/<two digits>/<hash of Xet>

    Any other link leaves the directory, so whoever packed it would choose what is read of this
    machine; so does one that comes back by further links. It is followed only if `follow_links`
    says so.

    Args:
      directory: the checkpoint directory.
      name: path of the file in the directory, with forward slashes.
      follow_links: follows links to any place.

    Raises:
      ValueError: the name is absolute, has `..` in it or is no path, the file is a link to another
        place, or what is there is no regular file, or a pointer of Git LFS to one.
    """
    parts = pathlib.PurePosixPath(name).parts
    escapes = parts[:1] == ("/",) or ".." in parts or "\\" in name
    if not parts or escapes or not name.isprintable() or not _has_length_of_path(parts):
        raise ValueError(
            f"a file of {show_path(directory)} must be named by a path inside of it, got "
            f"{show(name)}"
        )
    path = directory / name
    if not follow_links:
        _check_links(directory, path)
    if has_regular_file(path) and path.stat().st_size < _POINTER_BYTES:
        with open_regular(path) as stream:
            is_pointer = stream.read(len(_POINTER)) == _POINTER
        if is_pointer:
            raise ValueError(
                f"{show_path(path)} is a pointer of Git LFS and not the file itself; get the files "
                "with `git lfs pull`"
            )
    return path


def _check_links(directory: pathlib.Path, path: pathlib.Path) -> None:
    """Raises ValueError if a file of a directory is a link that `find_file` does not follow."""
    try:
        root = directory.resolve()
        places = (root, *_blobs_of(root))
        for target in _walk(path):
            if not any(target.is_relative_to(allowed) for allowed in places):
                blobs = " and of the blobs of its cache" if len(places) > 1 else ""
                raise ValueError(
                    f"{show_path(path)} is a link to {show_path(target)}, outside of the "
                    f"checkpoint directory{blobs}; if you trust it, follow such links with "
                    "follow_links=True (--follow-links)"
                )
    except (RuntimeError, OSError) as error:  # links in a circle, names that are too long
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{show_path(path)} cannot be followed to a file: {why}") from error


def _has_length_of_path(parts: tuple[str, ...]) -> bool:
    sizes = [len(part.encode()) for part in parts]
    return max(sizes) <= _MAX_PART and sum(sizes) <= _MAX_PATH


def _walk(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The places that a path leads through, link by link, each in the folder that it really has.

    Raises:
      OSError: there are more links than a path may have.
    """
    for _ in range(_MAX_LINKS):
        whole = path.name == ".."  # whose folder would tell nothing
        path = path.resolve() if whole else path.parent.resolve() / path.name
        yield path
        if not path.is_symlink():
            return
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _blobs_of(root: pathlib.Path) -> list[pathlib.Path]:
    """Where the contents of a snapshot in a Hugging Face cache lie; empty for other directories."""
    for folder in (root, *root.parents):
        if folder.parent.name == "snapshots":
            model = folder.parent.parent
            shared = [model.parent / "blobs"] if model.name.startswith("models--") else []
            return [model / "blobs", *shared]
    return []
