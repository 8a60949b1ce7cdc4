"""One stream of events, told to whoever listens, on a thread of its own.

    any thread    bell.tell(event) --> queue --> daemon thread --> listener 1, listener 2, ...

    LogListener()                  one line per commit into ``logging``
    MetricsListener(callback)      flat numbers for TensorBoard, W&B or whatever takes a dict
    on_commit(uri)                 committed URIs and nothing else
    prometheus.PrometheusTextfile, telemetry.TelemetryListener

Training never waits for a listener: ``tell`` only queues. Listeners are called one at a time, in the
order in which they were given, each event after the one told before it. One that raises is logged
and called again for the next event; no save ever fails of it. One that never returns holds back the
events behind it, and nothing else.

A listener is called on the coordinator alone, because a commit is told alike on every rank and
carries every rank's counters; ``EveryRank(listener)`` is called on each.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ckptfs.events import (
    CopyCommitted,
    CopyFailed,
    Counters,
    Deleted,
    DeleteFailed,
    Event,
    Restored,
    Retained,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
)
from ckptfs.text import size_text

__all__ = ["Bell", "EveryRank", "Listener", "LogListener", "MetricsListener", "TimedListener"]

logger = logging.getLogger("ckptfs.manager")

Listener = Callable[[Event], None]

_MIB = 1 << 20
_QUEUED_MAX = 4096  # a save tells about ten: a listener that is so far behind will not catch up
_PHASES = ("plan_s", "stage_s", "write_s", "sync_s", "commit_s")


class TimedListener(ABC):
    """A listener that is also told when each event happened; a base class."""

    def __call__(self, event: Event) -> None:
        """Hear an event that happens now."""
        self.hear(event, time.time_ns())

    @abstractmethod
    def hear(self, event: Event, at_ns: int) -> None:
        """Take one event.

        Args:
            event: What happened.
            at_ns: When it happened, in nanoseconds of Unix time; the call may come later.
        """


@dataclass(frozen=True, slots=True)
class EveryRank:
    """``listeners=[EveryRank(listener)]``: called on every rank, with what happened on that rank.

    Attributes:
        listener: The listener.
    """

    listener: Listener

    def __call__(self, event: Event) -> None:
        """Pass it on."""
        self.listener(event)


@dataclass(frozen=True, slots=True)
class _OnCommit:
    """The hook of ``on_commit=``: it cannot see a checkpoint that does not exist."""

    callback: Callable[[str], None]

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveCommitted):
            self.callback(event.result.uri)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Set when everything told before it was heard."""

    reached: threading.Event


