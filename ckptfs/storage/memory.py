"""The model of a storage, in this process's memory, in two shapes.

    memory://name/run                 filesystem: real directories, rename in one step
    memory://name/run?shape=object    object: keys only, etags, conditional replace

``MemoryStoreRegistry`` holds the named stores of one process. Several threads may share a store. Several
processes cannot, and get an error: each would see a store of its own, and every rank's checkpoint
would vanish with its process. A store survives nothing, so ``durable`` is False.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Mapping
from typing import Any

from ckptfs.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import (
    Capabilities,
    DataReader,
    DataWriter,
    Entry,
    Shape,
    Space,
    Stat,
    Storage,
)
from ckptfs.uri import Uri

__all__ = ["STORES", "MemoryStorage", "MemoryStoreRegistry", "MemoryTree", "open_memory"]


class MemoryTree:
    """The content of one store: ``files`` maps a path to (bytes, etag), ``dirs`` is a set of paths.

    Paths have no leading slash; "" is the top, which always exists. ``lock`` makes each operation
    one step.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.files: dict[str, tuple[bytes, str]] = {}
        self.dirs: set[str] = {""}
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self._etags = itertools.count(1)

    def put(self, path: str, data: bytes) -> None:
        """Set a file's bytes under a new etag."""
        self.files[path] = (data, f"{next(self._etags)}")


