"""An fsspec filesystem that writes files whole or not at all, over any place that ckptfs knows.

    reads, lists     fsspec's own filesystem of the bare protocol (``underlying``)
    writes           ckptfs's storage: visible when closed, nothing after an exception (``files``)
    names            ckptfs+s3://bucket/key, or with the chain's prefix ckptfs::s3://bucket/key

Users of stock's FsspecWriter pass raw URLs to every method, so each method accepts them.

Methods exist twice, as fsspec requires of a filesystem that is used inside an event loop
(``fsspec.generic``, zarr): ``info`` works on the thread that calls it, ``_info`` is a coroutine
that runs ``info`` on another thread. Methods for many files (``_get``, ``_copy``, ``_cat_ranges``
...) are fsspec's own.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.utils import isfilelike, stringify_path

from ckptfs._torch import is_called_by_dcp
from ckptfs.errors import AlreadyExistsError, NotFoundError, UnsupportedError, UriError
from ckptfs.integrations.fsspec.files import (
    AsyncFile,
    CompressedFile,
    DurableWriter,
    EditedFile,
    HeldWriter,
    PublishedFile,
    TextFile,
    UnderlyingWriter,
)
from ckptfs.integrations.fsspec.underlying import (
    OBJECT_STORES,
    fsspec_class,
    open_underlying,
    options_for_storage,
    typed_errors,
    without_secrets,
)
from ckptfs.storage.base import DataWriter, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.storage.threads import ProcessLock, Threads
from ckptfs.uri import Uri, check_key

__all__ = ["PlainFileSystem"]

_CHUNK_BYTES = 4 << 20
_TEXT = ("encoding", "errors", "newline")
_DRAFT_BYTES = 64 << 20  # in memory of an edited file; the rest is on disk without a name
_AT_ONCE = 32  # calls from event loops; more wait


def _is_plain(path: str) -> bool:
    """Whether ckptfs's own storage takes a key as it is."""
    return "?" not in path and not {"", ".", ".."} & set(path.split("/"))


