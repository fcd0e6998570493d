"""Results of benchmarks in JSON files, each written whole, so that an interrupted run loses little.

`Output` is the file of one run of `dsv4-jax bench`. A file of kernel times is shared by many runs,
and each of its rows names its run:

    {"runs": {"2026-11-23-1": {"device": ..., "jax": ..., "date": ..., "command": ...}},
     "rows": [{"run": "2026-11-23-1", "op": "gather_entries", "shape": "64 x 512", ...}]}
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import jax

from dsv4_jax.config.json_file import read_json_object


class Output:
    """Figures of one run; the file is written each time that one is added.

    Attributes:
      fields: the contents of the file.
    """

    def __init__(self, path: pathlib.Path | None, **fields: Any) -> None:
        """Starts the file with the device, the date and these fields; None writes no file.

        Raises:
          ValueError: the file's folder is not there.
        """
        if path is not None:
            check_folder(path)
        self._path = path
        self.fields: dict[str, Any] = describe_device()
        self.set(**fields)

    def set(self, **fields: Any) -> None:
        """Adds or replaces fields."""
        self.fields |= fields
        if self._path is not None:
            write_json(self._path, self.fields)


class RowKeeper:
    """Keeps the rows of one run in a file that other runs keep theirs in."""

    def __init__(self, path: str | pathlib.Path, command: str) -> None:
        """Describes the run; nothing is written before the first row.

        Args:
          path: the JSON file, which need not exist.
          command: the command line that repeats the run.

        Raises:
          ValueError: the file's folder is not there, or the file holds something else.
        """
        self._path = pathlib.Path(path)
        check_folder(self._path)
        self._run = describe_device() | {"command": command}
        taken = _read_rows(self._path)["runs"]
        number = 1
        while (name := f"{self._run['date']}-{number}") in taken:
            number += 1
        self._name = name

    def keep(self, row: dict[str, Any]) -> None:
        """Adds a row, in place of the row of any run with the same op and shape."""
        contents = _read_rows(self._path)
        rows = [
            old
            for old in contents["rows"]
            if (old["op"], old["shape"]) != (row["op"], row["shape"])
        ]
        rows.append({"run": self._name} | row)
        runs = contents["runs"] | {self._name: self._run}
        left = {row["run"] for row in rows}
        runs = {name: run for name, run in runs.items() if name in left}
        write_json(self._path, contents | {"runs": runs, "rows": rows})


def describe_device() -> dict[str, Any]:
    """The device, the version of jax and today's date."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def command_line() -> str:
    """The command that started this process, with paths shortened to their last part."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", sys.argv[0]] if spec is None else ["python", "-m", spec.name]
    return " ".join(os.path.basename(word.rstrip("/")) for word in program + sys.argv[1:])


def check_folder(path: pathlib.Path) -> None:
    """Raises ValueError if the folder of a file that is to be written is not there."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path} must be a file in a folder that is there; make {path.parent}")


def read_json(path: str | pathlib.Path) -> dict[str, Any]:
    """The contents of a file; {} if there is none.

    Raises:
      ValueError: it holds no JSON object.
    """
    path = pathlib.Path(path)
    return read_json_object(path) if path.exists() else {}


def _read_rows(path: pathlib.Path) -> dict[str, Any]:
    """The contents of a file of rows and runs, each of which has the fields that are read."""
    contents = {"runs": {}, "rows": []} | read_json(path)
    rows, runs = contents["rows"], contents["runs"]
    has_rows = isinstance(rows, list) and all(
        isinstance(row, dict) and {"op", "shape", "run"} <= row.keys() for row in rows
    )
    if not has_rows or not isinstance(runs, dict):
        raise ValueError(
            f"{path} must hold runs, an object, and rows, a list of objects with op, shape and run"
        )
    return contents


def write_json(path: str | pathlib.Path, contents: dict[str, Any]) -> None:
    """Replaces a file whole: a process that is killed leaves the old one or the new one."""
    path = pathlib.Path(path)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(contents, indent=1) + "\n")
    new.replace(path)
