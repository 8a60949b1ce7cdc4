"""A target of the benchmark: its kind, its caches, its files and their removal.

    Home(asked)    the directory or prefix of one benchmark: nothing outside it is written or removed
      .describe()    the ``Target`` of the result          .wire      which interfaces carry its bytes
      .check_space() refuses what does not fit             .remove()  everything, unfinished uploads too
      .clear(name)   one attempt's files                   .evict / .fill   the page cache

No torch: the process that starts the ranks also cleans up after them, and it does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import mmap
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckptfs.bench.clock import WireKind
from ckptfs.bench.machine import filesystem
from ckptfs.bench.messages import TargetAsked
from ckptfs.bench.results import Target
from ckptfs.errors import NoSpaceError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.options import OURS
from ckptfs.storage.registry import open_storage
from ckptfs.text import size_text
from ckptfs.uri import Uri

__all__ = [
    "Home",
    "endpoint_of",
    "evict",
    "fsspec_options",
    "fsspec_uri",
    "has_cold",
    "resident_share",
]

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_OVER_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "9p",
    "virtiofs",
)
_SPARE = 1.05  # room for metadata, digests, and the filesystem's own needs
_CHUNK_BYTES = 8 << 20


class Home:
    """The home of one target.

    Args:
        asked: The target.

    Attributes:
        place: The target's URI.
        root: The home's URI.
    """

    def __init__(self, asked: TargetAsked) -> None:
        self.asked = asked
        self.place = asked.place
        self.root = asked.root
        self._storage: Storage | None = None

    @property
    def path(self) -> Path | None:
        """The home as a directory; None if it is not on a local filesystem."""
        return Path(self.root.local_path) if self.root.is_local else None

    def describe(self) -> Target:
        """Return the target without credentials."""
        return Target(str(self.place), self.kind, self.cached)

    @property
    def kind(self) -> str:
        """The kind of storage, such as ``ext4``, ``s3 at 127.0.0.1:9000`` or ``gs``."""
        if self.place.is_local:
            return filesystem(_nearest(Path(self.place.local_path)))
        endpoint = endpoint_of(self.place, self.asked.storage_options)
        return f"{self.place.protocol} at {endpoint}" if endpoint else self.place.protocol

    @property
    def cached(self) -> str:
        """Which caches may hold its files when they are read, in words."""
        if not self.place.is_local:
            return "the server's caches cannot be emptied from here: every load may find them warm"
        if not has_cold(self):
            return "it is memory: there is no cold load"
        text = "cold: this machine's page cache was emptied of the files"
        if self.kind in _OVER_NETWORK or self.kind.startswith("fuse"):
            return f"{text}; the server's caches were not"
        return f"{text}; caches of the disk and of a hypervisor were not"

    @property
    def wire(self) -> WireKind:
        """The network interfaces that count its bytes."""
        if self.place.is_local:
            return WireKind.NETWORK if self.kind in _OVER_NETWORK else WireKind.NONE
        if self.place.protocol.rpartition("+")[2] in ("file", "memory"):
            return WireKind.NONE
        endpoint = endpoint_of(self.place, self.asked.storage_options)
        return WireKind.LOOPBACK if endpoint and _is_loopback(endpoint) else WireKind.NETWORK

    # -- its files

    @property
    def storage(self) -> Storage:
        """The storage of the home, with the target's options; opened once, as that costs CPU."""
        if self._storage is None:
            self._storage = open_storage(self.root, self.asked.storage_options)
        return self._storage

    def make(self) -> None:
        """Make the home. Does nothing if names there need no directory.

        Raises:
            StorageError: It could not be made.
        """
        self.storage.make_dir("")

    def clear(self, name: str) -> None:
        """Remove the attempt ``name``. Succeeds if it does not exist.

        Raises:
            StorageError: Something stayed.
        """
        self.storage.remove_tree(name)
        if self.path is not None:
            # Otherwise a journalled filesystem would free the blocks during a later measurement.
            self._fsync(self.path)

    def remove(self) -> None:
        """Remove the home and nothing else.

        Raises:
            StorageError: Something stayed.
        """
        # The root of a storage is never removed, so this one is rooted above the home.
        with contextlib.closing(open_storage(self.place, self.asked.storage_options)) as above:
            above.remove_tree(self.asked.home)
        # Uploads are swept below a storage's root: here only those of the home.
        with contextlib.closing(self.storage) as storage, contextlib.suppress(StorageError):
            self._storage = None
            storage.sweep_uploads(0.0)

    def evict(self, name: str) -> float | None:
        """Evict an attempt's files from this machine's page cache. Needs no privileges.

        Args:
            name: The attempt.

        Returns:
            The share of their pages that stayed (a filesystem over tmpfs keeps all); None if not known.
        """
        evict(self._files(name))
        return resident_share(self._files(name))

    def fill(self, name: str) -> None:
        """Read the files of attempt ``name`` once: not all writers leave them in the page cache."""
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for path in self._files(name):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    @staticmethod
    def _fsync(directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _files(self, name: str) -> Iterator[Path]:
        if self.path is not None:
            yield from (path for path in (self.path / name).rglob("*") if path.is_file())

    # -- its space

    def check_space(self, needed_bytes: int) -> None:
        """Check that the storage has enough free space, if that is known. Nothing is written.

        Args:
            needed_bytes: The bytes that must fit.

        Raises:
            NoSpaceError: They do not fit.
        """
        if not self.place.is_local:
            return
        found = os.statvfs(_nearest(Path(self.place.local_path)))
        if not found.f_blocks:  # ramfs and the like do not count blocks: they are not full
            return
        free_bytes = found.f_bavail * found.f_frsize
        if needed_bytes * _SPARE > free_bytes:
            raise NoSpaceError(
                f"this keeps up to {size_text(needed_bytes)} at once, and "
                f"{size_text(free_bytes)} are free",
                uri=self.place,
                hint="give a smaller --size or --params, or another URI; --keep keeps every engine's",
            )


def has_cold(home: Home) -> bool:
    """True if the files of ``home`` can be evicted from the cache that loads read from."""
    return home.place.is_local and home.kind not in _IN_MEMORY and hasattr(os, "posix_fadvise")


def endpoint_of(place: Uri, options: Mapping[str, Any]) -> str | None:
    """Return ``host:port`` of a server that an option, the query or the environment names.

    It contains no credentials.

    Args:
        place: The target's URI.
        options: Its storage_options.
    """
    client = options.get("client_kwargs")
    endpoint = (
        options.get("endpoint_url")
        or (client.get("endpoint_url") if isinstance(client, Mapping) else None)
        or place.options.get("endpoint_url")
        or (os.environ.get("AWS_ENDPOINT_URL_S3") if place.protocol in ("s3", "s3a") else None)
        or (os.environ.get("AWS_ENDPOINT_URL") if place.protocol in ("s3", "s3a") else None)
    )
    if endpoint:
        parts = urlsplit(str(endpoint))
        return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
    if place.protocol in ("webhdfs", "hdfs", "http", "https"):
        return place.authority or None
    return None


def fsspec_options(home: Home) -> dict[str, Any]:
    """Return the options of ``home`` for fsspec's library, without those of ckptfs."""
    found = {**home.place.options, **home.asked.storage_options}
    return {name: value for name, value in found.items() if name not in OURS}


def fsspec_uri(place: Uri) -> str:
    """Return ``place`` without its query, which fsspec's library would read as part of the name."""
    return replace(place, query="").full


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0] or endpoint
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def _nearest(path: Path) -> Path:
    """Return the path, or the deepest directory above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


# -- the page cache --------------------------------------------------------------------------------


_WINDOW_BYTES = 1 << 30  # mapped at a time


def evict(files: Iterable[Path]) -> None:
    """Evict files from the page cache. Needs no privileges.

    Args:
        files: The files.

    Raises:
        OSError: A file cannot be opened or synced.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not written yet would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_share(files: Iterable[Path]) -> float | None:
    """Measure the share of the files' pages that can be read without the disk.

    Args:
        files: The files. The user must own them: for others' files the kernel reports all pages.

    Returns:
        The share, from 0.0 to 1.0; None if not known.

    Raises:
        OSError: A file cannot be opened.
    """
    if sys.platform != "linux":
        return None
    resident = pages = 0
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            for start in range(0, size, _WINDOW_BYTES):
                found = _pages(file.fileno(), start, min(_WINDOW_BYTES, size - start))
                if found is None:
                    return None
                resident += sum(page & 1 for page in found)
                pages += len(found)
    return resident / pages if pages else 0.0


def _pages(fd: int, start: int, length: int) -> bytes | None:
    """Return one byte for each page; its lowest bit says whether the page is in memory."""
    try:
        # A private mapping that is never written: ctypes takes addresses only of writable memory.
        mapped = mmap.mmap(fd, length, access=mmap.ACCESS_COPY, offset=start)
    except OSError:
        return None
    with mapped:
        found = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(mapped)
        library = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = library.mincore(address, ctypes.c_size_t(length), found)
        del first  # otherwise the mapping could not be closed
        return None if failed else bytes(found)
