"""Every error that ckptfs raises, typed by what the handler does about it.

    CkptfsError                              base; carries uri, rank, node, hint, outcome
    |
    |  fix the call
    |-- UriError (ValueError)                the URI cannot mean anything here
    |   `-- MissingDriverError (ImportError) the scheme is known, its library is not installed
    |-- StateError (ValueError)              the state dict cannot be saved or loaded as asked
    |
    |  look at the storage
    |-- StorageError (OSError)               any failure of the place itself
    |   |-- NotFoundError (FileNotFoundError)
    |   |-- AlreadyExistsError (FileExistsError)
    |   |-- AccessError (PermissionError)    permission, read-only mount
    |   |   `-- CredentialsError             missing, wrong or expired; or a clock that is off
    |   |-- NoSpaceError                     space, quota or inodes
    |   |-- StaleError                       the handle or name moved under us: look again
    |   |-- SymlinkError                     a link leads out of where we write: remove it
    |   |-- TransientError                   worth a retry; nothing happened
    |   |-- AnswerLostError                  it may or may not have happened
    |   `-- UnsupportedError                 this storage cannot do that
    |
    |  look at the other ranks
    |-- CollectiveError (RuntimeError)       some ranks failed; every rank raises this same error
    |-- DeadlineError (TimeoutError)         ranks were silent for longer than timeout_s
    |-- ControlPlaneLostError (ConnectionError)  the store that the ranks talk through is gone
    |
    |  somebody else's run
    |-- FencedError (RuntimeError)           a newer owner took the run: stop
    |-- RunBusyError (RuntimeError)          a living owner holds the run: wait or take over
    |-- CommitConflictError (FileExistsError)    that checkpoint exists already
    |-- CommitInDoubtError (RuntimeError)    committed or not is settled at the next call
    |
    |  the checkpoint itself
    |-- IncompleteCheckpointError (FileNotFoundError)  files or domains of it are missing
    |-- IntegrityError (ValueError)          bytes differ from what was written
    `-- ManifestError (ValueError)           the description is foreign, damaged or too new

``outcome`` is ``"failed"`` when the save surely did not commit and ``"unknown"`` when it may have.
Every error pickles to an equal one, and its text never carries credentials.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Never

__all__ = [
    "AccessError",
    "AlreadyExistsError",
    "AnswerLostError",
    "CkptfsError",
    "CollectiveError",
    "CommitConflictError",
    "CommitInDoubtError",
    "ControlPlaneLostError",
    "CredentialsError",
    "DeadlineError",
    "Failure",
    "FencedError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "ManifestError",
    "MissingDriverError",
    "NoSpaceError",
    "NotFoundError",
    "RunBusyError",
    "StaleError",
    "StateError",
    "StorageError",
    "SymlinkError",
    "TransientError",
    "UnsupportedError",
    "UriError",
]

Outcome = Literal["failed", "unknown"]


class CkptfsError(Exception):
    """The base of every ckptfs error.

    message: one sentence that says what happened.
    uri: where, credentials already masked; rank and node: who; hint: what to do next.
    outcome: "failed" (the save surely did not commit) or "unknown" (it may have).
    """

    default_outcome: Outcome = "failed"

    def __init__(
        self,
        message: str,
        *,
        uri: object = None,
        rank: int | None = None,
        node: str | None = None,
        hint: str | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.uri = None if uri is None else str(uri)
        self.rank = rank
        self.node = node
        self.hint = hint
        self.outcome: Outcome = outcome or self.default_outcome

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("uri", self.uri), ("rank", self.rank), ("node", self.node))
            if value is not None
        ]
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        return text + (f" -- {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[Any, ...]:
        # A custom __init__ breaks the default pickling of exceptions, and an error that cannot
        # be unpickled kills the coordinator while every other rank waits (pytorch DCP).
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[CkptfsError], message: str, state: Mapping[str, Any]) -> CkptfsError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class UriError(CkptfsError, ValueError):
    """The URI cannot mean anything here; nothing was touched."""


class MissingDriverError(UriError, ImportError):
    """The scheme is known but its library is not installed; the hint names the extra."""


class StateError(CkptfsError, ValueError):
    """The state dict cannot be saved or loaded as asked; no file was made, no tensor changed."""


class ArgumentChoice(Enum):
    """An argument that takes one of a few words. Any other one is a StateError that lists them."""

    @classmethod
    def _missing_(cls, value: object) -> Never:
        words = [f'"{one.value}"' for one in cls]
        raise StateError(f"{value!r} is no choice here: {', '.join(words[:-1])} or {words[-1]}")


class StorageError(CkptfsError, OSError):
    """The place failed. ``errno`` is set where the storage gave one."""

    default_errno: int | None = _errno.EIO

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        uri: object = None,
        rank: int | None = None,
        node: str | None = None,
        hint: str | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(message, uri=uri, rank=rank, node=node, hint=hint, outcome=outcome)
        self.errno = self.default_errno if errno is None else errno

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_os, (type(self), self.message, dict(self.__dict__), self.errno))


def _rebuild_os(
    cls: type[StorageError], message: str, state: Mapping[str, Any], errno: int | None
) -> StorageError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    error.errno = errno
    return error


class NotFoundError(StorageError, FileNotFoundError):
    """No such file, directory, object or bucket."""

    default_errno = _errno.ENOENT


class AlreadyExistsError(StorageError, FileExistsError):
    """The name is taken; what stood there is untouched."""

    default_errno = _errno.EEXIST


class AccessError(StorageError, PermissionError):
    """Not permitted, or a read-only mount."""

    default_errno = _errno.EACCES


class CredentialsError(AccessError):
    """No credentials, wrong or expired ones, or a clock too far off to sign: renew and call again."""


class NoSpaceError(StorageError):
    """No space, no quota or no inodes left; what was committed stays."""

    default_errno = _errno.ENOSPC


class StaleError(StorageError):
    """The handle or the name moved under us (ESTALE): look again by name."""

    default_errno = _errno.ESTALE


class SymlinkError(StorageError):
    """A symbolic link stands where only a directory of the run may: nothing behind it was written,
    moved or deleted. The message names the link.
    """

    default_errno = _errno.ELOOP


class TransientError(StorageError):
    """A failure that a retry may cure; the operation surely did not happen."""


class AnswerLostError(StorageError):
    """The request was sent and no answer came: it may have happened, or may yet."""

    default_errno = _errno.ETIMEDOUT
    default_outcome: Outcome = "unknown"


class UnsupportedError(StorageError):
    """This storage cannot do that; see its capabilities."""

    default_errno = _errno.ENOTSUP


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed, as it travels between ranks: text and names, never a pickle.

    type: dotted class path of the original error; message: its text, credentials masked;
    errno: where it had one; traceback: formatted text.
    """

    rank: int
    node: str
    type: str
    message: str
    errno: int | None = None
    traceback: str = ""


