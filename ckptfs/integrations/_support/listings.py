"""fsspec's cached listings, for programs that list with fsspec and write with ckptfs."""

from __future__ import annotations

import contextlib

from fsspec.core import url_to_fs

__all__ = ["forget_listing"]


def forget_listing(path: str) -> None:
    """Clear fsspec's cached listing of the directory of ``path``.

    It is cleared in the filesystem that fsspec returns for ``path``, in this spelling. Otherwise
    fsspec would keep listing what was there before the write.
    """
    if "://" in path:
        with contextlib.suppress(ImportError, ValueError):  # no driver: there is no listing
            fs, inner = url_to_fs(path)
            fs.invalidate_cache(inner.rpartition("/")[0])
