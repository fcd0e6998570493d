"""Pages that lie elsewhere than on the devices, in the host's memory or in files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from dsv4_jax.allocator.disk_tier import DiskTier
from dsv4_jax.allocator.host_tier import Page
from dsv4_jax.allocator.page_files import DamagedFileError, StoredPage
from dsv4_jax.allocator.prefix_tree import BlockContent
from dsv4_jax.serving.device.page_memory import PageMemory


class FilePage(NamedTuple):
    """A page that lies on the disk alone; fields as of `Page`."""

    of: str
    content: BlockContent
    num_bytes: int
    file: StoredPage


type AnyPage = Page | FilePage


class DamagedError(Exception):
    """Pages that came with other bytes than they left with; they are its arguments."""


def on_host(pages: Sequence[AnyPage]) -> list[Page]:
    """Those in the host's memory."""
    return [page for page in pages if isinstance(page, Page)]


def gather_pages(memory: PageMemory, disk: DiskTier | None, pages: list[AnyPage]) -> jax.Array:
    """In a thread: pages, to the device, whose bytes are those that they left with."""
    filled: list[tuple[Any, int]] = []
    for page in pages:
        if isinstance(page, Page):
            if page.filling is not None:
                page.filling.result()
            filled.append((page.data, page.checksum))
        else:
            assert disk is not None
            try:
                filled.append(disk.read(page.file, page.num_bytes))
            except DamagedFileError as error:
                raise DamagedError(page) from error
    packed, checksums = memory.to_devices([data for data, _ in filled])
    wrong = [
        page for page, (_, one), found in zip(pages, filled, checksums, strict=True) if one != found
    ]
    if wrong:
        raise DamagedError(*wrong)
    return packed
