"""From errno to a typed error with the URI in it: one table, used by every backend.

ENOENT ENOTDIR                     NotFoundError
EEXIST ENOTEMPTY                   AlreadyExistsError
EACCES EPERM EROFS                 AccessError
ENOSPC EDQUOT                      NoSpaceError
ESTALE                             StaleError
ELOOP                              SymlinkError     (with the link's path)
EINTR EAGAIN ETIMEDOUT EBUSY ...   TransientError   (after a change was asked for: AnswerLostError)
ENOTSUP ENOSYS EXDEV               UnsupportedError
anything else                      StorageError
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    SymlinkError,
    TransientError,
    UnsupportedError,
)
from ckptfs.uri import Uri, mask_credentials

__all__ = ["CONTROL", "HARD_TO_TELL", "lost_answer", "too_large", "translated", "typed"]

# Where whoever builds on a storage keeps what is its own: nothing in it is reached through a link.
CONTROL = ".ckptfs"

# A network filesystem may answer so although the server did, or will do, what was asked.
HARD_TO_TELL = frozenset(
    {errno.ETIMEDOUT, errno.EIO, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.EPIPE}
)

_TABLE: dict[int, tuple[type[StorageError], str | None]] = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), (NotFoundError, None)),
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY), (AlreadyExistsError, None)),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        (AccessError, "check the owner, group and mode of the directory, and the umask"),
    ),
    errno.EROFS: (AccessError, "the mount is read-only"),
    errno.ENOSPC: (NoSpaceError, "free space or inodes there; what was committed stays"),
    errno.EDQUOT: (NoSpaceError, "the quota is used up; what was committed stays"),
    errno.ELOOP: (SymlinkError, "remove the link; ckptfs changes nothing behind one"),
    errno.ESTALE: (StaleError, "the file moved on the server: look it up again"),
    **dict.fromkeys(
        (errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.EBUSY, errno.EMFILE, errno.ENFILE),
        (TransientError, None),
    ),
    **dict.fromkeys((errno.ENOTSUP, errno.ENOSYS, errno.EXDEV), (UnsupportedError, None)),
}

_LOOKS = frozenset({"read", "open", "stat", "list"})

# Root may do anything on a disk of its own.
_ROOT_IS_REFUSED = (
    "this process is root and is refused: an NFS export with root_squash takes root for nobody; "
    "run as the user who owns the directory, or export it with no_root_squash"
)


def typed(error: OSError, uri: Uri, action: str) -> StorageError:
    """The typed error for an OSError met while doing ``action`` ("read", "create", ...)."""
    if isinstance(error, StorageError):
        return error
    kind, hint = _TABLE.get(error.errno or 0, (None, None))
    if error.errno == errno.EACCES and uri.is_local and os.geteuid() == 0:
        hint = _ROOT_IS_REFUSED
    if kind is None:
        # A library may raise the builtin class without an errno.
        kind = (
            NotFoundError
            if isinstance(error, FileNotFoundError | NotADirectoryError)
            else AlreadyExistsError
            if isinstance(error, FileExistsError)
            else AccessError
            if isinstance(error, PermissionError)
            else TransientError
            if isinstance(error, TimeoutError | ConnectionError | BlockingIOError)
            else StorageError
        )
    said = os.strerror(error.errno) if error.errno else mask_credentials(str(error))
    if kind is SymlinkError and error.filename is not None:
        if action in _LOOKS and f"/{CONTROL}/" not in uri.path:
            hint = "ask for what it leads to (follow_links, --follow-links), or remove it"
        refused = f"{action} refused: {os.fsdecode(error.filename)} is a symbolic link"
        return kind(refused, errno=error.errno, uri=uri, hint=hint)
    return kind(
        f"{action} failed: {said or type(error).__name__}", errno=error.errno, uri=uri, hint=hint
    )


def lost_answer(error: BaseException, uri: Uri, action: str) -> AnswerLostError:
    """The error for a change that was asked for, and whose answer does not say what happened."""
    return AnswerLostError(
        f"{action} may have happened: {mask_credentials(str(error))}",
        errno=getattr(error, "errno", None),
        uri=uri,
        hint="read it back before doing it again",
    )


def too_large(uri: Uri, size_bytes: int, limit_bytes: int) -> StorageError:
    """The error for a small file that is none."""
    return StorageError(
        f"read refused: it has {size_bytes} bytes, and no such file has more than {limit_bytes}",
        errno=errno.EFBIG,
        uri=uri,
        hint="ckptfs did not write it; look at what stands there, or restore the file",
    )


@contextmanager
def translated(uri: Uri, action: str) -> Iterator[None]:
    """Turn every OSError inside into a typed error that names ``uri``."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise typed(error, uri, action) from error
