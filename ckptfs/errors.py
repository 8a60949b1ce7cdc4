"""Every error that ckptfs raises, typed by what the handler does about it.

    CkptfsError                              base; carries uri, rank, node, hint, outcome
    |
    |  fix the call
    |-- UriError (ValueError)                the URI has no meaning here
    |   `-- MissingDriverError (ImportError) the scheme is known, its library is not installed
    |-- StateError (ValueError)              the state dict cannot be saved or loaded as asked
    |   `-- AmbiguousCheckpointError         another program saved there too: say which one you mean
    |
    |  look at the storage
    |-- StorageError (OSError)               any failure of the place itself
    |   |-- NotFoundError (FileNotFoundError)
    |   |-- AlreadyExistsError (FileExistsError)
    |   |-- AccessError (PermissionError)    permission, read-only mount
    |   |   `-- CredentialsError             missing, wrong or expired; or a clock that is off
    |   |-- NoSpaceError                     space, quota or inodes
    |   |-- StaleError                       the handle or name has changed: look it up again by name
    |   |-- SymlinkError                     a link leads out of where we write: remove it
    |   |-- TransientError                   worth a retry; nothing happened
    |   |-- AnswerLostError                  it may or may not have happened
    |   `-- UnsupportedError                 this storage cannot do that
    |
    |  look at the other ranks
    |-- CollectiveError (RuntimeError)       some ranks failed; every rank raises this same error,
    |                                        which is also the type of their failures, if it is one
    |-- DeadlineError (TimeoutError)         ranks were silent for longer than timeout_s
    |-- ControlPlaneLostError (ConnectionError)  the store that the ranks talk through is gone
    |
    |  another job's run
    |-- FencedError (RuntimeError)           a newer owner took the run: stop
    |-- RunBusyError (RuntimeError)          a living owner holds the run: wait or take over
    |-- CommitConflictError (FileExistsError)    that checkpoint exists already
    |-- CommitInDoubtError (RuntimeError)    committed or not is settled at the next call
    |
    |  the checkpoint itself
    |-- IncompleteCheckpointError (FileNotFoundError)  files or domains of it are missing
    |-- IntegrityError (ValueError)          bytes differ from what was written
    `-- ManifestError (ValueError)           the description is foreign, damaged or too new

``outcome`` is ``"failed"`` when the save surely did not commit and ``"unknown"`` when it may have. The
error of a delete or a pin says the same about its entry.
Every error pickles to an equal one, and its text never carries credentials.
"""

from __future__ import annotations

import errno as _errno
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, Never

