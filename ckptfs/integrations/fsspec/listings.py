"""What fsspec remembers of a directory, for programs that look with fsspec and write with us."""

from __future__ import annotations

import contextlib

from fsspec.core import url_to_fs

__all__ = ["forget_listing"]


def forget_listing(path: str) -> None:
    """Have the filesystem that fsspec hands out for ``path``, as it is spelled, look at its directory
    again. It would go on telling what was there before we wrote.
    """
    if "://" in path:
        with contextlib.suppress(ImportError, ValueError):  # no driver: nobody has looked with it
            fs, inner = url_to_fs(path)
            fs.invalidate_cache(inner.rpartition("/")[0])
