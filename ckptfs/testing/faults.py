"""A storage that fails on purpose, at an operation that is chosen from outside.

    FaultyStorage(inner, Plan([Fault("create", "*/log/*", 2, Kill(When.HALF))]))
    faults+file:///data/run      with CKPTFS_TEST_FAULT="kill-half:create:*/log/*:2"

Every storage operation is counted under its key. Operations of ``Storage`` have the name of their method;
those of writers and readers are ``write``, ``close``, ``abort``, ``read_into`` and ``close_read``.

    ACTION:OP:KEY PATTERN:N[@RANK[.RESTART]]      several separated by ";"

    kill  kill-half  kill-after     SIGKILL to this process, before, half-way through or after it
    fail=NAME  fail-half=  fail-after=  raise an errno (ENOSPC), a class of ckptfs.errors, or
                                    KeyboardInterrupt
    lose                            the operation is done, but AnswerLostError is raised
    lose-undone                     it is not done, and AnswerLostError is raised
    lose-late=M                     AnswerLostError now; done just before the M-th operation after it
    hold=PATH                       makes PATH.reached, then waits until PATH exists

OP and KEY PATTERN are shell patterns. N counts the operations that match both, from 1: ``kill:*:*:17`` is
the 17th of all, and ``*`` instead of N is every one. RANK and RESTART are those of torchrun. ``write``
half-way writes half of its bytes; ``create`` and ``replace`` half-way leave half of a temporary file;
``remove_tree`` and ``remove_many`` half-way leave half of the names. CKPTFS_TEST_TRACE=PATH appends one
line "NUMBER OP KEY" per operation to PATH.RANK, and the file is complete even after a SIGKILL.

A ``Plan`` decides and records; a ``FaultyStorage`` acts. Only ``ckptfs.testing`` reads these variables,
production code never does.
"""

from __future__ import annotations

import copy
import errno
import fnmatch
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, Protocol, TypeVar

import ckptfs.errors
from ckptfs.errors import AnswerLostError, CkptfsError, StorageError, UriError
from ckptfs.storage.base import (
    Capabilities,
    DataReader,
    DataWriter,
    Entry,
    Shape,
    Space,
    Stat,
    Storage,
    UnfinishedUpload,
)
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.storage.os_errors import typed
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = [
    "Action",
    "Do",
    "Fail",
    "Fault",
    "FaultyReader",
    "FaultyStorage",
    "FaultyWindows",
    "FaultyWriter",
    "Hold",
    "HoldFile",
    "Kill",
    "Lose",
    "Operation",
    "Plan",
    "When",
    "open_faulty",
    "parse_faults",
]

T = TypeVar("T")
Done = Callable[[], object]


class When(Enum):
    """The moment of an operation at which a fault happens.

    Attributes:
        BEFORE: Before it.
        HALF: Half-way through.
        AFTER: After it.
    """

    BEFORE = "before"
    HALF = "half"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to this process.

    Attributes:
        when: The moment.
    """

    when: When = When.BEFORE


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise an error.

    Attributes:
        error: The error. An OSError becomes the typed error for its errno; any other error is raised as
            it is.
        when: The moment.
    """

    error: BaseException
    when: When = When.BEFORE


