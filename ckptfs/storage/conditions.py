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
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    StorageError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import IF_ABSENT, Condition, IfMatch, ObjectClient
from ckptfs.storage.retrying import NOT_DONE, Retrier
from ckptfs.uri import mask_credentials

__all__ = ["NOTHING", "Honoured", "Spelling", "Verdict", "probe_conditions"]

log = logging.getLogger(__name__)

PROBE_PREFIX = ".partial-probe-"


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
    """Probe on a fresh key below ``folder`` ("" or ending in a slash): six requests, or seven.

    StorageError: whatever is no answer, such as no permission to put. After an answer that was lost
    all begins anew, on another key. A key that cannot be deleted stays, and is told.
    """
    if not client.conditions.if_absent:
        return NOTHING

    def once() -> Honoured:
        probe = _Probe(client, f"{folder}{PROBE_PREFIX}{secrets.token_hex(8)}", retrier)
        try:
            return probe.ask()
        finally:
            probe.clean()

    # What a lost answer has left open, no second try on the same key can tell.
    return retrier.run(once, after=(AnswerLostError,))


class Verdict:
    """What was found of one bucket, by whichever thread of this process came first."""

    def __init__(self) -> None:
        self._found: Honoured | None = None
        self._lock = threading.Lock()

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


@dataclass(frozen=True, slots=True)
class _Probe:
    client: ObjectClient
    key: str
    retrier: Retrier

    def ask(self) -> Honoured:
        if not self._put(b"first", IF_ABSENT) or self._put(b"second", IF_ABSENT):
            return NOTHING
        data, etag = self.retrier.run(lambda: self.client.get(self.key))
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
            if self._put(b"third", right):
                ignored = self._put(b"fourth", right)  # "third" took that etag away
                return None if ignored else spelling
        return None

    def _put(self, data: bytes, condition: Condition) -> bool:
        """Whether it was done."""
        try:
            self.retrier.run(lambda: self.client.put(self.key, data, condition), after=NOT_DONE)
        except (AlreadyExistsError, UnsupportedError):
            return False
        return True

    def clean(self) -> None:
        try:
            for refused in self.retrier.run(lambda: self.client.delete([self.key])):
                raise refused.error
        except StorageError as error:
            # No permission to delete, or a lock: the answer stands, and a few bytes stay.
            log.warning("left behind: the probe %s (%s)", self.key, mask_credentials(str(error)))
