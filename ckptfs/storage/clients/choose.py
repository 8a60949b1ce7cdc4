"""Chooses the library that carries the data of a URI. It is loaded when it is first needed.

    s3 s3a            obstore, else s3fs
    gs gcs            obstore, else gcsfs
    az abfs abfss     obstore, else adlfs

``client="auto"`` takes obstore if it is installed and can express every option that was given, else
the fsspec library. The log says once per bucket which library was chosen, and why. If the user named a
library that is not installed, that is a MissingDriverError.
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
from ckptfs.storage.clients.http_errors import Dialect, Reason
from ckptfs.storage.clients.obstore import is_forked
from ckptfs.storage.options import ObjectOptions
from ckptfs.uri import Uri

__all__ = ["PROTOCOLS", "DataPath", "choose_path", "dialect_of", "open_client", "open_library"]

log = logging.getLogger("ckptfs.storage")

FAST = "obstore"


@dataclass(frozen=True, slots=True)
class _Libraries:
    """One store."""

    usual: str  # the fsspec library
    extra: str  # how to install it
    module: str  # its client on obstore, and what ``FsspecStorage`` needs of the fsspec library
    dialect: str  # the name of its Dialect in that module


_CLIENTS = "ckptfs.storage.clients"
_S3 = _Libraries("s3fs", "s3", f"{_CLIENTS}.s3", "S3")
_GCS = _Libraries("gcsfs", "gcs", f"{_CLIENTS}.gcs", "GCS")
_AZURE = _Libraries("adlfs", "azure", f"{_CLIENTS}.azure", "AZURE")

PROTOCOLS: Mapping[str, _Libraries] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}


@dataclass(frozen=True, slots=True)
class DataPath:
    """The library that carries the data."""

    library: str
    why: str  # the reason, as the log and ``doctor`` give it

    @property
    def is_obstore(self) -> bool:
        """Whether it is obstore. If not, it is ``FsspecStorage`` over ``library``."""
        return self.library == FAST

    def __str__(self) -> str:
        return f"{self.library}, because {self.why}"


def choose_path(uri: Uri, client: str, library_options: Mapping[str, Any]) -> DataPath:
    """Choose the library for ``uri``.

    Args:
        uri: What is opened.
        client: The storage option of that name.
        library_options: The storage options that are the library's own.

    Raises:
        UriError: There is no such library for this scheme, or it cannot do what an option asks for.
        MissingDriverError: It is not installed.
    """
    path = _path(uri, PROTOCOLS[uri.protocol], client, library_options)
    _log_once(f"{uri.protocol}://{uri.authority} goes through {path}")
    return path


def open_client(
    uri: Uri,
    options: ObjectOptions,
    library_options: Mapping[str, Any],
    path: DataPath | None = None,
) -> ObjectClient:
    """Return the client for ``uri``. No request is made.

    Args:
        uri: What is opened.
        options: The storage options of ckptfs.
        library_options: The storage options that are the library's own.
        path: The choice, if ``choose_path`` has been called.

    Raises:
        UriError: As ``choose_path``, or an option is unknown.
        MissingDriverError: As ``choose_path``.
    """
    path = path or choose_path(uri, options.client, library_options)
    if not path.is_obstore:
        raise UriError(f"{path.library} has no client of its own here", uri=uri)
    module = import_module(PROTOCOLS[uri.protocol].module)
    return cast("ObjectClient", module.open_client(uri, library_options, options.times))


def open_library(
    uri: Uri, options: ObjectOptions, library_options: Mapping[str, Any]
) -> BucketLibrary:
    """Return the fsspec library for ``uri``, for ``FsspecStorage``.

    No request is made. Errors as for ``open_client``.
    """
    module = import_module(PROTOCOLS[uri.protocol].module)
    return cast("BucketLibrary", module.open_library(uri, library_options, options.times))


def dialect_of(protocol: str) -> Dialect:
    """Return the Dialect of the store behind a protocol of fsspec, whichever library serves it."""
    store = PROTOCOLS.get(protocol)
    if store is None:
        hint = "allow it, or give other credentials"
        return Dialect(protocol, hints={Reason.FORBIDDEN: hint})
    return cast("Dialect", getattr(import_module(store.module), store.dialect))


@lru_cache(maxsize=256)
def _log_once(line: str) -> None:
    log.info("%s", line)


def _path(
    uri: Uri, libraries: _Libraries, client: str, library_options: Mapping[str, Any]
) -> DataPath:
    if client not in ("auto", libraries.usual, FAST):
        raise UriError(
            f"storage option client={client!r}: {uri.protocol}:// knows 'auto', "
            f"{libraries.usual!r} and {FAST!r}",
            uri=uri,
        )
    if client == FAST:
        _need(uri, FAST, libraries.extra)
        why = import_module(libraries.module).unsupported_option(library_options)
        if why is not None:
            raise UriError(
                f"client='obstore' cannot do what is asked: {why}",
                uri=uri,
                hint=f"client='auto' or {libraries.usual!r}, or leave the option out",
            )
        return DataPath(FAST, "client='obstore' asks for it")
    if client == "auto":
        why = _why_not(libraries, library_options)
        if why is None:
            return DataPath(FAST, "it supports all of the given options")
        _need(uri, libraries.usual, libraries.extra)
        return DataPath(libraries.usual, f"obstore cannot be used: {why}")
    _need(uri, libraries.usual, libraries.extra)
    return DataPath(libraries.usual, f"client={client!r} asks for it")


def _why_not(libraries: _Libraries, library_options: Mapping[str, Any]) -> str | None:
    """Return why "auto" does not choose obstore, or None if it does."""
    if find_spec(FAST) is None:
        return "it is not installed"
    why: str | None = import_module(libraries.module).unsupported_option(library_options)
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