class Bell:
    """Tells the listeners of one manager on one rank. The thread starts with the first event.

    rank: this rank; 0 is the coordinator. on_commit: called on the coordinator with the URI of each
    committed checkpoint (credentials masked), after the listeners.
    """

    def __init__(
        self,
        listeners: Iterable[Listener] = (),
        *,
        on_commit: Callable[[str], None] | None = None,
        rank: int = 0,
    ) -> None:
        heard = [one for one in listeners if rank == 0 or isinstance(one, EveryRank)]
        if on_commit is not None and rank == 0:
            heard.append(_OnCommit(on_commit))
        self._listeners = [one.listener if isinstance(one, EveryRank) else one for one in heard]
        self._events: _Events = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dropped = 0
        self._complained: set[str] = set()
        self._pid = os.getpid()

    def tell(self, event: Event) -> None:
        """Any thread; returns at once. Dropped once closed, and in the child of a fork."""
        at_ns = time.time_ns()
        if not self._listeners or os.getpid() != self._pid:
            return  # the thread did not come along with the fork
        with self._lock:
            if self._closed:
                return
            if self._events.qsize() >= _QUEUED_MAX:
                self._drop()
                return
            self._events.put((self, event, at_ns))
            if self._thread is None:
                # Idle, the thread keeps nobody alive: a listener may refer to the manager itself.
                self._thread = threading.Thread(
                    target=_serve, args=(self._events,), name="ckptfs-bell", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._events.put, None).atexit = False

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was told so far was heard, ``timeout_s`` at most; whether it was."""
        if os.getpid() != self._pid:
            return True
        mark = _Mark(threading.Event())
        with self._lock:
            thread = self._thread
            if thread is None or self._closed:
                return True
            self._events.put(mark)
        return thread is threading.current_thread() or mark.reached.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Let the listeners hear what was told, ``timeout_s`` at most. Harmless twice.

        False where a listener did not return: its thread is left to the end of the process.
        """
        if os.getpid() != self._pid:
            return True  # and the lock may have been held when the process forked
        with self._lock:
            closing, self._closed = not self._closed, True
            thread = self._thread
            if closing:
                self._events.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        if thread.is_alive() and closing:
            logger.warning("a listener has not returned within %g s; it is abandoned", timeout_s)
        return not thread.is_alive()

    def _drop(self) -> None:
        if not self._dropped:
            logger.warning("a listener hangs: %d events wait, later ones are dropped", _QUEUED_MAX)
        self._dropped += 1

    def ring(self, event: Event, at_ns: int) -> None:
        """All listeners hear it; on the bell's thread."""
        for listener in self._listeners:
            self._ring(listener, event, at_ns)

    def _ring(self, listener: Listener, event: Event, at_ns: int) -> None:
        try:
            if isinstance(listener, TimedListener):
                listener.hear(event, at_ns)
            else:
                listener(event)
        except BaseException:
            # Whatever a listener raises, sys.exit() too: the thread that serves the others goes on.
            kind = _kind_of(listener)
            first = kind not in self._complained
            self._complained.add(kind)
            logger.log(
                logging.ERROR if first else logging.DEBUG,
                "listener %s failed at %s; the save goes on",
                kind,
                type(event).__name__,
                exc_info=True,
            )


_Events = queue.SimpleQueue[tuple[Bell, Event, int] | _Mark | None]


def _serve(events: _Events) -> None:
    while (told := events.get()) is not None:
        if isinstance(told, _Mark):
            told.reached.set()
        else:
            bell, event, at_ns = told
            bell.ring(event, at_ns)
            del bell, event
        del told


def _kind_of(listener: Listener) -> str:
    inner = listener.callback if isinstance(listener, _OnCommit) else listener
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


# -- into logging ----------------------------------------------------------------------------------


class LogListener:
    """One line per commit, failure, skip, delete and copy.

    INFO for what went well, WARNING for the rest; deletes and retention at DEBUG.

    Args:
        log: The logger; None: ckptfs's own.
    """

    def __init__(self, log: logging.Logger | None = None) -> None:
        self._log = log or logger

    def __call__(self, event: Event) -> None:
        """Log it."""
        match event:
            case SaveCommitted():
                self._log.info("%s", commit_line(event))
            case SaveFailed(uri, step, error, outcome):
                known = "nothing was committed" if outcome == "failed" else "the outcome is unknown"
                self._log.warning("step %d was not saved to %s, %s: %s", step, uri, known, error)
            case SaveSkipped(uri, step, in_flight):
                self._log.warning("step %d skipped, %d saves in flight: %s", step, in_flight, uri)
            case Restored(uri, step, skipped, copy_of=copy_of):
                if copy_of is None:
                    self._log.info("restored step %s from %s", step, uri)
                else:
                    self._log.warning("restored step %s from %s, a copy of %s", step, uri, copy_of)
                for line in skipped:
                    self._log.warning("not restored: %s", line)
            case Retained(kept, going):
                self._log.debug("%d checkpoints stay; %s go", kept, list(going) or "none")
            case Deleted(uri, save_id, reason):
                self._log.debug("deleted %s (%s): %s", uri, save_id, reason)
            case DeleteFailed(uri, save_id, error):
                self._log.warning(
                    "the bytes of %s (%s) were not removed yet: %s", uri, save_id, error
                )
            case CopyCommitted(uri, copy_uri, size_bytes, wall_s):
                size = size_text(size_bytes)
                self._log.info("copied %s to %s: %s in %.2f s", uri, copy_uri, size, wall_s)
            case CopyFailed(uri, copy_uri, error):
                self._log.warning("the copy of %s to %s is tried again: %s", uri, copy_uri, error)
            case _:
                self._log.debug("%s", event)


