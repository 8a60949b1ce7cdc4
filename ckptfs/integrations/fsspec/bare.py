"""The fsspec filesystem below a ``ckptfs+X://`` URL: what reads, lists and moves plain files.

    file s3 gs az ...       fsspec's own implementation, its listing cache off: others write there too
    memory hdfs and others  a view on ckptfs's backend (``StorageView``)

Options are one flat mapping for both: ours (``storage.options``) are taken out for fsspec's, fsspec's
own (caches, event loops) for ours. MissingDriverError where a library is not installed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from ckptfs.errors import CkptfsError, MissingDriverError, StorageError
from ckptfs.integrations.fsspec.view import StorageView
from ckptfs.storage.options import OURS
from ckptfs.uri import Uri, mask_credentials

__all__ = [
    "BUCKETS",
    "bare_class",
    "bare_filesystem",
    "options_for_storage",
    "told",
    "without_secrets",
]

BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"))
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_FSSPECS_OWN = frozenset(
    (
        "asynchronous",
        "loop",
        "use_listings_cache",
        "listings_expiry_time",
        "max_paths",
        "skip_instance_cache",
        "batch_size",
        "auto_mkdir",
    )
)
_SECRET = re.compile(r"key|secret|token|passw|cred|sas|connection_string|signature", re.IGNORECASE)


def bare_class(protocol: str) -> type[AbstractFileSystem] | None:
    """fsspec's class, None where a view serves or its library is missing."""
    if protocol not in BUCKETS and protocol not in ("file", "local"):
        return None
    try:
        found: type[AbstractFileSystem] = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        return None
    return found


def bare_filesystem(protocol: str, options: Mapping[str, Any]) -> AbstractFileSystem:
    """A filesystem over the bare protocol. MissingDriverError."""
    if protocol in ("file", "local"):
        return fsspec.filesystem("file", auto_mkdir=options.get("auto_mkdir", True))
    if protocol not in BUCKETS:
        return StorageView(protocol, options_for_storage(protocol, options))
    mine = {name: value for name, value in options.items() if name not in OURS}
    try:
        return fsspec.filesystem(protocol, **{"use_listings_cache": False, **mine})
    except ImportError as error:
        raise MissingDriverError(
            f"the library of {protocol}:// is not installed",
            uri=f"{protocol}://",
            hint=f"pip install 'ckptfs[{_EXTRAS.get(protocol, 'azure')}]'",
        ) from error


@contextlib.contextmanager
def told(action: str, uri: Uri) -> Iterator[None]:
    """Inside, what a library raises that is no OSError (no credentials, say) becomes one."""
    try:
        yield
    except (OSError, CkptfsError):
        raise
    except Exception as error:  # noqa: BLE001 - the edge where all become typed
        text = mask_credentials(f"{type(error).__name__}: {error}")
        raise StorageError(f"{action} failed: {text}", uri=uri) from None


def options_for_storage(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``open_storage`` takes of what a filesystem was made with."""
    if protocol in ("file", "local"):
        return {}
    return {name: value for name, value in options.items() if name not in _FSSPECS_OWN}


def without_secrets(options: Any) -> Any:
    """The same nested options without values whose names look like credentials."""
    if isinstance(options, Mapping):
        return {
            name: without_secrets(value)
            for name, value in options.items()
            if not (isinstance(value, str | bytes) and _SECRET.search(str(name)))
        }
    if isinstance(options, list | tuple):
        return type(options)(without_secrets(value) for value in options)
    return options
