"""Retrying one request: when again, and when no more. The one place where object stores wait.

    try 1 fails --wait--> try 2 fails --wait--> ...            until ``retry_s`` after the first failure
               0 .. 0.1 s            0 .. 0.2 s   0 .. 5 s     then the last error, told with the number
                                                              of tries and the endpoint

Waits double and are drawn from their whole range (full jitter): thousands of ranks that one throttled
answer met at once come back spread out. Only what a retry may cure is tried again: TransientError
always, AnswerLostError where doing it twice is the same as once. The clients make one try each.
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

__all__ = ["IDEMPOTENT", "NOT_DONE", "Retrier", "RetryPolicy", "notice_of", "wait_s"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_WARN_S = 3.0
_AGAIN_S = 60.0

Retryable = tuple[type[StorageError], ...]

# Reads, deletes, parts, unconditional puts: twice is once.
IDEMPOTENT: Final[Retryable] = (TransientError, AnswerLostError)
# Conditional puts: a second one would meet our own object and take it for somebody else's.
NOT_DONE: Final[Retryable] = (TransientError,)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """retry_s: from the first failure of one request until it is given up, 0 for a single try.
    first_s: the longest first wait, doubled from wait to wait up to cap_s.
    """

    retry_s: float = 60.0
    first_s: float = 0.1
    cap_s: float = 5.0


def wait_s(policy: RetryPolicy, failures: int, share: float, since_first_s: float) -> float | None:
    """How long to wait after failure number ``failures`` (from 1), or None: give up. Pure.

    share: the drawn part of the wait's range, in [0, 1]. The last wait ends at the deadline, so that
    there is a try at the end of the time that was promised.
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


class Notice:
    """When it was last told that requests to an endpoint fail. Threads that race may tell it twice, which is
    harmless.
    """

    def __init__(self) -> None:
        self._told_s: float | None = None

    def is_due(self, now_s: float) -> bool:
        """Whether to tell it now; then not again for a minute."""
        if self._told_s is not None and now_s - self._told_s < _AGAIN_S:
            return False
        self._told_s = now_s
        return True


@functools.lru_cache(maxsize=256)
def notice_of(endpoint: str) -> Notice:
    """That of this process: it has a storage for each run, copy and reader, and one endpoint for all."""
    del endpoint
    return Notice()


@dataclass(frozen=True, slots=True)
class Retrier:
    """Runs requests against one endpoint under one policy. Threads may share it; it pickles.

    clock, sleep (seconds, and what ends it sooner) and draw (a number in [0, 1]) are for tests. notice:
    of all requests of this process to the endpoint, so that only one of them warns.
    """

    endpoint: str
    policy: RetryPolicy = RetryPolicy()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float, threading.Event | None], object] = _sleep
    draw: Callable[[], float] = _draw
    notice: Notice = field(default_factory=Notice, compare=False, repr=False)

    def run(
        self,
        request: Callable[[], T],
        *,
        after: Retryable = IDEMPOTENT,
        stop: threading.Event | None = None,
    ) -> T:
        """The request's result. After an error that is not in ``after``, or when the time is over,
        that error; its message names the endpoint and the tries where there were several.

        stop: somebody who does not need the result any more sets it; no wait outlasts it, and the
        last error comes at once.
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
                    self._told(error, failures, now_s - first_s)
                    raise
                log.debug("try %d at %s failed: %s", failures, self.endpoint, error)
                before_s = _WARN_S - (now_s - first_s)
                if 0.0 < before_s <= pause_s:
                    # The line comes when it is due, and not after a pause that goes on beyond that.
                    self.sleep(before_s, stop)
                    pause_s -= before_s
                self._warn(error, self.clock() - first_s)
            except StorageError as error:
                if failures:
                    self._told(error, failures + 1, self.clock() - first_s)
                raise
            self.sleep(pause_s, stop)

    def _warn(self, error: StorageError, spent_s: float) -> None:
        """Say once what a request is waiting for, so that a wrong endpoint is seen before it is given up."""
        if (
            spent_s >= _WARN_S
            and self.policy.retry_s > _WARN_S
            and self.notice.is_due(self.clock())
        ):
            log.warning(
                "a request to %s has failed for %.0f s: %s; tried again for %.0f s more",
                self.endpoint,
                spent_s,
                mask_credentials(error.message),
                max(0.0, self.policy.retry_s - spent_s),
            )

    def _told(self, error: StorageError, tries: int, spent_s: float) -> None:
        many = f"{tries} tries in {spent_s:.1f} s" if tries > 1 else "1 try"
        if self.endpoint in error.message:
            error.message = f"{error.message} ({many})"
        else:
            error.message = f"{error.message} ({self.endpoint}, {many})"
