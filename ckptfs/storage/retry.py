"""Retries of one request. This is the only place where object stores wait.

    try 1 fails --wait--> try 2 fails --wait--> ...            until ``retry_s`` after the first failure,
               0 .. 0.1 s            0 .. 0.2 s   0 .. 5 s     then the last error, with the number of
                                                              tries and the endpoint in its message

Waits double and are drawn from their whole range (full jitter), so that thousands of ranks that were throttled
at the same moment come back at different ones. Only errors that a retry may cure are retried: TransientError
always, AnswerLostError where doing it twice is the same as doing it once. The clients make one try each.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ckptfs.errors import AnswerLostError, StorageError, TransientError
from ckptfs.uri import mask_credentials

__all__ = ["IDEMPOTENT", "NOT_DONE", "Retrier", "RetryPolicy", "wait_s", "warning_limit_of"]

log = logging.getLogger("ckptfs.storage")
T = TypeVar("T")
_WARN_S = 3.0
_WARN_INTERVAL_S = 60.0

Retryable = tuple[type[StorageError], ...]

# Reads, deletes, parts, unconditional puts: doing them twice is the same as doing them once.
IDEMPOTENT: Final[Retryable] = (TransientError, AnswerLostError)
# Conditional puts: a second one would find our own object and take it for another writer's.
NOT_DONE: Final[Retryable] = (TransientError,)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long one request is retried, and how long the waits are."""

    retry_s: float = (
        60.0  # from the first failure until the request is given up; 0 for a single try
    )
    first_s: float = 0.1  # the longest first wait; each further one may be twice as long
    cap_s: float = 5.0  # the longest wait of all


def wait_s(policy: RetryPolicy, failures: int, share: float, since_first_s: float) -> float | None:
    """Return how long to wait before the next try. Pure.

    The last wait ends at the deadline, so that there is a try at the end of the time that was promised.

    Args:
        policy: The bounds.
        failures: How many tries have failed, from 1.
        share: Which part of the wait's range was drawn, in [0, 1].
        since_first_s: The time since the first failure.

    Returns:
        Seconds, or None: give up.
    """
    left_s = policy.retry_s - since_first_s
    if left_s <= 0:
        return None
    longest_s = min(policy.cap_s, policy.first_s * 2.0 ** min(failures - 1, 60))
    return min(share * longest_s, left_s)


def _draw() -> float:
    # Not random.random itself: that is a method, and would pickle one generator for all ranks.
    return random.random()  # noqa: S311 - no secret, a spread


def _sleep(seconds: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)


class WarningLimit:
    """Limits how often the log warns that requests to an endpoint fail.

    Threads that race may warn twice, which is harmless.
    """

    def __init__(self) -> None:
        self._warned_s: float | None = None

    def is_due(self, now_s: float) -> bool:
        """Return whether to warn now; after True it returns False for a minute."""
        if self._warned_s is not None and now_s - self._warned_s < _WARN_INTERVAL_S:
            return False
        self._warned_s = now_s
        return True


@functools.lru_cache(maxsize=256)
def warning_limit_of(endpoint: str) -> WarningLimit:
    """Return the limit of this process for an endpoint: runs, copies and readers have storages of their own."""
    del endpoint
    return WarningLimit()


@dataclass(frozen=True, slots=True)
class Retrier:
    """Runs requests against one endpoint under one policy. Thread-safe and picklable."""

    endpoint: str
    policy: RetryPolicy = RetryPolicy()
    # Replaced by tests. ``sleep`` takes seconds and an event that ends it early, ``draw`` returns a number in [0, 1].
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float, threading.Event | None], object] = _sleep
    draw: Callable[[], float] = _draw
    # Shared by all requests of this process to the endpoint, so that only one of them warns.
    warning_limit: WarningLimit = field(default_factory=WarningLimit, compare=False, repr=False)

    def run(
        self,
        request: Callable[[], T],
        *,
        after: Retryable = IDEMPOTENT,
        stop: threading.Event | None = None,
    ) -> T:
        """Call ``request`` until it succeeds or the policy's time is over.

        Args:
            request: One try.
            after: The errors that are retried.
            stop: Set by somebody who does not need the result any more: no wait outlasts it, and the last error
                is raised at once.

        Returns:
            The result of the first try that succeeds.

        Raises:
            StorageError: The last error. Its message names the endpoint, and the number of tries if there were
                several.
        """
        failures = 0
        first_s = 0.0
        while True:
            try:
                return request()
            except after as error:
                failures += 1
                now_s = self.clock()
                first_s = now_s if failures == 1 else first_s
                pause_s = wait_s(self.policy, failures, self.draw(), now_s - first_s)
                if pause_s is None or (stop is not None and stop.is_set()):
                    self._add_tries(error, failures, now_s - first_s)
                    raise
                log.debug("try %d at %s failed: %s", failures, self.endpoint, error)
                before_s = _WARN_S - (now_s - first_s)
                if 0.0 < before_s <= pause_s:
                    # The warning is logged when it is due, and not after a pause that lasts longer.
                    self.sleep(before_s, stop)
                    pause_s -= before_s
                self._warn(error, self.clock() - first_s)
            except StorageError as error:
                if failures:
                    self._add_tries(error, failures + 1, self.clock() - first_s)
                raise
            self.sleep(pause_s, stop)

    def _warn(self, error: StorageError, spent_s: float) -> None:
        """Warn once what a request waits for, so that a wrong endpoint is noticed before it is given up."""
        if (
            spent_s >= _WARN_S
            and self.policy.retry_s > _WARN_S
            and self.warning_limit.is_due(self.clock())
        ):
            log.warning(
                "a request to %s has failed for %.0f s: %s; ckptfs retries it for another %.0f s",
                self.endpoint,
                spent_s,
                mask_credentials(error.message),
                max(0.0, self.policy.retry_s - spent_s),
            )

    def _add_tries(self, error: StorageError, tries: int, spent_s: float) -> None:
        many = f"{tries} tries in {spent_s:.1f} s" if tries > 1 else "1 try"
        if self.endpoint in error.message:
            error.message = f"{error.message} ({many})"
        else:
            error.message = f"{error.message} ({self.endpoint}, {many})"
