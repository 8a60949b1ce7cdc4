"""What a mount really does, found by trying it under names of our own.

    exclusive_create   link(2) works, refuses an existing name, and the new name has the bytes
    atomic_replace     rename over a file shows the new bytes and removes the old name
    shape              rename of a directory moves it: same inode below the new name, no old name
    durable            fsync of a directory is accepted

FUSE mounts of object stores look like filesystems; some have no links, and some copy a directory file by
file when it is renamed. So the type of the mount never decides, only what it did in this probe.
"""

from __future__ import annotations

import errno
import logging
import secrets

from ckptfs.storage.base import Capabilities, Shape
from ckptfs.storage.local.directories import remove_tree, sync_dir
from ckptfs.storage.local.files import may_exist, read_file, unlink_quietly, write_file
from ckptfs.storage.local.posix import Posix, without_mark
from ckptfs.uri import Uri

__all__ = ["PROBE_PREFIX", "probe_posix"]

log = logging.getLogger("ckptfs.storage")

# A sweep of partial files also finds what a killed process leaves of a probe.
PROBE_PREFIX = ".partial-probe-"

# Errors that mean "not supported" rather than "failed now": only these become a capability.
_CANNOT = frozenset(
    {
        errno.EPERM,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.EMLINK,
        errno.EXDEV,
        errno.EINVAL,
    }
)


def probe_posix(posix: Posix, directory: str) -> Capabilities:
    """Try everything once in an existing, writable ``directory``.

    Nothing is left behind. This takes some thirty system calls, one of them an fsync of the directory.

    Raises:
        OSError: The probe failed without an answer (no space, no permission, no such directory).
    """
    stem = f"{directory}/{PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        exclusive = _has_links(posix, stem)
        replaces = _replaces_files(posix, stem)
        moves = _moves_directories(posix, stem)
        durable = sync_dir(posix, directory) is not None
    finally:
        for tail in "abc":
            unlink_quietly(posix, f"{stem}{tail}")
        for tail in "de":
            _remove_quietly(posix, f"{stem}{tail}")
    return Capabilities(
        shape=Shape.FILESYSTEM if moves else Shape.OBJECT,
        exclusive_create=exclusive,
        atomic_replace=replaces,
        conditional_replace=False,
        durable=durable,
    )


def _has_links(posix: Posix, stem: str) -> bool:
    write_file(posix, f"{stem}a", b"first", durable=False)
    try:
        posix.link(f"{stem}a", f"{stem}b")
    except FileExistsError:
        pass  # no other process knows this name: we made it, and the answer was lost
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    try:
        posix.link(f"{stem}a", f"{stem}b")
    except FileExistsError:
        return _content(posix, f"{stem}b") == b"first"
    return False


def _replaces_files(posix: Posix, stem: str) -> bool:
    write_file(posix, f"{stem}c", b"second", durable=False)
    try:
        posix.rename(f"{stem}c", f"{stem}a")
    except OSError as error:
        if error.errno in _CANNOT or isinstance(error, FileExistsError):
            return False
        raise
    has_new_bytes = _content(posix, f"{stem}a") == b"second"
    return has_new_bytes and _is_gone(posix, f"{stem}c")


def _moves_directories(posix: Posix, stem: str) -> bool:
    posix.mkdir(f"{stem}d")
    write_file(posix, f"{stem}d/f", b"below", durable=False)
    before = posix.stat(f"{stem}d/f").st_ino
    try:
        posix.rename(f"{stem}d", f"{stem}e")
    except OSError as error:
        if error.errno in _CANNOT or error.errno in (errno.EISDIR, errno.ENOTEMPTY):
            return False
        raise
    # A rename that copies makes new files: another inode, or both names for a while.
    moved = posix.stat(f"{stem}e/f").st_ino == before
    return moved and _is_gone(posix, f"{stem}d")


def _content(posix: Posix, path: str) -> bytes:
    return read_file(posix, path, Uri("file", "", without_mark(path)))


def _is_gone(posix: Posix, path: str) -> bool:
    """Whether nothing exists at ``path``.

    Any other error (ESTALE, EIO) is raised. Taken for an answer, it would make this process treat a
    filesystem as an object store.
    """
    try:
        posix.stat(path, follow=False)
    except FileNotFoundError:
        return True
    return False


def _remove_quietly(posix: Posix, path: str) -> None:
    try:
        remove_tree(posix, path)
    except OSError as error:
        # The result or error of the probe matters more than a directory that could not be removed.
        if may_exist(posix, path):
            log.warning("left behind: %s (%s)", without_mark(path), error)