__all__ = [
    "AccessError",
    "AlreadyExistsError",
    "AmbiguousCheckpointError",
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

TEXT_CHARS = 400  # of a CollectiveError: of many ranks each would add a paragraph
_WORD = re.compile(r"\S+")


class CkptfsError(Exception):
    """The base of every ckptfs error.

    Args:
        message: One sentence that says what happened.
        uri: Where, with credentials masked; None if no URI is concerned.
        rank: Which rank; None if no rank is concerned.
        node: Which node; None if no node is concerned.
        hint: What to do next; None if there is nothing to say.
        outcome: "failed" when the save surely did not commit, "unknown" when it may have; None:
            ``default_outcome``.

    Attributes:
        default_outcome: The outcome of errors of this class: "failed" or "unknown".
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
    """The URI has no meaning here; nothing was touched."""


class MissingDriverError(UriError, ImportError):
    """The scheme is known but its library is not installed; the hint names the extra."""


class StateError(CkptfsError, ValueError):
    """The state dict cannot be saved or loaded as asked; no file was made, no tensor changed."""


class AmbiguousCheckpointError(StateError):
    """Another program, such as stock torch, saved into the run.

    It saved over the checkpoint that was asked for, or after the newest commit. The caller has to
    say which one is meant; nothing was touched.

    Args:
        names: The names of the other program's checkpoints.
    """

    def __init__(
        self,
        message: str,
        *,
        names: tuple[str, ...] = (),
        uri: object = None,
        rank: int | None = None,
        node: str | None = None,
        hint: str | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        super().__init__(message, uri=uri, rank=rank, node=node, hint=hint, outcome=outcome)
        self.names = names


class ArgumentChoice(Enum):
    """An argument that takes one of a few words.

    Any other word is a StateError that names the argument and lists the words.
    """

    parameter: ClassVar[str]

    def __init_subclass__(cls, *, parameter: str) -> None:
        """Set the public name of the ``parameter``, such as ``if_exists``."""
        super().__init_subclass__()
        cls.parameter = parameter

    @classmethod
    def _missing_(cls, value: object) -> Never:
        words = [f'"{one.value}"' for one in cls]
        raise StateError(
            f"{cls.parameter}={value!r:.100} is not one of the choices: "
            f"{', '.join(words[:-1])} or {words[-1]}"
        )


class StorageError(CkptfsError, OSError):
    """The storage failed.

    Args:
        errno: The number of the operating system; None: ``default_errno``.

    Attributes:
        default_errno: The number of errors of this class if the storage gave none.
    """

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
    """No such file, directory, object or bucket.

    Attributes:
        of_bucket: The bucket itself is missing, so that nothing in it is merely absent.
    """

    default_errno = _errno.ENOENT
    of_bucket: bool = False


class AlreadyExistsError(StorageError, FileExistsError):
    """The name is taken; what has it is untouched."""

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
    """The handle or the name has changed (ESTALE): look it up again by name."""

    default_errno = _errno.ESTALE


class SymlinkError(StorageError):
    """A symbolic link is where only a directory of the run may be. The message names the link.

    Nothing behind it was written, moved or deleted.
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

    Attributes:
        rank: The rank that failed.
        node: Its node, for a person.
        type: Dotted class path of the original error.
        message: Its text, credentials masked.
        errno: Its number; None if it had none.
        traceback: Formatted text.
        summary: The sentence that ``message`` is made from, if the error was one of ckptfs.
        uri: The URI in it; None if it had none.
        hint: What to do next; None if it had none.
    """

    rank: int
    node: str
    type: str
    message: str
    errno: int | None = None
    traceback: str = ""
    summary: str = ""
    uri: str | None = None
    hint: str | None = None


class CollectiveError(CkptfsError, RuntimeError):
    """Some ranks failed, so the collective call failed on every rank with this same error.

    If all of them are errors of one type, this error is of that type too: a save that finds no
    space on two of four ranks is a CollectiveError and a NoSpaceError. ``all_are(kind)`` answers
    the same for any type. Its text has at most 400 characters; what does not fit is in
    ``failures``.

    Args:
        failures: How each rank failed, by rank; None: of no rank.

    Attributes:
        errno: The first number of its failures, if it is a StorageError too.
    """

    # Not the outcome of the type that it also is: the code that raises it knows whether a collective
    # call failed or is in doubt.
    default_outcome: Outcome = "failed"

    def __new__(  # noqa: PYI034 - another class than the one that was called
        cls,
        message: str,
        *,
        failures: Mapping[int, Failure] | None = None,
        uri: object = None,  # noqa: ARG004 - this signature is the one that is shown
        rank: int | None = None,  # noqa: ARG004
        node: str | None = None,  # noqa: ARG004
        hint: str | None = None,  # noqa: ARG004
        outcome: Outcome | None = None,  # noqa: ARG004
    ) -> CollectiveError:
        """Make an instance of the class that is also the type of all failures, if they have one."""
        kind = _type_of_all((failures or {}).values())
        # A class that is derived from this one stays what it is.
        chosen = _also(kind.__name__) if kind is not None and cls == CollectiveError else cls
        # The builtin that makes the instance: an OSError has a memory layout of its own.
        maker: type[Exception] = OSError if OSError in chosen.__mro__ else RuntimeError
        error: CollectiveError = maker.__new__(chosen, message)
        return error

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
        if isinstance(self, StorageError):
            first = next((f.errno for f in self.failures.values() if f.errno is not None), None)
            self.errno = self.default_errno if first is None else first

    def __str__(self) -> str:
        # Rank and node are in the message, the node by its host's name.
        where = f" [uri {self.uri}]" if self.uri is not None else ""
        hint = f" -- {self.hint}" if self.hint else ""
        return _fitted(self.message, where, hint)

    def __reduce__(self) -> tuple[Any, ...]:
        cls = CollectiveError if type(self).__name__ == CollectiveError.__name__ else type(self)
        state = dict(self.__dict__)
        return (_rebuild_collective, (cls, self.message, state, getattr(self, "errno", None)))

    def all_are(self, kind: type[CkptfsError]) -> bool:
        """True when every failure is ``kind`` or one of its subclasses."""
        kinds = [_declared(failure.type) for failure in self.failures.values()]
        return bool(kinds) and all(met is not None and issubclass(met, kind) for met in kinds)


def _rebuild_collective(
    cls: type[CollectiveError], message: str, state: Mapping[str, Any], errno: int | None
) -> CollectiveError:
    error = cls.__new__(cls, message, failures=state["failures"])
    Exception.__init__(error, message)
    error.__dict__.update(state)
    if isinstance(error, StorageError):
        error.errno = errno
    return error


def _type_of_all(failures: Iterable[Failure]) -> type[CkptfsError] | None:
    """Return the most special type that all failures have, if a collective error may be that too.

    Types that say something about the collective call itself are not returned: that its ranks lost
    contact with each other, or that a commit is in doubt. A handler would take them for the whole
    call's.
    """
    kinds = [_declared(failure.type) for failure in failures]
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        return None
    shared: type = next(c for c in known[0].__mro__ if all(c in kind.__mro__ for kind in known))
    of_the_call = (CollectiveError, DeadlineError, ControlPlaneLostError, CommitInDoubtError)
    return None if shared is CkptfsError or shared in of_the_call else shared


def _declared(type_path: str) -> type[CkptfsError] | None:
    """Return the class of this module that a failure's dotted path names."""
    found = globals().get(type_path.removeprefix(f"{__name__}."))
    return found if isinstance(found, type) and issubclass(found, CkptfsError) else None


@functools.cache
def _also(name: str) -> type[CollectiveError]:
    """Return a class that is both.

    Its name is CollectiveError, so that logs and metrics have one name for it.
    """
    named = {"__module__": __name__, "__doc__": CollectiveError.__doc__}
    both: type[CollectiveError] = type("CollectiveError", (CollectiveError, globals()[name]), named)
    return both


def _fitted(message: str, where: str, hint: str) -> str:
    """Return at most ``TEXT_CHARS`` characters.

    Long paths lose their middle, then the hint is dropped, then the end is cut.
    """
    if len(message + where + hint) <= TEXT_CHARS:
        return message + where + hint
    if where:  # as a whole: a URI may have blanks in it
        where = f"{_cut(where.removesuffix(']'), 100)}]"
    for longest in (TEXT_CHARS, 120, 80, 40):
        message = _shortened(message, longest)
        if len(message + where + hint) <= TEXT_CHARS:
            return message + where + hint
    if len(message + where) <= TEXT_CHARS:
        return message + where
    return f"{message[: TEXT_CHARS - len(where) - 1]}…{where}"


def _shortened(text: str, longest: int) -> str:
    """Return the text with each word cut to at most ``longest`` characters."""
    return _WORD.sub(lambda found: _cut(found[0], longest), text)


def _cut(text: str, longest: int) -> str:
    """Return at most ``longest`` characters: the beginning, and of a path the last name."""
    if len(text) <= longest:
        return text
    last = text.rpartition("/")[2]
    end = text[-min(longest // 2, len(last) or longest // 2) :]
    return f"{text[: longest - len(end) - 1]}…{end}"


class DeadlineError(CkptfsError, TimeoutError):
    """Ranks were silent for longer than ``timeout_s``; or what was waited for did not come in time.

    Args:
        silent: The ranks that were silent.
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
