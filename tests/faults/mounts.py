"""Mounts that are less than a filesystem, at the seam of system calls.

    LocalStorage(uri, posix=CopyingMount())      a directory that is renamed is copied, file by file
    LocalStorage(uri, posix=CopyingMount(links=False))   and there are no hard links: s3fs, rclone mount

So do FUSE mounts of object stores: every name of the old directory is copied, then removed; who looks
in between sees half of each. Files are still renamed in one step.
"""

from __future__ import annotations

import errno
import os
import shutil

from ckptfs.storage.local.posix import Posix

__all__ = ["CopyingMount"]


class CopyingMount(Posix):
    """A kernel with directories that are prefixes. Thread-safe; picklable.

    Args:
        links: Whether it has hard links.
    """

    def __init__(self, *, links: bool = True) -> None:
        self.links = links

    def rename(self, source: str, target: str) -> None:
        if not os.path.isdir(source):
            super().rename(source, target)
            return
        os.makedirs(target, exist_ok=True)
        for name in sorted(os.listdir(source)):
            below = f"{source}/{name}"
            if os.path.isdir(below):
                self.rename(below, f"{target}/{name}")
            else:
                shutil.copyfile(below, f"{target}/{name}")
                os.unlink(below)
        os.rmdir(source)

    def link(self, source: str, target: str) -> None:
        if not self.links:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), target)
        super().link(source, target)
