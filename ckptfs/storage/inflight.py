"""The system calls that this process waits for: which call, on which path, since when.

    with in_flight("fsync", fd):        every call of ``Posix`` is registered like this
        os.fsync(fd)
    with in_task(new_task()) as task:   the calls of this thread belong to this task
    thread(target=with_task(work))      and so do the calls of that thread
    oldest_call(task)                   the call of this task that has waited longest, or None

    with WatchedFile(path) as file:     as open(path, "rb", buffering=0); mode "wb" writes
        file.read(size)
    walk(top)                           as os.walk
    remove_tree(top)                    as shutil.rmtree with ignore_errors=True

A thread in a dead hard mount cannot be interrupted and cannot report anything. Another thread of its process
can: the heartbeat reads the oldest call here and reports it to the other ranks. Nothing here does any I/O, and no
lock is held during a call. Hand work to other threads with ``with_task``, or with ``Threads``, which uses it. Calls
of a thread that works for no operation belong to no task.

Log records of ckptfs name the operation that they belong to, on every thread that works for it:

    with log_fields(run="s3://bucket/run", step=100, rank=0):
        ...
        add_fields(save_id=save_id)         known later

Each record has the attributes of ``FIELDS``, None where they are not known, so that a formatter may name them.
Loggers have the names of the folders of the package (``LOGGERS``), so their names stay when a module is moved.

``WatchedFile``, ``walk`` and ``remove_tree`` are for the plain files of a user. These files too may be in a mount
of a server that is gone, and a rank that hangs there is reported with the path. Each call is registered separately,
because many calls that return are not a hang.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "FIELDS",
    "LOGGERS",
    "PendingCall",
    "WatchedFile",
    "add_fields",
    "in_flight",
    "in_task",
    "log_fields",
    "new_task",
    "oldest_call",
    "path_of",
    "remove_tree",
    "walk",
    "with_task",
]


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that has not returned."""

    number: int  # unique in this process; later calls have larger numbers
    name: str
    where: str | int  # a path or a descriptor
    task: int = 0  # the task that it belongs to; 0 for none

    @property
    def text(self) -> str:
        """The call for a message: ``fsync of /nfs/run/...``."""
        return f"{self.name} of {path_of(self.where)}"


def path_of(where: str | int) -> str:
    """Return the path that is open under a descriptor, as far as the kernel knows; a path is returned as it is.

    Resolve the path before a descriptor is closed: afterwards it has none.
    """
    if isinstance(where, str):
        return where
    try:
        return os.readlink(f"/proc/self/fd/{where}")
    except OSError:
        return f"descriptor {where}"


_NUMBERS = count(1)
# By thread: a thread waits for one call at a time. Each thread changes only its own item, and a reader
# copies the whole in one step.
_PENDING: dict[int, PendingCall] = {}
os.register_at_fork(after_in_child=_PENDING.clear)


class _ThreadTask(threading.local):
    """The task that this thread's calls belong to."""

    task = 0


_CURRENT = _ThreadTask()


class in_flight:  # noqa: N801 - used as a with statement, and cheaper than a generator
    """Register the block as one call. Of nested calls the inner one counts."""

    __slots__ = ("_call", "_outer", "_thread")

    def __init__(self, name: str, where: str | int) -> None:
        self._call = PendingCall(next(_NUMBERS), name, where, _CURRENT.task)
        self._thread = threading.get_ident()
        self._outer: PendingCall | None = None

    def __enter__(self) -> None:
        self._outer = _PENDING.get(self._thread)
        _PENDING[self._thread] = self._call

    def __exit__(self, *exc: object) -> None:
        if self._outer is None:
            _PENDING.pop(self._thread, None)
        else:
            _PENDING[self._thread] = self._outer


def new_task() -> int:
    """Return a number that no other call and no other task of this process has."""
    return next(_NUMBERS)


@contextlib.contextmanager
def in_task(task: int) -> Iterator[int]:
    """Let the calls of this thread belong to ``task`` inside the block, not to the surrounding task."""
    outer, _CURRENT.task = _CURRENT.task, task
    try:
        yield task
    finally:
        _CURRENT.task = outer


