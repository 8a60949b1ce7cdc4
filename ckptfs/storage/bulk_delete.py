"""Deletes: in batches, every key tried, and not asked again and again where they are refused.

    delete_keys   known names, as few requests as the store takes; the first failure with its number
    delete_tree   list below "key/", delete, list again, until a listing is empty
    Holds         names below which a delete was refused for want of permission

An object lock, a retention rule or a policy without the permission to delete answers every try with
the same "no". The first is told as a warning; after it nothing below that name is asked for a minute,
then two, up to an hour: callers get the same AccessError without a request, and their next try, much
later, goes through if the lock has ended. A name is the root's key and the first component below it, one
checkpoint of one run; below ``.ckptfs``, which all checkpoints share, it is the whole key.
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

__all__ = ["Deleter", "Holds"]

log = logging.getLogger(__name__)

_FIRST_HOLD_S = 60.0
_LONGEST_HOLD_S = 3600.0
_SWEEPS = 4
_SHARED = ".ckptfs"


@dataclass(frozen=True, slots=True)
class _Hold:
    since_s: float
    length_s: float


class Holds:
    """Which names' deletes are not asked for now. Thread-safe; one per bucket and process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, _Hold] = {}
        self._told = False
        self._lock = threading.Lock()

    def left_s(self, name: str) -> float:
        """Seconds until deletes below ``name`` may be tried again, 0 for now."""
        with self._lock:
            hold = self._held.get(name)
            return 0.0 if hold is None else max(0.0, hold.since_s + hold.length_s - self._clock())

    def refused(self, name: str, error: AccessError) -> None:
        """A delete was refused: hold the next ones, twice as long as the last time."""
        with self._lock:
            before = self._held.get(name)
            now_s = self._clock()
            if before is not None and now_s < before.since_s + before.length_s:
                return  # of several refused at once, the first counts
            length_s = (
                _FIRST_HOLD_S if before is None else min(2 * before.length_s, _LONGEST_HOLD_S)
            )
            self._held[name] = _Hold(now_s, length_s)
            first, self._told = not self._told, True
        log.log(
            logging.WARNING if first else logging.DEBUG,
            "deletes are refused, their bytes stay and cost; tried again later: %s",
            error,
        )

    def allowed(self, name: str) -> None:
        """A delete went through."""
        with self._lock:
            self._held.pop(name, None)


@dataclass(frozen=True, slots=True)
class Deleter:
    """The deletes of one root. ``prefix``: "" or the root's key with a slash."""

    client: ObjectClient
    retrier: Retrier
    holds: Holds
    root: Uri
    prefix: str

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete objects by name; absent is success. All are tried, then the first failure."""
        failures = self._delete(keys)
        if failures:
            raise first_of(failures, len(keys)) if len(keys) > 1 else failures[0]

    def delete_tree(self, key: str) -> None:
        """Delete all below ``key``, or the object of that name. TransientError: others keep writing."""
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
        raise TransientError("remove_tree: new objects keep coming", uri=self.root / key)

    def _is_object(self, key: str) -> bool:
        # Not deleted on suspicion: with versions, deleting what is absent leaves a marker for ever.
        try:
            self.retrier.run(lambda: self.client.head(self.prefix + key))
        except NotFoundError:
            return False
        return True

    def _delete(self, keys: Sequence[str]) -> list[StorageError]:
        by_name: dict[str, list[str]] = {}
        for key in keys:
            by_name.setdefault(self._name(key), []).append(key)
        held = {name: left for name in by_name if (left := self.holds.left_s(name))}
        failures: list[StorageError] = [
            AccessError(
                "not deleted: the store refused before",
                uri=self.root / key,
                hint=f"asked again in {left_s:.0f} s; see the object lock, the retention rule or "
                "the permission to delete",
            )
            for name, left_s in held.items()
            for key in by_name[name]
        ]
        asked = [key for name, group in by_name.items() if name not in held for key in group]
        for key, error in self._ask(asked):
            failures.append(error)
            if isinstance(error, AccessError) and not isinstance(error, CredentialsError):
                self.holds.refused(self._name(key), error)
        if not failures:
            for name in by_name:
                self.holds.allowed(name)
        return failures

    def _name(self, key: str) -> str:
        """What a refusal of this key holds. With the root: step_1 of another run is another one."""
        first = key.partition("/")[0]
        return self.prefix + (key if first == _SHARED else first)

    def _ask(self, keys: Sequence[str]) -> Iterable[tuple[str, StorageError]]:
        size = max(1, self.client.limits.delete_batch)
        for start in range(0, len(keys), size):
            batch = keys[start : start + size]
            try:
                refused = self.retrier.run(lambda b=batch: self._once(b))  # type: ignore[misc]
            except IDEMPOTENT as error:
                # Retried until the time was over: the endpoint is out of reach for the rest too.
                yield from ((key, error) for key in keys[start:])
                return
            except StorageError as error:
                yield from ((key, error) for key in batch)
                continue
            yield from refused

    def _once(self, keys: Sequence[str]) -> list[tuple[str, StorageError]]:
        """One request. What a retry may cure is raised, so that the batch goes again whole."""
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
