"""Exit codes: one number per thing that a script would do next. Pure.

    0  done, or yes                     4  not permitted, or no valid credentials
    1  no: damaged, too old, differs    5  the storage failed, or cannot do that
    2  wrong call                       6  somebody else's: busy, fenced, taken
    3  not found                        7  unknown: it may have happened     130  Ctrl-C

The numbers are part of the interface: docs/cli.md has them, and they do not change.
"""

from __future__ import annotations

from enum import IntEnum

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    CommitInDoubtError,
    FencedError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    RunBusyError,
    StateError,
    StorageError,
    UriError,
)

__all__ = ["Exit", "exit_of"]


class Exit(IntEnum):
    """How a command ends."""

    OK = 0
    NO = 1
    USAGE = 2
    NOT_FOUND = 3
    ACCESS = 4
    STORAGE = 5
    TAKEN = 6
    UNKNOWN = 7
    INTERRUPTED = 130


# In this order: the first that fits. A class stands before those that it derives from.
_EXITS: tuple[tuple[type[CkptfsError], Exit], ...] = (
    (CommitInDoubtError, Exit.UNKNOWN),
    (AnswerLostError, Exit.UNKNOWN),
    (IncompleteCheckpointError, Exit.NO),
    (IntegrityError, Exit.NO),
    (ManifestError, Exit.NO),
    (NotFoundError, Exit.NOT_FOUND),
    (AccessError, Exit.ACCESS),
    (AlreadyExistsError, Exit.TAKEN),
    (CommitConflictError, Exit.TAKEN),
    (FencedError, Exit.TAKEN),
    (RunBusyError, Exit.TAKEN),
    (UriError, Exit.USAGE),
    (StateError, Exit.USAGE),
    (StorageError, Exit.STORAGE),
)


def exit_of(error: CkptfsError) -> Exit:
    """The exit code of an error; of a collective one, that of its first failed rank's."""
    if isinstance(error, CollectiveError):
        # As errors of one failure each: where all are of one type the error is of that type too.
        ones = (
            CollectiveError("", failures={r: error.failures[r]}) for r in sorted(error.failures)
        )
        code = next((code for one in ones if (code := _code_of(one)) is not None), None)
    else:
        code = _code_of(error)
    if code is not None:
        return code
    return Exit.UNKNOWN if error.outcome == "unknown" else Exit.STORAGE


def _code_of(error: CkptfsError) -> Exit | None:
    for kind, code in _EXITS:
        if isinstance(error, kind) or (isinstance(error, CollectiveError) and error.all_are(kind)):
            return code
    return None
