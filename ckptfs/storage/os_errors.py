"""Turn an errno into a typed error that names the URI: one table for every backend.

ENOENT ENOTDIR                     NotFoundError
EEXIST ENOTEMPTY                   AlreadyExistsError
EACCES EPERM EROFS                 AccessError
ENOSPC EDQUOT                      NoSpaceError
ESTALE                             StaleError
ELOOP                              SymlinkError     (with the link's path)
EINTR EAGAIN ETIMEDOUT EBUSY ...   TransientError   (of a change that may have happened: AnswerLostError)
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

__all__ = ["CONTROL", "IN_DOUBT_ERRNOS", "lost_answer", "too_large", "translated", "typed"]

# The directory in which the layers above keep their own files. Nothing in it is reached through a link.
CONTROL = ".ckptfs"

# A network filesystem may return these although the server made the change, or is yet to make it.
IN_DOUBT_ERRNOS = frozenset(
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
    errno.ENOSPC: (NoSpaceError, "free space or inodes; what was committed is safe"),
    errno.EDQUOT: (NoSpaceError, "the quota is used up; what was committed is safe"),
    errno.ELOOP: (SymlinkError, "remove the link; ckptfs changes nothing behind one"),
    errno.ESTALE: (StaleError, "the file moved on the server: look it up again"),
    **dict.fromkeys(
        (errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.EBUSY, errno.EMFILE, errno.ENFILE),
        (TransientError, None),
    ),
    **dict.fromkeys((errno.ENOTSUP, errno.ENOSYS, errno.EXDEV), (UnsupportedError, None)),
}

_LOOKS = frozenset({"read", "open", "stat", "list"})

# On a local disk root is never refused.
_ROOT_IS_REFUSED = (
    "this process is root, which an NFS export with root_squash refuses; run as the user who "
    "owns the directory, or export it with no_root_squash"
)


def typed(error: OSError, uri: Uri, action: str) -> StorageError:
    """Return the typed error for an OSError.

    Args:
        error: The error; a StorageError is returned as it is.
        uri: What the operation was about.
        action: What failed, as a verb: "read", "create", ...
    """
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
    reason = os.strerror(error.errno) if error.errno else mask_credentials(str(error))
    if kind is SymlinkError and error.filename is not None:
        if action in _LOOKS and f"/{CONTROL}/" not in uri.path:
            hint = "follow the link (follow_links, --follow-links), or remove it"
        refused = f"{action} refused: {os.fsdecode(error.filename)} is a symbolic link"
        return kind(refused, errno=error.errno, uri=uri, hint=hint)
    return kind(
        f"{action} failed: {reason or type(error).__name__}", errno=error.errno, uri=uri, hint=hint
    )


def lost_answer(error: BaseException, uri: Uri, action: str) -> AnswerLostError:
    """Return the error for a change that may or may not have happened, because its answer was lost."""
    return AnswerLostError(
        f"{action} may have happened: {mask_credentials(str(error))}",
        errno=getattr(error, "errno", None),
        uri=uri,
        hint="read it back before you repeat the call",
    )


def too_large(uri: Uri, size_bytes: int, limit_bytes: int) -> StorageError:
    """Return the error for a file that is larger than files of its kind may be."""
    return StorageError(
        f"read refused: it has {size_bytes} bytes, but a file of this kind has at most "
        f"{limit_bytes}",
        errno=errno.EFBIG,
        uri=uri,
        hint="ckptfs did not write it; look at the file, or restore it",
    )


@contextmanager
def translated(uri: Uri, action: str) -> Iterator[None]:
    """Raise every OSError of the block as a typed error that names ``uri``; see ``typed``."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise typed(error, uri, action) from error
