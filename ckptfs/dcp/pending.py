"""A save that runs in the background: what its caller can do with it.

    pending = ckptfs.async_save(state, uri)       tensors may change now
    pending.staged .durable .committed            concurrent futures, done in this order
    pending.result(timeout_s)                     the SaveResult, or the error that all ranks have
    pending.progress()                            phase, bytes and items of this rank

Errors in the background are in the futures.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckptfs.errors import CkptfsError, DeadlineError
from ckptfs.events import Counters, SaveResult

__all__ = ["PendingSave", "Phase", "SaveProgress", "Watch"]


class Phase(Enum):
    """What a save is doing."""

    QUEUED = "queued"  # waiting for an earlier save
    PLAN = "plan"
    WRITE = "write"
    COMMIT = "commit"
    COMMITTED = "committed"
    FAILED = "failed"


_ENDS = (Phase.COMMITTED, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """How far this rank has come.

    Attributes:
        phase: What the save is doing.
        size_bytes: What this rank writes, in bytes; 0 until the ranks have planned. Objects count as 0 bytes.
        items: How many items it writes, objects included; 0 until the ranks have planned.
        written_bytes: How many of these bytes the storage has taken.
        written_items: How many of these items the storage has taken.
    """

    phase: Phase
    size_bytes: int = 0
    items: int = 0
    written_bytes: int = 0
    written_items: int = 0

    @property
    def fraction(self) -> float:
        """The written fraction of all bytes, 0.0 to 1.0."""
        if self.phase is Phase.COMMITTED:
            return 1.0
        return self.written_bytes / self.size_bytes if self.size_bytes else 0.0


class Watch:
    """Receives reports from the threads that save. This base class ignores them."""

    def enter(self, phase: Phase) -> None:
        """A phase begins."""

    def planned(self, size_bytes: int, items: int) -> None:
        """The ranks have agreed on what this rank writes."""

    def durable(self, own: Counters) -> None:
        """This rank's part is written and durable; nothing is committed yet."""

    def hangs(self, error: CkptfsError) -> None:
        """The threads that save hang in their storage, and all ranks have this error."""

    def committed(self, result: SaveResult) -> None:
        """The threads that save hang in their storage, but the save is committed."""


class PendingSave:
    """An asynchronous save. Any thread may call its methods; cancelling is not possible.

    Args:
        uri: The checkpoint as this rank read it, credentials masked.
        step: Completed optimizer steps; None if there is no number.

    Attributes:
        staged: Done when the tensors may be changed, which is before ``async_save`` returns.
        durable: Done when this rank's files are on the storage, with its counters; nothing is committed.
        committed: Done when the checkpoint exists, with the SaveResult; or with the error that every rank
            has.
        began: When the call began, by ``time.perf_counter``.
        stall_s: How long the call blocked, in seconds.
    """

    def __init__(self, uri: str, step: int | None) -> None:
        self.uri = uri
        self.step = step
        self.staged: Future[None] = _running()
        self.durable: Future[Counters] = _running()
        self.committed: Future[SaveResult] = _running()
        self.began = time.perf_counter()
        self.stall_s = 0.0
        self._lock = threading.Lock()
        self._progress = SaveProgress(Phase.QUEUED)

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the commit.

        Args:
            timeout_s: How long, in seconds; None: as long as it takes.

        Returns:
            The result, the same object that ``committed`` holds.

        Raises:
            DeadlineError: Not committed within ``timeout_s``. The save continues, and the call can be
                repeated.
            CkptfsError: That of the save, the same on every rank; the failed ranks' tracebacks are in its
                notes and in ``failures``.
        """
        try:
            return self.committed.result(timeout_s)
        except FutureTimeoutError:
            if self.committed.done():
                raise  # the save itself failed with a TimeoutError
            now = self.progress()
            raise DeadlineError(
                f"not committed within {timeout_s:g} s: {now.phase.value}, "
                f"{now.written_bytes} of {now.size_bytes} bytes written",
                uri=self.uri,
                hint="the save continues in the background; wait again",
            ) from None

    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self.committed.done()

    def progress(self) -> SaveProgress:
        """Return how far this rank has come; costs nothing."""
        with self._lock:
            return self._progress

    def __repr__(self) -> str:
        return f"<PendingSave {self.uri} {self.progress().phase.value}>"

    # -- for the threads that save -----------------------------------------------------------

    def advance(self, **changes: Any) -> None:
        """Set the fields of the progress that ``changes`` names. Only the first final phase counts."""
        with self._lock:
            if self._progress.phase in _ENDS:
                changes.pop("phase", None)
            known = {name: getattr(self._progress, name) for name in SaveProgress.__slots__}
            self._progress = SaveProgress(**known | changes)

    def wrote(self, size_bytes: int) -> None:
        """Count one more item as written, of ``size_bytes`` bytes."""
        with self._lock:
            now = self._progress
            self._progress = SaveProgress(
                now.phase,
                now.size_bytes,
                now.items,
                now.written_bytes + size_bytes,
                now.written_items + 1,
            )

    def has_staged(self, error: BaseException | None) -> None:
        """Let the caller continue; ``error`` is why not everything was staged, None if all was."""
        self.stall_s = time.perf_counter() - self.began
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """End with ``error``; only the first end counts."""
        self.advance(phase=Phase.FAILED)
        if self.progress().phase is not Phase.FAILED:
            return
        for future in (self.durable, self.committed):
            with contextlib.suppress(InvalidStateError):  # it has its answer already
                future.set_exception(error)

    def succeed(self, result: SaveResult) -> None:
        """End with ``result``; only the first end counts."""
        self.advance(phase=Phase.COMMITTED)
        if self.progress().phase is Phase.COMMITTED:  # else it hung until it was given up
            with contextlib.suppress(
                InvalidStateError
            ):  # set already, when a step after the seal hung
                self.committed.set_result(result)

    def watch(self) -> Watch:
        """Return the object that ``save_at`` reports to, so that this save follows it."""
        return _PendingWatch(self)


class _PendingWatch(Watch):
    def __init__(self, pending: PendingSave) -> None:
        self._pending = pending

    def enter(self, phase: Phase) -> None:
        self._pending.advance(phase=phase)

    def planned(self, size_bytes: int, items: int) -> None:
        self._pending.advance(size_bytes=size_bytes, items=items)

    def durable(self, own: Counters) -> None:
        with contextlib.suppress(InvalidStateError):  # it hung until it was given up
            self._pending.durable.set_result(own)

    def hangs(self, error: CkptfsError) -> None:
        self._pending.fail(error)

    def committed(self, result: SaveResult) -> None:
        self._pending.succeed(result)


def _running() -> Future[Any]:
    """Return a future that cannot be cancelled, because ranks that wait cannot be called back."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
