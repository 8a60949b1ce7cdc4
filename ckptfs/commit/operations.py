"""The operations that commit programs yield, and the one driver that executes them.

A *program* is a generator: it yields an operation, is sent the result, or has the storage error
thrown in. Programs hold the protocol and no I/O; ``drive`` holds the I/O and no protocol. The
tests' search executes the same programs against a model of storage, one operation at a time, and
crashes, stalls or loses the answer at every one of them.

    program:  entry = yield Read("x/.ckptfs/log/00000000")
    driver:   storage.read(...)  ->  program.send(bytes) | program.throw(NotFoundError)

Programs are deterministic: identifiers, clocks and randomness come in as arguments.

Programs that do not depend on each other run side by side: on an object store, where each operation is a
request, their requests are sent at the same time.

    stood, state = yield from side_by_side(read_metadata(name), catch_up(known))

If two programs of one process move files of one name in one domain, they take turns:

    turn = threading.Lock()                       one per domain
    drive(take_turns(program, turn), storage)

A removal reads that ``.metadata`` belongs to the old save and then renames it away. A projection that ran between
these two would permanently lose the file that it has just put there. Between processes, fences and trash directories
prevent this; within one process, retention, clearing and projection may run on three threads. Slow work (unlinking
and waiting) is done between turns, and a program checks again after it.

Symbolic links in the places where a run keeps its own files are refused before anything is fenced, written or
deleted (``LocalStorage`` makes sure that no operation follows a link that is put there later):

    control_is_plain    before a fence: nothing in ``.ckptfs`` is a link
    name_is_plain       before a save: its name is no link
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ckptfs.commit.paths import AHEAD_BYTES, ATTEMPTS, CONTROL, SHARED, TRASH, limit_of
from ckptfs.errors import (
    CkptfsError,
    CommitInDoubtError,
    FencedError,
    NotFoundError,
    StorageError,
    UriError,
)
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.uri import check_key

__all__ = [
    "AtOnce",
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
    "WriteFiles",
    "all_at_once",
    "control_is_plain",
    "drive",
    "is_checkpoint_name",
    "is_long",
    "name_is_plain",
    "perform",
    "read_limited",
    "settled",
    "side_by_side",
    "take_turns",
]


@dataclass(frozen=True, slots=True)
class Read:
    """All bytes of a small file. -> bytes"""

    key: str


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Small files that were written in this order. -> their bytes, up to the first that is missing.

    StorageError (EFBIG) if one of them has more than ``AHEAD_BYTES``: many of that size would fill
    the memory.
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
    """A new file with durable bytes; its name is durable after Sync of its directory. -> None"""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """New files in one directory, in any order; bytes and names are durable. -> None

    If one of them fails, others may be there.
    """

    folder: str
    files: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class MakeDir:
    """-> None; existing is success. Without ``is_synced`` its name is durable after Sync of its parent."""

    key: str
    is_synced: bool = True


@dataclass(frozen=True, slots=True)
class Rename:
    """-> None, or NotFoundError (source or target's parent), or AlreadyExistsError"""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Link:
    """A second name for a file. -> None

    NotFoundError (source or target's parent), AlreadyExistsError, or UnsupportedError: no hard
    links, or not between these two.
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Remove:
    """-> None; absent is success"""

    key: str


@dataclass(frozen=True, slots=True)
class RemoveMany:
    """Remove files with known names, in as few requests as possible. -> None; absent is success.

    Not atomic, and in no order.
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
    """Check one name. -> None, or SymlinkError if it is a symbolic link"""

    key: str


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Operations that do not depend on each other. -> tuple of their answers in order

    They run in any order, and at the same time if the storage gains by it. If one fails, its
    StorageError is its answer.
    """

    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before try number ``attempt`` (0, 1, ...) of the same operation. -> None

    At its deadline the driver ends the wait with CommitInDoubtError.
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
    | WriteFiles
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
    | AtOnce
    | Pause
)

T = TypeVar("T")
Program = Generator[Op, Any, T]


def read_limited(storage: Storage, key: str) -> bytes:
    """Return all bytes of a small file, up to the limit of its kind. Errors: ``read_small``."""
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
        case WriteFiles(folder, files):
            return storage.write_files(folder, dict(files))
        case MakeDir(key, is_synced):
            return storage.make_dir(key) if is_synced else storage.make_dir_unsynced(key)
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
        case AtOnce(ops):
            return _perform_all(ops, storage)
        case Pause():
            raise TypeError("Pause is executed by the driver")


def _perform_all(ops: Sequence[Op], storage: Storage) -> tuple[Any, ...]:
    answers = storage.at_once([partial(perform, op, storage) for op in ops])
    for answer in answers:
        if isinstance(answer, NotFoundError) and answer.of_bucket:
            raise answer  # not given to the program, as for a single operation: see ``drive``
    return tuple(answers)


def drive(
    program: Program[T],
    storage: Storage,
    *,
    deadline_s: float = 60.0,
    stopped: threading.Event | None = None,
) -> T:
    """Run a program against a storage until it returns.

    Storage errors are thrown into the program; an error that it does not catch reaches the caller.

    Args:
        program: The program. It is closed in any case.
        storage: The storage.
        deadline_s: How long the program may keep pausing, in seconds from its first pause.
        stopped: Once it is set, the program does no further operation.

    Returns:
        What the program returns.

    Raises:
        FencedError: ``stopped`` is set.
        CommitInDoubtError: The program was still pausing at its deadline, and did not catch this.
    """
    try:
        return _drive(program, storage, deadline_s, stopped)
    finally:
        # In any case: a suspended program may hold its domain's turn (``take_turns``).
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
            raise FencedError("the run was released during the operation", uri=storage.root)
        answer = failure = None
        try:
            if isinstance(op, Pause):
                now = time.monotonic()
                first_pause = first_pause or now
                if now - first_pause > deadline_s:
                    raise CommitInDoubtError(
                        f"the storage gave no definite answer within {deadline_s:g} s: {op.why}",
                        uri=storage.root,
                        hint="nothing was deleted; the next save or prepare_run settles it",
                    )
                # Jitter: thousands of owners that met the same throttling must not return at once.
                time.sleep(min(2.0, 0.05 * 2**op.attempt) * random.uniform(0.5, 1.0))  # noqa: S311
            else:
                answer = perform(op, storage)
        except (StorageError, CommitInDoubtError) as error:
            if isinstance(error, NotFoundError) and error.of_bucket:
                raise  # the program would take it for a run without any entry
            failure = error


PLAIN_NAMES = 2  # a step's .metadata and ckptfs.json


def is_long(op: Op) -> bool:
    """Whether other programs may have the turn during this operation."""
    if isinstance(op, RemoveMany):
        # Between reading the plain names and removing them, no other thread may project there.
        return len(op.keys) > PLAIN_NAMES
    return isinstance(op, RemoveTree | Pause)


def all_at_once(ops: Sequence[Op]) -> Program[None]:
    """Do operations without a result, such as writes.

    The first error is raised when all of them have ended.
    """
    for answer in (yield AtOnce(tuple(ops))):
        if isinstance(answer, StorageError):
            raise answer


def side_by_side(*programs: Program[Any]) -> Program[tuple[Any, ...]]:
    """Run programs that do not depend on each other, and return their results in order.

    In each round every program does one operation, all of them ``AtOnce``. The first error ends all
    programs after the operations of its round; what the others have done is not undone.
    """
    values: list[Any] = [None] * len(programs)
    answers: dict[int, Any] = dict.fromkeys(range(len(programs)))
    try:
        while answers:
            ops: dict[int, Op] = {}
            for at, answer in answers.items():
                op = yield from _to_request(programs[at], answer)
                if isinstance(op, _Ended):
                    values[at] = op.value
                else:
                    ops[at] = op
            answers = yield from _round(ops)
    finally:
        for program in programs:
            program.close()
    return tuple(values)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A program has returned."""

    value: Any


def settled(program: Program[T]) -> Program[T | CkptfsError]:
    """Return the result of a program, or the error that ended it.

    Among programs that run side by side, an error then ends only its own program.
    """
    try:
        return (yield from program)
    except CkptfsError as error:
        return error


def _to_request(program: Program[Any], answer: Any) -> Program[Op | _Ended]:
    """Return the program's next operation that may be a request to an object store.

    Operations that need no request are done first.
    """
    while True:
        try:
            op = program.throw(answer) if isinstance(answer, StorageError) else program.send(answer)
        except StopIteration as stop:
            return _Ended(stop.value)
        if not isinstance(op, Refresh | Sync | MakeDir):
            return op
        try:
            answer = yield op
        except StorageError as error:
            answer = error


def _round(ops: dict[int, Op]) -> Program[dict[int, Any]]:
    """Do one operation of each program. Pauses come after all others have their answers."""
    answers: dict[int, Any] = {}
    quick = {at: op for at, op in ops.items() if not isinstance(op, Pause)}
    if len(quick) == 1:
        ((at, op),) = quick.items()
        try:
            answers[at] = yield op
        except StorageError as error:
            answers[at] = error
    elif quick:
        answers = yield from _all_of(quick)
    for at, waits in ops.items():
        if at not in quick:
            answers[at] = yield waits
    return answers


def _all_of(ops: Mapping[int, Op]) -> Program[dict[int, Any]]:
    """Do operations of several programs at once.

    If one of them is itself an ``AtOnce``, its operations are sent together with the others.
    """
    flat = [
        (at, one) for at, op in ops.items() for one in (op.ops if isinstance(op, AtOnce) else (op,))
    ]
    found = yield AtOnce(tuple(one for _, one in flat))
    answers: dict[int, Any] = {at: [] for at in ops}
    for (at, _), answer in zip(flat, found, strict=True):
        answers[at].append(answer)
    return {
        at: tuple(answers[at]) if isinstance(op, AtOnce) else answers[at][0]
        for at, op in ops.items()
    }


def take_turns(program: Program[T], turn: threading.Lock) -> Program[T]:
    """Run a program that holds its domain's turn, except during its long operations."""
    reply: Any = None
    failure: Exception | None = None
    with turn:
        while True:
            try:
                op = program.send(reply) if failure is None else program.throw(failure)
            except StopIteration as stop:
                value: T = stop.value
                return value
            reply = failure = None
            away = is_long(op)
            if away:
                turn.release()
            try:
                reply = yield op
            except Exception as error:  # noqa: BLE001 - all of them belong to the program
                failure = error
            finally:
                if away:
                    turn.acquire()


def control_is_plain(shape: Shape) -> Program[None]:
    """Raise SymlinkError if one of the run's own directories, an attempt or a trash is a link.

    Reads only.
    """
    if shape is Shape.OBJECT:
        return
    # A process that claims the run makes the other directories, and making one refuses a link in its place.
    yield RefuseLink(TRASH)
    for folder in (ATTEMPTS, TRASH):
        for entry in (yield from _names(folder)):
            if entry.is_link:
                yield RefuseLink(f"{folder}/{entry.name}")


def name_is_plain(name: str, shape: Shape) -> Program[None]:
    """Raise SymlinkError if the checkpoint's name, or that of its whole, is a link.

    A save would write to the target of the link.
    """
    if shape is Shape.OBJECT:
        return
    checkpoint, part, _ = name.partition("/")
    yield RefuseLink(checkpoint)
    if part:
        yield RefuseLink(name)


def is_checkpoint_name(name: str, *, is_part: bool) -> bool:
    """Whether a save may have this name. Pure.

    A name is one component (two for a part), and not one that the run uses itself. Recovery moves
    what it finds under the name that a dead attempt recorded to the trash, so that name is checked
    too.
    """
    try:
        check_key(name)
    except UriError:
        return False
    checkpoint, *parts = name.split("/")
    return len(parts) == int(is_part) and checkpoint not in ("", CONTROL, SHARED)


def _names(folder: str) -> Program[list[Entry]]:
    try:
        found: list[Entry] = yield List(folder)
    except NotFoundError:
        return []
    return found
