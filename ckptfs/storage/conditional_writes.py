"""Finds out which conditional writes a bucket honours, by making some; never by the name of the store.

    put if absent      "first"                   must be done
    put if absent      "second"                  must be refused     else: no exclusive create
    get                                          "first", and its etag
    put if it matches  "third"   the right etag  must be done        as it was given, else unquoted
    put if it matches  "fourth"  the old etag    must be refused     else: no conditional replace
    delete

The probe uses a key of its own, once per process and bucket, before the first conditional write; it takes six
requests. Some servers ignore conditions and write; some (radosgw 16.2) refuse every etag in quotation marks,
although they return them so; some answer "not implemented". All of them are called S3.

A library may silently repeat a request after its answer was lost. The repeated request finds our own object, so
"exists already" means nothing before the object has been read back. No other process knows the key, so if this
happens to "first", the probe starts again on another key. For "third", reading it back shows that the write was
done.
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
from ckptfs.storage.retry import NOT_DONE, Retrier
from ckptfs.storage.threads import ProcessLock
from ckptfs.uri import mask_credentials

__all__ = [
    "NO_CONDITIONS",
    "ConditionProbe",
    "EtagSpelling",
    "HonouredConditions",
    "probe_conditions",
]

log = logging.getLogger("ckptfs.storage")

PROBE_PREFIX = ".partial-probe-"
_KEYS = 4  # keys to try, if a layer below us seems to repeat each first put


class EtagSpelling(Enum):
    """How an etag is written in a condition."""

    AS_GIVEN = "as told"
    UNQUOTED = "without quotation marks"

    def of(self, etag: str) -> str:
        """Return the etag in this spelling."""
        return etag if self is EtagSpelling.AS_GIVEN else etag.strip('"')


@dataclass(frozen=True, slots=True)
class HonouredConditions:
    """Which conditional writes can be relied on."""

    if_absent: bool  # of several creates one wins
    if_match: (
        EtagSpelling | None
    )  # how the etag is written; None: replacing by etag cannot be relied on


NO_CONDITIONS = HonouredConditions(if_absent=False, if_match=None)


def probe_conditions(client: ObjectClient, folder: str, retrier: Retrier) -> HonouredConditions:
    """Probe with a fresh key: six requests, a few more if an etag is refused.

    If an answer is lost, here or in a library, the probe starts again on another key. A key that cannot be deleted
    stays, with a warning.

    Args:
        client: The client of the bucket.
        folder: Where the key is created: "" or a prefix that ends in a slash.
        retrier: Retries the requests.

    Raises:
        StorageError: There was no answer to the question, for example because a permission to put is missing.
    """
    if not client.conditions.if_absent:
        return NO_CONDITIONS

    def once() -> HonouredConditions | None:
        probe = _ProbeObject(client, f"{folder}{PROBE_PREFIX}{secrets.token_hex(8)}", retrier)
        try:
            return probe.run()
        finally:
            probe.clean()

    for _ in range(_KEYS):
        # After a lost answer, no second try on the same key can find out what happened.
        found = retrier.run(once, after=(AnswerLostError,))
        if found is not None:
            return found
    # Not NO_CONDITIONS: if two writers disagree about a store, neither sees the other's log.
    raise StorageError(
        f"the store's support for conditional writes is unknown: it said of each of {_KEYS} "
        "new objects that it existed already",
        uri=f"{retrier.endpoint}/{folder}",
        hint="a proxy or the connection repeats requests after it loses their answers: check both",
    )


class _PutOutcome(Enum):
    """The outcome of one conditional put: done, the condition did not hold, or no such request here."""

    DONE = "done"
    NO = "no"
    UNKNOWN = "unknown"


class ConditionProbe:
    """The probe's result for one bucket. The first thread of this process that needs it probes."""

    def __init__(self) -> None:
        self._found: HonouredConditions | None = None
        self._lock = ProcessLock()  # held over requests: a child that is forked then has its own

    @property
    def found(self) -> HonouredConditions | None:
        """The result, or None if there was no probe yet."""
        return self._found

    def settle(self, probe: Callable[[], HonouredConditions]) -> HonouredConditions:
        """Return the result, and probe now if there is none.

        After a failed probe there is still none.
        """
        with self._lock:
            if self._found is None:
                self._found = probe()
            return self._found


@dataclass(slots=True)
class _ProbeObject:
    """The key that one probe writes to."""

    client: ObjectClient
    key: str
    retrier: Retrier
    may_exist: bool = False  # some put was done, or may have been

    def run(self) -> HonouredConditions | None:
        """Run the probe.

        None: the first answer was about our own first put, so it means nothing.
        """
        match self._put(b"first", IF_ABSENT):
            case _PutOutcome.NO:
                return None if self._holds(b"first") else NO_CONDITIONS
            case _PutOutcome.UNKNOWN:
                return NO_CONDITIONS
        if self._put(b"second", IF_ABSENT) is _PutOutcome.DONE:
            return NO_CONDITIONS
        data, etag = self._read()
        if data != b"first":
            return NO_CONDITIONS  # it answered "no", and wrote
        return HonouredConditions(if_absent=True, if_match=self._probe_etag(etag))

    def _probe_etag(self, etag: str | None) -> EtagSpelling | None:
        if etag is None or not self.client.conditions.if_match:
            return None
        for spelling in EtagSpelling:
            if spelling is EtagSpelling.UNQUOTED and spelling.of(etag) == etag:
                continue
            right = IfMatch(spelling.of(etag))
            answer = self._put(b"third", right)
            done = answer is _PutOutcome.DONE
            if done or (answer is _PutOutcome.NO and self._holds(b"third")):
                # "third" changed that etag.
                ignored = self._put(b"fourth", right) is _PutOutcome.DONE
                # A put that was refused once and done once may come from a server that always
                # answers "no", and writes.
                honoured = not ignored and (done or self._holds(b"third"))
                return spelling if honoured else None
        return None

    def _put(self, data: bytes, condition: Condition) -> _PutOutcome:
        try:
            self.retrier.run(lambda: self.client.put(self.key, data, condition), after=NOT_DONE)
        except AlreadyExistsError:
            self.may_exist = True
            return _PutOutcome.NO
        except UnsupportedError:
            return _PutOutcome.UNKNOWN
        except (AccessError, NotFoundError):
            raise  # refused, or no such bucket: this put has made nothing
        except StorageError:
            self.may_exist = True
            raise
        self.may_exist = True
        return _PutOutcome.DONE

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
            # No permission to delete, or a lock: the result is valid, and a few bytes stay.
            log.warning("left behind: the probe %s (%s)", self.key, mask_credentials(str(error)))
