"""The events of a manager, delivered to its listeners on a thread of their own.

    any thread    dispatcher.tell(event) --> queue --> daemon thread --> listener 1, listener 2, ...

    LogListener()                  one line per commit into ``logging``
    MetricsListener(callback)      flat numbers for TensorBoard, W&B or whatever takes a dict
    on_commit(uri)                 committed URIs and nothing else
    prometheus.PrometheusTextfile, telemetry.TelemetryListener

Training never waits for a listener: ``tell`` only puts the event into a queue. Listeners are called
one at a time, in the order in which they were given, and events are delivered in the order in which
they were queued. The exception of a listener is logged, and the listener is called again for the
next event; no save fails because of it. A listener that never returns holds back the later events,
and nothing else.

A listener is called on the coordinator only, because the event of a commit is the same on every
rank and carries every rank's counters; ``EveryRank(listener)`` is called on each rank.
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

__all__ = [
    "EventDispatcher",
    "EveryRank",
    "Listener",
    "LogListener",
    "MetricsListener",
    "TimedListener",
]

logger = logging.getLogger("ckptfs.manager")

Listener = Callable[[Event], None]

_MIB = 1 << 20
_QUEUED_MAX = 4096  # a save has about ten events: a listener so far behind will not catch up
_PHASES = ("plan_s", "stage_s", "write_s", "sync_s", "commit_s")


class TimedListener(ABC):
    """A listener that also receives the time of each event; a base class."""

    def __call__(self, event: Event) -> None:
        """Take an event that happens now."""
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
        """Pass the event to the listener."""
        self.listener(event)


@dataclass(frozen=True, slots=True)
class _OnCommit:
    """The listener for ``on_commit``. It sees commits only, so every URI that it passes exists."""

    callback: Callable[[str], None]

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveCommitted):
            self.callback(event.result.uri)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place in the queue. ``reached`` is set when all earlier events were delivered."""

    reached: threading.Event


class EventDispatcher:
    """Delivers events to the listeners of one manager on one rank.

    The thread starts with the first event. ``rank`` is this rank; 0 is the coordinator.
    ``on_commit`` is called on the coordinator with the URI of each committed checkpoint
    (credentials masked), after the listeners.
    """

    def __init__(
        self,
        listeners: Iterable[Listener] = (),
        *,
        on_commit: Callable[[str], None] | None = None,
        rank: int = 0,
    ) -> None:
        selected = [one for one in listeners if rank == 0 or isinstance(one, EveryRank)]
        if on_commit is not None and rank == 0:
            selected.append(_OnCommit(on_commit))
        self._listeners = [one.listener if isinstance(one, EveryRank) else one for one in selected]
        self._events: _Events = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._dropped = 0
        self._complained: set[str] = set()
        self._pid = os.getpid()

    def tell(self, event: Event) -> None:
        """Queue an event, from any thread, and return at once.

        The event is dropped after ``close``, and in the child of a fork.
        """
        at_ns = time.time_ns()
        if not self._listeners or os.getpid() != self._pid:
            return  # a fork does not copy the thread
        with self._lock:
            if self._closed:
                return
            if self._events.qsize() >= _QUEUED_MAX:
                self._drop()
                return
            self._events.put((self, event, at_ns))
            if self._thread is None:
                # An idle thread keeps no dispatcher alive: a listener may refer to the manager itself.
                self._thread = threading.Thread(
                    target=_serve, args=(self._events,), name="ckptfs-events", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._events.put, None).atexit = False

    def drain(self, timeout_s: float) -> bool:
        """Wait until the events queued so far are delivered, for up to ``timeout_s`` seconds.

        Returns whether they were.
        """
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
        """Deliver the queued events, for up to ``timeout_s`` seconds. A second call does nothing.

        Returns False if a listener did not return: its thread is left running until the process
        ends.
        """
        if os.getpid() != self._pid:
            return True  # the thread is the parent's, and the lock may have been held at the fork
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
        """Call all listeners with one event; runs on the dispatcher's thread."""
        for listener in self._listeners:
            self._ring(listener, event, at_ns)

    def _ring(self, listener: Listener, event: Event, at_ns: int) -> None:
        try:
            if isinstance(listener, TimedListener):
                listener.hear(event, at_ns)
            else:
                listener(event)
        except BaseException:
            # Whatever a listener raises, sys.exit() included, the thread must keep serving the others.
            kind = _kind_of(listener)
            first = kind not in self._complained
            self._complained.add(kind)
            logger.log(
                logging.ERROR if first else logging.DEBUG,
                "listener %s failed at %s; the save continues",
                kind,
                type(event).__name__,
                exc_info=True,
            )


