"""When to save: ``should_save``, and the rendezvous of a save on failure.

``should_save(step)``: by steps, by time, and when the job is about to be stopped. All ranks agree.

    by steps      step % every_steps == 0                   pure: no clock, no word between ranks
    by time       every_s since the last save returned      the coordinator's clock alone
    preempted     a signal came to some rank                 any rank's; once

Steps need no agreement. The other two do, and training must not stand still for it, so it is
pipelined over a clone of the control, served by one thread per rank:

    call n        obey the round that was begun at the call before, begin the next round
    call n + 1    obey the round begun at n (waiting for it only if it has not come yet) ...

Every rank obeys the same round at the same call, so all answer alike: one call late. Where calls
come faster than every 0.25 s the coordinator spaces the rounds out, again alike for all. One process
alone obeys at once. Without ``every_s`` and signals there is no thread, no clone and no round.

All ranks within a deadline, or none of them: what a save on failure needs.

    rank 0   reach ----------------.
    rank 1   reach --------.       |            everybody came in time: reach returns everywhere
    rank 2      (its own exception, or stuck)   else: an error on every rank that calls, now or later

A collective call waits for a rank as long as that one lives, and a rank that trains on lives. Here a
caller gives up after ``timeout_s``, and giving up is final: two steps, of which the second asks every
rank whether it is still there. So nobody goes on while another has given up, whoever comes late.
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

__all__ = ["Post", "Rally", "Round", "Rules", "Schedule", "calls_between", "settle_round"]

logger = logging.getLogger("ckptfs.manager")


class Rally:
    """Meetings of all ranks, over a clone of the control. Made by all ranks in the same order."""

    def __init__(self, control: Control) -> None:
        self._control = control.clone()
        self._under_way: _Meeting | None = None

    def reach(self, label: str, timeout_s: float) -> None:
        """Return when every rank has called, on all of them; the thread that made it.

        DeadlineError: not all came within ``timeout_s`` of this rank's call; nobody will return.
        CollectiveError: another rank gave up first, ended or left. After a meeting that this rank
        gave up, the late ones have to come to that one first, in the time of the next.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._under_way is not None and not self._under_way.is_over(timeout_s):
            raise self._late(label, timeout_s)
        meeting = _Meeting(self._control, label)
        self._under_way = meeting
        threading.Thread(target=meeting.hold, name="ckptfs-rally", daemon=True).start()
        if not meeting.is_over(max(0.0, deadline_s - time.monotonic())) and meeting.give_up():
            raise self._late(label, timeout_s)
        meeting.outcome.result()  # once confirmed, only a death can keep the others from it

    def close(self) -> None:
        """Leave; harmless twice."""
        self._control.close()

    def _late(self, label: str, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"{label}: some ranks did not arrive within {timeout_s:g} s",
            rank=self._control.rank,
            node=self._control.world.node,
            hint="nothing was saved; see the logs of the missing ranks",
        )


class _Meeting:
    """One meeting as one rank sees it. It has given up, or confirmed, never both."""

    def __init__(self, control: Control, label: str) -> None:
        self._control = control
        self._label = label
        self._lock = threading.Lock()
        self._gave_up = False
        self._confirmed = False
        self.outcome: Future[None] = Future()

    def is_over(self, timeout_s: float) -> bool:
        """Wait for the outcome, good or bad, for up to ``timeout_s``."""
        return bool(wait((self.outcome,), timeout_s).done)

    def give_up(self) -> bool:
        """False where it is too late for that: all have come."""
        with self._lock:
            self._gave_up = not self._confirmed and not self.outcome.done()
            return self._gave_up

    def hold(self) -> None:
        """Both steps; ends when all ranks have come, in time or not, or have left."""
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
    """Present."""


def _all_are_here(_: list[None]) -> None:
    """Everybody is."""


_PERIOD_S = 0.25  # a preemption seen so much later costs nothing; a round per millisecond does
_CALLS_MAX = 64  # should steps suddenly take long, so many of them is how late we may be
_SLOW_PERIODS = 8  # a round is never waited for beyond this: one rank's evaluation is no slow store

_TOO_SLOW = (
    "the last save took %.0f s, but a preempted job has %.0f s (grace_s): its last save may "
    "not be committed in time. Earlier commits are safe; let your launcher wait longer "
    "(docs/howto/preemption.md)"
)


