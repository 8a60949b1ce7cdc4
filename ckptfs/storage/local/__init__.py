"""Local disks and mounted network filesystems, by POSIX calls alone."""

from ckptfs.storage.local.storage import ASSUMED, LocalStorage

__all__ = ["ASSUMED", "LocalStorage"]
