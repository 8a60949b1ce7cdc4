"""Heartbeats: which ranks are alive, silent or dead; one thread per process and control.

    every rank, every 2 s     beat/<rank> = a number that grows, and the call that its storage is stuck in
    the coordinator           reads all beats, publishes which ranks are silent or stuck:    watch
    the others                read watch; if it does not change, the coordinator itself is silent
    every rank, twice a s     checks the processes of its node (pid and start time in /proc);
                              one that is gone is written to dead/<i>, which all ranks read,
                              unless its last beat says that it had left

So each rank reads a fixed number of keys, whatever the world's size. A rank that is silent for 10 s is named in
every rank's log. ``Monitor.alarm()`` ends a waiting call: because of a dead process, a silence of ``timeout_s``, or
a store that is gone. Silence is counted on the observer's clock and only while the observer itself runs: an observer
that was frozen reports no other rank as silent when it wakes up.

A rank may also hang while its heartbeat continues: its part of a step waits for one system call that never returns,
in a hard mount of a server that is gone. That ends a waiting call of the same control.

    with Hanging.working(keys, tell):     a part of a step, on any thread
        local()
    Hanging.at(elapsed_s)                 at every beat, the stuck parts, by control: {prefix: (step,
                                          "fsync of /nfs/run/... has not returned for 600 s")};
                                          empty as long as all of them progress

Only system calls of that part count, on its own thread or on a thread that does a piece of it. A background task of
the same process may hang for any time, and so may the step of another control.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ckptfs.control.rank_errors import collective_error
from ckptfs.control.tcpstore_client import StepKeys, StoreClient, answer
from ckptfs.control.world import Life, World, is_gone
from ckptfs.errors import CkptfsError, ControlPlaneLostError, DeadlineError, Failure
from ckptfs.storage.inflight import in_task, new_task, oldest_call

__all__ = [
    "LEFT",
    "Alarm",
    "Hanging",
    "Monitor",
    "Patience",
    "Pulses",
    "Stuck",
    "Tempo",
    "first_beat",
]

LEFT = "left"  # the last beat of a rank that closed its control


@dataclass(frozen=True, slots=True)
class Tempo:
    """How often, in seconds, to beat and to check the node's processes, and when to log silence."""

    beat_s: float = 2.0
    look_s: float = 0.5
    warn_s: float = 10.0  # a long pickle holds the GIL that long, and is no fault

    @staticmethod
    def within(timeout_s: float) -> Tempo:
        """Return the usual tempo, or a faster one if timeout_s is too short for it."""
        return Tempo(min(2.0, timeout_s / 5), min(0.5, timeout_s / 10), min(10.0, timeout_s / 2))


class Pulses:
    """Counts how long each rank has been silent. Pure: the caller has the clock.

    A rank with the beat LEFT has said goodbye and is never silent.

    longest_tick_s: No tick counts for more, so that an observer that was frozen does not report the
    others.
    """

    def __init__(self, ranks: Sequence[int], longest_tick_s: float) -> None:
        self._longest_tick_s = longest_tick_s
        self._beats: dict[int, str] = {}
        self._silent_s = dict.fromkeys(ranks, 0.0)

    def tick(self, elapsed_s: float, beats: Mapping[int, str]) -> None:
        """Count ``elapsed_s`` seconds, with these beats now."""
        counted_s = min(elapsed_s, self._longest_tick_s)
        for rank in self._silent_s:
            beat = beats.get(rank, "")
            moved = beat == LEFT or beat != self._beats.get(rank, "")
            self._silent_s[rank] = 0.0 if moved else self._silent_s[rank] + counted_s
            self._beats[rank] = beat

    def silent(self, at_least_s: float) -> dict[int, float]:
        """Return the ranks that are silent for at least that long, with the seconds of silence."""
        return {rank: s for rank, s in self._silent_s.items() if s >= at_least_s}


class Patience:
    """Counts how long one call has lasted. Pure: the caller has the clock.

    longest_tick_s: No tick counts for more: a process that was frozen has not waited.
    """

    def __init__(self, longest_tick_s: float) -> None:
        self._longest_tick_s = longest_tick_s
        self._thing: object = None
        self._waited_s = 0.0

    def tick(self, elapsed_s: float, thing: object) -> float:
        """Count ``elapsed_s`` seconds and return how long the current call has lasted, in seconds.

        thing: The current call; None if there is none.
        """
        same = thing is not None and thing == self._thing
        self._waited_s = self._waited_s + min(elapsed_s, self._longest_tick_s) if same else 0.0
        self._thing = thing
        return self._waited_s


Tell = Callable[[str, Callable[[], bool]], None]
Stuck = dict[str, tuple[int, str]]  # by a control's prefix: the number of its step, and at what