# -- decisions: pure -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """When to save. None: not by that rule. StateError: not a positive number."""

    every_steps: int | None = None
    every_s: float | None = None
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise StateError(f"{name} is {value!r}; it must be above zero")

    def by_steps(self, step: int) -> bool:
        """Whether the step is one that is saved anyway; step 0 has learned nothing yet."""
        return self.every_steps is not None and step > 0 and step % self.every_steps == 0

    def by_time(self, since_save_s: float) -> bool:
        """Whether the last save is long enough ago."""
        return self.every_s is not None and since_save_s >= self.every_s


@dataclass(frozen=True, slots=True)
class Post:
    """What one rank brings to a round. The coordinator's clock readings count, the others' do not.

    preempted: who got which signal, None: nobody here. saves: how many were told so far. calls and
    elapsed_s: since the last round was begun; round_s: how long that one took.
    """

    preempted: str | None
    saves: int
    since_save_s: float
    calls: int
    elapsed_s: float
    round_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """What all ranks obey. next_round: after so many calls. saves: as of when it was begun."""

    preempted: tuple[str, ...]
    time_is_up: bool
    saves: int
    next_round: int


def settle_round(posts: Sequence[Post], rules: Rules, period_s: float = _PERIOD_S) -> Round:
    """One answer from what every rank said, in order of rank."""
    first = posts[0]
    return Round(
        tuple(post.preempted for post in posts if post.preempted is not None),
        rules.by_time(first.since_save_s),
        first.saves,
        calls_between(first.calls, first.elapsed_s, first.round_s, period_s),
    )


def calls_between(calls: int, elapsed_s: float, round_s: float, period_s: float) -> int:
    """After how many calls the next round is worth it, 1 at least.

    So that rounds come every ``period_s`` and no call waits for one: a round that took long gets
    twice as much time, eight periods at most.
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
    """Answers ``should_save``. The thread that makes the manager's calls; ``took`` from any.

    control: called once, at the first call that needs ranks to agree; the schedule clones what it
    gets. Every rank makes the same calls in the same order. signals: what tells of a preemption, closed
    with the schedule; None: nothing does. clock: monotonic seconds. period_s: the least time between
    two rounds.
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
        """Whether the ranks have agreed that the job is about to be stopped; it stays so."""
        return self._preempted

    def __call__(self, step: int) -> bool:
        """Whether to save now; the same on all ranks. Ranks must call equally often.

        False for a step that was saved already, preempted or not. Raises what ended the agreement
        (a rank is gone: CollectiveError; silent: DeadlineError; no store: ControlPlaneLostError) at
        the call after, and at every later one.
        """
        if self._closed:
            raise StateError("the manager is closed")
        due = self._rules.by_steps(step)
        if self._agrees:
            due = self._agree() or due
        return due and step != self._saved_step

    def saved(self, step: int) -> None:
        """A save of this step was made, or is on its way; every rank tells it after the same call."""
        self._saves += 1
        self._saved_step = step
        self._saved_at_s = self._clock()

    @property
    def warns_here(self) -> bool:
        """Whether ``took`` may warn on this rank: the coordinator, where signals are watched."""
        return self._signals is not None and not self._warned and self._control().rank == 0

    def took(self, wall_s: float | None) -> None:
        """How long the last save took until its commit, of this job or the one before; None: unknown.

        Warns once, on the coordinator, where the grace is shorter.
        """
        if wall_s is None or self._signals is None or self._warned:
            return
        if wall_s > self._rules.grace_s:
            self._warned = True
            if self._control().rank == 0:
                logger.warning(_TOO_SLOW, wall_s, self._rules.grace_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Put signal handlers back and end the thread. Harmless twice; local, waits for timeout_s."""
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
        told = self._signals.received if self._signals is not None else None
        world = rounds.world
        post = Post(
            f"{told} to rank {world.rank} on {world.place}" if told else None,
            self._saves,
            now_s - self._saved_at_s,
            self._calls if self._next_round else 0,
            now_s - self._begun_at_s,
            rounds.last_s,
        )
        self._begun_at_s, self._calls = now_s, 0
        return post

    def _obey(self, settled: Round) -> bool:
        # Begun before the last save: its clock did not know of it, and would save once more.
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

    immediate: there is nobody to wait for, hence no thread.
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
        """Post this rank's word; the answer comes with ``obey``."""
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
        """The answer of the round that was begun last. Signals are handled while it waits."""
        if self._last is None:
            raise StateError("no round was begun")
        return self._last.answer.result()

    @property
    def last_s(self) -> float:
        """How long the last round took; 0.0 before there is one."""
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
    """The thread. Idle it keeps nothing alive but the control: a manager that nobody has any more has to
    be collected, or its run is never released.
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
