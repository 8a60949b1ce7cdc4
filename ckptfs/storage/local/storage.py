"""The local backend: POSIX filesystems, and network filesystems that are mounted.

    create   staging file, fsync      link to the key        fsync directory   unlink staging
    replace  .partial-*, fsync        rename over the key    fsync directory
    data     .partial-*, fsync        rename over the key    (sync, by the caller, once for all)
    make_dir mkdir, EEXIST is success                        fsync every parent up to the root's

Nothing is asked before it is done (``exists`` and ``is_dir`` may be answered from a network
client's cache): each call acts, and reads the answer. What a failed or interrupted call made, it
removes; only an answer that was lost leaves the staging file, because the link may yet happen.
Modes are 0o666 and 0o777 & ~umask; no chmod, no chown, so that setgid and default ACLs work (but for
what a person's own file is replaced by, see ``over``).

The root may be reached through links. Below it, what writes, moves or deletes never goes through one:
SymlinkError, whatever was looked at before. What only reads does, but not in ``.ckptfs``: a step that
was moved to another disk and linked back is read as before, and nothing is decided by another run's log.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ckptfs.errors import (
    AlreadyExistsError,
    NotFoundError,
    StaleError,
    StorageError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import (
    CONTROL,
    Capabilities,
    DataWriter,
    Entry,
    Shape,
    Space,
    Stat,
    Storage,
    usable,
)
from ckptfs.storage.io import Engine, ParallelWriter
from ckptfs.storage.local.direct_io import WindowedFile
from ckptfs.storage.local.directories import (
    make_dirs,
    refresh_dir,
    remove_tree,
    sync_dir,
    unlink_if_there,
)
from ckptfs.storage.local.files import (
    InPlaceWriter,
    KeptFile,
    LocalWriter,
    OverWriter,
    WriteMethod,
    kept_name,
    look_at_target,
    partial_name,
    read_whole,
    unlink_quietly,
    write_whole,
)
from ckptfs.storage.local.mount_probe import probe_posix
from ckptfs.storage.local.posix import Posix, beneath, core_count, holder_of, without_mark
from ckptfs.storage.local.reader import LocalReader
from ckptfs.storage.os_errors import HARD_TO_TELL, lost_answer, translated, typed
from ckptfs.uri import Uri

__all__ = ["ASSUMED", "LocalStorage"]

log = logging.getLogger(__name__)
T = TypeVar("T")

# What a mounted filesystem is taken for until this process writes to it: a reader must not write
# a probe, and takes none of the decisions that these answers guard.
ASSUMED = Capabilities(
    shape=Shape.FILESYSTEM,
    exclusive_create=True,
    atomic_replace=True,
    conditional_replace=False,
    durable=True,
)
# Each try opens a file, asks what it is and reads it: where a file is replaced all the time, one in four
# meets a replacement.
_STALE_TRIES = 10
_MOST_LINKS = 40  # as the kernel's own
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})  # f_type of tmpfs and ramfs
_MAX_FILES = 4
_MIN_FILE_BYTES = 64 << 20
_NO_LINKS = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)


class LocalStorage(Storage):
    """Bytes under one directory.

    root: a ``file`` URI (or a wrapper's, with ``directory`` saying where it really is).
    posix: the system calls; the tests put a simulated disk here.
    """

    def __init__(
        self, root: Uri, *, posix: Posix | None = None, directory: str | None = None
    ) -> None:
        self.root = root
        self._directory = directory or root.local_path
        self._posix = posix or Posix()
        self._capabilities: Capabilities | None = None
        self._unlinked: str | None = None  # below it no link is read through
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """What the probe saw, once this process has made a directory, created or replaced here;
        before that what any POSIX filesystem does (``ASSUMED``). Asking writes nothing.
        """
        return self._capabilities or ASSUMED

    def local_path(self, key: str) -> str:
        """The absolute path of a key."""
        return without_mark(self._path(key))

    # -- small, whole ------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        return self._read(key, None)

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        return self._read(key, limit_bytes)

    def _read(self, key: str, limit_bytes: int | None) -> bytes:
        uri, flags = self.uri(key), self._flags(key)

        def look(path: str) -> bytes:
            return read_whole(self._posix, path, uri, limit_bytes=limit_bytes, flags=flags)

        return self._reading("read", key, look)

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """As ``Storage.create``. When this raises AlreadyExistsError, what stands there is durable.

        UnsupportedError where the place has no hard links; ``capabilities`` says so from then on.
        """
        path, temporary, directory = self._path(key), self._path(staging), self._parent(key)
        self._probe_once(holder_of(temporary), self.uri(staging))
        if not self.capabilities.exclusive_create:
            raise self._no_exclusive_create(key)
        keep = False
        try:
            with translated(self.uri(staging), "create"):
                # Never O_TRUNC: after a lost answer the staging file and the entry are one inode,
                # and truncating it would empty an entry that others have read.
                unlink_if_there(self._posix, temporary)
                write_whole(self._posix, temporary, data)
            try:
                self._posix.link(temporary, path)
            except FileExistsError as error:
                # Its maker may not have come to its own fsync; who builds on the entry must.
                self._sync_names(directory, key, "create")
                raise typed(error, self.uri(key), "create") from error
            except OSError as error:
                if error.errno in HARD_TO_TELL:
                    keep = True
                    raise lost_answer(error, self.uri(key), "create") from error
                if error.errno in _NO_LINKS:
                    self._without_exclusive_create()
                    raise self._no_exclusive_create(key) from error
                raise typed(error, self.uri(key), "create") from error
            self._sync_names(directory, key, "create")
        finally:
            if not keep:
                unlink_quietly(self._posix, temporary)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        if if_match is not None:
            raise UnsupportedError("no conditional replace on a filesystem", uri=self.uri(key))
        path, directory = self._path(key), self._parent(key)
        self._in_directory(key, lambda: self._replace(path, data, key))
        self._sync_names(directory, key, "replace")

    def _replace(self, path: str, data: bytes, key: str) -> None:
        self._probe_once(holder_of(path), self.uri(key))
        partial = partial_name(path)
        done = False
        try:
            with translated(self.uri(key), "replace"):
                write_whole(self._posix, partial, data)
            self._publish(partial, path, key)
            done = True
        finally:
            if not done:
                unlink_quietly(self._posix, partial)

    def _publish(self, partial: str, path: str, key: str) -> None:
        try:
            self._posix.rename(partial, path)
        except OSError as error:
            if error.errno in HARD_TO_TELL:
                raise lost_answer(error, self.uri(key), "write") from error
            raise typed(error, self.uri(key), "write") from error

    def stat(self, key: str) -> Stat:
        follow = not self._flags(key)

        def look(path: str) -> os.stat_result:
            found = self._posix.stat(path, follow=follow)
            if not follow and stat.S_ISLNK(found.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), without_mark(path))
            return found

        found = self._reading("stat", key, look)
        is_dir = stat.S_ISDIR(found.st_mode)
        if is_dir and self.capabilities.shape is Shape.OBJECT:
            raise NotFoundError("stat failed: a prefix, not a file", uri=self.uri(key))
        size_bytes = 0 if is_dir else found.st_size
        return Stat(size_bytes, is_dir, modified_s=found.st_mtime)

    def list(self, key: str) -> list[Entry]:
        try:
            found = self._reading("list", key, self._posix.scandir)
        except NotFoundError:
            if self.capabilities.shape is Shape.OBJECT:
                return []
            raise
        return usable((Entry(*one) for one in found), self.uri(key))

    def refusing_links(self, top: str) -> LocalStorage:
        self.uri(top)
        strict = copy.copy(self)
        strict._unlinked = top  # noqa: SLF001 - one of our own
        return strict

    def refuse_link(self, key: str) -> None:
        path = self._path(key)
        with translated(self.uri(key), "write"):
            try:
                found = self._posix.stat(path, follow=False)
            except (FileNotFoundError, NotADirectoryError):
                return
            if stat.S_ISLNK(found.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), without_mark(path))

    # -- large, streamed ---------------------------------------------------------------

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> LocalWriter:
        del size_hint_bytes
        path, uri = self._path(key), self.uri(key)

        def begin() -> LocalWriter:
            with translated(uri, "write"):
                return LocalWriter(
                    self._posix,
                    uri,
                    partial_name(path),
                    lambda partial: self._publish(partial, path, key),
                )

        return self._in_directory(key, begin)

    def open_over(self, key: str) -> DataWriter:
        """As ``Storage.open_over``. No run is written so: its files are its own."""
        uri = self.uri(key)

        def begin() -> DataWriter:
            target = look_at_target(self._posix, self.local_path(key), uri)
            if target.method is WriteMethod.IN_PLACE:
                return InPlaceWriter(self._posix, uri, target.path)

            def publish(partial: str) -> None:
                self._publish(partial, target.path, key)
                # The name is not in the directory that the caller syncs where a link led elsewhere.
                self._sync_names(holder_of(target.path), key, "write")

            with translated(uri, "write"):
                return OverWriter(self._posix, uri, partial_name(target.path), publish, target)

        return self._in_directory(key, begin)

    def files_at_once(self, key: str, size_bytes: int) -> int:
        """As ``Storage.files_at_once``: more than one on a filesystem in memory only."""
        return files_at_once(self._posix, self.local_path(key), size_bytes)

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: Engine | None = None
    ) -> ParallelWriter | None:
        """As ``Storage.open_parallel``; none where a mount is used like an object store, which may
        take bytes in their order only.
        """
        if self.capabilities.shape is Shape.OBJECT:
            return None
        path, uri = self._path(key), self.uri(key)
        with translated(uri, "write"):
            return WindowedFile(
                self._posix,
                uri,
                partial_name(path),
                lambda partial: self._publish(partial, path, key),
                size_bytes=size_bytes,
                wanted=engine,
            )

    def open_kept(self, key: str, *, size_bytes: int) -> LocalWriter:
        """As ``Storage.open_kept``: ``.partial-kept-<name>``, locked by who writes it."""
        if self.capabilities.shape is Shape.OBJECT:
            return self.open_write(key, size_hint_bytes=size_bytes)
        path, uri = self._path(key), self.uri(key)
        with translated(uri, "write"):
            return KeptFile(
                self._posix,
                uri,
                kept_name(path),
                lambda partial: self._publish(partial, path, key),
                size_bytes,
            )

    def open_read(self, key: str) -> LocalReader:
        uri, flags = self.uri(key), self._flags(key)
        return self._reading("open", key, lambda path: LocalReader(self._posix, uri, path, flags))

    # -- names -------------------------------------------------------------------------

    def make_dir(self, key: str) -> None:
        path = self._path(key)
        with translated(self.uri(key), "make_dir"):
            make_dirs(self._posix, path, self._directory)
        self._probe_once(path, self.uri(key))

    def rename(self, source: str, target: str) -> None:
        start, end = self._path(source), self._path(target)
        if self.capabilities.shape is Shape.OBJECT:
            raise UnsupportedError("this mount does not rename directories", uri=self.uri(source))
        try:
            self._posix.rename(start, end)
        except OSError as error:
            if error.errno in HARD_TO_TELL:
                raise lost_answer(error, self.uri(target), "rename") from error
            if error.errno == errno.EISDIR or (
                error.errno == errno.ENOTDIR and self._stands(start) and self._stands(end)
            ):
                raise AlreadyExistsError(
                    "rename failed: something of another kind stands there",
                    errno=error.errno,
                    uri=self.uri(target),
                ) from error
            at = source if error.errno == errno.ENOENT and not self._stands(start) else target
            raise typed(error, self.uri(at), "rename") from error

    def link(self, source: str, target: str) -> None:
        start, end = self._path(source), self._path(target)
        if self.capabilities.shape is Shape.OBJECT:
            raise UnsupportedError("this mount is used without links", uri=self.uri(target))
        try:
            self._posix.link(start, end)
        except OSError as error:
            if error.errno in HARD_TO_TELL:
                raise lost_answer(error, self.uri(target), "link") from error
            if error.errno in _NO_LINKS:
                raise UnsupportedError(
                    f"link failed: {error.strerror}", errno=error.errno, uri=self.uri(target)
                ) from error
            at = source if error.errno == errno.ENOENT and not self._stands(start) else target
            raise typed(error, self.uri(at), "link") from error

    def remove(self, key: str) -> None:
        with translated(self.uri(key), "remove"):
            unlink_if_there(self._posix, self._path(key))

    def remove_dir(self, key: str) -> None:
        path = self._path(key)
        if self.capabilities.shape is Shape.OBJECT:
            return
        with translated(self.uri(key), "remove_dir"):
            try:
                self._posix.rmdir(path)
            except FileNotFoundError:
                return
            except NotADirectoryError as error:
                if not self._stands(path):
                    return  # it lies below something that is no directory: it is not there
                # A link to a directory is one too: what lies behind it was not made here.
                raise AlreadyExistsError(
                    "remove_dir failed: no directory stands there, but a link or a file",
                    errno=errno.ENOTDIR,
                    uri=self.uri(key),
                ) from error

    def remove_tree(self, key: str) -> None:
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        with translated(self.uri(key), "remove_tree"):
            left = remove_tree(self._posix, self._path(key))
        for name in left:
            # NFS keeps a file that is open somewhere on this node under such a name; it goes by
            # itself at the last close, and a trainer must not die of it.
            log.warning("left in place, still open on this node: %s in %s", name, self.uri(key))

    # -- certainty ---------------------------------------------------------------------

    def sync(self, key: str) -> None:
        path = self._path(key)
        try:
            with translated(self.uri(key), "sync"):
                sync_dir(self._posix, path)
        except NotFoundError:
            if self.capabilities.shape is not Shape.OBJECT:
                raise

    def refresh(self, key: str) -> None:
        with translated(self.uri(key), "refresh"):
            refresh_dir(self._posix, self._readable(key), self._directory)

    def touch(self, key: str) -> None:
        with translated(self.uri(key), "touch"):
            self._posix.utime(self._path(key))

    def space(self) -> Space | None:
        path = self._directory
        with translated(self.root, "space"):
            while True:
                try:
                    found = self._posix.statvfs(path)
                except FileNotFoundError:
                    # Not made yet: it will be on the filesystem of its nearest ancestor.
                    path = os.path.dirname(path)
                    continue
                if not found.f_blocks:
                    return None  # ramfs and its like count nothing: that is not "full"
                return Space(
                    free_bytes=found.f_bavail * found.f_frsize,
                    free_inodes=found.f_favail if found.f_files else None,
                )

    # -- inside ------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        """For what changes something: no link below the root is followed (``posix``)."""
        tail = self.uri(key).path.removeprefix(self.root.path).lstrip("/")
        return beneath(self._directory, tail) if tail else self._directory

    def _readable(self, key: str) -> str:
        """For what only reads."""
        if _is_control(key):
            return self._path(key)
        top = self._unlinked
        if top is None or key == top or not _is_below(key, top):
            return self.local_path(key)
        return beneath(self.local_path(top), key[len(top) :].lstrip("/"))

    def _flags(self, key: str) -> int:
        """For opening what only is read."""
        # The run's own files are no links: what it decides by lies in it.
        is_link_refused = _is_control(key) or (
            self._unlinked is not None and key != self._unlinked and _is_below(key, self._unlinked)
        )
        return os.O_NOFOLLOW if is_link_refused else 0

    def _parent(self, key: str) -> str:
        return holder_of(self._path(key))

    def _stands(self, path: str) -> bool:
        """For the wording of an error only; nothing is decided by it."""
        try:
            self._posix.stat(path, follow=False)
        except OSError:
            return False
        return True

    def _reading(self, action: str, key: str, look: Callable[[str], T]) -> T:
        """``look`` at the path of a key, which only reads."""
        path = self._readable(key)
        try:
            return self._looking_again(action, key, lambda: look(path))
        except SymlinkError:
            top = self._unlinked
            if top is None or not self._flags(key) or _is_control(key):
                raise
            with translated(self.uri(key), action):
                path = self._without_links(key[len(top) :], top)
            # Opened without following links as well: one that is put there now is not followed either.
            return self._looking_again(action, key, lambda: look(path))

    def _without_links(self, below: str, top: str) -> str:
        """The path that ``below`` leads to in the directory ``top`` through links that stay in it. ELOOP
        where one leads out, or where they lead on without end.
        """
        holder = self.local_path(top)
        left, passed, links = below.split("/"), list[str](), 0
        while left:
            name = left.pop(0)
            path = beneath(holder, "/".join([*passed, name]))
            if name in ("", "."):
                continue
            if name == "..":
                if not passed:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self.local_path(top))
                passed.pop()
                continue
            target = self._posix.readlink(path)
            if target is None:
                passed.append(name)
                continue
            links += 1
            if target.startswith(f"{holder}/"):
                passed, target = [], target[len(holder) :]
            elif target.startswith("/") or links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), without_mark(path))
            left = [*target.split("/"), *left]
        return beneath(holder, "/".join(passed)) if passed else holder

    def _looking_again(self, action: str, key: str, look: Callable[[], T]) -> T:
        """Repeat by name what an NFS server answers with ESTALE: a rename went under us."""
        for remaining in reversed(range(_STALE_TRIES)):
            try:
                with translated(self.uri(key), action):
                    return look()
            except StaleError:
                if not remaining:
                    raise
                # The client may go on taking the name for the file that is gone, until it asks anew.
                with contextlib.suppress(StorageError):
                    self.refresh(key.rpartition("/")[0])
        raise AssertionError("unreachable")

    def _in_directory(self, key: str, write: Callable[[], T]) -> T:
        """``write``, once more with the directory made where a mount is used like an object store:
        its callers, told so by ``capabilities``, make no directories.
        """
        try:
            return write()
        except NotFoundError:
            if self.capabilities.shape is not Shape.OBJECT:
                raise
            self.make_dir(key.rpartition("/")[0])
            return write()

    def _sync_names(self, directory: str, key: str, action: str) -> None:
        """Fsync after the name is there. A failure cannot say that nothing happened: it did."""
        try:
            sync_dir(self._posix, directory)
        except OSError as error:
            raise lost_answer(error, self.uri(key), action) from error

    def _probe_once(self, directory: str, uri: Uri) -> None:
        if self._capabilities is not None:
            return
        with self._lock:
            if self._capabilities is not None:
                return
            with translated(uri, "the first write"):
                self._capabilities = probe_posix(self._posix, directory)

    def _without_exclusive_create(self) -> None:
        known = self.capabilities
        self._capabilities = Capabilities(
            shape=known.shape,
            exclusive_create=False,
            atomic_replace=known.atomic_replace,
            conditional_replace=False,
            durable=known.durable,
        )

    def _no_exclusive_create(self, key: str) -> StorageError:
        return UnsupportedError(
            "this place has no hard links, hence no exclusive create",
            uri=self.uri(key),
            hint="use a filesystem with link(2) for fences that hold; see capabilities",
        )


def _is_control(key: str) -> bool:
    return _is_below(key, CONTROL)


def _is_below(key: str, top: str) -> bool:
    return not top or key == top or key.startswith(f"{top}/")


def files_at_once(posix: Posix, directory: str, size_bytes: int) -> int:
    """How many files in ``directory`` a process writes its bytes into.

    A file lets one thread write at a time. On a disk or over a network that does not matter, because the bytes
    wait for something else. In memory (tmpfs, ramfs) the copy that the thread makes is all that a write costs.

    Args:
        posix: The system calls.
        directory: An existing directory.
        size_bytes: What the process writes, all files together.

    Returns:
        1, or on a filesystem in memory one per core, at most 4, each of at least 64 MiB.
    """
    most = min(core_count(), _MAX_FILES, size_bytes // _MIN_FILE_BYTES)
    return most if most > 1 and _fs_type(posix, directory) in _IN_MEMORY else 1


def _fs_type(posix: Posix, directory: str) -> int | None:
    try:
        fd = posix.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return posix.fs_type(fd)
    finally:
        posix.close(fd)
