"""What is to go wrong, and where: faults, the count of operations, and the text form of both.

    Plan([Fault("create", "*/log/*", 2, Kill(When.HALF)), ...])    or    parse_faults("kill-half:...")

A plan decides and records; ``ckptfs.testing.faults`` acts. The text form is described there.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ckptfs.errors
from ckptfs.errors import CkptfsError, StorageError, UriError

__all__ = [
    "Action",
    "Fail",
    "Fault",
    "Hold",
    "HoldFile",
    "Kill",
    "Lose",
    "Operation",
    "Plan",
    "When",
    "parse_faults",
]

Done = Callable[[], object]


class When(Enum):
    """At which moment of an operation.

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
    """SIGKILL to this process.

    Attributes:
        when: At which moment.
    """

    when: When = When.BEFORE


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise an error.

    Attributes:
        error: What is raised: an OSError becomes the typed error of its errno; anything else is raised as it
            is.
        when: At which moment.
    """

    error: BaseException
    when: When = When.BEFORE


@dataclass(frozen=True, slots=True)
class Lose:
    """Raise AnswerLostError.

    Attributes:
        done: Whether the operation is done.
        later: It is done later, by ``deliver`` or after ``after``.
        after: How many operations later it is done; None: by ``deliver``.
    """

    done: bool = True
    later: bool = False
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Set ``reached``, then wait for ``release`` before the operation is done.

    Attributes:
        reached: Set when the operation begins.
        release: Waited for.
    """

    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class HoldFile:
    """The same between processes: make the file ``path``.reached, wait until ``path`` exists.

    Attributes:
        path: The file that is waited for.
    """

    path: str


Action = Kill | Fail | Lose | Hold | HoldFile


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, at an operation that matches both patterns.

    Attributes:
        op: Shell pattern of the operation.
        key: Shell pattern of the key.
        nth: The number of the matching operation, from 1; None: each of them.
        action: What happens.
        rank: Only in the process with this RANK; None: in all.
        restart: Only in the process with this TORCHELASTIC_RESTART_COUNT; None: in all.
    """

    op: str
    key: str
    nth: int | None
    action: Action
    rank: str | None = None
    restart: str | None = None

    def is_for(self, op: str, key: str) -> bool:
        """True when operation ``op`` of ``key`` counts for this fault, in this process."""
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
        number: From 1.
        op: The operation.
        key: Its key.
    """

    number: int
    op: str
    key: str


class Plan:
    """Faults and the trace of the operations. Thread-safe; may serve several storages.

    Args:
        faults: What goes wrong.
        trace_path: A file that gets a line for each operation; None: no file.

    Attributes:
        trace: The operations so far.
    """

    def __init__(self, faults: Iterable[Fault] = (), *, trace_path: str | None = None) -> None:
        self.faults = list(faults)
        self.trace: list[Operation] = []
        self._trace_path = trace_path
        self._seen = [0] * len(self.faults)
        self._late: list[tuple[int, Done]] = []
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # Another process begins to count afresh, as it does when it reads the variable itself.
        return {"faults": self.faults, "_trace_path": self._trace_path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["faults"], trace_path=state["_trace_path"])  # type: ignore[misc]

    @classmethod
    def from_environment(cls) -> Plan:
        """Return the plan of CKPTFS_TEST_FAULT, with the trace file of CKPTFS_TEST_TRACE.

        Raises:
            UriError: The text is not a plan.
        """
        text = os.environ.get("CKPTFS_TEST_FAULT", "")
        trace = os.environ.get("CKPTFS_TEST_TRACE")
        return cls(parse_faults(text), trace_path=f"{trace}.{_who()}" if trace else None)

    def add(self, fault: Fault) -> None:
        """Add one more ``fault``; it counts from now."""
        with self._lock:
            self.faults.append(fault)
            self._seen.append(0)

    def begin(self, op: str, key: str) -> Action | None:
        """Count one operation ``op`` of ``key``.

        Returns:
            What goes wrong with it; None: nothing.
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
                    self._seen[index] += 1
                    if found is None and fault.nth in (None, self._seen[index]):
                        found = fault.action
        _deliver(due)
        return found

    def later(self, after: int | None, done: Done) -> None:
        """Keep an operation with a lost answer, ``done``, until ``after`` more operations; None: until
        ``deliver``.
        """
        with self._lock:
            self._late.append((len(self.trace) + after if after else 1 << 62, done))

    def deliver(self) -> None:
        """Do now, in order, what was lost and is still on its way. Its errors reach nobody."""
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
    """The faults of a CKPTFS_TEST_FAULT text.

    Args:
        text: The text.

    Raises:
        UriError: A part of it is wrong; the message says which.
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


def _parse_action(text: str, whole: str) -> Action:
    name, _, argument = text.partition("=")
    verb, _, moment = name.partition("-")
    when = When(moment) if moment in ("half", "after", "before") else When.BEFORE
    match verb, moment:
        case "kill", "" | "before" | "half" | "after":
            return Kill(when)
        case "fail", "" | "before" | "half" | "after":
            return Fail(_parse_error(argument, whole), when)
        case "lose", "":
            return Lose()
        case "lose", "undone":
            return Lose(done=False)
        case "lose", "late":
            return Lose(done=False, later=True, after=int(argument) if argument else None)
        case "hold", "" if argument:
            return HoldFile(argument)
    raise UriError(f"no such action in CKPTFS_TEST_FAULT: {whole!r}")


def _parse_error(name: str, whole: str) -> BaseException:
    if name == "KeyboardInterrupt":
        return KeyboardInterrupt()
    if isinstance(number := getattr(errno, name, None), int):
        return OSError(number, os.strerror(number))
    kind = getattr(ckptfs.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CkptfsError):
        return kind("the test asked for it")
    raise UriError(f"no such error in CKPTFS_TEST_FAULT: {whole!r}")


def _deliver(due: Iterable[Done]) -> None:
    for done in due:
        try:
            done()
        except StorageError:
            # The caller was told long ago that the answer is lost.
            continue


def _who() -> str:
    return os.environ.get("RANK") or f"pid{os.getpid()}"
