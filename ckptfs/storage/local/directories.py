"""Directories of a POSIX filesystem: make, make durable, refresh, remove.

    make_dirs          mkdir, parents first where they are missing, EEXIST is success; then fsync of
                       every directory on the path, up to one that this process made durable before
    sync_dir           fsync of a directory: its names survive a power cut
    refresh_dir        open + fstat, which makes an NFS client ask the server again
    unlink_if_present  absent is success
    remove_tree        never follows a link, leaves the files that NFS keeps

Nothing here checks for existence first: a network client may answer such a check from its cache, while the
server answers the operation itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ckptfs.storage.local.posix import Identity, Posix, held_fd, hold_directory, parent_of

__all__ = [
    "DurableDirs",
    "held_open",
    "make_dirs",
    "refresh_dir",
    "remove_tree",
    "sync_dir",
    "unlink_if_present",
]

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_NO_LINK = _OPEN_DIRECTORY | os.O_NOFOLLOW
_ABSENT = (FileNotFoundError, NotADirectoryError)
_NOT_A_DIRECTORY = frozenset({errno.ENOTDIR, errno.ELOOP})
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_TRIES = 3
_MOST_KNOWN = 64


def unlink_if_present(posix: Posix, path: str) -> None:
    """Unlink a file. An absent file is success."""
    try:
        posix.unlink(path)
    except _ABSENT:
        return


@contextmanager
def held_open(posix: Posix, path: str) -> Iterator[None]:
    """Open a directory once for the calls of this block in it and for its ``sync_dir``: see ``hold_directory``.

    Where it cannot be opened, each call of the block fails or succeeds by itself.
    """
    fd = None
    with suppress(OSError):
        fd = posix.open(path, _OPEN_DIRECTORY)
    if fd is None:
        yield
        return
    try:
        with hold_directory(path, fd):
            yield
    finally:
        with suppress(OSError):  # nothing was written through it, and its fsync has its own answer
            posix.close(fd)


def sync_dir(posix: Posix, path: str) -> Identity | None:
    """Fsync a directory and return its identity.

    Returns:
        The identity; None if directories cannot be synced (some FUSE and SMB mounts).
    """
    held = held_fd(path)
    fd = posix.open(path, _OPEN_DIRECTORY) if held is None else held
    try:
        posix.fsync(fd)
        return posix.identity(fd)
    except OSError as error:
        if error.errno in _NO_DIRECTORY_SYNC:
            return None
        raise
    finally:
        if held is None:
            posix.close(fd)


class DurableDirs:
    """Directories that this process has made durable: their own names and all names above them.

    Each path is stored with the identity of its directory. A directory that was removed and made
    again is another one, and its maker may not have synced its name yet. If the identity has no
    time of birth, it may be the same for both, so the directory is synced again. Any thread may use
    this.
    """

    def __init__(self) -> None:
        self._known: dict[str, Identity] = {}

    def has(self, path: str, identity: Identity) -> bool:
        """Whether the directory that is at ``path`` now is one of them."""
        return self._known.get(path) == identity

    def nearest(self, path: str, root: str) -> str | None:
        """Return the deepest directory above ``path`` that was one of them when it was last seen."""
        while path != root:
            path = parent_of(path)
            if path in self._known:
                return path
        return None

    def add(self, found: dict[str, Identity]) -> None:
        """Record that these directories are durable now."""
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()  # an unknown directory is synced once more
        self._known.update((path, one) for path, one in found.items() if one.born_ns)

    def forget(self, path: str) -> None:
        """Forget ``path`` and everything below it.

        They are being moved, so their names are not the ones that were synced.
        """
        for known in list(self._known):
            if known == path or known.startswith(f"{path}/"):
                self._known.pop(known, None)


def make_dirs(
    posix: Posix, path: str, root: str, durable: DurableDirs, *, is_synced: bool = True
) -> None:
    """Make ``path`` and its missing ancestors. The names from ``root`` down to ``path`` are durable then.

    Directories that existed are synced, too: their maker may not have come to its own fsync, and bytes that
    were acknowledged below a name that vanishes are lost. What is above a directory that this process made
    durable before is not synced again.

    Args:
        posix: The system calls.
        path: The directory.
        root: The directory of the storage.
        durable: What this process has made durable; it learns what this call adds.
        is_synced: Whether the name of ``path`` itself is made durable; if not, only the names above it are.
    """
    with ExitStack() as held:
        made = list[str]()
        if not _make_below(posix, path, durable.nearest(path, root), held):
            held.close()
            made = _make(posix, path)
        synced = dict[str, Identity]()
        below = path if is_synced or path == root else parent_of(path)
        while below != root:
            below = parent_of(below)
            identity = sync_dir(posix, below)
            if identity is not None and durable.has(below, identity):
                durable.add(synced)
                return
            if identity is not None:
                synced[below] = identity
    for name in made:
        if name != root and not name.startswith(f"{root}/"):
            sync_dir(posix, parent_of(name))
    try:
        sync_dir(posix, os.path.dirname(root))
    except PermissionError:
        # We may pass through this parent but not read it, as with /home. That is an error only if we
        # made the root in it: then we can write to it, and it is unreadable because of a mode that
        # somebody chose.
        if root in made:
            raise
    durable.add(synced)


def _make_below(posix: Posix, path: str, top: str | None, held: ExitStack) -> bool:
    """Make ``path`` and what is missing between it and ``top``. Each parent stays open, for its sync.

    Returns:
        False if ``top`` is None, or a directory was removed in the meantime: nothing is made below it then.
    """
    if top is None:
        return False
    missing = list[str]()
    while path != top:
        missing.append(path)
        path = parent_of(path)
    for name in reversed(missing):
        held.enter_context(held_open(posix, parent_of(name)))
        try:
            posix.mkdir(name)
        except FileExistsError:
            continue
        except FileNotFoundError:
            return False
    return True


def _make(posix: Posix, path: str) -> list[str]:
    """Make ``path`` and its ancestors. Returns the directories that this call made, topmost first."""
    try:
        posix.mkdir(path)
    except FileExistsError:
        return []
    except FileNotFoundError:
        parent = parent_of(path)
        if parent == path:
            raise
    else:
        return [path]
    made = _make(posix, parent)
    try:
        posix.mkdir(path)
    except FileExistsError:
        return made  # another process made it in between: success
    return [*made, path]


def refresh_dir(posix: Posix, path: str, root: str) -> None:
    """Open a directory and fstat it; where it is absent, refresh its parent and try again.

    An NFS client caches an absence, too, and drops it only when the parent directory is refreshed. That holds
    above ``root`` as well, because the cache of its parent may hold the absence of the whole run; but the
    directories above need not be readable.
    """
    if _look(posix, path):
        return
    parent = parent_of(path)
    if parent == path:
        return
    if path == root or not path.startswith(f"{root}/"):
        with suppress(PermissionError):
            refresh_dir(posix, parent, root)
    else:
        refresh_dir(posix, parent, root)
    _look(posix, path)


def _look(posix: Posix, path: str) -> bool:
    try:
        fd = posix.open(path, _OPEN_DIRECTORY)
    except PermissionError:
        # The directory may be passed through but not listed (0711). An access to its contents shows who is
        # refused.
        return True
    except OSError as error:
        if isinstance(error, _ABSENT) or error.errno == errno.ESTALE:
            return False
        raise
    try:
        posix.fstat(fd)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return False
    finally:
        posix.close(fd)
    return True


def remove_tree(posix: Posix, path: str) -> list[str]:
    """Remove ``path`` and everything below it.

    Every name is resolved against an open directory, so that no process can replace a component by
    a link between the check and the unlink. A link is unlinked, its target stays. Absent is success
    everywhere, because another process may be removing the same tree.

    Returns:
        The names of files that NFS keeps (``.nfsXXXX``) because they are open on this node.

    Raises:
        OSError: As the kernel reports it.
    """
    return _remove(posix, path, None)


def _remove(posix: Posix, name: str, dir_fd: int | None) -> list[str]:
    try:
        fd = posix.open(name, _OPEN_NO_LINK, dir_fd=dir_fd)
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno in _NOT_A_DIRECTORY:
            return _unlink(posix, name, dir_fd)
        raise
    try:
        for remaining in reversed(range(_TRIES)):
            left = _empty(posix, fd)
            try:
                posix.rmdir(name, dir_fd=dir_fd)
            except FileNotFoundError:
                return []
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    raise
                # A file that an unlink turned into .nfsXXXX appears in the next listing only.
                if left or not remaining:
                    return _check_nfs_leftovers(left, error)
            else:
                return []
        raise AssertionError("unreachable")
    finally:
        posix.close(fd)


def _empty(posix: Posix, fd: int) -> list[str]:
    left: list[str] = []
    for name, is_dir, _ in posix.scandir(fd):
        below = _remove(posix, name, fd) if is_dir else _unlink(posix, name, fd)
        left += [f"{name}/{entry}" if is_dir else entry for entry in below]
    return left


def _unlink(posix: Posix, name: str, dir_fd: int | None) -> list[str]:
    try:
        posix.unlink(name, dir_fd=dir_fd)
    except _ABSENT:
        return []
    except OSError as error:
        if error.errno == errno.EBUSY and name.startswith(".nfs"):
            return [name]
        raise
    return []


def _check_nfs_leftovers(left: list[str], error: OSError) -> list[str]:
    if not left:
        raise error  # another process keeps making new names in the directory
    return left