@dataclass(frozen=True, slots=True)
class Lose:
    """Raise AnswerLostError.

    Attributes:
        done: Whether the operation is done.
        later: Whether it is done later instead, by ``Plan.deliver`` or after ``after`` operations.
        after: How many operations later it is done; None: by ``Plan.deliver``.
    """

    done: bool = True
    later: bool = False
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Set ``reached``, then wait for ``release`` before doing the operation.

    Attributes:
        reached: Set when the operation begins.
        release: The operation waits for this event.
    """

    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class HoldFile:
    """As ``Hold``, between processes: make the file ``path``.reached, then wait for ``path``.

    Attributes:
        path: The file that the operation waits for.
    """

    path: str


Action = Kill | Fail | Lose | Hold | HoldFile


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault, at an operation that matches both patterns.

    Attributes:
        op: A shell pattern for the operation.
        key: A shell pattern for the key.
        nth: The number of the matching operation, from 1; None: all of them.
        action: What happens.
        rank: The RANK of the processes that it happens in; None: all.
        restart: The TORCHELASTIC_RESTART_COUNT of these processes; None: all.
    """

    op: str
    key: str
    nth: int | None
    action: Action
    rank: str | None = None
    restart: str | None = None

    def is_for(self, op: str, key: str) -> bool:
        """True if the operation ``op`` on ``key`` counts for this fault in this process."""
        return (
            fnmatch.fnmatchcase(op, self.op)
            and fnmatch.fnmatchcase(key, self.key)
            and self.rank in (None, os.environ.get("RANK", "0"))
            and self.restart in (None, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the trace.

    Attributes:
        number: The number of the operation, from 1.
        op: Its name.
        key: Its key.
    """

    number: int
    op: str
    key: str


class Plan:
    """Planned faults, and the trace of all operations. Thread-safe; several storages may share it.

    Args:
        faults: The faults.
        trace_path: A file to append a line to for each operation; None: no file.

    Attributes:
        trace: The operations so far.
    """

    def __init__(self, faults: Iterable[Fault] = (), *, trace_path: str | None = None) -> None:
        self.faults = list(faults)
        self.trace: list[Operation] = []
        self._trace_path = trace_path
        self._counts = [0] * len(self.faults)
        self._late: list[tuple[int, Done]] = []
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # Another process counts from 1 again, as it does when it reads the variable itself.
        return {"faults": self.faults, "_trace_path": self._trace_path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["faults"], trace_path=state["_trace_path"])  # type: ignore[misc]

    @classmethod
    def from_environment(cls) -> Plan:
        """Return the plan in CKPTFS_TEST_FAULT, with the trace file of CKPTFS_TEST_TRACE.

        Raises:
            UriError: The text is not a plan.
        """
        text = os.environ.get("CKPTFS_TEST_FAULT", "")
        trace = os.environ.get("CKPTFS_TEST_TRACE")
        return cls(parse_faults(text), trace_path=f"{trace}.{_who()}" if trace else None)

    def add(self, fault: Fault) -> None:
        """Add a ``fault``. It counts operations from now on."""
        with self._lock:
            self.faults.append(fault)
            self._counts.append(0)

    def begin(self, op: str, key: str) -> Action | None:
        """Count one operation ``op`` on ``key``.

        Returns:
            The fault's action for this operation; None if there is none.
        """
        with self._lock:
            operation = Operation(len(self.trace) + 1, op, key)
            self.trace.append(operation)
            self._write(operation)
            due = [done for number, done in self._late if number <= operation.number]
            self._late = [(n, done) for n, done in self._late if n > operation.number]
            found: Action | None = None
            for index, fault in enumerate(self.faults):
                if fault.is_for(op, key):
                    self._counts[index] += 1
                    if found is None and fault.nth in (None, self._counts[index]):
                        found = fault.action
        _deliver(due)
        return found

    def later(self, after: int | None, done: Done) -> None:
        """Keep an operation with a lost answer, to do it later.

        Args:
            after: After this many more operations; None: when ``deliver`` is called.
            done: Does the operation.
        """
        with self._lock:
            self._late.append((len(self.trace) + after if after else 1 << 62, done))

    def deliver(self) -> None:
        """Do all kept operations now, in order. Their storage errors are dropped."""
        with self._lock:
            due, self._late = [done for _, done in self._late], []
        _deliver(due)

    def _write(self, operation: Operation) -> None:
        if self._trace_path:
            line = f"{operation.number} {operation.op} {operation.key}\n".encode()
            fd = os.open(self._trace_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)


def parse_faults(text: str) -> list[Fault]:
    """The faults in a text of CKPTFS_TEST_FAULT.

    Args:
        text: The text.

    Raises:
        UriError: A part of it is invalid; the message says which.
    """
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    plan, _, who = text.partition("@")
    pieces = plan.split(":")
    if len(pieces) != 4:
        raise UriError(f"not ACTION:OP:KEY:N in CKPTFS_TEST_FAULT: {text!r}")
    name, op, key, nth = pieces
    rank, _, restart = who.partition(".")
    if nth != "*" and not nth.isdigit():
        raise UriError(f"N is a number from 1, or *, in CKPTFS_TEST_FAULT: {text!r}")
    number = None if nth == "*" else int(nth)
    return Fault(op, key, number, _parse_action(name, text), rank or None, restart or None)


def _parse_action(text: str, rule: str) -> Action:
    name, _, argument = text.partition("=")
    verb, _, moment = name.partition("-")
    when = When(moment) if moment in ("half", "after", "before") else When.BEFORE
    match verb, moment:
        case "kill", "" | "before" | "half" | "after":
            return Kill(when)
        case "fail", "" | "before" | "half" | "after":
            return Fail(_parse_error(argument, rule), when)
        case "lose", "":
            return Lose()
        case "lose", "undone":
            return Lose(done=False)
        case "lose", "late":
            return Lose(done=False, later=True, after=int(argument) if argument else None)
        case "hold", "" if argument:
            return HoldFile(argument)
    raise UriError(f"no such action in CKPTFS_TEST_FAULT: {rule!r}")


def _parse_error(name: str, rule: str) -> BaseException:
    if name == "KeyboardInterrupt":
        return KeyboardInterrupt()
    if isinstance(number := getattr(errno, name, None), int):
        return OSError(number, os.strerror(number))
    kind = getattr(ckptfs.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CkptfsError):
        return kind("the test asked for it")
    raise UriError(f"no such error in CKPTFS_TEST_FAULT: {rule!r}")


def _deliver(due: Iterable[Done]) -> None:
    for done in due:
        try:
            done()
        except StorageError:
            # The caller got AnswerLostError long ago.
            continue


def _who() -> str:
    return os.environ.get("RANK") or f"pid{os.getpid()}"


# -- the storage -----------------------------------------------------------------------------------


class Do(Protocol):
    """Counts an operation on a key, and does it or what the plan says instead."""

    def __call__(
        self, op: str, key: str, act: Callable[[], T], half: Callable[[], object] | None = None
    ) -> T:
        """Return the result of ``act``, or do what the plan says."""


class FaultyWriter(DataWriter):
    """A writer of ``key`` that passes operations through ``do``; ``inner`` is the real writer."""

    def __init__(self, do: Do, key: str, inner: DataWriter) -> None:
        self._do = do
        self._key = key
        self._inner = inner
        self._send = inner.write
        self.there_bytes = inner.there_bytes

    @property
    def spared_bytes(self) -> int:  # type: ignore[override]  # a number of the base class
        """The value of the real writer."""
        return self._inner.spared_bytes

    def read_there(self, offset: int, buffer: memoryview) -> None:
        """Call the real writer; not counted."""
        self._inner.read_there(offset, buffer)

    def skip(self, size_bytes: int) -> None:
        """Call the real writer; not counted."""
        self._inner.skip(size_bytes)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        def half() -> None:
            view = memoryview(data).cast("B")
            self._inner.write(view[: len(view) // 2])
            flush = getattr(self._inner, "flush", None)
            if flush is not None:
                flush()  # a crash leaves what the kernel has, not what Python still buffers

        return self._do("write", self._key, lambda: self._send(data), half)

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        """Count it as a write: for a planned fault it makes no difference who copies the bytes."""
        self._send = self._inner.lend
        try:
            return self.write(data)
        finally:
            self._send = self._inner.write

    def close(self) -> None:
        self._do("close", self._key, self._inner.close)

    def abort(self) -> None:
        try:
            self._do("abort", self._key, self._inner.abort)
        except CkptfsError:
            # abort never raises: a planned failure means that nothing was removed.
            return


class FaultyReader(DataReader):
    """A reader of ``key`` that passes operations through ``do``; ``inner`` is the real reader."""

    def __init__(self, do: Do, key: str, inner: DataReader) -> None:
        self._do = do
        self._key = key
        self._inner = inner
        self.size_bytes = inner.size_bytes
        self.concurrency, self.window_bytes = inner.concurrency, inner.window_bytes
        self.reach = inner.reach

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._do("read_into", self._key, lambda: self._inner.read_into(offset, buffer))

    def keep_cached(self) -> None:
        """Call the real reader; not counted."""
        self._inner.keep_cached()

    def close(self) -> None:
        self._do("close_read", self._key, self._inner.close)


class FaultyWindows(ParallelWriter):
    """A parallel writer of ``key`` that passes operations through ``do``; a window is a ``write``.
    ``inner`` is the real writer.
    """

    def __init__(self, do: Do, key: str, inner: ParallelWriter) -> None:
        self._do = do
        self._key = key
        self._inner = inner
        self.window_bytes, self.concurrency = inner.window_bytes, inner.concurrency

    @property
    def engine(self) -> FileEngine:
        """The engine of the real writer."""
        return self._inner.engine

    @property
    def direct_bytes(self) -> int:
        """The value of the real writer."""
        return self._inner.direct_bytes

    def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
        def half() -> None:
            held = b"".join(views)
            self._inner.write_at(offset, [memoryview(held)[: len(held) // 2]])

        self._do("write", self._key, lambda: self._inner.write_at(offset, views), half)

    def close(self) -> None:
        self._do("close", self._key, self._inner.close)

    def abort(self) -> None:
        try:
            self._do("abort", self._key, self._inner.abort)
        except CkptfsError:
            return  # as for FaultyWriter


def open_faulty(uri: Uri, storage_options: Mapping[str, Any]) -> FaultyStorage:
    """The factory of ``faults+X`` for the registry: the storage X with the plan of the environment.

    Args:
        uri: ``faults+`` and the URI of the real storage.
        storage_options: The options of the real storage.

    Returns:
        The storage.

    Raises:
        UriError: CKPTFS_TEST_FAULT is not a plan, or the URI cannot be opened.
    """
    inner = open_storage(uri.with_protocol(uri.protocol.removeprefix("faults+")), storage_options)
    return FaultyStorage(inner, Plan.from_environment(), root=uri)


class FaultyStorage(Storage):
    """A storage that fails as a plan says.

    Args:
        inner: The real storage.
        plan: The planned faults; its trace records every operation.
        root: The URI that the storage presents as its own; None: that of ``inner``.

    Attributes:
        inner: The real storage.
        plan: The planned faults and the trace.
    """

    def __init__(self, inner: Storage, plan: Plan, *, root: Uri | None = None) -> None:
        self.inner = inner
        self.plan = plan
        self.root = root or inner.root

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the real storage; not counted."""
        return self.inner.capabilities

    def probe(self, key: str) -> Capabilities:
        """Probe the real storage; not counted."""
        return self.inner.probe(key)

    def read(self, key: str) -> bytes:
        return self._do("read", key, lambda: self.inner.read(key))

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        return self._do("read", key, lambda: self.inner.read_small(key, limit_bytes))

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        self._do(
            "create",
            key,
            lambda: self.inner.create(key, data, staging=staging),
            lambda: self._half_file(staging, data, plain=True),
        )

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        self._do(
            "replace",
            key,
            lambda: self.inner.replace(key, data, if_match=if_match),
            lambda: self._half_file(key, data, plain=False),
        )

    def stat(self, key: str) -> Stat:
        return self._do("stat", key, lambda: self.inner.stat(key))

    def list(self, key: str) -> list[Entry]:
        return self._do("list", key, lambda: self.inner.list(key))

    def refusing_links(self, top: str) -> Storage:
        strict = copy.copy(self)
        strict.inner = self.inner.refusing_links(top)
        return strict

    def refuse_link(self, key: str) -> None:
        self._do("refuse_link", key, lambda: self.inner.refuse_link(key))

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        def opened() -> DataWriter:
            writer = self.inner.open_write(key, size_hint_bytes=size_hint_bytes)
            return FaultyWriter(self._do, key, writer)

        return self._do("open_write", key, opened)

    def files_at_once(self, key: str, size_bytes: int) -> int:
        """Return the value of the real storage."""
        return self.inner.files_at_once(key, size_bytes)

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        """Count it as ``open_write``, which it replaces; no count if inner has no such writer."""
        writer = self.inner.open_parallel(key, size_bytes=size_bytes, engine=engine)
        if writer is None:
            return None
        try:
            return self._do("open_write", key, lambda: FaultyWindows(self._do, key, writer))
        except BaseException:
            writer.abort()
            raise

    def open_kept(self, key: str, *, size_bytes: int) -> DataWriter:
        """Count it as ``open_write``."""

        def opened() -> DataWriter:
            return FaultyWriter(self._do, key, self.inner.open_kept(key, size_bytes=size_bytes))

        return self._do("open_write", key, opened)

    def open_read(self, key: str) -> DataReader:
        return self._do(
            "open_read", key, lambda: FaultyReader(self._do, key, self.inner.open_read(key))
        )

    def make_dir(self, key: str) -> None:
        parent = key.rpartition("/")[0]
        self._do(
            "make_dir",
            key,
            lambda: self.inner.make_dir(key),
            lambda: self.inner.make_dir(parent) if parent else None,
        )

    def make_dir_unsynced(self, key: str) -> None:
        parent = key.rpartition("/")[0]
        self._do(
            "make_dir",
            key,
            lambda: self.inner.make_dir_unsynced(key),
            lambda: self.inner.make_dir(parent) if parent else None,
        )

    def rename(self, source: str, target: str) -> None:
        self._do("rename", source, lambda: self.inner.rename(source, target))

    def link(self, source: str, target: str) -> None:
        self._do("link", target, lambda: self.inner.link(source, target))

    def remove(self, key: str) -> None:
        self._do("remove", key, lambda: self.inner.remove(key))

    def remove_many(self, keys: Sequence[str]) -> None:
        self._do(
            "remove_many",
            keys[0] if keys else "",
            lambda: self.inner.remove_many(keys),
            lambda: self.inner.remove_many(keys[: (len(keys) + 1) // 2]),
        )

    def remove_dir(self, key: str) -> None:
        self._do("remove_dir", key, lambda: self.inner.remove_dir(key))

    def remove_tree(self, key: str) -> None:
        self._do(
            "remove_tree",
            key,
            lambda: self.inner.remove_tree(key),
            lambda: self._half_tree(key),
        )

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        return self._do("unfinished_uploads", "", self.inner.unfinished_uploads)

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        return self._do("sweep_uploads", "", lambda: self.inner.sweep_uploads(older_than_s, keys))

    def sync(self, key: str) -> None:
        self._do("sync", key, lambda: self.inner.sync(key))

    def refresh(self, key: str) -> None:
        self._do("refresh", key, lambda: self.inner.refresh(key))

    def touch(self, key: str) -> None:
        self._do("touch", key, lambda: self.inner.touch(key))

    def space(self) -> Space | None:
        return self._do("space", "", self.inner.space)

    def local_path(self, key: str) -> str | None:
        """Return the path in the real storage; operations on that path bypass the plan."""
        return self.inner.local_path(key)

    def close(self) -> None:
        self.inner.close()

    def _do(
        self, op: str, key: str, act: Callable[[], T], half: Callable[[], object] | None = None
    ) -> T:
        action = self.plan.begin(op, key)
        match action:
            case Kill(when) | Fail(_, when):
                if when is When.HALF and half is not None:
                    half()
                elif when is When.AFTER:
                    act()
                self._end(action, op, key)
            case Lose(done, later, after):
                if later:
                    self.plan.later(after, act)
                elif done:
                    act()
                raise AnswerLostError(f"{op}: the test lost the answer", uri=self.uri(key))
            case Hold(reached, release):
                reached.set()
                release.wait()
            case HoldFile(path):
                _hold(path)
            case None:
                pass
        return act()

    def _end(self, action: Kill | Fail, op: str, key: str) -> NoReturn:
        if isinstance(action, Kill):
            _die()
        error = action.error
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise typed(error, self.uri(key), op)
        raise error

    def _half_file(self, key: str, data: bytes, *, plain: bool) -> None:
        """Leave half of a temporary file, as a crash in the middle of writing ``key`` does."""
        if self.inner.capabilities.shape is not Shape.FILESYSTEM:
            return
        half = data[: len(data) // 2]
        if plain:
            self.inner.replace(key, half)
            return
        path = self.inner.local_path(key)
        if path is not None:
            with open(f"{os.path.dirname(path)}/.partial-half", "wb") as file:
                file.write(half)

    def _half_tree(self, key: str) -> None:
        mounted = self.inner.capabilities.shape is Shape.FILESYSTEM
        if mounted and not self.inner.stat(key).is_dir:
            return  # there is no half of one file
        names = self.inner.list(key)
        for entry in names[: (len(names) + 1) // 2]:
            self.inner.remove_tree(f"{key}/{entry.name}")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a SIGKILL is not survived")


def _hold(path: str) -> None:
    with open(f"{path}.reached", "wb"):
        pass
    while not os.path.exists(path):
        time.sleep(0.005)
