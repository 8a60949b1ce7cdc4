"""The local backend: POSIX filesystems, and network filesystems that are mounted.

    create   staging file, fsync      link to the key        fsync directory   unlink staging
    replace  .partial-*, fsync        rename over the key    fsync directory
    data     .partial-*, fsync        rename over the key    (sync, by the caller, once for all)
    make_dir mkdir, EEXIST is success                        fsync every parent up to one that is durable

No call checks for existence first, because a network client may answer such a check from its cache: each
call acts and looks at the result. A call that fails or is interrupted removes what it made. Only after a
lost answer does the staging file stay, because the link may still happen.
Modes are 0o666 and 0o777 & ~umask. There is no chmod and no chown, so that setgid and default ACLs work;
the exception is a file that replaces a person's own file (``ReplacingWriter``).

The root may be reached through links. Below it, an operation that writes, moves or deletes never follows a
link: it raises SymlinkError, whatever was there before. An operation that only reads follows links, except
in ``.ckptfs``. So a step that was moved to another disk and linked back is read as before, and the log of
another run never decides anything.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
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
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.storage.local.directories import (
    DurableDirs,
    held_open,
    make_dirs,
    refresh_dir,
    remove_tree,
    sync_dir,
    unlink_if_present,
)
from ckptfs.storage.local.files import partial_name, read_file, unlink_quietly, write_file
from ckptfs.storage.local.mount_probe import probe_posix
from ckptfs.storage.local.posix import (
    Posix,
    beneath,
    core_count,
    hold_directory,
    parent_of,
    without_mark,
)
from ckptfs.storage.local.reader import LocalReader
from ckptfs.storage.local.writers import (
    InPlaceWriter,
    LocalWriter,
    ReplacingWriter,
    ResumableFile,
    WindowedFile,
    WriteMethod,
    find_target,
    resumable_name,
)
from ckptfs.storage.os_errors import IN_DOUBT_ERRNOS, lost_answer, translated, typed
from ckptfs.uri import Uri

__all__ = ["ASSUMED", "LocalStorage"]

log = logging.getLogger("ckptfs.storage")
T = TypeVar("T")

# What we assume of a mounted filesystem until this process writes to it. A reader must not write a
# probe, and makes none of the decisions that depend on these answers.
ASSUMED = Capabilities(
    shape=Shape.FILESYSTEM,
    exclusive_create=True,
    atomic_replace=True,
    conditional_replace=False,
    durable=True,
)
# Each try opens, stats and reads a file. If a file is replaced all the time, one try in four meets a
# replacement.
_STALE_TRIES = 10
_MAX_LINKS = 40  # the kernel's limit
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})  # f_type of tmpfs and ramfs
_MAX_FILES = 4
_MIN_FILE_BYTES = 64 << 20
_NO_HARD_LINKS = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)


class LocalStorage(Storage):
    """Bytes under one directory.

    Args:
        root: A ``file`` URI, or the URI of a wrapper; ``directory`` is the real path then.
        posix: The system calls. Tests pass a simulated disk.
        directory: The directory if ``root`` does not name it.
    """

    def __init__(
        self, root: Uri, *, posix: Posix | None = None, directory: str | None = None
    ) -> None:
        self.root = root
        self._directory = directory or root.local_path
        self._posix = posix or Posix()
        self._capabilities: Capabilities | None = None
        self._no_links_below: str | None = None  # below this key reads follow no link
        self._durable = DurableDirs()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_durable")  # what this process synced says nothing to another machine
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._durable = DurableDirs()
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """What the probe found, once this process has made a directory, created or replaced something here.

        Before that, what any POSIX filesystem does (``ASSUMED``). Reading this property writes nothing.
        """
        return self._capabilities or ASSUMED

    def local_path(self, key: str) -> str:
        """The absolute path of a key."""
        return without_mark(self._write_path(key))

    # -- small, whole ------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        return self._read(key, None)

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        return self._read(key, limit_bytes)

    def _read(self, key: str, limit_bytes: int | None) -> bytes:
        uri, flags = self.uri(key), self._flags(key)

        def look(path: str) -> bytes:
            path = path if flags else self._write_path(key)
            return read_file(self._posix, path, uri, limit_bytes=limit_bytes, flags=flags)

        return self._read_from("read", key, look)

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """As ``Storage.create``. When this raises AlreadyExistsError, the existing file is durable.

        Raises:
            UnsupportedError: The filesystem has no hard links. ``capabilities`` says so from then on.
        """
        path, temporary, directory = (
            self._write_path(key),
            self._write_path(staging),
            self._parent_path(key),
        )
        self._probe_once(parent_of(temporary), self.uri(staging))
        if not self.capabilities.exclusive_create:
            raise self._no_exclusive_create(key)
        keep_staging = False
        with hold_directory(parent_of(temporary)):
            try:
                with translated(self.uri(staging), "create"):
                    try:
                        write_file(self._posix, temporary, data)
                    except FileExistsError:
                        # Never O_TRUNC: after a lost answer the staging file and the entry are one inode,
                        # and truncating it would empty an entry that others have read.
                        unlink_if_present(self._posix, temporary)
                        write_file(self._posix, temporary, data)
                # Not opened earlier: a directory that was made again by now would refuse the name.
                with held_open(self._posix, directory):
                    try:
                        self._posix.link(temporary, path)
                    except FileExistsError as error:
                        # The maker of the entry may not have come to its own fsync, and our caller relies
                        # on the entry.
                        self._sync_directory(directory, key, "create")
                        raise typed(error, self.uri(key), "create") from error
                    except OSError as error:
                        if error.errno in IN_DOUBT_ERRNOS:
                            keep_staging = True
                            raise lost_answer(error, self.uri(key), "create") from error
                        if error.errno in _NO_HARD_LINKS:
                            self._without_exclusive_create()
                            raise self._no_exclusive_create(key) from error
                        raise typed(error, self.uri(key), "create") from error
                    self._sync_directory(directory, key, "create")
            finally:
                if not keep_staging:
                    unlink_quietly(self._posix, temporary)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        if if_match is not None:
            raise UnsupportedError("no conditional replace on a filesystem", uri=self.uri(key))
        path, directory = self._write_path(key), self._parent_path(key)
        self._write_in_directory(key, lambda: self._replace(path, data, key))
        self._sync_directory(directory, key, "replace")

    def _replace(self, path: str, data: bytes, key: str) -> None:
        self._probe_once(parent_of(path), self.uri(key))
        partial = partial_name(path)
        done = False
        try:
            with translated(self.uri(key), "replace"):
                write_file(self._posix, partial, data)
            self._publish(partial, path, key)
            done = True
        finally:
            if not done:
                unlink_quietly(self._posix, partial)

    def _publish(self, partial: str, path: str, key: str) -> None:
        try:
            self._posix.rename(partial, path)
        except OSError as error:
            if error.errno in IN_DOUBT_ERRNOS:
                raise lost_answer(error, self.uri(key), "write") from error
            raise typed(error, self.uri(key), "write") from error

    def stat(self, key: str) -> Stat:
        follow = not self._flags(key)

        def look(path: str) -> os.stat_result:
            found = self._posix.stat(path, follow=follow)
            if not follow and stat.S_ISLNK(found.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), without_mark(path))
            return found

        found = self._read_from("stat", key, look)
        is_dir = stat.S_ISDIR(found.st_mode)
        if is_dir and self.capabilities.shape is Shape.OBJECT:
            raise NotFoundError("stat failed: a prefix, not a file", uri=self.uri(key))
        size_bytes = 0 if is_dir else found.st_size
        return Stat(size_bytes, is_dir, modified_s=found.st_mtime)

    def list(self, key: str) -> list[Entry]:
        try:
            found = self._read_from("list", key, self._posix.scandir)
        except NotFoundError:
            if self.capabilities.shape is Shape.OBJECT:
                return []
            raise
        return usable((Entry(*one) for one in found), self.uri(key))

    def refusing_links(self, top: str) -> LocalStorage:
        self.uri(top)
        strict = copy.copy(self)
        strict._no_links_below = top  # noqa: SLF001 - one of our own
        return strict

    def refuse_link(self, key: str) -> None:
        path = self._write_path(key)
        with translated(self.uri(key), "write"):
            try:
                found = self._posix.stat(path, follow=False)
            except (FileNotFoundError, NotADirectoryError):
                return
            if stat.S_ISLNK(found.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), without_mark(path))

    # -- large, streamed ---------------------------------------------------------------

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> LocalWriter:
        path, uri = self._write_path(key), self.uri(key)
        # A mount that is used like an object store may accept bytes through the page cache only.
        is_mount = self.capabilities.shape is Shape.FILESYSTEM
        size_bytes = (size_hint_bytes or 0) if is_mount else 0

        def begin() -> LocalWriter:
            with translated(uri, "write"):
                return LocalWriter(
                    self._posix,
                    uri,
                    partial_name(path),
                    lambda partial: self._publish(partial, path, key),
                    size_bytes=size_bytes,
                )

        return self._write_in_directory(key, begin)

    def write_files(self, folder: str, files: Mapping[str, bytes]) -> None:
        # One lookup of the directory for all files and for the sync.
        with held_open(self._posix, self._write_path(folder)):
            for name, data in files.items():
                key = f"{folder}/{name}" if folder else name
                with self.open_write(key, size_hint_bytes=len(data)) as writer:
                    writer.write(data)
            self.sync(folder)

    def open_over(self, key: str) -> DataWriter:
        """As ``Storage.open_over``. Never used for the files of a run, which belong to ckptfs."""
        uri = self.uri(key)

        def begin() -> DataWriter:
            target = find_target(self._posix, self.local_path(key), uri)
            if target.method is WriteMethod.IN_PLACE:
                return InPlaceWriter(self._posix, uri, target.path)

            def publish(partial: str) -> None:
                self._publish(partial, target.path, key)
                # If a link led elsewhere, the name is not in the directory that the caller syncs.
                self._sync_directory(parent_of(target.path), key, "write")

            with translated(uri, "write"):
                return ReplacingWriter(self._posix, uri, partial_name(target.path), publish, target)

        return self._write_in_directory(key, begin)

    def files_at_once(self, key: str, size_bytes: int) -> int:
        """As ``Storage.files_at_once``: more than one on a filesystem in memory only."""
        return files_at_once(self._posix, self.local_path(key), size_bytes)

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        """As ``Storage.open_parallel``.

        None on a mount that is used like an object store, which may accept bytes in order only.
        """
        if self.capabilities.shape is Shape.OBJECT:
            return None
        path, uri = self._write_path(key), self.uri(key)
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
        """As ``Storage.open_kept``: the file ``.partial-kept-<name>``, locked by its writer."""
        if self.capabilities.shape is Shape.OBJECT:
            return self.open_write(key, size_hint_bytes=size_bytes)
        path, uri = self._write_path(key), self.uri(key)
        with translated(uri, "write"):
            return ResumableFile(
                self._posix,
                uri,
                resumable_name(path),
                lambda partial: self._publish(partial, path, key),
                size_bytes,
            )

    def open_read(self, key: str) -> LocalReader:
        uri, flags = self.uri(key), self._flags(key)

        def look(path: str) -> LocalReader:
            return LocalReader(self._posix, uri, path if flags else self._write_path(key), flags)

        return self._read_from("open", key, look)

    # -- names -------------------------------------------------------------------------

    def make_dir(self, key: str) -> None:
        path = self._write_path(key)
        with translated(self.uri(key), "make_dir"):
            make_dirs(self._posix, path, self._directory, self._durable)
        self._probe_once(path, self.uri(key))

    def make_dir_unsynced(self, key: str) -> None:
        path = self._write_path(key)
        with translated(self.uri(key), "make_dir"):
            make_dirs(self._posix, path, self._directory, self._durable, is_synced=False)
        self._probe_once(path, self.uri(key))

    def rename(self, source: str, target: str) -> None:
        source_path, target_path = self._write_path(source), self._write_path(target)
        if self.capabilities.shape is Shape.OBJECT:
            raise UnsupportedError("this mount does not rename directories", uri=self.uri(source))
        for moved in (source_path, target_path):
            self._durable.forget(moved)
        try:
            self._posix.rename(source_path, target_path)
        except OSError as error:
            if error.errno in IN_DOUBT_ERRNOS:
                raise lost_answer(error, self.uri(target), "rename") from error
            if error.errno == errno.EISDIR or (
                error.errno == errno.ENOTDIR
                and self._exists(source_path)
                and self._exists(target_path)
            ):
                raise AlreadyExistsError(
                    "rename failed: the target exists and is of another kind",
                    errno=error.errno,
                    uri=self.uri(target),
                ) from error
            at = source if error.errno == errno.ENOENT and not self._exists(source_path) else target
            raise typed(error, self.uri(at), "rename") from error

    def link(self, source: str, target: str) -> None:
        source_path, target_path = self._write_path(source), self._write_path(target)
        if self.capabilities.shape is Shape.OBJECT:
            raise UnsupportedError(
                "hard links are switched off for this mount", uri=self.uri(target)
            )
        try:
            self._posix.link(source_path, target_path)
        except OSError as error:
            if error.errno in IN_DOUBT_ERRNOS:
                raise lost_answer(error, self.uri(target), "link") from error
            if error.errno in _NO_HARD_LINKS:
                raise UnsupportedError(
                    f"link failed: {error.strerror}", errno=error.errno, uri=self.uri(target)
                ) from error
            at = source if error.errno == errno.ENOENT and not self._exists(source_path) else target
            raise typed(error, self.uri(at), "link") from error

    def remove(self, key: str) -> None:
        with translated(self.uri(key), "remove"):
            unlink_if_present(self._posix, self._write_path(key))

    def remove_dir(self, key: str) -> None:
        path = self._write_path(key)
        if self.capabilities.shape is Shape.OBJECT:
            return
        with translated(self.uri(key), "remove_dir"):
            try:
                self._posix.rmdir(path)
            except FileNotFoundError:
                return
            except NotADirectoryError as error:
                if not self._exists(path):
                    return  # an ancestor is not a directory: nothing exists at this path
                # That includes a link to a directory: we did not make its target.
                raise AlreadyExistsError(
                    "remove_dir failed: it is a link or a file, not a directory",
                    errno=errno.ENOTDIR,
                    uri=self.uri(key),
                ) from error

    def remove_tree(self, key: str) -> None:
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        with translated(self.uri(key), "remove_tree"):
            left = remove_tree(self._posix, self._write_path(key))
        for name in left:
            # NFS keeps a file that is open on this node under such a name. It disappears at the last
            # close, and a training job must not fail because of it.
            log.warning("left in place, still open on this node: %s in %s", name, self.uri(key))

    # -- certainty ---------------------------------------------------------------------

    def sync(self, key: str) -> None:
        path = self._write_path(key)
        try:
            with translated(self.uri(key), "sync"):
                sync_dir(self._posix, path)
        except NotFoundError:
            if self.capabilities.shape is not Shape.OBJECT:
                raise

    def refresh(self, key: str) -> None:
        with translated(self.uri(key), "refresh"):
            refresh_dir(self._posix, self._read_path(key), self._directory)

    def touch(self, key: str) -> None:
        with translated(self.uri(key), "touch"):
            self._posix.utime(self._write_path(key))

    def space(self) -> Space | None:
        path = self._directory
        with translated(self.root, "space"):
            while True:
                try:
                    found = self._posix.statvfs(path)
                except FileNotFoundError:
                    # Not made yet: the directory will be on the filesystem of its nearest ancestor.
                    path = os.path.dirname(path)
                    continue
                if not found.f_blocks:
                    return None  # ramfs and similar filesystems report zero blocks: that does not mean full
                return Space(
                    free_bytes=found.f_bavail * found.f_frsize,
                    free_inodes=found.f_favail if found.f_files else None,
                )

    # -- inside ------------------------------------------------------------------------

    def _write_path(self, key: str) -> str:
        """The path for an operation that changes something: no link below the root is followed (``posix``)."""
        tail = self.uri(key).path.removeprefix(self.root.path).lstrip("/")
        return beneath(self._directory, tail) if tail else self._directory

    def _read_path(self, key: str) -> str:
        """The path for an operation that only reads."""
        if _is_control(key):
            return self._write_path(key)
        top = self._no_links_below
        if top is None or key == top or not _is_below(key, top):
            return self.local_path(key)
        return beneath(self.local_path(top), key[len(top) :].lstrip("/"))

    def _flags(self, key: str) -> int:
        """The flags for opening a file that is only read."""
        # The run's control files are never links: the run makes its decisions by them.
        is_link_refused = _is_control(key) or (
            self._no_links_below is not None
            and key != self._no_links_below
            and _is_below(key, self._no_links_below)
        )
        return os.O_NOFOLLOW if is_link_refused else 0

    def _parent_path(self, key: str) -> str:
        return parent_of(self._write_path(key))

    def _exists(self, path: str) -> bool:
        """Whether anything exists at ``path``: for the wording of an error, never for a decision."""
        try:
            self._posix.stat(path, follow=False)
        except OSError:
            return False
        return True

    def _read_from(self, action: str, key: str, look: Callable[[str], T]) -> T:
        """Call ``look``, which only reads, with the path of ``key``."""
        path = self._read_path(key)
        try:
            return self._retry_if_stale(action, key, lambda: look(path))
        except SymlinkError:
            top = self._no_links_below
            if top is None or not self._flags(key) or _is_control(key):
                raise
            with translated(self.uri(key), action):
                path = self._resolve_inside(key[len(top) :], top)
            # ``look`` opens this path without following links: a link that appears now is not followed either.
            return self._retry_if_stale(action, key, lambda: look(path))

    def _resolve_inside(self, below: str, top: str) -> str:
        """Resolve ``below``, a path in the directory ``top``, through links that stay in ``top``.

        Raises:
            OSError: ELOOP if a link leads out of ``top``, or there are too many links.
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
            elif target.startswith("/") or links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), without_mark(path))
            left = [*target.split("/"), *left]
        return beneath(holder, "/".join(passed)) if passed else holder

    def _retry_if_stale(self, action: str, key: str, look: Callable[[], T]) -> T:
        """Repeat ``look`` by name after ESTALE: another process replaced the file by a rename."""
        for remaining in reversed(range(_STALE_TRIES)):
            try:
                with translated(self.uri(key), action):
                    return look()
            except StaleError:
                if not remaining:
                    raise
                # Until the directory is refreshed, the NFS client may take the name for the file that is gone.
                with contextlib.suppress(StorageError):
                    self.refresh(key.rpartition("/")[0])
        raise AssertionError("unreachable")

    def _write_in_directory(self, key: str, write: Callable[[], T]) -> T:
        """Call ``write``, and once more with the directory made on a mount that is used like an object store.

        By ``capabilities`` the callers know that this is an object store, so they make no directories.
        """
        try:
            return write()
        except NotFoundError:
            if self.capabilities.shape is not Shape.OBJECT:
                raise
            self.make_dir(key.rpartition("/")[0])
            return write()

    def _sync_directory(self, directory: str, key: str, action: str) -> None:
        """Fsync a directory after a name was made in it. If this fails, the change may have happened."""
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
            "this place has no hard links, so it has no exclusive create",
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