_Events = queue.SimpleQueue[tuple[EventDispatcher, Event, int] | _Mark | None]


def _serve(events: _Events) -> None:
    while (item := events.get()) is not None:
        if isinstance(item, _Mark):
            item.reached.set()
        else:
            dispatcher, event, at_ns = item
            dispatcher.ring(event, at_ns)
            del dispatcher, event
        del item


def _kind_of(listener: Listener) -> str:
    inner = listener.callback if isinstance(listener, _OnCommit) else listener
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return f"{named.__module__}.{named.__qualname__}"


# -- into logging ----------------------------------------------------------------------------------


class LogListener:
    """Writes one line per commit, failure, skip, delete and copy.

    Successes are logged at INFO, the rest at WARNING; deletes and retention at DEBUG.

    Args:
        log: The logger; None: ckptfs's own.
    """

    def __init__(self, log: logging.Logger | None = None) -> None:
        self._log = log or logger

    def __call__(self, event: Event) -> None:
        """Log the event."""
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
            case Retained(remaining, deleting):
                self._log.debug("%d checkpoints stay; %s go", remaining, list(deleting) or "none")
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
    """Return the log line of a commit.

    It has the step, the bytes, the seconds, and the bytes per second in total and of the slowest
    and the fastest rank.
    """
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
    """Return the MiB/s of the slowest and the fastest rank that wrote anything; 0.0 if none did."""
    rates = [counters.mib_per_s for counters in per_rank if counters.size_bytes]
    return (min(rates), max(rates)) if rates else (0.0, 0.0)


# -- flat numbers ----------------------------------------------------------------------------------


class MetricsListener:
    """Calls ``callback(metrics, step)`` with flat names, units last: ``ckptfs/checkpoint/stall_s``.

    Per commit, under ``ckptfs/checkpoint/`` or ``ckptfs/weights/``: stall_s, wall_s; plan_s,
    stage_s, write_s, sync_s and commit_s, each of its slowest rank; size_bytes, mib_per_s, and
    rank_min_mib_per_s and rank_max_mib_per_s. Other events give counts since the start:
    ``ckptfs/failures``, ``ckptfs/skipped``, ``ckptfs/deleted``, ``ckptfs/delete_failures``,
    ``ckptfs/copies``, ``ckptfs/copy_failures``; and ``ckptfs/kept``, the number of checkpoints that
    retention keeps.

    The callback runs on the dispatcher's thread, after the commit: an asynchronous save of step 100 may
    be reported when training is at step 105.

    Args:
        callback: Takes the numbers by name, and the step.
    """

    def __init__(self, callback: Callable[[dict[str, float], int], Any]) -> None:
        self._callback = callback
        self._step = 0
        self._has_step = False
        self._counts: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Report the event's numbers; ignore events that have none."""
        match event:
            case SaveCommitted(result):
                self._step, self._has_step = result.step or 0, True
                self._callback(commit_metrics(event), self._step)
            # At the claim there is no step to report it for.
            case Retained(remaining) if self._has_step:
                self._callback({"ckptfs/kept": float(remaining)}, self._step)
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
    """Return the numbers of one commit under their flat names."""
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