def commit_line(event: SaveCommitted) -> str:
    """The line of a commit: step, bytes, seconds, bytes per second in total and of the slowest and fastest rank."""
    result = event.result
    mib_per_s = (result.total.mib_per_s, *rank_rates(result.per_rank))
    total, slowest, fastest = (size_text(rate * _MIB) for rate in mib_per_s)
    return (
        f"{event.kind} of step {result.step} committed: {result.uri} "
        f"({size_text(result.total.size_bytes)} in {result.wall_s:.2f} s, "
        f"{total}/s, per rank {slowest}/s to {fastest}/s, "
        f"training stopped for {event.stall_s:.3f} s)"
    )


def rank_rates(per_rank: Iterable[Counters]) -> tuple[float, float]:
    """MiB/s of the slowest and the fastest rank among those that wrote; 0.0 where none did."""
    rates = [counters.mib_per_s for counters in per_rank if counters.size_bytes]
    return (min(rates), max(rates)) if rates else (0.0, 0.0)


# -- flat numbers ----------------------------------------------------------------------------------


class MetricsListener:
    """Calls ``callback(metrics, step)`` with flat names, units last: ``ckptfs/checkpoint/stall_s``.

    Per commit, under ``ckptfs/checkpoint/`` or ``ckptfs/weights/``: stall_s, wall_s, plan_s, stage_s,
    write_s, sync_s, commit_s (of the slowest rank each), size_bytes, mib_per_s, and rank_min_mib_per_s and
    rank_max_mib_per_s. Otherwise counts since the start: ``ckptfs/failures``, ``ckptfs/skipped``,
    ``ckptfs/deleted``, ``ckptfs/delete_failures``, ``ckptfs/copies``, ``ckptfs/copy_failures``, and
    ``ckptfs/kept``.

    The callback runs on the bell's thread, after the commit: an asynchronous save of step 100 is reported
    when training may be at step 105.

    Args:
        callback: Takes the numbers by name, and the step.
    """

    def __init__(self, callback: Callable[[dict[str, float], int], Any]) -> None:
        self._callback = callback
        self._step = 0
        self._has_step = False
        self._counts: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Turn it into numbers; events that have none are passed over."""
        match event:
            case SaveCommitted(result):
                self._step, self._has_step = result.step or 0, True
                self._callback(commit_metrics(event), self._step)
            case Retained(kept) if self._has_step:  # at the claim there is no step to tell it for
                self._callback({"ckptfs/kept": float(kept)}, self._step)
            case SaveFailed(step=step):
                self._count("failures", step)
            case SaveSkipped(step=step):
                self._count("skipped", step)
            case Deleted():
                self._count("deleted", self._step)
            case DeleteFailed():
                self._count("delete_failures", self._step)
            case CopyCommitted():
                self._count("copies", self._step)
            case CopyFailed():
                self._count("copy_failures", self._step)
            case _:
                pass

    def _count(self, name: str, step: int) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + 1.0
        self._callback({f"ckptfs/{name}": self._counts[name]}, step)


def commit_metrics(event: SaveCommitted) -> dict[str, float]:
    """The numbers of one commit under their flat names."""
    total = event.result.total
    slowest, fastest = rank_rates(event.result.per_rank)
    numbers = {
        "stall_s": event.stall_s,
        "wall_s": event.result.wall_s,
        **{phase: getattr(total, phase) for phase in _PHASES},
        "size_bytes": float(total.size_bytes),
        "mib_per_s": total.mib_per_s,
        "rank_min_mib_per_s": slowest,
        "rank_max_mib_per_s": fastest,
    }
    return {f"ckptfs/{event.kind}/{name}": value for name, value in numbers.items()}