class MemoryStoreRegistry:
    """The named stores of one process. Tests may have one of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: dict[str, MemoryTree] = {}

    def tree(self, name: str, shape: Shape) -> MemoryTree:
        """Return the store of that name, made at first use.

        UriError: it exists in the other shape.
        """
        with self._lock:
            tree = self._trees.setdefault(name, MemoryTree(shape))
        if tree.shape is not shape:
            raise UriError(f"the memory store {name!r} has the shape {tree.shape.value}")
        return tree

    def drop(self, name: str) -> None:
        """Forget a store and its bytes; absent is success."""
        with self._lock:
            self._trees.pop(name, None)


# The stores of memory:// URIs: one set for the whole process, because such a URI names no other
# place.
STORES = MemoryStoreRegistry()


def open_memory(uri: Uri, storage_options: Mapping[str, Any]) -> MemoryStorage:
    """Open ``memory://``: the registry's factory.

    It has one option: shape = "filesystem" (default) or "object".
    """
    unknown = set(storage_options) - {"shape"}
    if unknown:
        raise UriError(f"memory:// has no option {min(unknown)!r}", uri=uri, hint="shape")
    try:
        shape = Shape(storage_options.get("shape", Shape.FILESYSTEM.value))
    except ValueError:
        raise UriError("shape is filesystem or object", uri=uri) from None
    return MemoryStorage(uri, shape=shape)


class MemoryStorage(Storage):
    """One root in a store. ``stores`` defaults to the process's own."""

    def __init__(
        self,
        root: Uri,
        *,
        shape: Shape = Shape.FILESYSTEM,
        stores: MemoryStoreRegistry | None = None,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise UriError(
                "memory:// belongs to one process, but WORLD_SIZE says that there are more",
                uri=root,
                hint="use a directory that all processes can reach",
            )
        self.root = root
        self.shape = shape
        self._tree: MemoryTree | None = (stores or STORES).tree(root.authority, shape)
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "shape": self.shape, "_pid": self._pid}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Never raises: an object that cannot be used raises a readable error when it is first used.
        self.__dict__.update(state)
        here = self._pid == os.getpid()
        self._tree = STORES.tree(self.root.authority, self.shape) if here else None

    @property
    def tree(self) -> MemoryTree:
        """The store. UriError in another process than the one that opened it."""
        if self._tree is None or self._tree.pid != os.getpid():
            raise UriError(
                "memory:// belongs to the process that opened it",
                uri=self.root,
                hint="use a directory that all processes can reach",
            )
        return self._tree

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            shape=self.shape,
            exclusive_create=True,
            atomic_replace=True,
            conditional_replace=self.shape is Shape.OBJECT,
            durable=False,
        )

    # -- small, whole ------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        with self.tree.lock:
            return self._file("read", key)[0]

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        with self.tree.lock:
            self._need_parent("create", staging)
            self._need_parent("create", key)
            if self._stands(self._path(key)):
                raise AlreadyExistsError("create failed: File exists", uri=self.uri(key))
            self.tree.put(self._path(key), bytes(data))

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        path = self._path(key)
        with self.tree.lock:
            if if_match is not None:
                if self.shape is not Shape.OBJECT:
                    raise UnsupportedError("no conditional replace here", uri=self.uri(key))
                if self.tree.files.get(path, (b"", ""))[1] != if_match:
                    raise AlreadyExistsError("replace failed: it has changed", uri=self.uri(key))
            self._put("replace", key, bytes(data))

    def stat(self, key: str) -> Stat:
        path = self._path(key)
        with self.tree.lock:
            if path in self.tree.files:
                data, etag = self.tree.files[path]
                return Stat(len(data), is_dir=False, etag=self._etag(etag))
            if self.shape is Shape.FILESYSTEM and path in self.tree.dirs:
                return Stat(0, is_dir=True)
        raise self._missing("stat", key)

    def list(self, key: str) -> list[Entry]:
        path = self._path(key)
        below = f"{path}/" if path else ""
        with self.tree.lock:
            tree = self.tree
            if self.shape is Shape.FILESYSTEM and path not in tree.dirs:
                raise self._missing("list", key)
            found: dict[str, bool] = {}
            for name, is_file in [(n, True) for n in tree.files] + [(n, False) for n in tree.dirs]:
                if name.startswith(below) and name != path:
                    head, slash, _ = name[len(below) :].partition("/")
                    found[head] = found.get(head, False) or bool(slash) or not is_file
        return [Entry(name, is_dir) for name, is_dir in sorted(found.items())]

    # -- large, streamed ---------------------------------------------------------------

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        del size_hint_bytes
        with self.tree.lock:
            self._need_parent("write", key)
        return _MemoryWriter(self, key)

    def open_read(self, key: str) -> DataReader:
        with self.tree.lock:
            return _MemoryReader(self.uri(key), self._file("open", key)[0])

    # -- names -------------------------------------------------------------------------

    def make_dir(self, key: str) -> None:
        path = self._path(key)
        if self.shape is Shape.OBJECT:
            return
        with self.tree.lock:
            if path in self.tree.files:
                return  # as mkdir(2): EEXIST is success, whatever exists there
            parts = path.split("/") if path else []
            made = ["/".join(parts[: n + 1]) for n in range(len(parts))]
            if any(name in self.tree.files for name in made):
                raise self._missing("make_dir", key, errno.ENOTDIR)
            self.tree.dirs.update(made)

    def rename(self, source: str, target: str) -> None:
        if self.shape is Shape.OBJECT:
            raise UnsupportedError("an object store has no rename", uri=self.uri(source))
        start, end = self._path(source), self._path(target)
        with self.tree.lock:
            tree = self.tree
            if not self._stands(start):
                raise self._missing("rename", source)
            self._need_parent("rename", target)
            if start == end:
                return
            if start in tree.files:
                if end in tree.dirs:
                    raise self._exists_error(target)
                tree.files[end] = tree.files.pop(start)
                return
            if f"{end}/".startswith(f"{start}/"):
                raise StorageError("rename failed: into itself", errno=errno.EINVAL, uri=self.root)
            if end in tree.files or any(
                name.startswith(f"{end}/") for name in (*tree.files, *tree.dirs)
            ):
                raise self._exists_error(target)
            tree.files = {_moved(n, start, end): held for n, held in tree.files.items()}
            tree.dirs = {_moved(name, start, end) for name in tree.dirs}

    def link(self, source: str, target: str) -> None:
        end = self._path(target)
        if self.shape is Shape.OBJECT:
            raise UnsupportedError("an object store has no links", uri=self.uri(source))
        with self.tree.lock:
            held = self._file("link", source)
            self._need_parent("link", target)
            if self._stands(end):
                raise self._exists_error(target)
            self.tree.files[end] = held  # bytes that are never changed in place

    def remove(self, key: str) -> None:
        path = self._path(key)
        with self.tree.lock:
            if self.shape is Shape.FILESYSTEM and path in self.tree.dirs:
                raise StorageError(
                    "remove failed: a directory", errno=errno.EISDIR, uri=self.uri(key)
                )
            self.tree.files.pop(path, None)

    def remove_dir(self, key: str) -> None:
        path = self._path(key)
        if self.shape is Shape.OBJECT:
            return
        with self.tree.lock:
            if path in self.tree.files:
                raise self._missing("remove_dir", key, errno.ENOTDIR)
            if any(n.startswith(f"{path}/") for n in (*self.tree.files, *self.tree.dirs)):
                raise AlreadyExistsError(
                    "remove_dir failed: not empty", errno=errno.ENOTEMPTY, uri=self.uri(key)
                )
            self.tree.dirs.discard(path)

    def remove_tree(self, key: str) -> None:
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        path = self._path(key)
        with self.tree.lock:
            tree = self.tree
            tree.files = {n: h for n, h in tree.files.items() if not f"{n}/".startswith(f"{path}/")}
            tree.dirs = {n for n in tree.dirs if not f"{n}/".startswith(f"{path}/")}

    # -- certainty ---------------------------------------------------------------------

    def sync(self, key: str) -> None:
        path = self._path(key)
        with self.tree.lock:
            if self.shape is Shape.FILESYSTEM and path not in self.tree.dirs:
                raise self._missing("sync", key)

    def refresh(self, key: str) -> None:
        self.uri(key)

    def space(self) -> Space | None:
        return None

    # -- inside ------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return self.uri(key).path.lstrip("/")

    def _stands(self, path: str) -> bool:
        return path in self.tree.files or (
            self.shape is Shape.FILESYSTEM and path in self.tree.dirs
        )

    def _etag(self, etag: str) -> str | None:
        return etag if self.shape is Shape.OBJECT else None

    def _file(self, action: str, key: str) -> tuple[bytes, str]:
        path = self._path(key)
        held = self.tree.files.get(path)
        if held is None:
            if self.shape is Shape.FILESYSTEM and path in self.tree.dirs:
                raise StorageError(
                    f"{action} failed: Is a directory", errno=errno.EISDIR, uri=self.uri(key)
                )
            raise self._missing(action, key)
        return held

    def _put(self, action: str, key: str, data: bytes) -> None:
        self._need_parent(action, key)
        path = self._path(key)
        if self.shape is Shape.FILESYSTEM and path in self.tree.dirs:
            raise self._exists_error(key)
        self.tree.put(path, data)

    def _need_parent(self, action: str, key: str) -> None:
        parent = self._path(key).rpartition("/")[0]
        if self.shape is Shape.FILESYSTEM and parent not in self.tree.dirs:
            raise self._missing(action, key)

    def _missing(self, action: str, key: str, number: int = errno.ENOENT) -> NotFoundError:
        reason = os.strerror(number)
        return NotFoundError(f"{action} failed: {reason}", errno=number, uri=self.uri(key))

    def _exists_error(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError("the name exists already", uri=self.uri(key))


def _moved(name: str, start: str, end: str) -> str:
    return f"{end}{name[len(start) :]}" if f"{name}/".startswith(f"{start}/") else name


class _MemoryWriter(DataWriter):
    def __init__(self, storage: MemoryStorage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._parts: bytearray | None = bytearray()
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._parts is None:
            raise StorageError("the file is closed", uri=self._storage.uri(self._key))
        view = memoryview(data).cast("B")
        self._parts += view
        return len(view)

    def close(self) -> None:
        if self._closed:
            return
        if self._parts is None:
            raise StorageError("the file is aborted", uri=self._storage.uri(self._key))
        with self._storage.tree.lock:
            self._storage._put("write", self._key, bytes(self._parts))  # noqa: SLF001 - one module
        self._parts, self._closed = None, True

    def abort(self) -> None:
        self._parts = None


class _MemoryReader(DataReader):
    def __init__(self, uri: Uri, data: bytes) -> None:
        self._uri = uri
        self._data: bytes | None = data
        self.size_bytes = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._data is None:
            raise StorageError("the reader is closed", uri=self._uri)
        view = buffer.cast("B")
        part = self._data[offset : offset + len(view)]
        if len(part) < len(view):
            raise IntegrityError(
                f"the file ends at byte {len(self._data)}, but {offset + len(view)} were requested",
                uri=self._uri,
            )
        view[:] = part

    def close(self) -> None:
        self._data = None