class CollectiveError(CkptfsError, RuntimeError):
    """Some ranks failed, so the collective call failed on every rank with this same error.

    ``failures`` maps rank to Failure; ``all_are(NoSpaceError)`` asks whether every failed rank met
    that error or a subclass of it.
    """

    def __init__(
        self,
        message: str,
        *,
        failures: Mapping[int, Failure] | None = None,
        uri: object = None,
        rank: int | None = None,
        node: str | None = None,
        hint: str | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(message, uri=uri, rank=rank, node=node, hint=hint, outcome=outcome)
        self.failures: dict[int, Failure] = dict(failures or {})

    def all_are(self, kind: type[CkptfsError]) -> bool:
        """True when every failure is ``kind`` or one of its subclasses."""
        names = {f"{__name__}.{cls.__name__}" for cls in _family(kind)}
        return bool(self.failures) and all(f.type in names for f in self.failures.values())


def _family(kind: type[CkptfsError]) -> list[type[CkptfsError]]:
    return [kind, *(deep for child in kind.__subclasses__() for deep in _family(child))]


class DeadlineError(CkptfsError, TimeoutError):
    """Ranks were silent for longer than timeout_s, ``silent`` lists them; or what was waited for did
    not come in time.
    """

    def __init__(
        self,
        message: str,
        *,
        silent: tuple[int, ...] = (),
        uri: object = None,
        rank: int | None = None,
        node: str | None = None,
        hint: str | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(message, uri=uri, rank=rank, node=node, hint=hint, outcome=outcome)
        self.silent = silent


class ControlPlaneLostError(CkptfsError, ConnectionError):
    """The store that the ranks talk through is gone, before any verdict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


class FencedError(CkptfsError, RuntimeError):
    """A newer owner holds the run: this process must stop writing; nothing of it was committed."""


class RunBusyError(CkptfsError, RuntimeError):
    """A living owner holds the run; host, pid, job and last commit are in the message."""


class CommitConflictError(CkptfsError, FileExistsError):
    """A checkpoint of that name is committed already; it is untouched."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


class CommitInDoubtError(CkptfsError, RuntimeError):
    """Whether the save committed is not known now; nothing was deleted; the next call settles it."""

    default_outcome: Outcome = "unknown"


class IncompleteCheckpointError(CkptfsError, FileNotFoundError):
    """Files, shards or whole domains of the checkpoint are missing; the message says which, where."""


class IntegrityError(CkptfsError, ValueError):
    """Bytes differ from what was written; tensors already loaded are undefined."""


class ManifestError(CkptfsError, ValueError):
    """The description is foreign, damaged, or from a version that this one cannot read."""
