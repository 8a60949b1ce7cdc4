"""Names on a POSIX filesystem: make, make durable, look afresh, remove; without asking first.

    make_dirs        mkdir, upwards where the parent is missing, EEXIST is success; then fsync of
                     every directory that holds a name on the way
    sync_dir         fsync of a directory: its names survive a power cut
    refresh_dir      open + fstat: an NFS client asks the server again
    unlink_if_there  absent is success
    remove_tree      never follows a link, leaves what NFS keeps

``exists`` and ``is_dir`` are not asked anywhere: a network client may answer them from its cache,
while the operation itself is always answered by the server.
"""

from __future__ import annotations

import contextlib
import errno
import os

from ckptfs.storage.local.posix import Posix, holder_of

__all__ = ["make_dirs", "refresh_dir", "remove_tree", "sync_dir", "unlink_if_there"]

_LOOK = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OURS = _LOOK | os.O_NOFOLLOW
_NO_SUCH = (FileNotFoundError, NotADirectoryError)
_NOT_A_DIRECTORY = frozenset({errno.ENOTDIR, errno.ELOOP})
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_ROUNDS = 3


def unlink_if_there(posix: Posix, path: str) -> None:
    """Unlink a file; absent is success."""
    try:
        posix.unlink(path)
    except _NO_SUCH:
        return


def sync_dir(posix: Posix, path: str) -> bool:
    """Fsync a directory. False where directories cannot be synced (some FUSE and SMB mounts)."""
    fd = posix.open(path, _LOOK)
    try:
        posix.fsync(fd)
    except OSError as error:
        if error.errno in _NO_DIRECTORY_SYNC:
            return False
        raise
    finally:
        posix.close(fd)
    return True


def make_dirs(posix: Posix, path: str, root: str) -> None:
    """Make ``path`` and its missing ancestors; the names from ``root`` down to ``path`` are durable.

    Also those that stood already: whoever made them may not have come to the fsync, and bytes
    acknowledged below a name that vanishes are lost.
    """
    made = _make(posix, path)
    below = path
    while below != root:
        below = holder_of(below)
        sync_dir(posix, below)
    for name in made:
        if name != root and not name.startswith(f"{root}/"):
            sync_dir(posix, holder_of(name))
    try:
        sync_dir(posix, os.path.dirname(root))
    except PermissionError:
        # A parent that we may pass but not read (/home, say): if we had made the root in it, we
        # could write to it; then an unreadable parent is a mode that somebody chose.
        if root in made:
            raise


def _make(posix: Posix, path: str) -> list[str]:
    """Returns what was made here, topmost first."""
    try:
        posix.mkdir(path)
    except FileExistsError:
        return []
    except FileNotFoundError:
        parent = holder_of(path)
        if parent == path:
            raise
    else:
        return [path]
    made = _make(posix, parent)
    try:
        posix.mkdir(path)
    except FileExistsError:
        return made  # somebody made it meanwhile: success
    return [*made, path]


def refresh_dir(posix: Posix, path: str, root: str) -> None:
    """Open a directory and fstat it; where it is absent, the nearest one above.

    An absence may be cached too, and only a look at the holder of the name drops it: so the
    holder is refreshed, and the name asked for again. Above ``root`` as well, because a whole run
    that was not there is absent in the cache of its parent; but what lies there need not be readable.
    """
    if _look(posix, path):
        return
    parent = holder_of(path)
    if parent == path:
        return
    if path == root or not path.startswith(f"{root}/"):
        with contextlib.suppress(PermissionError):
            refresh_dir(posix, parent, root)
    else:
        refresh_dir(posix, parent, root)
    _look(posix, path)


def _look(posix: Posix, path: str) -> bool:
    try:
        fd = posix.open(path, _LOOK)
    except PermissionError:
        # It may be passed through and not be listed (0711). What is in it tells who is refused.
        return True
    except OSError as error:
        if isinstance(error, _NO_SUCH) or error.errno == errno.ESTALE:
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
    """Remove ``path`` and all below it; returns what NFS keeps (``.nfsXXXX``, open on this node).

    Every name is resolved against an open directory, so that nobody can swap a component for a
    link between the look and the unlink: a link is unlinked, what it points to stays. Absent is
    success everywhere, because another remover may be at work. OSError as the kernel gave it.
    """
    return _remove(posix, path, None)


def _remove(posix: Posix, name: str, dir_fd: int | None) -> list[str]:
    try:
        fd = posix.open(name, _OURS, dir_fd=dir_fd)
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno in _NOT_A_DIRECTORY:
            return _unlink(posix, name, dir_fd)
        raise
    try:
        for remaining in reversed(range(_ROUNDS)):
            left = _empty(posix, fd)
            try:
                posix.rmdir(name, dir_fd=dir_fd)
            except FileNotFoundError:
                return []
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    raise
                # A file that an unlink turned into .nfsXXXX shows up at the next look only.
                if left or not remaining:
                    return _only_silly(left, error)
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
    except _NO_SUCH:
        return []
    except OSError as error:
        if error.errno == errno.EBUSY and name.startswith(".nfs"):
            return [name]
        raise
    return []


def _only_silly(left: list[str], error: OSError) -> list[str]:
    if not left:
        raise error  # somebody keeps making new names in there
    return left
