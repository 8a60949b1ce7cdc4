"""From a URI to its backend.

    file                  LocalStorage
    memory                MemoryStorage
    s3 s3a  gs gcs        ObjectStorage, over the client that ``clients.choose`` finds
    az abfs abfss
    webhdfs               WebHdfsStorage
    faults+X, nodes+X     ckptfs.testing: faults planned from outside; node-local disks as directories
    objects+memory        ckptfs.testing: ObjectStorage over an object store in this process's memory
    fsspec+X              FsspecStorage over X, even if X has another backend (fsspec+file, fsspec+memory)
    entry points          group "ckptfs.backends", name = protocol, value = "module:factory"
    anything fsspec knows FsspecStorage

A factory is ``factory(uri: Uri, storage_options: Mapping[str, Any]) -> Storage``. It opens no
connection: clients are lazy. A URI's query is merged into the options, which win.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckptfs.errors import MissingDriverError, UriError
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.memory import open_memory
from ckptfs.uri import HasProtocol, Uri, options_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "Factory", "is_served", "open_storage"]

GROUP = "ckptfs.backends"

Factory = Callable[[Uri, Mapping[str, Any]], Storage]

# By name and loaded at first use: storage must not import testing, and fsspec costs 50 ms.
_WRAPPERS = {
    "faults": "ckptfs.testing.faults:open_faulty",
    "nodes": "ckptfs.testing.nodes:open_nodes",
    "fsspec": "ckptfs.storage.fsspec_store:open_fsspec",
    "objects": "ckptfs.testing.memory_object_store:open_memory_objects",
}
_OBJECT_STORE = "ckptfs.storage.object_store:open_object_store"
_WEBHDFS = "ckptfs.storage.webhdfs:open_webhdfs"
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_EXTRAS = {
    **dict.fromkeys(("adl", "wasb", "wasbs"), "azure"),
    **dict.fromkeys(("hdfs", "viewfs", "webhdfs", "arrow_hdfs"), "hdfs"),
}
# Implementations that fsspec ships itself and that import their library when they connect.
_LATE = {"hdfs": "pyarrow", "arrow_hdfs": "pyarrow", "sftp": "paramiko", "ssh": "paramiko"}

# os.path turns a URI that is given as a path into this: s3://bucket becomes a directory "s3:".
_URI_AS_PATH = re.compile(r"/((?:ckptfs\+)?(?:s3|gs|gcs|az|abfss?|adl|hdfs|memory)):/")


def open_storage(
    uri: Uri | str | os.PathLike[Any] | HasProtocol,
    storage_options: Mapping[str, Any] | None = None,
) -> Storage:
    """Open the storage rooted at ``uri``. Nothing is read or written yet.

    Raises:
        UriError: No backend knows the protocol, or the credentials were masked on the way.
        MissingDriverError: Its library is not installed; the hint names the extra.
    """
    place = Uri.parse(uri)
    if place.is_local and (as_path := _URI_AS_PATH.search(place.path)) is not None:
        warnings.warn(
            f"{place.path} is on this machine's own disk: a program used the URI "
            f"{as_path[1]}://... as a path. Pass the URI to ckptfs, and a directory to other "
            "programs",
            stacklevel=2,
        )
    if place.is_masked:
        raise UriError(
            "the credentials in this URI are masked: it was copied from a log or an error",
            uri=place,
            hint="pass the original, or credentials in storage_options",
        )
    options = {**place.options, **options_of(uri), **(storage_options or {})}
    return _factory(place)(place, options)


def is_served(uri: Uri) -> bool:
    """Whether a backend knows the protocol. No I/O.

    It is also True if the library of the backend is missing: ``open_storage`` reports that.
    """
    wrapper, plus, inner = uri.protocol.partition("+")
    try:
        if plus and wrapper in ("faults", "fsspec"):
            return is_served(replace(uri, protocol=inner))
        _factory(uri)
    except MissingDriverError:
        return True
    except UriError:
        return False
    return True


def _factory(uri: Uri) -> Factory:
    protocol = uri.protocol
    if protocol == "file":
        return _open_local
    if protocol == "memory":
        return open_memory
    for point in entry_points(group=GROUP, name=protocol):
        try:
            found: Factory = point.load()
        except ImportError as error:
            raise MissingDriverError(
                f"the backend of {protocol}:// cannot be imported: {error}",
                uri=uri,
                hint=f"reinstall {point.dist.name if point.dist else point.value}",
            ) from error
        return found
    wrapper, plus, _ = protocol.partition("+")
    if plus and wrapper in _WRAPPERS:
        return _load(_WRAPPERS[wrapper])
    if protocol in _OBJECT_STORES:
        return _load(_OBJECT_STORE)
    _need_driver(uri)
    return _load(_WEBHDFS if protocol == "webhdfs" else _WRAPPERS["fsspec"])


def _open_local(uri: Uri, storage_options: Mapping[str, Any]) -> Storage:
    if storage_options:
        raise UriError(f"a directory has no storage option {min(storage_options)!r}", uri=uri)
    return LocalStorage(uri)


def _load(target: str) -> Factory:
    module, _, name = target.partition(":")
    factory: Factory = getattr(import_module(module), name)
    return factory


def _need_driver(uri: Uri) -> None:
    # fsspec takes long to import, and plain paths never come here.
    from fsspec.registry import get_filesystem_class, known_implementations

    protocol = uri.protocol
    try:
        get_filesystem_class(protocol)
        if (library := _LATE.get(protocol)) and find_spec(library) is None:
            raise ImportError(f"no module named {library}")
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        reason = known_implementations.get(protocol, {}).get("err", str(error))
        raise MissingDriverError(
            f"the library of {protocol}:// is not installed",
            uri=uri,
            hint=f"pip install 'ckptfs[{extra}]'" if extra else reason,
        ) from error
    except ValueError as error:
        raise UriError(
            f"no backend knows {protocol}://",
            uri=uri,
            hint="a path, file://, s3://, gs://, az://, hdfs://, any protocol of fsspec, "
            f"or a package with an entry point in the group {GROUP!r}",
        ) from error


def entry_points(*, group: str, name: str) -> Iterable[EntryPoint]:
    """Return the entry points that are installed now."""
    return [point for point in _installed(group, _package_folders()) if point.name == name]


@lru_cache(maxsize=1)
def _installed(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, read once for each state of the folders.

    Reading them takes 7 ms and more.
    """
    # Imported when it is first used: for ``ckptfs ls`` it would take as long as everything else.
    from importlib.metadata import entry_points as installed

    del folders
    return tuple(installed(group=group))


def _package_folders() -> tuple[tuple[str, int], ...]:
    """Return the folders that Python imports from, and when a package was last added to each."""
    found = []
    for folder in sys.path:
        with suppress(OSError):
            found.append((folder, os.stat(folder or ".").st_mtime_ns))
    return tuple(found)
