"""should_save: by steps, by time and by preemption, the same on all ranks; and meetings in time."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfs
from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.commit.log.fold import LogState
from ckptfs.control.control import Control, SoloControl
from ckptfs.errors import CkptfsError, CollectiveError, DeadlineError, StateError
from ckptfs.manager.preemption import PreemptSignals
from ckptfs.manager.run_manager import between_s, last_save_s
from ckptfs.manager.schedule import Post, Rendezvous, Rules, Schedule, calls_between, settle_round
from ckptfs.testing.world import simulate
from tests.measures import own_threads, warned


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Rank:
    """One rank's schedule in the hands of a test. Signals are noted by hand: ranks are threads."""

    control: Control
    rules: Rules
    watches: bool = False
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.signals = PreemptSignals(()) if self.watches else None
        self.schedule = Schedule(
            self.rules, lambda: self.control, signals=self.signals, clock=self.clock, period_s=0.0
        )

    def preempt(self) -> None:
        """As if SIGTERM came to this rank now."""
        assert self.signals
        self.signals.note("SIGTERM")


def no_control() -> Control:
    """For schedules that must not ask for one."""
    raise AssertionError("no rank needs to be asked")


# -- by steps --------------------------------------------------------------------------------------


def test_by_steps_needs_neither_ranks_nor_threads() -> None:
    """Multiples of every_steps, step 0 never, and no one is asked: no control, no clone, no thread."""
    before = own_threads()
    schedule = Schedule(Rules(every_steps=10), no_control)
    assert [n for n in range(31) if schedule(n)] == [10, 20, 30]
    assert own_threads() <= before
    assert not schedule.preempted
    schedule.close()


def test_without_rules_nothing_is_due() -> None:
    """A manager without a rule leaves it to the caller."""
    schedule = Schedule(Rules(), no_control)
    assert not any(schedule(n) for n in range(100))


def test_a_step_that_was_saved_is_not_due_again() -> None:
    """A job that asks twice, or saves after a restore at that step, need not save it once more."""
    schedule = Schedule(Rules(every_steps=5), no_control)
    assert schedule(5)
    schedule.saved(5)
    assert not schedule(5)
    assert schedule(10)


