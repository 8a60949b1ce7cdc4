"""The operations that commit programs yield, and the one driver that executes them.

A *program* is a generator: it yields an operation, is sent the result, or has the storage error
thrown in. Programs hold the protocol and no I/O; ``drive`` holds the I/O and no protocol. The
tests' search executes the same programs against a model of storage, one operation at a time, and
crashes, stalls or loses the answer at every one of them.

    program:  entry = yield Read("x/.ckptfs/log/00000000")
    driver:   storage.read(...)  ->  program.send(bytes) | program.throw(NotFoundError)

Programs are deterministic: identifiers, clocks and randomness come in as arguments.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptfs.commit.layout import AHEAD_BYTES, limit_of
from ckptfs.errors import CommitInDoubtError, FencedError, NotFoundError, StorageError
from ckptfs.storage.base import Storage

__all__ = [
    "Create",
    "Link",
    "List",
    "MakeDir",
    "Op",
    "Pause",
    "Program",
    "Read",
    "ReadAhead",
    "Refresh",
    "RefuseLink",
    "Remove",
    "RemoveDir",
    "RemoveMany",
    "RemoveTree",
    "Rename",
    "Replace",
    "StatOf",
    "Sync",
    "Write",
    "drive",
    "perform",
    "read_limited",
]


@dataclass(frozen=True, slots=True)
class Read:
    """All bytes of a small file. -> bytes"""

    key: str


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Small files that were written in this order. -> their bytes, up to the first that is missing;
    StorageError (EFBIG) where one of them has more than ``AHEAD_BYTES``: all of such would fill the memory
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatOf:
    """-> Stat"""

    key: str


@dataclass(frozen=True, slots=True)
class List:
    """Names directly under a directory. -> list[Entry]"""

    key: str


@dataclass(frozen=True, slots=True)
class Create:
    """Exclusive create. -> None, or AlreadyExistsError, or AnswerLostError"""

    key: str
    data: bytes
    staging: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Whole replace, conditional when if_match is given ("" means: only if absent). -> None"""

    key: str
    data: bytes
    if_match: str | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """A new file whose bytes are durable; its name is, after Sync of its directory. -> None"""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MakeDir:
    """-> None; existing is success"""

    key: str


@dataclass(frozen=True, slots=True)
class Rename:
    """-> None, or NotFoundError (source or target's parent), or AlreadyExistsError"""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Link:
    """A second name for a file. -> None, or NotFoundError (source or target's parent),
    AlreadyExistsError, or UnsupportedError: no hard links, or not between these two
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Remove:
    """-> None; absent is success"""

    key: str


@dataclass(frozen=True, slots=True)
class RemoveMany:
    """Files whose names are known, in as few requests as it takes. -> None; absent is success; not
    atomic, in no order
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RemoveDir:
    """rmdir. -> None; absent is success; AlreadyExistsError when not empty"""

    key: str


@dataclass(frozen=True, slots=True)
class RemoveTree:
    """-> None; absent is success; not atomic"""

    key: str


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync of a directory. -> None"""

    key: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Drop a client's cache of a directory. -> None"""

    key: str


@dataclass(frozen=True, slots=True)
class RefuseLink:
    """A look at one name. -> None, or SymlinkError where a symbolic link stands there"""

    key: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before try number ``attempt`` (0, 1, ...) of the same thing; the driver ends it with
    CommitInDoubtError at its deadline. -> None
    """

    attempt: int
    why: str = ""


Op = (
    Read
    | ReadAhead
    | StatOf
    | List
    | Create
    | Replace
    | Write
    | MakeDir
    | Rename
    | Link
    | Remove
    | RemoveDir
    | RemoveMany
    | RemoveTree
    | Sync
    | Refresh
    | RefuseLink
    | Pause
)

T = TypeVar("T")
Program = Generator[Op, Any, T]


def read_limited(storage: Storage, key: str) -> bytes:
    """All bytes of a small file that has at most what one of its kind may have. Errors: ``read_small``."""
    return storage.read_small(key, limit_of(key))


def perform(op: Op, storage: Storage) -> Any:
    """Execute one operation; Pause is the driver's own and not accepted here."""
    match op:
        case Read(key):
            return read_limited(storage, key)
        case ReadAhead(keys):
            return storage.read_ahead(keys, limit_bytes=AHEAD_BYTES)
        case StatOf(key):
            return storage.stat(key)
        case List(key):
            return storage.list(key)
        case Create(key, data, staging):
            return storage.create(key, data, staging=staging)
        case Replace(key, data, if_match):
            return storage.replace(key, data, if_match=if_match)
        case Write(key, data):
            with storage.open_write(key, size_hint_bytes=len(data)) as writer:
                writer.write(data)
            return None
        case MakeDir(key):
            return storage.make_dir(key)
        case Rename(source, target):
            return storage.rename(source, target)
        case Link(source, target):
            return storage.link(source, target)
        case Remove(key):
            return storage.remove(key)
        case RemoveMany(keys):
            return storage.remove_many(keys)
        case RemoveDir(key):
            return storage.remove_dir(key)
        case RemoveTree(key):
            return storage.remove_tree(key)
        case Sync(key):
            return storage.sync(key)
        case Refresh(key):
            return storage.refresh(key)
        case RefuseLink(key):
            return storage.refuse_link(key)
        case Pause():
            raise TypeError("Pause is executed by the driver")


def drive(
    program: Program[T],
    storage: Storage,
    *,
    deadline_s: float = 60.0,
    stopped: threading.Event | None = None,
) -> T:
    """Run a program against a storage until it returns. FencedError once ``stopped`` is set.

    deadline_s bounds how long a program may keep pausing, in seconds from its first pause. Storage
    errors are thrown into the program; what it does not catch reaches the caller.
    """
    try:
        return _drive(program, storage, deadline_s, stopped)
    finally:
        # Whatever ended it: a suspended program may hold its domain's turn (turns.py).
        program.close()


def _drive(
    program: Program[T], storage: Storage, deadline_s: float, stopped: threading.Event | None
) -> T:
    first_pause: float | None = None
    answer: Any = None
    failure: Exception | None = None
    while True:
        try:
            op = program.send(answer) if failure is None else program.throw(failure)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if stopped is not None and stopped.is_set():
            raise FencedError("the run was released meanwhile", uri=storage.root)
        answer = failure = None
        try:
            if isinstance(op, Pause):
                now = time.monotonic()
                first_pause = first_pause or now
                if now - first_pause > deadline_s:
                    raise CommitInDoubtError(
                        f"no certain answer from the storage within {deadline_s:g} s: {op.why}",
                        uri=storage.root,
                        hint="nothing was deleted; the next save or prepare_run settles it",
                    )
                # Jitter: thousands of owners that met the same throttling must not return at once.
                time.sleep(min(2.0, 0.05 * 2**op.attempt) * random.uniform(0.5, 1.0))  # noqa: S311
            else:
                answer = perform(op, storage)
        except (StorageError, CommitInDoubtError) as error:
            if isinstance(error, NotFoundError) and error.of_bucket:
                raise  # to the program it would look like a run that nobody wrote yet
            failure = error
