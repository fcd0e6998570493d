"""DiskTier: pages in files that outlive the process, in a bounded part of a disk.

The files themselves say what there is (`docs/disk_cache.md`): no index can disagree with them. One
process writes; others read what it has written. All that touches the disk runs on the thread of the
tier or of who reads, never on the one that asks what there is.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import heapq
import itertools
import json
import logging
import math
import os
import pathlib
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from dsv4_jax.allocator.block_contents import BlockContent
from dsv4_jax.allocator.page_files import (
    NO_PARENT,
    DamagedFileError,
    StoredPage,
    disk_bytes,
    path_of,
    proof_of,
    read_name,
    read_page,
    read_parent,
    write_page,
)
from dsv4_jax.cache.row_sums import as_halves

_log = logging.getLogger(__name__)

LOCK, SHAPE, BESIDE = "writer.lock", "shape.json", "new-"
RETRY_S = 60.0
"""After a write that failed nothing is written for so long."""
REFRESH_S = 10.0
"""Who only reads looks so often what has been written."""
MOST_SHOWN = 1024
"""Blocks of which it is known what comes before them, for whoever wants to look."""
_EVICTED_SHARE = 64
"""Where pages must give way, an n-th of all do, so that looking for the oldest is rare."""


class DiskTier:
    """Pages of one shape of engines, and how much those of all shapes take.

    Attributes:
      max_bytes: of all files together, in whole units of the disk; 0 only reads.
      num_bytes: of all files that are there.
      folder: of pages of this shape.
      stored_bytes: written so far; `evicted_bytes`: given way; `damaged`: files that were refused.
      is_writer: this process alone writes there.
    """

    def __init__(self, folder: str, max_bytes: int, shape: Mapping[str, str]) -> None:
        """Opens a directory, or makes it, and looks what there is.

        Args:
          folder: of the files.
          max_bytes: as above.
          shape: by name, all that must be equal for pages to be of use.

        Raises:
          ValueError: others can write to the directory, or it is none.
          OSError: it cannot be made or read.
        """
        text = json.dumps(dict(shape), indent=1, sort_keys=True)
        self.shape = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self.max_bytes = max_bytes
        self.stored_bytes = self.evicted_bytes = self.damaged = 0
        self._root = pathlib.Path(folder)
        self.folder = self._root / self.shape.hex()
        self.num_bytes = 0
        self._pages: dict[tuple[str, bytes], StoredPage] = {}
        self._others: dict[pathlib.Path, StoredPage] = {}
        self._shown: dict[bytes, StoredPage] = {}
        self._refused: set[pathlib.Path] = set()
        self._warned: set[str] = set()
        self._changing = threading.Lock()
        self._numbers = itertools.count()
        self._resumes_s = self._looked_s = 0.0
        self._missed_s = -math.inf
        self._is_closed = False
        self._unlock: Callable[[], object] = lambda: None
        self._make(self._root)
        self.is_writer = max_bytes > 0 and self._take_lock()
        if self.is_writer:
            self.is_writer = self._try_to_write_shape(text)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "disk-cache")
        self.look()
        self._show()

    @property
    def num_pages(self) -> int:
        """Blocks and snapshots of this shape."""
        return len(self._pages)

    @property
    def pages(self) -> list[StoredPage]:
        """All of this shape."""
        return list(self._pages.values())

    def has(self, of: str, key: bytes) -> bool:
        """Whether there is a page of that key."""
        return (of, key) in self._pages

    def find(self, of: str, content: BlockContent, parent: bytes) -> StoredPage | None:
        """The page of that content; its proof is compared, and all of it when it is read."""
        page = self._pages.get((of, content.key))
        return page if page is not None and page.proof == proof_of(content, parent) else None

    def latest(self) -> list[StoredPage]:
        """Blocks that were used last, of which it is known what comes before them."""
        return [page for page in list(self._shown.values()) if page.parent is not None]

    def write(
        self,
        of: str,
        content: BlockContent,
        parent: bytes,
        data: np.ndarray,
        checksum: int,
        stamp: int,
    ) -> bool:
        """In a thread: writes a page, for which the oldest give way; whether it is there now.

        Args:
          of: "blocks" or "snapshots".
          content: of its block.
          parent: key of the prefix before it.
          data: u8[n].
          checksum: of the data.
          stamp: nanoseconds, as of `StoredPage`.
        """
        size = disk_bytes(data.nbytes)
        if self.has(of, content.key):
            return True
        if not self.is_writer or size > self.max_bytes or time.monotonic() < self._resumes_s:
            return False
        proof = proof_of(content, parent)
        path = path_of(self.folder, of, content.key, proof)
        page = StoredPage(of, content.key, proof, path, size, stamp, parent or NO_PARENT)
        try:
            self._make_room(size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            beside = str(self.folder / f"{BESIDE}{os.getpid()}-{next(self._numbers)}")
            write_page(page, self.shape, parent, data, checksum, beside)
        except OSError as error:
            self._resumes_s = time.monotonic() + RETRY_S
            self._warn("write", f"pages cannot be written for now: {error}")
            return False
        with self._changing:
            self._pages[of, content.key] = page
            self.num_bytes += size
            self.stored_bytes += data.nbytes
            self._add_shown([page])
        return True

    def read(self, page: StoredPage, data: np.ndarray, sums: np.ndarray) -> None:
        """In a thread: fills u8[n] with the data of a page, and u32[2] with its checksum.

        Raises:
          OSError: it has gone, or cannot be read.
          DamagedFileError: it is not what it should be.
        """
        try:
            sums[:] = as_halves(read_page(page, self.shape, data))
        except (OSError, DamagedFileError) as error:
            if isinstance(error, FileNotFoundError):
                self._look_for_missing()
            else:
                self.damaged += 1
                self._refused.add(page.path)
                self._warn("read", f"a page is computed again: {error}")
            self._drop(page)
            raise

    def drop(self, page: StoredPage) -> None:
        """It is of no use, and a miss from now on; its file goes, in time."""
        self._later(self._drop, page)

    def use(self, pages: Iterable[StoredPage]) -> None:
        """These are the last used, the first last, in time."""
        listed, now = list(pages), time.time_ns()
        for number, page in enumerate(listed):
            page.stamp = now - 1000 * number
        if self.is_writer:
            self._later(_touch, listed)
        self._later(self._show, listed[:MOST_SHOWN])

    def refresh(self) -> None:
        """Looks what another process has written, in time, if that was not done just now."""
        if not self.is_writer and time.monotonic() > self._looked_s + REFRESH_S:
            self._looked_s = time.monotonic()
            self._later(self.look)
            self._later(self._show)

    def damaged_files(self, sizes: Mapping[str, int]) -> list[str]:
        """What is wrong with files of this shape, all of which are read; the sizes are of data."""
        found = []
        for page in list(self._pages.values()):
            try:
                read_page(page, self.shape, np.empty(sizes[page.of], np.uint8))
            except DamagedFileError as error:
                found.append(str(error))
            except OSError as error:
                found.append(f"{page.path}: {error}")
        return found

    def close(self) -> None:
        """Another process, or another tier of this one, may write from now on; this one reads."""
        self._thread.shutdown()
        self._is_closed, self.is_writer = True, False
        self._unlock()

    def _later[*A](self, function: Callable[[*A], object], *arguments: *A) -> None:
        if not self._is_closed:
            self._thread.submit(function, *arguments)

    def _make(self, folder: pathlib.Path) -> None:
        """Makes a directory for its owner alone, or looks at one that is there."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        status = folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"disk_cache_dir must be a directory, got {folder}")
        if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
            raise ValueError(
                "disk_cache_dir must be a directory to which nobody else can write, since answers "
                f"follow from its files, got {folder}; take another, or chmod go-w"
            )

    def _take_lock(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(self._root / LOCK, flags, 0o600)
            self._unlock = weakref.finalize(self, os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._warn("lock", "another process writes there, and this one only reads")
        except OSError as error:
            self._warn("lock", f"it is only read: {error}")
        else:
            return True
        self._unlock()
        return False

    def _try_to_write_shape(self, text: str) -> bool:
        """Makes the folder of this shape, and says there what it is."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            for left in self._root.glob(f"*/{BESIDE}*"):
                left.unlink()  # of a process that was killed
            file = os.open(self.folder / SHAPE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(file, "w") as stream:
                stream.write(text)
        except OSError as error:
            self._warn("lock", f"it is only read: {error}")
            return False
        return True

    def look(self) -> None:
        """Finds all files; those that have gone are forgotten."""
        pages: dict[tuple[str, bytes], StoredPage] = {}
        others: dict[pathlib.Path, StoredPage] = {}
        try:
            for page in _walk(self._root):
                if page.path.parent.parent == self.folder:
                    before = self._pages.get((page.of, page.key))
                    if page.path not in self._refused:
                        pages[page.of, page.key] = before or page
                else:
                    others[page.path] = page
        except OSError as error:
            self._warn("look", f"its files cannot be listed: {error}")
        with self._changing:
            self._pages, self._others = pages, others
            of_blocks = {key: page for (of, key), page in pages.items() if of == "blocks"}
            self._shown = {
                key: page for key, page in self._shown.items() if of_blocks.get(key) is page
            }
            every = (*pages.values(), *others.values())
            self.num_bytes = sum(page.num_bytes for page in every)

    def _look_for_missing(self) -> None:
        """Who removed one file may have removed many, each of which would be a miss of its own."""
        if time.monotonic() > self._missed_s + REFRESH_S:
            self._missed_s = time.monotonic()
            self._later(self._drop_missing)

    def _drop_missing(self) -> None:
        for page in list(self._pages.values()):
            if not page.path.exists():
                self._drop(page)

    def _show(self, used: Sequence[StoredPage] | None = None) -> None:
        """Looks what comes before blocks that were used, or before those that were used last."""
        if used is None:
            blocks = (page for page in self._pages.values() if page.of == "blocks")
            used = heapq.nlargest(MOST_SHOWN, blocks, key=lambda page: page.stamp)
        for page in used:
            if page.parent is None and page.of == "blocks":
                with contextlib.suppress(OSError):
                    read_parent(page)
        with self._changing:
            self._add_shown([page for page in reversed(used) if page.of == "blocks"])

    def _add_shown(self, pages: Iterable[StoredPage]) -> None:
        """These are listed last; the first ones are left out where they are too many."""
        for page in pages:
            if page.of == "blocks" and self._pages.get((page.of, page.key)) is page:
                self._shown.pop(page.key, None)
                self._shown[page.key] = page
        while len(self._shown) > MOST_SHOWN:
            del self._shown[next(iter(self._shown))]

    def _make_room(self, size: int) -> None:
        missing = self.num_bytes + size - self.max_bytes
        if missing <= 0:
            return
        missing = max(missing, self.max_bytes // _EVICTED_SHARE)
        with self._changing:
            oldest = sorted(
                (*self._pages.values(), *self._others.values()), key=lambda page: page.stamp
            )
        for page in oldest:
            if missing <= 0:
                break
            self._drop(page)
            self.evicted_bytes += page.num_bytes
            missing -= page.num_bytes

    def _drop(self, page: StoredPage) -> None:
        with self._changing:
            is_there = self._pages.get((page.of, page.key)) is page
            if is_there:
                del self._pages[page.of, page.key]
                if self._shown.get(page.key) is page:
                    del self._shown[page.key]
            if is_there or self._others.pop(page.path, None) is not None:
                self.num_bytes -= page.num_bytes
        if self.is_writer:
            with contextlib.suppress(OSError):
                page.path.unlink()

    def _warn(self, about: str, message: str) -> None:
        """Once about each thing."""
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("disk cache %s: %s", self._root, message)


def _walk(root: pathlib.Path) -> Iterator[StoredPage]:
    for shape in os.scandir(root):
        if shape.is_dir(follow_symlinks=False):
            for part in os.scandir(shape.path):
                if part.is_dir(follow_symlinks=False):
                    for entry in os.scandir(part.path):
                        with contextlib.suppress(FileNotFoundError):
                            if page := read_name(entry):
                                yield page


def _touch(pages: list[StoredPage]) -> None:
    for page in pages:
        with contextlib.suppress(OSError):
            os.utime(page.path, ns=(page.stamp, page.stamp))
