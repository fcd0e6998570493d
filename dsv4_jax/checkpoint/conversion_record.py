"""What a conversion has written so far: a file beside the weights, by which a restart goes on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from dsv4_jax.checkpoint.write_files import write_json
from dsv4_jax.config.json_file import read_json_object
from dsv4_jax.progress import Progress
from dsv4_jax.regular_files import has_regular_file, open_regular, show_path

RECORD = "conversion.json"


class ConversionRecord:
    """Sizes and digests of the weight files that a conversion has finished.

    The file stays when the conversion is complete: started again, it looks at what it has made.
    """

    def __init__(self, destination: pathlib.Path, description: dict[str, Any]) -> None:
        """Reads what is there, and writes nothing.

        Args:
          destination: directory that is written, which need not exist.
          description: what is converted, and how; two conversions are the same if it is.

        Raises:
          ValueError: the directory holds another model, another conversion, or a record that cannot
            be read.
          OSError: it cannot be looked at.
        """
        self._directory = destination
        text = json.dumps(description, sort_keys=True)
        self._conversion = hashlib.sha256(text.encode()).hexdigest()
        self._files: dict[str, Any] = {}
        file = destination / RECORD
        held = [p.name for p in destination.glob("*") if p.name == "config.json"]
        held += sorted(p.name for p in destination.glob("*.safetensors"))
        record = read_json_object(file) if has_regular_file(file) else {}
        if record.get("conversion") == self._conversion:
            files = record.get("files")
            self._files = dict(files) if isinstance(files, dict) else {}
        elif record and "config.json" not in held:
            raise ValueError(
                f"{show_path(destination)} holds an unfinished conversion of another checkpoint, "
                "or with other options; remove it or pass another directory"
            )
        elif held:
            raise ValueError(
                f"{show_path(destination)} holds a model already ({held[0]}); remove it or pass "
                "another directory"
            )

    def find_whole(self, names: Iterable[str], progress: bool) -> set[str]:
        """Which of the files are still what was written, by their sizes and digests.

        Args:
          names: of files that the conversion makes.
          progress: shows a bar, or lines, since files that were finished are read.
        """
        finished = {name: self._files[name] for name in names if name in self._files}
        whole = set()
        with Progress(len(finished), unit="file", doing="comparing", shown=progress) as bar:
            for name, noted in finished.items():
                if isinstance(noted, dict) and self._is_whole(self._directory / name, noted):
                    whole.add(name)
                bar.add()
        return whole

    def _is_whole(self, path: pathlib.Path, noted: dict[str, Any]) -> bool:
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(found.st_mode) or noted.get("bytes") != found.st_size:
            return False
        with open_regular(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == noted.get("sha256")

    def keep(self, names: set[str]) -> None:
        """Writes the record, with these files alone as what is finished."""
        self._files = {name: self._files[name] for name in names}
        self._write()

    def add(self, name: str, num_bytes: int, digest: str) -> None:
        """Notes a file that is whole."""
        self._files[name] = {"bytes": num_bytes, "sha256": digest}
        self._write()

    def _write(self) -> None:
        files = dict(sorted(self._files.items()))
        write_json(self._directory / RECORD, {"conversion": self._conversion, "files": files})


@contextlib.contextmanager
def alone_in(directory: pathlib.Path) -> Iterator[None]:
    """Keeps other conversions out of a directory, which has to exist.

    Raises:
      ValueError: another process converts into it.
    """
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no directory
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told = f"another process converts into {show_path(directory)}"
                raise ValueError(told) from None
        yield
    finally:
        os.close(number)
