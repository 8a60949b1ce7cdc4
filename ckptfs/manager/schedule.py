"""When to save: ``should_save``, and the rendezvous for a save on failure.

``should_save(step)`` decides by steps, by time, and when the job is about to be stopped. All ranks
agree.

    by steps      step % every_steps == 0                   pure: no clock, no message between ranks
    by time       every_s since the last save returned      the coordinator's clock decides
    preempted     a signal arrived at some rank             true once, on all ranks

Steps need no agreement. The other two do, but training must not stop for it. Therefore agreement is
pipelined in rounds, over a clone of the control that one thread per rank serves:

    call n        obey the round that was begun at the call before, begin the next round
    call n + 1    obey the round begun at n (waiting for it only if it has not ended yet) ...

Every rank obeys the same round at the same call, so all ranks answer alike: one call late. Where
calls come faster than every 0.25 s, the coordinator spaces the rounds out, again alike for all
ranks. A single process obeys at once. Without ``every_s`` and signals there is no thread, no clone
and no round.

``Rendezvous`` is what a save on failure needs: all ranks arrive within a deadline, or the save is made
by none of them.

    rank 0   reach ----------------.
    rank 1   reach --------.       |            all came in time: reach returns on every rank
    rank 2      (its own exception, or stuck)   else: an error on every rank that calls, now or later

A normal collective call waits for a rank as long as its process lives, and a rank that still trains
lives. Here a caller gives up after ``timeout_s`` seconds, and giving up is final. To that end there
are two steps, and the second asks every rank whether it is still waiting. So no rank continues
after another one has given up, however late a rank arrives.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from ckptfs.control.control import Control
from ckptfs.errors import DeadlineError, StateError
from ckptfs.manager.preemption import PreemptSignals

__all__ = ["Post", "Rendezvous", "Round", "Rules", "Schedule", "calls_between", "settle_round"]

logger = logging.getLogger("ckptfs.manager")


class Rendezvous:
    """Meetings of all ranks, over a clone of the control. All ranks make one, in the same order."""

    def __init__(self, control: Control) -> None:
        self._control = control.clone()
        self._under_way: _Meeting | None = None

    def reach(self, label: str, timeout_s: float) -> None:
        """Return when every rank has called this, on all of them.

        Call it on the thread that made the rendezvous. After a meeting that this rank gave up, the late
        ranks have to arrive at that one first, within the time of the next.

        Raises DeadlineError if not all ranks arrived within ``timeout_s`` seconds of this rank's
        call; then no rank returns. Raises CollectiveError if another rank gave up first, ended or
        left.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._under_way is not None and not self._under_way.has_ended(timeout_s):
            raise self._late(label, timeout_s)
        meeting = _Meeting(self._control, label)
        self._under_way = meeting
        threading.Thread(target=meeting.hold, name="ckptfs-rendezvous", daemon=True).start()
        if not meeting.has_ended(max(0.0, deadline_s - time.monotonic())) and meeting.give_up():
            raise self._late(label, timeout_s)
        meeting.outcome.result()  # once this rank confirmed, only a death can stop the others

    def close(self) -> None:
        """Leave. A second call does nothing."""
        self._control.close()

    def _late(self, label: str, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"{label}: some ranks did not arrive within {timeout_s:g} s",
            rank=self._control.rank,
            node=self._control.world.node,
            hint="nothing was saved; see the logs of the missing ranks",
        )