@pytest.mark.parametrize("name", ["every_steps", "every_s", "grace_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_rules_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    """Zero, negative, not a number: at the start, not at the first division."""
    with pytest.raises(StateError, match=name):
        Rules(**{name: value})


def test_a_closed_schedule_says_so() -> None:
    """After close, asking is an error; closing again is not."""
    schedule = Schedule(Rules(every_steps=1), no_control)
    schedule.close()
    schedule.close()
    with pytest.raises(StateError, match="closed"):
        schedule(1)


# -- one process -----------------------------------------------------------------------------------


def test_alone_time_and_signals_count_at_once() -> None:
    """One process obeys at the very call, without a thread."""
    before = own_threads()
    rank = Rank(SoloControl(), Rules(every_s=60.0), watches=True)
    answers = []
    for step in range(1, 7):
        rank.clock.now_s += 25
        if step == 5:
            rank.preempt()
        answers.append(rank.schedule(step))
        if answers[-1]:
            rank.schedule.saved(step)
    assert answers == [False, False, True, False, True, False]
    assert rank.schedule.preempted
    assert own_threads() <= before
    rank.schedule.close()


# -- many ranks ------------------------------------------------------------------------------------


def test_a_signal_to_one_rank_is_obeyed_by_all_one_call_late() -> None:
    """Any rank, any call: all ranks answer True at the call after it, once, and stay preempted."""

    def body(control: Control) -> tuple[list[bool], list[bool]]:
        rank = Rank(control, Rules(), watches=True)
        answers, preempted = [], []
        for step in range(1, 9):
            if control.rank == 2 and step == 4:
                rank.preempt()
            if control.rank == 1 and step == 6:
                rank.preempt()  # a launcher sends it to all, one after another
            answers.append(rank.schedule(step))
            preempted.append(rank.schedule.preempted)
        rank.schedule.close()
        return answers, preempted

    ends = [end.get() for end in simulate(4, body)]
    expected = ([n == 5 for n in range(1, 9)], [n >= 5 for n in range(1, 9)])
    assert ends == [expected] * 4


def test_time_is_the_coordinators_whatever_the_other_clocks_say() -> None:
    """Ranks with clocks that stop or run wild save at the same calls, every_s apart."""

    def body(control: Control) -> list[int]:
        rank = Rank(control, Rules(every_s=10.0))
        due = []
        for step in range(1, 41):
            rank.clock.now_s += {0: 1.0, 1: 0.0, 2: 500.0}[control.rank]
            if rank.schedule(step):
                due.append(step)
                rank.schedule.saved(step)
        rank.schedule.close()
        return due

    ends = [end.get() for end in simulate(3, body)]
    # Time is up at calls 10, 21, 32, reported one call later, and counted again from there.
    assert ends == [[11, 22, 33]] * 3


def test_a_round_begun_before_a_save_asks_for_no_second_one() -> None:
    """The call that saved had begun a round that did not know of it: its answer is void."""

    def body(control: Control) -> list[int]:
        rank = Rank(control, Rules(every_steps=6, every_s=5.0))
        due = []
        for step in range(1, 13):
            rank.clock.now_s += 1.0
            if rank.schedule(step):
                due.append(step)
                rank.schedule.saved(step)
        rank.schedule.close()
        return due

    # Time is up at call 5 and reported at 6, which saves by steps too: one save. The next by steps, 12.
    assert [end.get() for end in simulate(2, body)] == [[6, 12]] * 2


def test_a_save_that_was_due_and_not_made_is_due_again() -> None:
    """A caller that did not save is reminded at the next call."""

    def body(control: Control) -> list[bool]:
        rank = Rank(control, Rules(every_s=5.0))
        answers = []
        for step in range(1, 9):
            rank.clock.now_s += 1.0
            answers.append(rank.schedule(step))
        rank.schedule.close()
        return answers

    assert [end.get() for end in simulate(2, body)] == [[False] * 5 + [True] * 3] * 2


def test_asking_does_not_wait_for_the_others() -> None:
    """A rank with neighbours that have not come answers its first call, and waits only at the second."""
    first_done, others_may = threading.Event(), threading.Event()

    def body(control: Control) -> list[bool]:
        rank = Rank(control, Rules(), watches=True)
        if control.rank == 1:
            assert others_may.wait(120)
            rank.preempt()
        answers = [rank.schedule(1)]
        if control.rank == 0:
            first_done.set()
            others_may.set()
        answers.append(rank.schedule(2))
        rank.schedule.close()
        return answers

    ends = [end.get() for end in simulate(2, body)]
    assert first_done.is_set()
    assert ends == [[False, True]] * 2


def test_a_rank_that_left_is_an_error_at_the_next_call_of_the_others() -> None:
    """The others answer the call that he missed, raise at the one after, and at every later one."""

    def body(control: Control) -> list[str]:
        rank = Rank(control, Rules(every_s=1e6))
        said = []
        for step in range(1, 7):
            if control.rank == 1 and step == 3:
                break
            try:
                said.append(str(rank.schedule(step)))
            except CkptfsError as error:
                said.append(type(error).__name__)
        rank.schedule.close()
        return said

    ends = simulate(3, body)
    expected = ["False"] * 3 + ["CollectiveError"] * 3
    assert [ends[0].get(), ends[2].get()] == [expected, expected]


def test_closing_waits_for_the_last_round_so_that_nobody_is_left_in_it() -> None:
    """After equally many calls all ranks close without an error, and no thread stays."""

    def body(control: Control) -> bool:
        rank = Rank(control, Rules(every_s=1e6))
        for step in range(1, 20):
            rank.schedule(step)
        rank.schedule.close()
        return any(thread.is_alive() for thread in own_threads("ckptfs-schedule"))

    for end in simulate(4, body):
        end.get()
    assert not own_threads("ckptfs-schedule")


# -- the pure part ---------------------------------------------------------------------------------


def post(preempted: str | None = None, *, since_save_s: float = 0.0, saves: int = 0) -> Post:
    """What a rank says."""
    return Post(preempted, saves, since_save_s, 1, 1.0, 0.0)


def test_a_round_names_who_was_told_and_takes_time_and_count_from_the_coordinator() -> None:
    """Other ranks' clocks and counts decide nothing; every signal is named."""
    rules = Rules(every_s=10.0)
    posts = [post(since_save_s=9.0, saves=3), post("A", since_save_s=99.0, saves=7), post("B")]
    settled = settle_round(posts, rules)
    assert settled.preempted == ("A", "B")
    assert (settled.time_is_up, settled.saves) == (False, 3)
    assert settle_round([post(since_save_s=10.0)], rules).time_is_up


@pytest.mark.parametrize(
    ("calls", "elapsed_s", "round_s", "expected"),
    [
        (0, 5.0, 0.0, 1),  # the first round: nothing is known
        (1, 10.0, 0.001, 1),  # a step of 10 s: a round at each
        (1, 0.1, 0.001, 2),  # 100 ms: every 0.25 s
        (10, 0.05, 0.001, 50),  # 5 ms
        (1000, 0.0, 0.0, 64),  # faster than the clock
        (1, 0.1, 0.5, 10),  # a slow store: twice the round, so that no call waits for it
        (1, 1.0, 60.0, 2),  # one rank evaluated for a minute: no reason to look away for two
    ],
)
def test_rounds_come_every_quarter_second_at_most(
    calls: int, elapsed_s: float, round_s: float, expected: int
) -> None:
    """Fast loops are not slowed down by agreeing, slow ones agree at each call."""
    assert calls_between(calls, elapsed_s, round_s, 0.25) == expected


@given(
    calls=st.integers(0, 10**6),
    elapsed_s=st.floats(0, 1e6),
    round_s=st.floats(0, 1e6),
    period_s=st.floats(0, 10),
)
def test_the_next_round_is_always_near(
    calls: int, elapsed_s: float, round_s: float, period_s: float
) -> None:
    """Whatever was measured, a preemption is seen within 64 calls."""
    assert 1 <= calls_between(calls, elapsed_s, round_s, period_s) <= 64


class Counted:
    """A control that counts its steps, and those of its clones."""

    def __init__(self, control: Control, rounds: list[str]) -> None:
        self._control = control
        self._rounds = rounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    def clone(self) -> Counted:
        """As counted as the original."""
        return Counted(self._control.clone(), self._rounds)

    def step(self, label: str, *parts: Any) -> Any:
        """One more."""
        self._rounds.append(label)
        return self._control.step(label, *parts)


def test_a_fast_loop_makes_few_rounds_and_none_in_between() -> None:
    """1000 calls of 10 ms: a round every 0.25 s, about 40 of them, on every rank."""

    def body(control: Control) -> int:
        rounds: list[str] = []
        clock = Clock()
        counted: Any = Counted(control, rounds)
        schedule = Schedule(Rules(every_s=1e6), lambda: counted, clock=clock, period_s=0.25)
        for step in range(1000):
            clock.now_s += 0.01
            schedule(step)
        schedule.close()
        return len(rounds)

    first, second = (end.get() for end in simulate(2, body))
    assert first == second
    assert 30 <= first <= 45


@pytest.mark.parametrize("period_s", [0.0, 0.25])
def test_spaced_rounds_still_make_all_ranks_answer_alike(period_s: float) -> None:
    """Clocks of ranks differ by orders of magnitude; the coordinator's spacing holds for all."""

    def body(control: Control) -> list[int]:
        clock = Clock()
        signals = PreemptSignals(())
        schedule = Schedule(
            Rules(), lambda: control, signals=signals, clock=clock, period_s=period_s
        )
        due = []
        for step in range(1, 101):
            clock.now_s += 0.01 * 30**control.rank
            if control.rank == 1 and step == 40:
                signals.note("SIGTERM")
            if schedule(step):
                due.append(step)
        schedule.close()
        return due

    first, second = (end.get() for end in simulate(2, body))
    assert first == second
    assert len(first) == 1
    assert 40 < first[0] <= 40 + 2 * 64


# -- the grace -------------------------------------------------------------------------------------


def test_a_save_slower_than_the_grace_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Only where signals are watched, only when it took longer, on one rank, and not every time."""

    def body(control: Control) -> None:
        schedule = Schedule(Rules(grace_s=30.0), lambda: control, signals=PreemptSignals(()))
        schedule.took(None)
        schedule.took(29.0)
        assert not warned(caplog)
        control.step("looked", lambda: None)
        schedule.took(45.0)
        schedule.took(46.0)
        Schedule(Rules(grace_s=30.0), lambda: control).took(45.0)

    with caplog.at_level(logging.WARNING):
        for end in simulate(3, body):
            end.get()
    assert len(caplog.records) == 1
    assert "45 s" in caplog.text
    assert "30 s" in caplog.text


def test_how_long_the_last_save_took_is_in_the_log(tmp_path: Path) -> None:
    """From the time in its save_id to that of its seal; the newest save counts; nothing is appended."""

    def told() -> float | None:
        with looking_at(tmp_path, None) as look:
            (state,) = look.views.values()
            return last_save_s(state, look.storage)

    with ckptfs.prepare_run(tmp_path) as run:
        assert told() is None
        ckptfs.save({"a": 1}, tmp_path / "step_1", run=run)
        ckptfs.save({"a": 2}, tmp_path / "step_2", run=run)
    before = sorted(p.name for p in (tmp_path / ".ckptfs" / "log").iterdir())
    now = told()
    assert now is not None
    assert 0 <= now < 60
    for entry in (tmp_path / ".ckptfs" / "log").iterdir():
        record = json.loads(entry.read_text())
        if record["kind"] == "seal":
            began = record["save_id"].partition("-")[0]
            later = datetime.strptime(began, "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
            later += timedelta(seconds={"step_1": 300, "step_2": 45}[record["name"]])
            entry.write_text(json.dumps({**record, "at": f"{later:%Y-%m-%dT%H:%M:%SZ}"}))
    assert told() == 45
    assert sorted(p.name for p in (tmp_path / ".ckptfs" / "log").iterdir()) == before
    with looking_at(tmp_path, None) as look:
        (state,) = look.views.values()
        for entry in (tmp_path / ".ckptfs" / "log").iterdir():
            entry.write_text("torn")
        assert last_save_s(state, look.storage) is None
        assert last_save_s(LogState(), look.storage) is None


@pytest.mark.parametrize(
    ("save_id", "sealed", "expected"),
    [
        ("20261120T235950-a1", "2026-11-21T00:00:20Z", 30.0),
        ("20261120T100000-a1", "2026-11-20T10:00:00Z", 0.0),
        ("20261120T100001-a1", "2026-11-20T10:00:00Z", None),  # clocks that disagree
        ("somebody-elses", "2026-11-20T10:00:00Z", None),
        ("20261120T100000-a1", "", None),
    ],
)
def test_times_that_say_nothing_are_not_believed(
    save_id: str, sealed: str, expected: float | None
) -> None:
    """Another form of id or stamp, or an end before the beginning, is unknown and no error."""
    assert between_s(save_id, sealed) == expected


# -- all ranks in time, or none --------------------------------------------------------------------


def test_a_rally_that_all_reach_returns_everywhere() -> None:
    """Again and again."""

    def body(control: Control) -> str:
        rendezvous = Rendezvous(control)
        rendezvous.reach("save on failure", 20)
        rendezvous.reach("save on failure", 20)
        rendezvous.close()
        return "saved"

    assert [end.get() for end in simulate(4, body)] == ["saved"] * 4


def test_a_rally_that_one_rank_misses_saves_nobody() -> None:
    """The others give up at their deadline; the late one, though all are there now, gets an error."""
    gave_up = threading.Barrier(3)

    def body(control: Control) -> str:
        rendezvous = Rendezvous(control)
        if control.rank == 2:
            gave_up.wait(120)
        try:
            rendezvous.reach("save on failure", 0.05 if control.rank != 2 else 20)
        except CkptfsError as error:
            if control.rank != 2:
                gave_up.wait(120)
            return type(error).__name__
        return "saved"

    assert [end.get() for end in simulate(3, body)] == [
        DeadlineError.__name__,
        DeadlineError.__name__,
        CollectiveError.__name__,
    ]


def test_giving_up_is_final_until_the_others_have_come_to_that_one_too() -> None:
    """A second call gives up as well; once the late one came, the next meeting is a new one."""
    late_may, late_came, both = threading.Event(), threading.Event(), threading.Barrier(2)

    def early(control: Control) -> list[str]:
        rendezvous, said = Rendezvous(control), []
        for timeout_s in (0.05, 0.05):
            try:
                rendezvous.reach("x", timeout_s)
            except DeadlineError:
                said.append("late")
        late_may.set()
        assert late_came.wait(120)
        both.wait(120)
        rendezvous.reach("x", 20)
        return [*said, "together"]

    def late(control: Control) -> list[str]:
        rendezvous, said = Rendezvous(control), []
        assert late_may.wait(120)
        with pytest.raises(CollectiveError, match="stopped waiting"):
            rendezvous.reach("x", 20)
        said.append("alone")
        late_came.set()
        both.wait(120)
        rendezvous.reach("x", 20)
        return [*said, "together"]

    ends = simulate(2, lambda c: early(c) if c.rank == 0 else late(c))
    assert [end.get() for end in ends] == [["late", "late", "together"], ["alone", "together"]]


def test_a_rally_with_a_rank_that_ended_is_an_error_at_once() -> None:
    """Who has left is not waited for until the deadline."""

    def body(control: Control) -> str:
        rendezvous = Rendezvous(control)
        if control.rank == 1:
            return "left"
        with pytest.raises(CollectiveError):
            rendezvous.reach("save on failure", 3600)
        return "told"

    assert [end.get() for end in simulate(2, body)] == ["told", "left"]
