"""What a proxy is to do to which request: closed types, the counting, and the text form.

    ProxyPlan([HttpFault("PUT", "*/log/*", Nth(1), LOSE)])    or    parse_faults("lose:PUT:*/log/*:1")

    ACTION:METHOD:PATH PATTERN:WHICH      several separated by ";"

    delay=S                wait S seconds before the request is forwarded
    bandwidth=B            request and answer bodies together no faster than B bytes a second
    reset                  reset the connection; nothing was forwarded
    reset-request=N        after N bytes of the request's body were forwarded (without =N: half)
    lose                   the server acts, the connection is reset before any byte of its answer
    lose-silent            the server acts, no answer ever comes, the connection stays open
    reset-answer=N         after N bytes of the answer's body (without =N: half)
    status=CODE[,RETRY]    answer CODE without forwarding, with Retry-After: RETRY
    truncate=N             the connection is closed after N bytes of the answer's body
    truncate-lying=N       the same, and Content-Length says N
    trickle=B              the answer, headers too, byte by byte, B a second
    hold=PATH              make PATH.reached, forward when PATH exists
    hold-acted=PATH        the same between the server's answer and the client
    strip=HEADER           forwarded without this header: a server that does not know it
    refuse                 reset, and refuse connections from now on

METHOD and PATH PATTERN are shell patterns; the pattern is tried on the path and on path?query, with
and without their percent-encoding (write ``[?]`` for the question mark). WHICH counts the requests that match both, from 1: ``3``, ``3-8``
(a burst), ``*`` or ``1%`` (each with that probability, from the plan's seed). All faults that match
apply; of those that end a request, the first.
"""

from __future__ import annotations

import fnmatch
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final
from urllib.parse import unquote

from ckptfs.errors import UriError

__all__ = [
    "LOSE",
    "Action",
    "Answer",
    "At",
    "Bandwidth",
    "Chance",
    "Cut",
    "Delay",
    "Each",
    "Gate",
    "Hold",
    "HoldFile",
    "HttpFault",
    "Nth",
    "ProxyPlan",
    "Refuse",
    "Reset",
    "Strip",
    "Trickle",
    "Truncate",
    "Which",
    "matches",
    "parse_faults",
]


class At(Enum):
    """A moment of one request.

    Attributes:
        BEFORE: The head has arrived, nothing was forwarded.
        REQUEST: In the middle of the request's body.
        ACTED: The server has answered, the client has seen nothing of it.
        ANSWER: In the middle of the answer's body.
    """

    BEFORE = "before"
    REQUEST = "request"
    ACTED = "acted"
    ANSWER = "answer"


class Cut(Enum):
    """How a truncated answer ends.

    Attributes:
        CLOSED: Content-Length is true, the connection ends before.
        LYING: Content-Length is the truncated size.
    """

    CLOSED = "closed"
    LYING = "lying"


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait before forwarding.

    Attributes:
        wait_s: How many seconds.
    """

    wait_s: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """All bodies that match, in both directions together, are no faster.

    Attributes:
        bytes_per_s: In bytes per second.
    """

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Reset:
    """RST to the client at a moment; what was not forwarded by then never is.

    Attributes:
        at: The moment.
        after_bytes: How many bytes of that body; None is half of its Content-Length.
        do: Called first, with the Exchange, in the proxy's thread: the place to kill the client. None:
            nothing.
        silent: No RST, no answer either.
    """

    at: At
    after_bytes: int | None = None
    do: Callable[[Any], object] | None = None
    silent: bool = False


LOSE: Final = Reset(At.ACTED)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the proxy's own; the request does not reach the server. The body is an S3 error document.

    Attributes:
        status: Of the answer.
        retry_after_s: Its Retry-After, in seconds; None: no such header.
        code: Of the error document.
    """

    status: int
    retry_after_s: int | None = None
    code: str = "SlowDown"


@dataclass(frozen=True, slots=True)
class Truncate:
    """The answer's body ends early.

    Attributes:
        after_bytes: After so many bytes.
        cut: How it ends.
    """

    after_bytes: int
    cut: Cut = Cut.CLOSED


@dataclass(frozen=True, slots=True)
class Trickle:
    """A slow loris of a server: every byte of the answer by itself.

    Attributes:
        bytes_per_s: How many bytes per second.
    """

    bytes_per_s: float


class Gate:
    """Where a request is held.

    Attributes:
        reached: Set by the proxy.
        release: The request continues when it is set.
    """

    __slots__ = ("reached", "release")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until the test releases the request.

    Attributes:
        gate: Where it waits.
        at: BEFORE or ACTED.
    """

    gate: Gate = field(default_factory=Gate)
    at: At = At.BEFORE


@dataclass(frozen=True, slots=True)
class HoldFile:
    """The same between processes: make the file ``path``.reached, wait until ``path`` exists.

    Attributes:
        path: The file that is waited for.
        at: BEFORE or ACTED.
    """

    path: str
    at: At = At.BEFORE


@dataclass(frozen=True, slots=True)
class Strip:
    """The request is forwarded without a header: the server acts as one that does not know it.

    Where the header is signed, the server must not check signatures (moto does not).

    Attributes:
        header: Its name.
    """

    header: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reset this one and refuse every connection until ``FaultProxy.accept`` is called."""


