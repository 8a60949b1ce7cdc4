"""Plain files and directories of a user, beside any storage: each call on them is known to be under way.

    with WatchedFile(path) as file:     as open(path, "rb", buffering=0); "wb" writes
        file.read(size)
    walk(top)                           as os.walk
    remove_tree(top)                    as shutil.rmtree with ignore_errors=True

They may lie in a mount whose server is gone, as what a storage holds may: a rank that hangs there is named
with the path (``under_way``). One call at a time, because many that return are no hang.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from ckptfs.storage.inflight import under_way

__all__ = ["WatchedFile", "remove_tree", "walk"]


class WatchedFile(io.FileIO):
    """An unbuffered file: reads and writes may be short. ``sync`` is fsync."""

    def __init__(self, path: str, mode: str = "rb") -> None:
        with under_way("open", path):
            super().__init__(path, mode)

    def read(self, size: int | None = -1, /) -> bytes:
        """As ``FileIO.read``."""
        with under_way("read", self.fileno()):
            return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any, /) -> int:
        """As ``FileIO.readinto``."""
        with under_way("read", self.fileno()):
            return super().readinto(buffer)

    def write(self, data: Any, /) -> int:
        """As ``FileIO.write``."""
        with under_way("write", self.fileno()):
            return super().write(data)

    def sync(self) -> None:
        """fsync(2)."""
        with under_way("fsync", self.fileno()):
            os.fsync(self.fileno())

    def close(self) -> None:
        """As ``FileIO.close``; a network filesystem writes here what it holds back."""
        if self.closed:
            return
        with under_way("close", self.fileno()):
            super().close()


def walk(top: str, *, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """As ``os.walk``; links to directories are not followed."""
    found = os.walk(top, topdown=topdown)
    while True:
        with under_way("listing", top):
            one = next(found, None)
        if one is None:
            return
        yield one


def remove_tree(top: str) -> None:
    """Remove a directory and what is in it, as far as that can be; absent is fine."""
    if os.path.islink(top):
        return
    for folder, folders, names in walk(top, topdown=False):
        for name in (*names, *folders):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError), under_way("unlink", path):
                if name in folders and not os.path.islink(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)
    with contextlib.suppress(OSError), under_way("rmdir", top):
        os.rmdir(top)
