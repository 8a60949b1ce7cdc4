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
    for kind, code in _EXITS:
        if isinstance(error, kind):
            return code
    if isinstance(error, CollectiveError):
        for rank, failure in sorted(error.failures.items()):
            # A failure travels as the name of its class: one that derives from another has its code too.
            one = CollectiveError("", failures={rank: failure})
            for kind, code in _EXITS:
                if one.all_are(kind):
                    return code
    return Exit.UNKNOWN if error.outcome == "unknown" else Exit.STORAGE
