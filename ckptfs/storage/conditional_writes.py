"""Which conditions a bucket honours: seen by asking for them, never told by a name.

    put if absent      "first"                   must be done
    put if absent      "second"                  must be refused     else: no exclusive create
    get                                          "first", and its etag
    put if it matches  "third"   the right etag  must be done        as it was told, else unquoted
    put if it matches  "fourth"  the old etag    must be refused     else: no conditional replace
    delete

On a key of our own, once per process and bucket, before the first conditional write; six requests. Some servers
ignore conditions and write; some (radosgw 16.2) refuse every etag in quotation marks, which is how
they tell it; some answer "not implemented". All of them are called S3.

A library may repeat a request whose answer was lost, and nobody hears of that. The repeat meets our own
object, so "exists already" is no verdict before the object was read back: of "first", whose key
nobody else knows, all begins anew on another key; of "third", which can be read, it was done.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import IF_ABSENT, Condition, IfMatch, ObjectClient
from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.storage.retry import NOT_DONE, Retrier
from ckptfs.uri import mask_credentials

__all__ = ["NOTHING", "Honoured", "Spelling", "Verdict", "probe_conditions"]

log = logging.getLogger(__name__)

PROBE_PREFIX = ".partial-probe-"
_KEYS = 4  # that are tried where each first put seems to be repeated below us


class Spelling(Enum):
    """How an etag is written in a condition."""

    AS_TOLD = "as told"
    BARE = "without quotation marks"

    def of(self, etag: str) -> str:
        """The etag in this spelling."""
        return etag if self is Spelling.AS_TOLD else etag.strip('"')


@dataclass(frozen=True, slots=True)
class Honoured:
    """if_absent: of several creates one wins. if_match: how, or None where replacing by etag (and
    "only if absent") cannot be relied on.
    """

    if_absent: bool
    if_match: Spelling | None


NOTHING = Honoured(if_absent=False, if_match=None)


def probe_conditions(client: ObjectClient, folder: str, retrier: Retrier) -> Honoured:
    """Probe on a fresh key below ``folder`` ("" or ending in a slash): six requests, a few more where
    an etag is refused.

    StorageError: whatever is no answer, such as no permission to put. After an answer that was lost,
    here or below us, all begins anew, on another key. A key that cannot be deleted stays, and is told.
    """
    if not client.conditions.if_absent:
        return NOTHING

    def once() -> Honoured | None:
        probe = _Probe(client, f"{folder}{PROBE_PREFIX}{secrets.token_hex(8)}", retrier)
        try:
            return probe.ask()
        finally:
            probe.clean()

    for _ in range(_KEYS):
        # What a lost answer has left open, no second try on the same key can tell.
        found = retrier.run(once, after=(AnswerLostError,))
        if found is not None:
            return found
    # Not NOTHING: of two writers who think differently of one store, neither sees the other's log.
    raise StorageError(
        f"which conditions the store honours cannot be told: {_KEYS} new objects were made, and each "
        "was said to exist already",
        uri=f"{retrier.endpoint}/{folder}",
        hint="something on the way repeats requests whose answers are lost: look at the connection "
        "and the proxies",
    )


class _Answer(Enum):
    """To one conditional put: done, the condition did not hold, no such request here."""

    DONE = "done"
    NO = "no"
    UNKNOWN = "unknown"


class Verdict:
    """What was found of one bucket, by whichever thread of this process came first."""

    def __init__(self) -> None:
        self._found: Honoured | None = None
        self._lock = ProcessLock()  # held over requests: a child that is forked then has its own

    @property
    def found(self) -> Honoured | None:
        """The answer, or None: nobody asked yet."""
        return self._found

    def settle(self, probe: Callable[[], Honoured]) -> Honoured:
        """The answer, probed now where there is none. A probe that fails leaves it open."""
        with self._lock:
            if self._found is None:
                self._found = probe()
            return self._found


@dataclass(slots=True)
class _Probe:
    """may_exist: some put was done, or nobody knows whether it was."""

    client: ObjectClient
    key: str
    retrier: Retrier
    may_exist: bool = False

    def ask(self) -> Honoured | None:
        """None: the first answer was about our own first put, so that it tells nothing."""
        match self._put(b"first", IF_ABSENT):
            case _Answer.NO:
                return None if self._holds(b"first") else NOTHING
            case _Answer.UNKNOWN:
                return NOTHING
        if self._put(b"second", IF_ABSENT) is _Answer.DONE:
            return NOTHING
        data, etag = self._read()
        if data != b"first":
            return NOTHING  # it said no, and did it
        return Honoured(if_absent=True, if_match=self._ask_by(etag))

    def _ask_by(self, etag: str | None) -> Spelling | None:
        if etag is None or not self.client.conditions.if_match:
            return None
        for spelling in Spelling:
            if spelling is Spelling.BARE and spelling.of(etag) == etag:
                continue
            right = IfMatch(spelling.of(etag))
            answer = self._put(b"third", right)
            done = answer is _Answer.DONE
            if done or (answer is _Answer.NO and self._holds(b"third")):
                # "third" took that etag away.
                ignored = self._put(b"fourth", right) is _Answer.DONE
                # What was refused and done once may be a server that always says no, and does it.
                honoured = not ignored and (done or self._holds(b"third"))
                return spelling if honoured else None
        return None

    def _put(self, data: bytes, condition: Condition) -> _Answer:
        try:
            self.retrier.run(lambda: self.client.put(self.key, data, condition), after=NOT_DONE)
        except AlreadyExistsError:
            self.may_exist = True
            return _Answer.NO
        except UnsupportedError:
            return _Answer.UNKNOWN
        except (AccessError, NotFoundError):
            raise  # refused, or no such bucket: this put has made nothing
        except StorageError:
            self.may_exist = True
            raise
        self.may_exist = True
        return _Answer.DONE

    def _read(self) -> tuple[bytes, str | None]:
        return self.retrier.run(lambda: self.client.get(self.key))

    def _holds(self, data: bytes) -> bool:
        try:
            return self._read()[0] == data
        except NotFoundError:
            return False

    def clean(self) -> None:
        if not self.may_exist:
            return
        try:
            for refused in self.retrier.run(lambda: self.client.delete([self.key])):
                raise refused.error
        except StorageError as error:
            # No permission to delete, or a lock: the answer stands, and a few bytes stay.
            log.warning("left behind: the probe %s (%s)", self.key, mask_credentials(str(error)))
