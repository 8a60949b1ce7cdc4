"""Deletes in batches. Every key is tried; where deletes are refused, they are not requested again and again.

    delete_keys     known names, in as few requests as the store takes; raises the first failure with their number
    delete_tree     lists below "key/", deletes, lists again, until a listing is empty
    DeleteBackoff   names below which a delete was refused because a permission is missing

An object lock, a retention rule or a policy without the permission to delete refuses every try in the same
way. The first refusal is logged as a warning. After it no delete below that name is requested for one minute,
then two, up to an hour: callers get the same AccessError without a request. If the lock has ended, a much
later try succeeds. A name is the root's key and the first component below it, that is one checkpoint of one
run; below ``.ckptfs``, which all checkpoints share, it is the whole key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckptfs.errors import (
    AccessError,
    CredentialsError,
    NotFoundError,
    StorageError,
    TransientError,
)
from ckptfs.storage.base import first_of
from ckptfs.storage.clients.base import ObjectClient
from ckptfs.storage.retry import IDEMPOTENT, Retrier
from ckptfs.uri import Uri

__all__ = ["DeleteBackoff", "Deleter"]

log = logging.getLogger("ckptfs.storage")

_FIRST_WAIT_S = 60.0
_LONGEST_WAIT_S = 3600.0
_SWEEPS = 4
_SHARED = ".ckptfs"


@dataclass(frozen=True, slots=True)
class _Backoff:
    since_s: float
    length_s: float


class DeleteBackoff:
    """The names below which no delete is requested for now. Thread-safe; one per bucket and process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._backoffs: dict[str, _Backoff] = {}
        self._has_warned = False
        self._lock = threading.Lock()

    def left_s(self, name: str) -> float:
        """Return the seconds until deletes below ``name`` may be tried again; 0 if they may be now."""
        with self._lock:
            backoff = self._backoffs.get(name)
            return (
                0.0
                if backoff is None
                else max(0.0, backoff.since_s + backoff.length_s - self._clock())
            )

    def refused(self, name: str, error: AccessError) -> None:
        """Record a refused delete: the next ones wait, twice as long as the last time."""
        with self._lock:
            before = self._backoffs.get(name)
            now_s = self._clock()
            if before is not None and now_s < before.since_s + before.length_s:
                return  # if several are refused at the same time, the first one counts
            length_s = (
                _FIRST_WAIT_S if before is None else min(2 * before.length_s, _LONGEST_WAIT_S)
            )
            self._backoffs[name] = _Backoff(now_s, length_s)
            first, self._has_warned = not self._has_warned, True
        log.log(
            logging.WARNING if first else logging.DEBUG,
            "deletes are refused, their bytes stay and cost; tried again later: %s",
            error,
        )

    def allowed(self, name: str) -> None:
        """Record that a delete succeeded."""
        with self._lock:
            self._backoffs.pop(name, None)


@dataclass(frozen=True, slots=True)
class Deleter:
    """Deletes objects below one root."""

    client: ObjectClient
    retrier: Retrier
    backoff: DeleteBackoff
    root: Uri
    prefix: str  # "" or the root's key with a slash

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete objects by name. Absent ones are success, and all are tried.

        Raises:
            StorageError: The first failure, with the number of failures.
        """
        failures = self._delete(keys)
        if failures:
            raise first_of(failures, len(keys)) if len(keys) > 1 else failures[0]

    def delete_tree(self, key: str) -> None:
        """Delete everything below ``key``, or the object of that name.

        Raises:
            TransientError: Others keep writing there.
        """
        for _ in range(_SWEEPS):
            below = self.retrier.run(
                lambda: [
                    found.key.removeprefix(self.prefix)
                    for found in self.client.list_keys(f"{self.prefix}{key}/", delimiter=False)
                ]
            )
            if below:
                self.delete_keys(below)
            elif self._is_object(key):
                self.delete_keys([key])
            else:
                return
        raise TransientError(
            "remove_tree: another program keeps adding objects", uri=self.root / key
        )

    def _is_object(self, key: str) -> bool:
        # Check first: in a bucket with versions, deleting an absent key leaves a marker permanently.
        try:
            self.retrier.run(lambda: self.client.head(self.prefix + key))
        except NotFoundError:
            return False
        return True

    def _delete(self, keys: Sequence[str]) -> list[StorageError]:
        by_name: dict[str, list[str]] = {}
        for key in keys:
            by_name.setdefault(self._backoff_name(key), []).append(key)
        waiting = {name: left for name in by_name if (left := self.backoff.left_s(name))}
        failures: list[StorageError] = [
            AccessError(
                "not deleted: the store has already refused other keys",
                uri=self.root / key,
                hint=f"asked again in {left_s:.0f} s; see the object lock, the retention rule or "
                "the permission to delete",
            )
            for name, left_s in waiting.items()
            for key in by_name[name]
        ]
        allowed_keys = [
            key for name, group in by_name.items() if name not in waiting for key in group
        ]
        for key, error in self._send_batches(allowed_keys):
            failures.append(error)
            if isinstance(error, AccessError) and not isinstance(error, CredentialsError):
                self.backoff.refused(self._backoff_name(key), error)
        if not failures:
            for name in by_name:
                self.backoff.allowed(name)
        return failures

    def _backoff_name(self, key: str) -> str:
        """Return the name that a refusal of this key is recorded for.

        It contains the root's key, because another run has a step_1 too.
        """
        first = key.partition("/")[0]
        return self.prefix + (key if first == _SHARED else first)

    def _send_batches(self, keys: Sequence[str]) -> Iterable[tuple[str, StorageError]]:
        size = max(1, self.client.limits.delete_batch)
        for start in range(0, len(keys), size):
            batch = keys[start : start + size]
            try:
                refused = self.retrier.run(lambda b=batch: self._send_batch(b))  # type: ignore[misc]
            except IDEMPOTENT as error:
                # It was retried until the time was over: the endpoint is out of reach for the other
                # keys too.
                yield from ((key, error) for key in keys[start:])
                return
            except StorageError as error:
                yield from ((key, error) for key in batch)
                continue
            yield from refused

    def _send_batch(self, keys: Sequence[str]) -> list[tuple[str, StorageError]]:
        """Send one request.

        An error that a retry may cure is raised, so that the whole batch is sent again.
        """
        answers = self.client.delete([self.prefix + key for key in keys])
        refused = [
            (answer.key.removeprefix(self.prefix), self._typed(answer.key, answer.error))
            for answer in answers
        ]
        for _, error in refused:
            if isinstance(error, IDEMPOTENT):
                raise error
        return refused

    def _typed(self, key: str, error: Exception) -> StorageError:
        if isinstance(error, StorageError):
            return error
        uri = self.root / key.removeprefix(self.prefix)
        return StorageError(f"delete failed: {error}", uri=uri)
