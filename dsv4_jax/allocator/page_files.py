"""Files of pages: one block or one snapshot each, as `docs/disk_cache.md` describes them.

A file is written beside its place and renamed, so that no half of one is ever found. Who reads one
checks all of it: what it is, whose it is, and each byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
import stat
import struct

import numpy as np

from dsv4_jax.allocator.block_contents import BlockContent

_MAGIC, _VERSION = b"DSV4PAGE", 1
_HEADER = struct.Struct("<8sII16s16s16s16sQQ")
"""Magic, version, kind, shape, key, proof, parent, bytes of data, checksum of the row."""
_DIGEST_BYTES = 32
HEADER_BYTES = _HEADER.size + _DIGEST_BYTES
NO_PARENT = bytes(16)
"""In place of the key before a first block."""
KINDS = ("blocks", "snapshots")
_NAME = re.compile(r"([bs])([0-9a-f]{32})([0-9a-f]{32})")
_UNIT = 4096
"""What a file takes on a disk is counted in these."""


class DamagedFileError(ValueError):
    """A file is not what its name says."""


@dataclasses.dataclass(eq=False)
class StoredPage:
    """A page in a file.

    Attributes:
      of: "blocks" or "snapshots".
      key: of the prefix up to its end.
      proof: a second hash, of the page's own tokens, which tells tokens of one key apart.
      path: of its file.
      num_bytes: that it takes on the disk.
      stamp: nanoseconds, of when it was last used; of a prefix the end is the oldest.
      parent: key of the prefix before it, `NO_PARENT` for a first one; None until it was read.
    """

    of: str
    key: bytes
    proof: bytes
    path: pathlib.Path
    num_bytes: int
    stamp: int
    parent: bytes | None = None


def proof_of(content: BlockContent, parent: bytes) -> bytes:
    """16 bytes that stand for the tokens of a block behind a prefix."""
    return hashlib.blake2b(content.tokens, digest_size=16, key=parent, person=b"page").digest()


def path_of(folder: pathlib.Path, of: str, key: bytes, proof: bytes) -> pathlib.Path:
    """Where a page lies in the folder of its shape."""
    return folder / key.hex()[:2] / f"{of[0]}{key.hex()}{proof.hex()}"


def disk_bytes(num_bytes: int) -> int:
    """What a file of a page of so many bytes takes on a disk."""
    return -(-(HEADER_BYTES + num_bytes) // _UNIT) * _UNIT


def read_name(entry: os.DirEntry[str]) -> StoredPage | None:
    """A file as its name and status say; None if it is none of ours."""
    found = _NAME.fullmatch(entry.name)
    if found is None:
        return None
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        return None
    of = next(kind for kind in KINDS if kind[0] == found[1])
    key, proof = bytes.fromhex(found[2]), bytes.fromhex(found[3])
    num_bytes = disk_bytes(status.st_size - HEADER_BYTES)
    return StoredPage(of, key, proof, pathlib.Path(entry.path), num_bytes, status.st_mtime_ns)


def write_page(
    page: StoredPage, shape: bytes, parent: bytes, data: np.ndarray, checksum: int, beside: str
) -> None:
    """Writes a file whole, or leaves nothing.

    Args:
      page: what it is, and where it goes.
      shape: 16 bytes, of whose pages it is.
      parent: key of the prefix before it; b"" is none.
      data: u8[n].
      checksum: of the data, as `cache/row_sums.py` has it.
      beside: path of the file until it is whole.

    Raises:
      OSError: it cannot be written; the disk is full, say.
    """
    kind = KINDS.index(page.of)
    header = _HEADER.pack(
        _MAGIC, _VERSION, kind, shape, page.key, page.proof, parent, data.nbytes, checksum
    )
    digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
    digest.update(data)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(beside, flags, 0o600), "wb", buffering=0) as file:
            for part in (header + digest.digest(), memoryview(data).cast("B")):
                rest = memoryview(part)
                while len(rest):
                    rest = rest[file.write(rest) :]
        os.utime(beside, ns=(page.stamp, page.stamp))
        os.rename(beside, page.path)
    except BaseException:
        pathlib.Path(beside).unlink(missing_ok=True)
        raise


def read_page(page: StoredPage, shape: bytes, data: np.ndarray) -> int:
    """Fills u8[n] with the data of a file; the checksum that it had where it was packed.

    Args:
      page: what it is.
      shape: 16 bytes, of whose pages it must be.
      data: of as many bytes as the page must have; filled with anything where it raises.

    Raises:
      FileNotFoundError: there is none.
      OSError: it cannot be read.
      DamagedFileError: it is another page's or another shape's, or not the bytes that were written.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(page.path, flags), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != HEADER_BYTES + data.nbytes:
            _refuse(page, f"it has {size} bytes in place of {HEADER_BYTES + data.nbytes}")
        head = bytearray(HEADER_BYTES)
        for part in (head, data):
            rest = memoryview(part).cast("B")
            while len(rest):
                count = file.readinto(rest)
                if not count:
                    _refuse(page, "it ends early")
                rest = rest[count:]
    magic, version, kind, its_shape, key, proof, parent, _, checksum = _HEADER.unpack_from(head)
    if (magic, version) != (_MAGIC, _VERSION):
        _refuse(page, f"it begins with {bytes(head[:12])!r}")
    if its_shape != shape:
        _refuse(page, "it is of another model or engine")
    if (KINDS[kind & 1], key, proof) != (page.of, page.key, page.proof):
        _refuse(page, "it is another page")
    digest = hashlib.blake2b(head[: _HEADER.size], digest_size=_DIGEST_BYTES)
    digest.update(data)
    if digest.digest() != head[_HEADER.size :]:
        _refuse(page, "its digest is wrong")
    page.parent = parent
    return checksum


def read_parent(page: StoredPage) -> None:
    """Reads in the header of a file which page comes before it; nothing else is checked.

    Raises:
      OSError: it cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(page.path, flags), "rb", buffering=0) as file:
        head = file.read(_HEADER.size)
    if len(head) == _HEADER.size:
        page.parent = _HEADER.unpack(head)[6]


def _refuse(page: StoredPage, why: str) -> None:
    raise DamagedFileError(f"{page.path}: {why}")
