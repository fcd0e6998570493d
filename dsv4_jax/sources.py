"""A hash of the source code of this package and its kernels, by which what it made is found."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from typing import NamedTuple

_ROOTS = "dsv4_jax", "pallas_kernels"


class Sources(NamedTuple):
    """Files that Python imports of both packages.

    Attributes:
      digest: of their names and contents; None where not all of them are seen: a package that lies
        in an archive, without its source code, or in several places.
      files: their paths, as modules have them.
    """

    digest: str | None
    files: frozenset[str]


def read_sources() -> Sources:
    """The files as they are now."""
    found, files = hashlib.sha256(), []
    for root in _ROOTS:
        spec = importlib.util.find_spec(root)
        places = list((spec and spec.submodule_search_locations) or ())
        if len(places) != 1 or not os.path.isfile(os.path.join(places[0], "__init__.py")):
            return Sources(None, frozenset())
        for file in _walk(places[0]):
            with open(file, "rb") as opened:
                content = opened.read()
            found.update(f"{root} {os.path.relpath(file, places[0])} {len(content)}\n".encode())
            found.update(content)
            files.append(file)
    return Sources(found.hexdigest(), frozenset(files))


@functools.cache
def sources_at_start() -> Sources:
    """The same as they were at the first call, which is before this process imports the rest."""
    return read_sources()


def imports_others(files: frozenset[str]) -> bool:
    """Whether a module of the packages that is imported has its code in none of these files."""
    return any(getattr(sys.modules[name], "__file__", None) not in files for name in _imported())


def imports_before(expected: frozenset[str]) -> bool:
    """Whether this process has imported more of the packages than these modules.

    Whoever did that may have changed them, which no file says.
    """
    return bool(_imported() - expected)


def _imported() -> set[str]:
    return {name for name in list(sys.modules) if name.partition(".")[0] in _ROOTS}


def _walk(folder: str) -> list[str]:
    """Every file of Python below a folder, in linked ones too, in order."""
    found, seen = [], set()
    for where, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        found += [os.path.join(where, name) for name in names if name.endswith(".py")]
    return sorted(found)
