"""Which library carries the data of a URI, and why; loaded when it is first needed.

    s3 s3a            obstore, else s3fs
    gs gcs            obstore, else gcsfs
    az abfs abfss     obstore, else adlfs

``client="auto"`` takes obstore where it is installed and can express every option that was given, else
the fsspec library. The log says once for each bucket which of them it is, and why. A library that was
asked for by name and is not installed is a MissingDriverError.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from ckptfs.errors import MissingDriverError, UriError
from ckptfs.storage.clients.base import BucketLibrary, ObjectClient
from ckptfs.storage.clients.obstore_process import is_forked
from ckptfs.storage.options import ObjectOptions
from ckptfs.uri import Uri

__all__ = ["PROTOCOLS", "DataPath", "choose_path", "open_client", "open_library"]

log = logging.getLogger(__name__)

FAST = "obstore"


@dataclass(frozen=True, slots=True)
class _Libraries:
    """One store. usual: the fsspec library. extra: how to install it. fast_module: obstore's client.

    module: a client of our own on the fsspec library; None where ``FsspecStorage`` uses it.
    """

    usual: str
    extra: str
    module: str | None
    fast_module: str


_CLIENTS = "ckptfs.storage.clients"
_S3 = _Libraries("s3fs", "s3", f"{_CLIENTS}.s3", f"{_CLIENTS}.obstore_s3")
_GCS = _Libraries("gcsfs", "gcs", None, f"{_CLIENTS}.gcs")
_AZURE = _Libraries("adlfs", "azure", None, f"{_CLIENTS}.obstore_azure")

PROTOCOLS: Mapping[str, _Libraries] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}


@dataclass(frozen=True, slots=True)
class DataPath:
    """The library that carries the data. why: the reason, as the log and ``doctor`` give it."""

    library: str
    why: str
    module: str | None

    def __str__(self) -> str:
        return f"{self.library}, because {self.why}"


def choose_path(uri: Uri, asked: str, rest: Mapping[str, Any]) -> DataPath:
    """Which library ``uri`` goes through. asked: the storage option ``client``; rest: the library's own.

    UriError: no such library here, or an option that the named one cannot do. MissingDriverError: it is
    not installed.
    """
    path = _path(uri, PROTOCOLS[uri.protocol], asked, rest)
    _log_once(f"{uri.protocol}://{uri.authority} goes through {path}")
    return path


def open_client(
    uri: Uri, options: ObjectOptions, rest: Mapping[str, Any], path: DataPath | None = None
) -> ObjectClient:
    """The client for ``uri``; no request is made. path: as ``choose_path`` found it.

    Errors as ``choose_path``, and UriError for an option that nobody knows.
    """
    path = path or choose_path(uri, options.client, rest)
    if path.module is None:
        raise UriError(f"{path.library} has no client of its own here", uri=uri)
    return cast("ObjectClient", import_module(path.module).open_client(uri, rest, options.times))


def open_library(uri: Uri, options: ObjectOptions, rest: Mapping[str, Any]) -> BucketLibrary:
    """The fsspec library for ``uri``, for ``FsspecStorage``; no request is made. Errors as above."""
    module = import_module(PROTOCOLS[uri.protocol].fast_module)
    return cast("BucketLibrary", module.open_library(uri, rest, options.times))


@lru_cache(maxsize=256)
def _log_once(line: str) -> None:
    log.info("%s", line)


def _path(uri: Uri, libraries: _Libraries, asked: str, rest: Mapping[str, Any]) -> DataPath:
    if asked not in ("auto", libraries.usual, FAST):
        raise UriError(
            f"storage option client={asked!r}: {uri.protocol}:// knows 'auto', "
            f"{libraries.usual!r} and {FAST!r}",
            uri=uri,
        )
    if asked == FAST:
        _need(uri, FAST, libraries.extra)
        why = import_module(libraries.fast_module).cannot(rest)
        if why is not None:
            raise UriError(
                f"client='obstore' cannot do what is asked: {why}",
                uri=uri,
                hint=f"client='auto' or {libraries.usual!r}, or leave the option out",
            )
        return DataPath(FAST, "client='obstore' asks for it", libraries.fast_module)
    if asked == "auto":
        why = _why_not(libraries, rest)
        if why is None:
            return DataPath(FAST, "it can do all that the options ask for", libraries.fast_module)
        _need(uri, libraries.usual, libraries.extra)
        return DataPath(libraries.usual, f"obstore cannot be used: {why}", libraries.module)
    _need(uri, libraries.usual, libraries.extra)
    return DataPath(libraries.usual, f"client={asked!r} asks for it", libraries.module)


def _why_not(libraries: _Libraries, rest: Mapping[str, Any]) -> str | None:
    """Why "auto" leaves obstore, where the other library is there to be taken."""
    if find_spec(FAST) is None:
        return "it is not installed"
    why: str | None = import_module(libraries.fast_module).cannot(rest)
    if why is None and find_spec(libraries.usual) is not None and is_forked():
        return "this process was forked from one that used it"
    return why


def _need(uri: Uri, library: str, extra: str) -> None:
    if find_spec(library) is None:
        raise MissingDriverError(
            f"{library}, a library for {uri.protocol}://, is not installed",
            uri=uri,
            hint=f"pip install 'ckptfs[{extra}]'",
        )
