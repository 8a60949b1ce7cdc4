"""Which client library serves a URI, loaded when it is first needed.

    s3 s3a            s3fs     or obstore
    gs gcs            gcsfs    or obstore
    az abfs abfss     adlfs    or obstore

``client="auto"`` takes obstore for S3 where it is installed and can express every option that was
given, because it costs less CPU; else the fsspec library, and says why in the log. For GCS and Azure
obstore sends no checksum that the store would verify, so there it is taken by name, or where it is the
only one. A library asked for by name and not installed is MissingDriverError.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from ckptfs.errors import MissingDriverError, UriError
from ckptfs.storage.clients.base import ObjectClient
from ckptfs.storage.clients.obstore_process import is_forked
from ckptfs.storage.options import ObjectOptions
from ckptfs.uri import Uri

__all__ = ["PROTOCOLS", "open_client"]

log = logging.getLogger(__name__)

FAST = "obstore"


@dataclass(frozen=True, slots=True)
class _Libraries:
    """usual: the fsspec library and extra: how to install it; their client modules, and obstore's."""

    usual: str
    extra: str
    module: str
    fast_module: str
    fast_is_verified: bool  # obstore sends checksums that the store verifies


_CLIENTS = "ckptfs.storage.clients"
_S3 = _Libraries("s3fs", "s3", f"{_CLIENTS}.s3", f"{_CLIENTS}.obstore_s3", fast_is_verified=True)
_GCS = _Libraries(
    "gcsfs", "gcs", f"{_CLIENTS}.gcs", f"{_CLIENTS}.obstore_gcs", fast_is_verified=False
)
_AZURE = _Libraries(
    "adlfs", "azure", f"{_CLIENTS}.azure", f"{_CLIENTS}.obstore_azure", fast_is_verified=False
)

PROTOCOLS: Mapping[str, _Libraries] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}


def open_client(uri: Uri, options: ObjectOptions, rest: Mapping[str, Any]) -> ObjectClient:
    """The client for ``uri``; no request is made. ``rest``: the library's own options.

    UriError: no such client, or an option that it does not know. MissingDriverError: not installed.
    """
    libraries = PROTOCOLS[uri.protocol]
    module = _module(uri, libraries, options.client, rest)
    return cast("ObjectClient", import_module(module).open_client(uri, rest, options.times))


def _module(uri: Uri, libraries: _Libraries, asked: str, rest: Mapping[str, Any]) -> str:
    if asked not in ("auto", libraries.usual, FAST):
        raise UriError(
            f"storage option client={asked!r}: {uri.protocol}:// knows 'auto', "
            f"{libraries.usual!r} and {FAST!r}",
            uri=uri,
        )
    if asked == FAST:
        _need(uri, FAST, "fast")
        why = import_module(libraries.fast_module).cannot(rest)
        if why is not None:
            raise UriError(
                f"client='obstore' cannot do what is asked: {why}",
                uri=uri,
                hint=f"client='auto' or {libraries.usual!r}, or leave the option out",
            )
        return libraries.fast_module
    if asked == "auto" and find_spec(FAST) is not None:
        why = _why_not(libraries, rest)
        if why is None:
            return libraries.fast_module
        log.info("%s: through %s, because obstore cannot: %s", uri, libraries.usual, why)
    _need(uri, libraries.usual, libraries.extra)
    return libraries.module


def _why_not(libraries: _Libraries, rest: Mapping[str, Any]) -> str | None:
    """Why "auto" leaves obstore, where the other library is there to be taken."""
    why: str | None = import_module(libraries.fast_module).cannot(rest)
    if why is None and find_spec(libraries.usual) is not None:
        if not libraries.fast_is_verified:
            return "it sends no checksums here"
        if is_forked():
            return "it was used before this process was forked"
    return why


def _need(uri: Uri, library: str, extra: str) -> None:
    if find_spec(library) is None:
        raise MissingDriverError(
            f"{library}, a library for {uri.protocol}://, is not installed",
            uri=uri,
            hint=f"pip install 'ckptfs[{extra}]'",
        )