def with_task(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap work for another thread, so that it belongs to the operation of the current thread.

    Its calls then belong to the current task, and its log records to the same operation.
    """
    task, fields = _CURRENT.task, _fields_here()
    if not task and fields is None:
        return work

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with in_task(task), _fields_of(fields):
            return work(*args, **kwargs)

    return run


def oldest_call(task: int) -> PendingCall | None:
    """Return the oldest call of ``task`` that has not returned, on any thread. Thread-safe."""
    waited = [one for one in list(_PENDING.values()) if one.task == task]
    return min(waited, key=lambda one: one.number, default=None)


# -- what records say of the operation that a thread works for --------------------------------

FIELDS = ("run", "step", "rank", "save_id")
LOGGERS = (
    "ckptfs",
    "ckptfs.bench",
    "ckptfs.cli",
    "ckptfs.commit",
    "ckptfs.control",
    "ckptfs.dcp",
    "ckptfs.integrations",
    "ckptfs.manager",
    "ckptfs.replication",
    "ckptfs.retention",
    "ckptfs.storage",
    "ckptfs.testing",
    "ckptfs.tools",
    "ckptfs.topology",
)

_FIELDS_HERE: ContextVar[dict[str, Any] | None] = ContextVar("ckptfs_log_fields", default=None)


@contextmanager
def log_fields(**fields: Any) -> Iterator[dict[str, Any]]:
    """Add fields to all log records inside, on this thread and on those that work for it.

    Inner fields win over outer ones. Fields that are later put into the yielded dict are added from
    then on.
    """
    known = {**(_FIELDS_HERE.get() or {}), **fields}
    token = _FIELDS_HERE.set(known)
    try:
        yield known
    finally:
        _FIELDS_HERE.reset(token)


@contextmanager
def _fields_of(fields: dict[str, Any] | None) -> Iterator[None]:
    """Use another thread's dict of fields: a field that one thread adds is known to both."""
    token = _FIELDS_HERE.set(fields)
    try:
        yield
    finally:
        _FIELDS_HERE.reset(token)


def add_fields(**fields: Any) -> None:
    """Add fields to the operation of this thread. Outside of an operation this does nothing."""
    known = _FIELDS_HERE.get()
    if known is not None:
        known.update(fields)


def _fields_here() -> dict[str, Any] | None:
    """Return the dict of the operation that this thread works for, or None outside of any."""
    return _FIELDS_HERE.get()


class _OperationFilter(logging.Filter):
    """Adds the fields to each record. Fields that the call gave by ``extra=`` win."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields. Returns True always."""
        known = _FIELDS_HERE.get() or {}
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, known.get(name))
        return True


# The filter of a logger gets only the records that are logged to it, not those of loggers below, so
# each logger has it. Only loggers of ckptfs: other records are not changed.
for _name in LOGGERS:
    if not any(isinstance(one, _OperationFilter) for one in logging.getLogger(_name).filters):
        logging.getLogger(_name).addFilter(_OperationFilter())


# -- a user's own files --------------------------------------------------------------------------


class WatchedFile(io.FileIO):
    """An unbuffered file: reads and writes may be short. ``sync`` is fsync."""

    def __init__(self, path: str, mode: str = "rb") -> None:
        with in_flight("open", path):
            super().__init__(path, mode)

    def read(self, size: int | None = -1, /) -> bytes:
        """As ``FileIO.read``."""
        with in_flight("read", self.fileno()):
            return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any, /) -> int:
        """As ``FileIO.readinto``."""
        with in_flight("read", self.fileno()):
            return super().readinto(buffer)

    def write(self, data: Any, /) -> int:
        """As ``FileIO.write``."""
        with in_flight("write", self.fileno()):
            return super().write(data)

    def sync(self) -> None:
        """fsync(2)."""
        with in_flight("fsync", self.fileno()):
            os.fsync(self.fileno())

    def close(self) -> None:
        """As ``FileIO.close``; a network filesystem writes the rest of its bytes here."""
        if self.closed:
            return
        with in_flight("close", self.fileno()):
            super().close()


def walk(top: str, *, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """As ``os.walk``; links to directories are not followed."""
    found = os.walk(top, topdown=topdown)
    while True:
        with in_flight("listing", top):
            one = next(found, None)
        if one is None:
            return
        yield one


def remove_tree(top: str) -> None:
    """Remove a directory and what is in it, as far as possible. An absent directory is success."""
    if os.path.islink(top):
        return
    for folder, folders, names in walk(top, topdown=False):
        for name in (*names, *folders):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError), in_flight("unlink", path):
                if name in folders and not os.path.islink(path):
                    os.rmdir(path)
                else:
                    os.unlink(path)
    with contextlib.suppress(OSError), in_flight("rmdir", top):
        os.rmdir(top)