def matches(method: str, target: str, method_pattern: str, path_pattern: str) -> bool:
    """Whether a request is meant: the pattern may mean the path or path?query, encoded or not."""
    path = target.partition("?")[0]
    texts = (path, target, unquote(path), unquote(target))
    return fnmatch.fnmatchcase(method, method_pattern) and any(
        fnmatch.fnmatchcase(text, path_pattern) for text in texts
    )


Action = Delay | Bandwidth | Reset | Answer | Truncate | Trickle | Hold | HoldFile | Refuse | Strip


@dataclass(frozen=True, slots=True)
class Nth:
    """Requests ``first`` to ``last`` of those that match.

    Attributes:
        first: The number of the first, from 1.
        last: The number of the last; None: only ``first``.
    """

    first: int
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Each:
    """Every request that matches."""


@dataclass(frozen=True, slots=True)
class Chance:
    """Each request that matches, with this probability.

    Attributes:
        probability: From 0 to 1.
    """

    probability: float


Which = Nth | Each | Chance


@dataclass(frozen=True, slots=True)
class HttpFault:
    """What happens to the requests that match both patterns.

    Attributes:
        method: Shell pattern of the method.
        path: Shell pattern of the path.
        which: Which of the matching requests.
        action: What happens.
    """

    method: str
    path: str
    which: Which
    action: Action

    def is_for(self, method: str, target: str) -> bool:
        """True when a request ``method`` of ``target`` counts for this fault."""
        return matches(method, target, self.method, self.path)


class ProxyPlan:
    """Faults and how often each was counted. Thread-safe; ``add`` and ``clear`` while it runs.

    Args:
        faults: What goes wrong.
        seed: Of ``Chance``; the same requests in the same order meet the same faults.
    """

    def __init__(self, faults: Iterable[HttpFault] = (), *, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._faults: list[HttpFault] = list(faults)
        self._seen = [0] * len(self._faults)

    def add(self, fault: HttpFault) -> None:
        """Add one more ``fault``; it counts from now."""
        with self._lock:
            self._faults.append(fault)
            self._seen.append(0)

    def clear(self) -> None:
        """From now on nothing goes wrong."""
        with self._lock:
            self._faults.clear()
            self._seen.clear()

    def begin(self, method: str, target: str) -> list[Action]:
        """Count one request ``method`` of ``target``.

        Returns:
            What is to be done to it, in the order of the faults.
        """
        with self._lock:
            return list(self._matching(method, target))

    def _matching(self, method: str, target: str) -> Iterator[Action]:
        for index, fault in enumerate(self._faults):
            if not fault.is_for(method, target):
                continue
            self._seen[index] += 1
            if self._meant(fault.which, self._seen[index]):
                yield fault.action

    def _meant(self, which: Which, number: int) -> bool:
        match which:
            case Nth(first, last):
                return first <= number <= (first if last is None else last)
            case Chance(probability):
                return self._random.random() < probability
            case Each():
                return True


def parse_faults(text: str) -> list[HttpFault]:
    """The faults of a text.

    Args:
        text: The text.

    Raises:
        UriError: A part of it is wrong; the message says which.
    """
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> HttpFault:
    rest, _, which = text.rpartition(":")
    action, _, rest = rest.partition(":")
    method, _, path = rest.partition(":")
    if not (action and method and path and which):
        raise UriError(f"not ACTION:METHOD:PATH:WHICH: {text!r}")
    try:
        return HttpFault(method, path, _parse_which(which), _parse_action(action))
    except ValueError as error:
        raise UriError(f"{error} in {text!r}") from error


def _parse_which(text: str) -> Which:
    if text == "*":
        return Each()
    if text.endswith("%"):
        return Chance(float(text[:-1]) / 100)
    first, dash, last = text.partition("-")
    return Nth(int(first), int(last) if dash else None)


def _parse_action(text: str) -> Action:
    name, _, value = text.partition("=")
    match name:
        case "delay":
            return Delay(float(value))
        case "bandwidth":
            return Bandwidth(float(value))
        case "trickle":
            return Trickle(float(value))
        case "reset":
            return Reset(At.BEFORE)
        case "reset-request" | "reset-answer":
            return Reset(At(name.partition("-")[2]), int(value) if value else None)
        case "lose":
            return LOSE
        case "lose-silent":
            return Reset(At.ACTED, silent=True)
        case "status":
            status, _, retry = value.partition(",")
            return Answer(int(status), int(retry) if retry else None)
        case "truncate" | "truncate-lying":
            return Truncate(int(value), Cut.LYING if name.endswith("lying") else Cut.CLOSED)
        case "hold" | "hold-acted" if value:
            return HoldFile(value, At.ACTED if name.endswith("acted") else At.BEFORE)
        case "strip" if value:
            return Strip(value)
        case "refuse":
            return Refuse()
    raise ValueError(f"no such action: {text!r}")