class _Meeting:
    """One meeting as one rank sees it. The rank either gives up or confirms, never both."""

    def __init__(self, control: Control, label: str) -> None:
        self._control = control
        self._label = label
        self._lock = threading.Lock()
        self._gave_up = False
        self._confirmed = False
        self.outcome: Future[None] = Future()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the outcome, good or bad, for up to ``timeout_s`` seconds.

        Returns whether it is known.
        """
        return bool(wait((self.outcome,), timeout_s).done)

    def give_up(self) -> bool:
        """Give up; return False if it is too late for that, because all ranks have arrived."""
        with self._lock:
            self._gave_up = not self._confirmed and not self.outcome.done()
            return self._gave_up

    def hold(self) -> None:
        """Run both steps; ends when all ranks have arrived, in time or not, or have left."""
        try:
            self._control.step(self._label, _here, _all_are_here)
            self._control.step(f"{self._label}: confirm", self._confirm, _all_are_here)
        except BaseException as error:  # noqa: BLE001 - raised by reach, on the thread that called
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(None)

    def _confirm(self) -> None:
        with self._lock:
            if self._gave_up:
                raise DeadlineError("stopped waiting for the other ranks")
            self._confirmed = True


def _here() -> None:
    """Take part in a step without a value."""


def _all_are_here(_: list[None]) -> None:
    """Decide nothing: the step itself shows that all ranks are present."""


_PERIOD_S = 0.25  # seeing a preemption this much later costs nothing; a round per millisecond does
_CALLS_MAX = 64  # if steps suddenly take long, the answer is late by at most this many of them
_SLOW_PERIODS = 8  # a round gets no more time than this: one rank's evaluation is no slow store

_TOO_SLOW = (
    "the last save took %.0f s, but a preempted job has %.0f s (grace_s): its last save may "
    "not be committed in time. Earlier commits are safe; let your launcher wait longer "
    "(docs/howto/preemption.md)"
)


# -- decisions: pure -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """When to save. None turns a rule off. Raises StateError for a number that is not positive."""

    every_steps: int | None = None
    every_s: float | None = None
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise StateError(f"{name} is {value!r}; it must be above zero")

    def by_steps(self, step: int) -> bool:
        """Whether ``step`` is due by its number. Step 0 is not: nothing was learned yet."""
        return self.every_steps is not None and step > 0 and step % self.every_steps == 0

    def by_time(self, since_save_s: float) -> bool:
        """Whether the last save is long enough ago."""
        return self.every_s is not None and since_save_s >= self.every_s


@dataclass(frozen=True, slots=True)
class Post:
    """What one rank contributes to a round. Only the coordinator's clock readings count.

    Attributes:
        preempted: Which signal arrived at which rank; None: no signal arrived at this one.
        saves: How many saves were reported to the schedule so far.
        since_save_s: Seconds since the last save.
        calls: Calls since the last round was begun.
        elapsed_s: Seconds since the last round was begun.
        round_s: How many seconds the last round took.
    """

    preempted: str | None
    saves: int
    since_save_s: float
    calls: int
    elapsed_s: float
    round_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """What all ranks obey.

    Attributes:
        preempted: The signals that arrived, each with its rank.
        time_is_up: Whether a save is due by time.
        saves: The number of saves when the round was begun.
        next_round: After how many calls the next round is begun.
    """

    preempted: tuple[str, ...]
    time_is_up: bool
    saves: int
    next_round: int


def settle_round(posts: Sequence[Post], rules: Rules, period_s: float = _PERIOD_S) -> Round:
    """Return the one answer to what all ranks contributed. ``posts`` are in order of rank."""
    first = posts[0]
    return Round(
        tuple(post.preempted for post in posts if post.preempted is not None),
        rules.by_time(first.since_save_s),
        first.saves,
        calls_between(first.calls, first.elapsed_s, first.round_s, period_s),
    )


def calls_between(calls: int, elapsed_s: float, round_s: float, period_s: float) -> int:
    """Return after how many calls to begin the next round, at least 1.

    Rounds then come every ``period_s`` seconds, and no call waits for one: after a round that took
    long, the next one gets twice as much time, at most eight periods.
    """
    wanted_s = max(period_s, min(2 * round_s, _SLOW_PERIODS * period_s))
    if calls < 1 or wanted_s <= 0:
        return 1
    call_s = elapsed_s / calls
    if call_s * _CALLS_MAX <= wanted_s:
        return _CALLS_MAX
    return max(1, math.floor(wanted_s / call_s))


# -- the object that a manager holds ---------------------------------------------------------------


class Schedule:
    """Answers ``should_save``. Only the thread that makes the manager's calls may use it.

    ``took`` may be called from any thread. Every rank makes the same calls in the same order.

    Args:
        rules: When to save.
        control: Called once, at the first call that needs ranks to agree; the schedule clones the
            control.
        signals: Reports a preemption; closed with the schedule. None: preemption is not watched.
        clock: Returns monotonic seconds.
        period_s: The least number of seconds between two rounds.
    """

    def __init__(
        self,
        rules: Rules,
        control: Callable[[], Control],
        *,
        signals: PreemptSignals | None = None,
        clock: Callable[[], float] = time.monotonic,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._rules = rules
        self._control = control
        self._clock = clock
        self._period_s = period_s
        self._signals = signals
        self._agrees = signals is not None or rules.every_s is not None
        self._rounds: _Rounds | None = None
        self._pid = os.getpid()
        self._preempted = False
        self._saves = 0
        self._saved_step: int | None = None
        self._saved_at_s = self._begun_at_s = clock()
        self._calls = 0
        self._next_round = 0
        self._warned = False
        self._closed = False

    @property
    def preempted(self) -> bool:
        """Whether the ranks have agreed that the job is about to be stopped.

        It never becomes False again.
        """
        return self._preempted

    def __call__(self, step: int) -> bool:
        """Whether to save now; the same on all ranks. Ranks must call equally often.

        False for a step that was saved already, preempted or not. If the agreement between the
        ranks has ended, raises the reason at the next call and at every later one: CollectiveError
        if a rank is gone, DeadlineError if one is silent, ControlPlaneLostError if there is no
        store.
        """
        if self._closed:
            raise StateError("the manager is closed")
        due = self._rules.by_steps(step)
        if self._agrees:
            due = self._agree() or due
        return due and step != self._saved_step

    def saved(self, step: int) -> None:
        """Note that ``step`` was saved, or that its save is under way.

        Every rank calls this after the same call of ``should_save``.
        """
        self._saves += 1
        self._saved_step = step
        self._saved_at_s = self._clock()

    @property
    def warns_here(self) -> bool:
        """Whether ``took`` may warn on this rank: on the coordinator, if signals are watched."""
        return self._signals is not None and not self._warned and self._control().rank == 0

    def took(self, wall_s: float | None) -> None:
        """Note how many seconds the last save took until its commit; None: unknown.

        The save may be one of the previous job. If the grace is shorter, the coordinator warns
        once.
        """
        if wall_s is None or self._signals is None or self._warned:
            return
        if wall_s > self._rules.grace_s:
            self._warned = True
            if self._control().rank == 0:
                logger.warning(_TOO_SLOW, wall_s, self._rules.grace_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Restore the signal handlers and end the thread. Local. A second call does nothing.

        Waits up to ``timeout_s`` seconds for the thread.
        """
        self._closed = True
        if self._signals is not None:
            self._signals.close()
        if self._rounds is not None:
            self._rounds.close(timeout_s)

    def _agree(self) -> bool:
        if os.getpid() != self._pid:
            raise StateError(
                "should_save belongs to the process that made the manager, not a child"
            )
        if self._rounds is None:
            self._rounds = _Rounds(self._control(), self._settle)
        rounds = self._rounds
        self._calls += 1
        if rounds.immediate:
            rounds.begin(self._post(rounds))
            return self._obey(rounds.obey())
        if self._calls < self._next_round:
            return False
        settled = rounds.obey() if self._next_round else None
        rounds.begin(self._post(rounds))
        self._next_round = settled.next_round if settled else 1
        return settled is not None and self._obey(settled)

    def _settle(self, posts: list[Post]) -> Round:
        return settle_round(posts, self._rules, self._period_s)

    def _post(self, rounds: _Rounds) -> Post:
        now_s = self._clock()
        signal_name = self._signals.received if self._signals is not None else None
        world = rounds.world
        post = Post(
            f"{signal_name} to rank {world.rank} on {world.place}" if signal_name else None,
            self._saves,
            now_s - self._saved_at_s,
            self._calls if self._next_round else 0,
            now_s - self._begun_at_s,
            rounds.last_s,
        )
        self._begun_at_s, self._calls = now_s, 0
        return post

    def _obey(self, settled: Round) -> bool:
        # A round begun before the last save did not know of that save, and would save once more.
        due = settled.time_is_up and settled.saves == self._saves
        if settled.preempted and not self._preempted:
            self._preempted = due = True
            logger.warning("preempted: %s; a save is due now", "; ".join(settled.preempted[:4]))
        return due