@dataclass
class _Part:
    keys: StepKeys
    tell: Tell
    patience: Patience
    is_reported: bool = False


class Hanging:
    """The parts of steps that this process is working at.

    ``at`` is called from one thread, ``working`` from any.

    timeout_s: A system call that takes longer is a fault. longest_tick_s: As for ``Patience``.
    """

    def __init__(self, timeout_s: float, longest_tick_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_tick_s = longest_tick_s
        self._parts: dict[int, _Part] = {}

    @contextlib.contextmanager
    def working(self, keys: StepKeys, tell: Tell) -> Iterator[None]:
        """Inside the block, this thread does its part of a step, and other ranks wait for it.

        tell: Called once, on a thread of its own, if the part waits for one system call for
        timeout_s. It gets a text about that call, and a function that says whether the part is
        still running.
        """
        with in_task(new_task()) as part:
            self._parts[part] = _Part(keys, tell, Patience(self._longest_tick_s))
            try:
                yield
            finally:
                self._parts.pop(part, None)

    def at(self, elapsed_s: float) -> Stuck:
        """Count ``elapsed_s`` seconds since the last call. Returns what the parts are stuck in."""
        stuck: Stuck = {}
        for number, part in list(self._parts.items()):
            waited = oldest_call(number)
            waited_s = part.patience.tick(elapsed_s, waited)
            if waited is None or waited_s < self._timeout_s:
                part.is_reported = False
                continue
            text = f"{waited.text} has not returned for {waited_s:.0f} s"
            # A name that is no valid text could not be sent.
            text = text.encode("utf-8", "backslashreplace").decode()
            stuck[part.keys.prefix] = part.keys.number, text
            part.is_reported = part.is_reported or self._report(number, part, text)
        return stuck

    def _report(self, number: int, part: _Part, text: str) -> bool:
        thread = threading.Thread(
            target=part.tell,
            args=(text, lambda: number in self._parts),
            name="ckptfs-hangs",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            return False  # no threads left, or the interpreter is ending: again at the next beat
        return True


log = logging.getLogger("ckptfs.control")


@dataclass(frozen=True)
class Alarm:
    """Why a waiting call must end.

    Attributes:
        dead: Ranks with processes that are gone.
        silent: Ranks that are silent for too long.
        stuck: Ranks with storage that does not answer.
    """

    dead: Mapping[int, str] = field(default_factory=dict)
    silent: Mapping[int, float] = field(default_factory=dict)
    stuck: Mapping[int, str] = field(default_factory=dict)

    def names(self, rank: int) -> bool:
        """Whether that rank is one of them."""
        return rank in self.dead or rank in self.silent or rank in self.stuck

    def error(self, label: str, worlds: Sequence[World], timeout_s: float) -> CkptfsError:
        """Return the error that the step ``label`` ends with."""
        if self.dead:
            kind = "ckptfs.errors.CollectiveError"
            failures = {r: Failure(r, worlds[r].node, kind, why) for r, why in self.dead.items()}
            return collective_error(label, failures, worlds)
        if self.stuck:
            kind, number = "ckptfs.errors.AnswerLostError", errno.ETIMEDOUT
            failures = {
                r: Failure(r, worlds[r].node, kind, why, number) for r, why in self.stuck.items()
            }
            error = collective_error(label, failures, worlds)
            error.hint = (
                "the file server is down or cut off from there; a hard mount waits without a limit"
            )
            return error
        ranks = tuple(sorted(self.silent))
        named = "; ".join(f"rank {r} on {worlds[r].place}" for r in ranks[:8])
        return DeadlineError(
            f"{label}: no heartbeat for {timeout_s:g} s from {len(ranks)} of {len(worlds)} ranks: "
            + named,
            silent=ranks,
            rank=ranks[0] if len(ranks) == 1 else None,
            node=worlds[ranks[0]].node if len(ranks) == 1 else None,
            hint="the process is frozen, its node is down or cut off",
        )


@dataclass
class _VisitResult:
    """The result of one visit to the store. left: Suspects that had said goodbye before."""

    left: set[int]
    beats: dict[int, str]
    silent: dict[int, float]
    stuck: dict[int, Stuck]
    obituaries: list[dict[str, str]]


def first_beat(store: Any, prefix: str, rank: int) -> None:
    """Write a rank's keys before any rank reads them: reading a missing key blocks."""
    store.set(f"{prefix}/beat/{rank}", "0")
    if rank == 0:
        store.set(f"{prefix}/watch", "[0, {}, {}]")


class Monitor:
    """The heartbeat thread of one control, and its results. Any thread may call ``alarm()``.

    hanging: The parts of steps that this process is working at.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        worlds: Sequence[World],
        lives: Sequence[Life | None],
        rank: int,
        *,
        timeout_s: float,
        tempo: Tempo,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._worlds = worlds
        self._rank = rank
        self._timeout_s = timeout_s
        self._tempo = tempo
        node = worlds[rank].node
        self._neighbours = {
            r: life
            for r, life in enumerate(lives)
            if life is not None and r != rank and worlds[r].node == node
        }
        watched = [r for r in range(len(worlds)) if r != rank] if rank == 0 else [0]
        self._pulses = Pulses(watched, 2 * tempo.beat_s)
        self.hanging = Hanging(timeout_s, 2 * tempo.beat_s)
        self._lock = threading.Lock()
        self._dead: dict[int, str] = {}
        self._left: set[int] = set()
        self._silent: dict[int, float] = {}
        self._stuck: dict[int, Stuck] = {}
        self._lost: ControlPlaneLostError | None = None
        self._warned: set[int] = set()
        self._stop = threading.Event()
        self._count = 0
        self._next_obituary = 0
        self._mourned: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat. Every rank has written its first beat by then."""
        self._thread = threading.Thread(
            target=self._run, name=f"ckptfs-heartbeat-{self._rank}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop beating. Returns when no further key is written, or after 2 s of a hanging store."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def write_last_beat(self, store: Any) -> None:
        """Write the last beat, after ``stop``: a process that ends later has not died."""
        store.set(f"{self._prefix}/beat/{self._rank}", LEFT)
        if self._rank == 0:
            store.set(f"{self._prefix}/watch", json.dumps([LEFT, {}, {}]))

    def alarm(self, keys: StepKeys, waited_s: float = math.inf) -> Alarm | None:
        """Return why a call that has waited ``waited_s`` in that step must end now, or None.

        Dead ranks come first, because they stay dead. Stuck ranks come next, because they can say
        what they are stuck in, and silent ranks cannot.
        """
        # A report that a rank was stuck in an earlier step takes this long to arrive: beat, watch, read.
        is_fresh = waited_s > 3 * self._tempo.beat_s
        with self._lock:
            if self._dead:
                return Alarm(dead=dict(self._dead))
            last = keys.number if is_fresh else -1
            stuck = {}
            for rank, parts in self._stuck.items():
                number, text = parts.get(keys.prefix, (math.inf, ""))
                if rank != self._rank and (number == keys.number or number < last):
                    stuck[rank] = text
            if stuck:
                return Alarm(stuck=stuck)
            silent = {r: s for r, s in self._silent.items() if s >= self._timeout_s}
            return Alarm(silent=silent) if silent else None

    @property
    def lost(self) -> ControlPlaneLostError | None:
        """Return the error if the store does not answer: nothing can be agreed on any more."""
        return self._lost

    def with_gone(self, error: ControlPlaneLostError) -> ControlPlaneLostError:
        """Add the processes of this node that are gone: one of them may have hosted the store."""
        deadline = time.monotonic() + 1.0
        gone = self.gone_neighbours()
        while not gone and time.monotonic() < deadline:  # sockets close before their pid disappears
            time.sleep(0.05)
            gone = self.gone_neighbours()
        if not gone:
            return error
        ranks = list(gone)
        return ControlPlaneLostError(
            "; ".join([error.message, *(self._obituary(r, why) for r, why in gone.items())]),
            rank=ranks[0] if len(ranks) == 1 else None,
            node=self._worlds[ranks[0]].node,
            hint=error.hint,
        )

    def gone_neighbours(self) -> dict[int, str]:
        """Check this node's processes now."""
        return {
            rank: "its process is gone" for rank, life in self._neighbours.items() if is_gone(life)
        }

    def keys(self) -> list[str]:
        """Return every key of the heartbeats, for the last rank to leave."""
        beats = [f"{self._prefix}/beat/{rank}" for rank in range(len(self._worlds))]
        dead = [f"{self._prefix}/dead/{i}" for i in range(self._next_obituary + 1)]
        return [*beats, *dead, f"{self._prefix}/watch"]

    # -- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        visit: Future[_VisitResult] | None = None
        began = last = time.monotonic() - self._tempo.beat_s
        while not self._stop.is_set():
            now = time.monotonic()
            suspects = self.gone_neighbours().keys() - self._dead.keys() - self._left
            if visit is None and (suspects or now - began >= self._tempo.beat_s):
                began, visit = now, self._client.submit_short(self._visit(suspects, now - began))
            if visit is not None and visit.done():
                self._integrate(visit, now - last)
                last, visit = now, None
            elif visit is not None and now - began > self._timeout_s:
                self._lose(now - began)
            if self._lost is not None:
                return
            self._stop.wait(min(self._tempo.look_s, 0.05 if visit is not None else 9.0))

    def _note_dead(self, gone: Mapping[int, str]) -> None:
        with self._lock:
            fresh = {rank: why for rank, why in gone.items() if rank not in self._dead}
            self._dead.update(fresh)
        for rank, why in fresh.items():
            log.error("%s", self._obituary(rank, why))

    def _obituary(self, rank: int, why: str) -> str:
        return f"rank {rank} on {self._worlds[rank].place}: {why}"

    def _visit(self, suspects: AbstractSet[int], elapsed_s: float) -> Callable[[Any], _VisitResult]:
        """Return the operation of one beat: write ours, read what concerns us.

        suspects: Processes of this node that have ended. Their beat says whether they had left
        before.
        """
        self._count += 1
        try:
            own = self.hanging.at(elapsed_s)
        except Exception:  # the heartbeat continues in any case
            log.exception("this rank cannot send its state to the others")
            own = {}
        count, dead, silent = self._count, dict(self._dead), dict(self._silent)
        prefix, rank, size = self._prefix, self._rank, len(self._worlds)

        def visit(store: Any) -> _VisitResult:
            store.set(f"{prefix}/beat/{rank}", f"{count} {json.dumps(own) if own else ''}")
            beats, reported_silent = {}, {}
            stuck: dict[int, Stuck] = {}
            left = {r for r in suspects if store.get(f"{prefix}/beat/{r}") == LEFT.encode()}
            dead.update(dict.fromkeys(suspects - left, "its process is gone"))
            if rank == 0:
                keys = [f"{prefix}/beat/{r}" for r in range(1, size)]
                beats = {r + 1: b.decode() for r, b in enumerate(_get_all(store, keys))}
                texts = {r: beat.partition(" ")[2] for r, beat in beats.items()}
                stuck = {r: json.loads(text) for r, text in texts.items() if text}
                hanging = {rank: own, **stuck} if own else stuck
                store.set(f"{prefix}/watch", json.dumps([count, silent, hanging]))
            else:
                number, silences, hanging = json.loads(store.get(f"{prefix}/watch"))
                beats = {0: str(number)}
                reported_silent = {int(r): float(s) for r, s in silences.items()}
                stuck = {int(r): parts for r, parts in hanging.items()}
            return _VisitResult(
                left, beats, reported_silent, stuck, self._exchange_obituaries(store, dead)
            )

        return visit

    def _exchange_obituaries(self, store: Any, dead: Mapping[int, str]) -> list[dict[str, str]]:
        """Read the new obituaries; write one if we know a dead rank that none of them names."""
        found: list[dict[str, str]] = []
        while True:
            key = f"{self._prefix}/dead/{self._next_obituary}"
            ours = json.dumps({r: why for r, why in dead.items() if str(r) not in self._mourned})
            if store.check([key]):
                text = store.get(key).decode()
            elif ours == "{}":
                return found
            else:
                text = store.compare_set(key, "", ours).decode()
            self._next_obituary += 1
            found.append(json.loads(text))
            self._mourned |= set(found[-1])

    def _integrate(self, visit: Future[_VisitResult], elapsed_s: float) -> None:
        try:
            result = answer(visit, 0.0)
        except ControlPlaneLostError as error:
            self._lost = error
            return
        except Exception:  # a bug: this thread must continue, and the next beat may work
            log.exception("a heartbeat failed")
            return
        self._left |= result.left
        for obituary in result.obituaries:
            self._note_dead({int(r): why for r, why in obituary.items() if int(r) != self._rank})
        self._pulses.tick(elapsed_s, result.beats)
        own = self._pulses.silent(min(self._tempo.warn_s, self._timeout_s))
        with self._lock:
            self._silent = {**result.silent, **own}
            self._silent.pop(self._rank, None)  # the coordinator may not know yet that we woke up
            self._stuck = result.stuck
        self._warn()

    def _lose(self, waited_s: float) -> None:
        self._lost = ControlPlaneLostError(
            f"the store that the ranks talk through has not answered for {waited_s:.1f} s",
            hint="the process that hosts it (rank 0, or torchrun's agent) is frozen, or its node "
            "is cut off",
        )

    def _warn(self) -> None:
        loud = {r: s for r, s in self._silent.items() if s >= self._tempo.warn_s}
        for rank in sorted(loud.keys() - self._warned):
            log.warning(
                "rank %d on %s has been silent for %.0f s; calls that wait for it end at %g s",
                rank,
                self._worlds[rank].place,
                loud[rank],
                self._timeout_s,
            )
        for rank in sorted(self._warned - loud.keys()):
            log.warning("rank %d on %s is back", rank, self._worlds[rank].place)
        self._warned = set(loud)


def _get_all(store: Any, keys: list[str]) -> list[bytes]:
    if store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]  # FileStore