def _tidied(path: str) -> str:
    """Return the path as ``Uri.parse`` reads it."""
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def _on_a_thread(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the coroutine that belongs to the method ``name``."""

    async def call(self: PlainFileSystem, *args: Any, **kwargs: Any) -> Any:
        return await self.run_on_a_thread(getattr(self, name), *args, **kwargs)

    call.__name__ = f"_{name}"
    return call


class PlainFileSystem(AsyncFileSystem):
    """The plain half of ``ckptfs+X://``.

    A subclass has ``protocol`` and ``target``, the X; one without a target is the prefix of another
    URL in a chain. The options are those of the bare protocol, flat or under its name. Errors are
    ckptfs's, which are the OSErrors and ValueErrors that fsspec's callers expect. Picklable;
    instances serve any threads and event loops.

    With ``asynchronous`` it is for callers inside an event loop; fsspec starts no loop for it.
    """

    target: ClassVar[str | None] = None
    mirror_sync_methods = False  # a method that went through the loop would not survive a fork

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        if self._cached:
            return
        super().__init__(asynchronous=True, batch_size=batch_size)  # starts no loop
        self.asynchronous, self._loop = asynchronous, loop
        self._fo, self._target = fo, self.target or target_protocol
        nested = {name for name in (self._target, "ckptfs", self.protocol) if name}
        own_options = {name: value for name, value in options.items() if name not in nested}
        for name in nested & options.keys():
            own_options |= options[name]
        self._options = {**(target_options or {}), **own_options}
        self._begin_process()

    def _begin_process(self) -> None:
        # Clients and attempts belong to one process.
        self._pid, self._lock = os.getpid(), ProcessLock()
        self._threads = Threads(_AT_ONCE, "ckptfs-fsspec")
        self._inner: AbstractFileSystem | None = None
        self._storages: dict[str, Storage] = {}

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            self._begin_process()

    # -- inside an event loop ---------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """fsspec's loop for coroutines of this filesystem; None if it was made for another loop."""
        return None if self.asynchronous else self._loop or get_loop()

    async def run_on_a_thread(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` on a thread while the event loop runs.

        A call that has begun continues when this is cancelled.
        """
        self._check_fork()
        context = contextvars.copy_context()
        call = functools.partial(context.run, method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    _info = _on_a_thread("info")
    _ls = _on_a_thread("ls")
    _find = _on_a_thread("find")
    _exists = _on_a_thread("exists")
    _cat_file = _on_a_thread("cat_file")
    _pipe_file = _on_a_thread("pipe_file")
    _get_file = _on_a_thread("get_file")
    _put_file = _on_a_thread("put_file")
    _cp_file = _on_a_thread("cp_file")
    _mv_file = _on_a_thread("mv")
    _mkdir = _on_a_thread("mkdir")
    _makedirs = _on_a_thread("makedirs")
    _rmdir = _on_a_thread("rmdir")
    _touch = _on_a_thread("touch")
    _rm_file = _on_a_thread("rm_file")

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        del batch_size, kwargs  # a checkpoint is removed as a whole
        await self.run_on_a_thread(self.rm, path, recursive, maxdepth)

    async def open_async(self, path: Any, mode: str = "rb", **kwargs: Any) -> AsyncFile:
        """``open`` for binary files; its methods are coroutines."""
        if "b" not in mode or kwargs.get("compression"):
            raise ValueError("only binary files without compression")
        file = await self.run_on_a_thread(self.open, path, mode, **kwargs)
        return AsyncFile(self.run_on_a_thread, file, mode)

    # -- names ---------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        text: str = stringify_path(path)
        chained = text.startswith("ckptfs::")
        text = text.removeprefix("ckptfs::").removeprefix("ckptfs+")
        if text == "ckptfs://":  # fsspec's stand-in for this end of a chain
            return ""
        protocol, found, location = text.partition("://")
        if not found:
            if chained:
                raise UriError(f"no scheme behind ckptfs::{text}", hint="write ckptfs+file:///path")
            protocol, location = cls.target or "", text
        fs_class = fsspec_class(protocol)
        if fs_class is None:
            return location.rstrip("/") or cls.root_marker
        return fs_class._strip_protocol(f"{protocol}://{location}")  # noqa: SLF001 - fsspec's hook

    @classmethod
    def _get_kwargs_from_urls(cls, path: str) -> dict[str, Any]:
        url = path.removeprefix("ckptfs+")
        fs_class = fsspec_class(url.partition("://")[0])
        return {} if fs_class is None else dict(fs_class._get_kwargs_from_urls(url))  # noqa: SLF001

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL that leads here again."""
        return f"ckptfs+{self._protocol}://{self._strip_protocol(name)}"

    @property
    def _protocol(self) -> str:
        if self._target is None:
            raise UriError(
                "ckptfs:: needs the URI of a place behind it", hint="write ckptfs+s3://bucket/key"
            )
        return self._target

    @property
    def _is_bucket(self) -> bool:
        return self._protocol in OBJECT_STORES

    @property
    def _is_local(self) -> bool:
        return self._protocol in ("file", "local")

    def _path(self, path: Any) -> str:
        found: str = self._strip_protocol(path) or self._fo
        if self._is_bucket and not _is_plain(found) and is_called_by_dcp():
            # torch saves a checkpoint here, and ``ckptfs.load`` will find it by its URI.
            return _tidied(found)
        return found

    def _uri(self, path: str) -> Uri:
        """Return the URI of a path.

        A key of an object store is kept, with "//", "." and "?" in it.
        """
        if not self._is_bucket:
            return Uri.parse(f"{self._protocol}://{path}")
        bucket, _, key = path.partition("/")
        check_key(_tidied(key))
        root = Uri.parse(f"{self._protocol}://{bucket}")
        return dataclasses.replace(root, path=f"/{key}" if key else "")

    def to_dict(self, *, include_password: bool = False) -> dict[str, Any]:
        """Return fsspec's description of this instance; with credentials only on request."""
        found: dict[str, Any] = super().to_dict(include_password=True)
        return found if include_password else dict(without_secrets(found))

    def to_json(self, *, include_password: bool = False) -> str:
        """As ``to_dict``, for ``from_json``."""
        text: str = super().to_json(include_password=include_password)
        return text

    # -- what is below -----------------------------------------------------------------------

    @property
    def _underlying(self) -> AbstractFileSystem:
        self._check_fork()
        if self._inner is None:
            self._inner = open_underlying(self._protocol, self._options)
        return self._inner

    def _storage(self, uri: Uri) -> Storage:
        return open_storage(uri, options_for_storage(self._protocol, self._options))

    def _place(self, path: str) -> tuple[Storage, str]:
        """Return a storage and a key in it: one client for each bucket, none for a directory."""
        uri = self._uri(path)
        if uri.is_local:
            return self._storage(uri.parent), uri.name
        root = dataclasses.replace(uri, path="" if uri.authority else "/")
        self._check_fork()  # drops the parent's clients, and a lock that its thread may hold
        with self._lock:
            if root.full not in self._storages:
                self._storages[root.full] = self._storage(root)
            return self._storages[root.full], uri.path.lstrip("/")

    # -- files ---------------------------------------------------------------------------

    def open(self, path: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        """Open a file as fsspec does.

        A write is whole or not at all: an exception in ``with`` leaves nothing.
        """
        compression = kwargs.get("compression")
        if "b" not in mode and ("r" not in mode or "+" in mode):
            text = {name: kwargs.pop(name) for name in _TEXT if name in kwargs}
            return TextFile(self.open(path, f"{mode.replace('t', '')}b", *args, **kwargs), **text)
        if compression is None or "r" in mode:
            return super().open(self._path(path), mode, *args, **kwargs)
        from fsspec.core import get_compression

        codec = get_compression(self._path(path), kwargs.pop("compression"))
        if codec is None:
            return self.open(path, mode, *args, **kwargs)
        return CompressedFile(self.open(path, mode, *args), codec)

    def _open(self, path: str, mode: str = "rb", *, autocommit: bool = True, **kwargs: Any) -> Any:
        uri = self._uri(path)
        if mode == "rb":
            with typed_errors("open", uri):
                return self._underlying.open(path, mode, **kwargs)
        edits = self._is_local and mode in ("r+b", "w+b")
        if mode not in ("wb", "xb", "ab") and not edits:
            raise UnsupportedError(f"mode {mode!r}: files are written whole", uri=uri)
        if not self._options.get("auto_mkdir", True) and not self.isdir(self._parent(path)):
            raise NotFoundError("its directory does not exist, and auto_mkdir=False", uri=uri)
        if edits:
            return self._edited(path, mode, uri, autocommit=autocommit)
        writer = self._creating(path, uri) if mode == "xb" else self._writing(path, uri)
        file = PublishedFile(writer, path, autocommit=autocommit)
        if mode == "ab" and self.exists(path) and self.info(path)["type"] != "other":
            self._copy_into(path, file)
        return file

    def _edited(self, path: str, mode: str, uri: Uri, *, autocommit: bool) -> EditedFile:
        """Return a file that is read and written anywhere in it, and replaced when it is closed."""
        draft = tempfile.SpooledTemporaryFile(_DRAFT_BYTES, dir=self._parent(path))  # noqa: SIM115
        try:
            if mode == "r+b":
                autocommit = True  # fsspec's transactions do not commit files opened for reading
                with self._underlying.open(path, "rb") as source:
                    shutil.copyfileobj(source, draft, _CHUNK_BYTES)
                draft.seek(0)
            return EditedFile(
                self._writing(path, uri), path, draft, mode=mode, autocommit=autocommit
            )
        except BaseException:
            draft.close()
            raise

    def _writing(self, path: str, uri: Uri) -> DataWriter:
        del uri
        if self._is_bucket and not _is_plain(path):
            return UnderlyingWriter(self._underlying, path)
        return DurableWriter(*self._place(path))

    def _creating(self, path: str, uri: Uri) -> DataWriter:
        """Return a writer for a new file, with its bytes held in memory until it is closed.

        Of several creators the first to close wins; the others get AlreadyExistsError.
        """
        if self.exists(path):
            raise AlreadyExistsError("it exists", uri=uri)
        if self._is_bucket and not _is_plain(path):
            raise UnsupportedError(
                "mode 'x': not for keys with '?', '//' or '/./' in them", uri=uri
            )
        storage, key = self._place(path)
        home = key.rpartition("/")[0]
        storage.make_dir(home)
        if not storage.probe(home).exclusive_create:
            raise UnsupportedError("mode 'x': no exclusive create here", uri=uri)
        staging = f"{home}/" * bool(home) + f".partial-{secrets.token_hex(8)}"

        def create(data: bytes) -> None:
            storage.make_dir(home)  # a commit may have removed the empty step directory
            storage.create(key, data, staging=staging)

        return HeldWriter(create)

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        """Upload one file; mode="create": only if there is none."""
        if kwargs.get("mode") != "create" or os.path.isdir(lpath):
            super().put_file(lpath, rpath, *args, **kwargs)
            return
        with open(lpath, "rb") as source, self.open(rpath, "xb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)

    def _copy_into(self, path: str, file: PublishedFile) -> None:
        with self._underlying.open(path, "rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                file.write(chunk)

    def cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        """Copy one file, whole or not at all."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path2, "wb", **kwargs) as file:
            self._copy_into(self._path(path1), file)

    def cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return the bytes of a file, or a part of them."""
        path = self._path(path)
        with typed_errors("read", self._uri(path)):
            found: bytes = self._underlying.cat_file(path, start=start, end=end, **kwargs)
        return found

    def get_file(self, rpath: Any, lpath: Any, **kwargs: Any) -> None:
        """Download one file, making its directories; for a directory, make that."""
        if self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        path = self._path(rpath)
        if not isfilelike(lpath):
            # The library would fail with FileNotFoundError, as if the object were not there.
            os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        with typed_errors("read", self._uri(path)):
            if isfilelike(lpath):
                with self._underlying.open(path, "rb") as source:
                    shutil.copyfileobj(source, lpath, _CHUNK_BYTES)
            else:
                self._underlying.get_file(path, lpath, **kwargs)

    def find(
        self,
        path: Any,
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002
        detail: bool = False,  # noqa: FBT001, FBT002
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """Return all files below ``path``.

        With ``prefix``, only those with a path that begins with ``path``, a slash and the prefix.
        """
        top = self._path(path)
        begin = f"{top.rstrip('/')}/{prefix}" if prefix else ""
        folder = begin.rpartition("/")[0] if "/" in prefix else top
        if maxdepth is not None and "/" in prefix:
            maxdepth -= prefix.count("/")
            if maxdepth < 1:
                return {} if detail else []
        infos = super().find(folder, maxdepth, withdirs, detail=True, **kwargs)
        found = {name: info for name, info in infos.items() if name.startswith(begin)}
        return found if detail else list(found)

    # -- names that come and go ----------------------------------------------------------------

    def mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Make a directory; on object stores make a bucket, and nothing if there is a key."""
        path = self._path(path)
        if self._is_bucket:
            if "/" not in path:
                with typed_errors("make the bucket", self._uri(path)):
                    self._underlying.mkdir(path, create_parents=create_parents, **kwargs)
            return
        if not create_parents and not self.isdir(self._parent(path)):
            raise NotFoundError("its parent directory does not exist", uri=self._uri(path))
        self.makedirs(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        """Make a directory and its parents."""
        path = self._path(path)
        if self._is_bucket:
            if "/" not in path and not (exist_ok and self._underlying.exists(path)):
                self.mkdir(path)
            return
        if not exist_ok and self.isdir(path):
            raise AlreadyExistsError("it exists", uri=self._uri(path))
        self._storage(self._uri(path)).make_dir("")

    def rmdir(self, path: Any) -> None:
        """Remove an empty directory or bucket; do nothing for a key of an object store."""
        path = self._path(path)
        if not self._is_bucket or "/" not in path:
            with typed_errors("remove", self._uri(path)):
                self._underlying.rmdir(path)

    def touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Make an empty file.

        With truncate=False a file that is there stays, on a disk with a new time.
        """
        path = self._path(path)
        if truncate or not self.exists(path):
            with self.open(path, "wb", **kwargs):
                return
        if not self._is_local:
            raise UnsupportedError("an existing object cannot be touched", uri=self._uri(path))
        self._underlying.touch(path, truncate=False)

    def lexists(self, path: Any, **kwargs: Any) -> bool:
        """Whether it exists; on a disk a link that leads nowhere exists too."""
        if not self._is_local:
            return self.exists(path, **kwargs)
        return os.path.lexists(self._path(path))

    def islink(self, path: Any) -> bool:
        """Whether it is a symbolic link on a disk."""
        return self._is_local and os.path.islink(self._path(path))

    def exists(self, path: Any, **kwargs: Any) -> bool:
        """Whether it exists; errors other than its absence are raised."""
        try:
            self.info(path, **kwargs)
        except FileNotFoundError:
            return False
        return True

    def created(self, path: Any) -> Any:
        """Return when it was made, if the place knows."""
        return self._underlying.created(self._path(path))

    def modified(self, path: Any) -> Any:
        """Return when it was last written."""
        return self._underlying.modified(self._path(path))

    def invalidate_cache(self, path: Any = None) -> None:
        """Forget listings."""
        self._underlying.invalidate_cache(None if path is None else self._path(path))