@dataclass(slots=True)
class _Job:
    post: Post
    settle: Callable[[list[Post]], Round]
    answer: Future[Round] = field(default_factory=Future)
    took_s: float = 0.0


class _Rounds:
    """Rounds over a clone of the control, one after another, on a daemon thread.

    ``immediate``: there is no other rank to wait for, so there is no thread.
    """

    def __init__(self, control: Control, settle: Callable[[list[Post]], Round]) -> None:
        self._control = control.clone()
        self._settle = settle
        self.world = control.world
        self.immediate = control.size == 1
        self._last: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, post: Post) -> None:
        """Post what this rank contributes; ``obey`` returns the answer."""
        self._last = job = _Job(post, self._settle)
        if self.immediate:
            _serve_one(job, self._control)
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs, self._control), name="ckptfs-schedule", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        self._jobs.put(job)

    def obey(self) -> Round:
        """Return the answer of the round that was begun last.

        Signals are handled while this waits.
        """
        if self._last is None:
            raise StateError("no round was begun")
        return self._last.answer.result()

    @property
    def last_s(self) -> float:
        """How many seconds the last round took; 0.0 if there was none."""
        return 0.0 if self._last is None else self._last.took_s

    def close(self, timeout_s: float) -> None:
        """Let a round that is under way end, then leave the control."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.debug("the other ranks have not called should_save as often")
        self._control.close()


def _serve(jobs: queue.SimpleQueue[_Job | None], control: Control) -> None:
    """Serve rounds on the thread.

    An idle thread keeps nothing alive but the control. A manager without references has to be
    collected; otherwise its run would never be released.
    """
    while (job := jobs.get()) is not None:
        _serve_one(job, control)
        del job


def _serve_one(job: _Job, control: Control) -> None:
    began_s = time.monotonic()
    try:
        answer = control.step("should_save", lambda: job.post, job.settle)
    except BaseException as error:  # noqa: BLE001 - raised by obey, on the thread that asked
        job.answer.set_exception(error)
    else:
        job.took_s = time.monotonic() - began_s
        job.answer.set_result(answer)
