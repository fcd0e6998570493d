"""The files of a checkpoint directory, and the symbolic links among them that may be followed."""

from __future__ import annotations

import pathlib

from dsv4_jax.config.kinds import show

_MAX_PATH, _MAX_PART = 1024, 255


def find_file(directory: pathlib.Path, name: str, *, follow_links: bool = False) -> pathlib.Path:
    """The path of a file of a checkpoint directory, which need not exist.

    The directory itself may be a link. A file in it may be a link to another place in it or, in a
    snapshot of a Hugging Face cache, into the blobs of that model, which is where such caches keep
    contents:

        models--owner--name/snapshots/<revision>/config.json -> ../../blobs/<hash>

    Any other link leaves the directory, so whoever packed it would choose what is read of this
    machine. It is followed only if `follow_links` says so.

    Args:
      directory: the checkpoint directory.
      name: path of the file in the directory, with forward slashes.
      follow_links: follows links to any place.

    Raises:
      ValueError: the name is absolute, has `..` in it or is no path, or the file is a link to
        another place.
    """
    parts = pathlib.PurePosixPath(name).parts
    escapes = parts[:1] == ("/",) or ".." in parts or "\\" in name
    if not parts or escapes or not name.isprintable() or not _has_length_of_path(parts):
        raise ValueError(
            f"a file of {directory} must be named by a path inside of it, got {show(name)}"
        )
    path = directory / name
    if follow_links:
        return path
    try:
        root, target = directory.resolve(), path.resolve()
    except (RuntimeError, OSError) as error:  # links in a circle, names that are too long
        raise ValueError(f"{path} cannot be followed to a file: {error}") from error
    if not any(target.is_relative_to(place) for place in (root, *_blobs_of(root))):
        raise ValueError(
            f"{path} is a link to {target}, outside of the checkpoint directory; if you trust it, "
            "follow such links with follow_links=True (--follow-links)"
        )
    return path


def _has_length_of_path(parts: tuple[str, ...]) -> bool:
    sizes = [len(part.encode()) for part in parts]
    return max(sizes) <= _MAX_PART and sum(sizes) <= _MAX_PATH


def _blobs_of(root: pathlib.Path) -> list[pathlib.Path]:
    """Where the contents of a snapshot in a Hugging Face cache lie; empty for other directories."""
    for folder in (root, *root.parents):
        if folder.parent.name == "snapshots":
            return [folder.parent.parent / "blobs"]
    return []
