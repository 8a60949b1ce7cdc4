"""What tests of the commit layer rely on when they simulate ranks as threads."""

from __future__ import annotations

import threading

import pytest

from ckptfs.control.control import Control
from ckptfs.errors import CollectiveError, DeadlineError, FencedError, NoSpaceError
from ckptfs.testing.world import SimulatedDeath, simulate


def test_decide_runs_on_the_coordinator_only_and_all_get_its_answer() -> None:
    """The values arrive in order of rank, one rank decides, every rank returns the same."""
    deciders = []

    def body(control: Control) -> int:
        def decide(values: list[int]) -> int:
            deciders.append(control.rank)
            return values[0] * 1000 + values[3]

        return control.step("sum", lambda: control.rank + 1, decide)

    assert [end.get() for end in simulate(4, body)] == [1004] * 4
    assert deciders == [0]


def test_failures_of_some_ranks_reach_all() -> None:
    """Every rank raises one CollectiveError that names the failed ranks, nodes and messages."""

    def body(control: Control) -> None:
        def local() -> None:
            if control.rank % 2:
                raise NoSpaceError(f"disk of {control.rank} is full")

        control.step("write", local)

    ends = simulate(4, body, nodes=["a", "a", "b", "b"])
    for end in ends:
        assert isinstance(end.error, CollectiveError)
        assert sorted(end.error.failures) == [1, 3]
        assert end.error.failures[3].node == "b"
        assert end.error.all_are(NoSpaceError)
        assert "disk of 1 is full" in str(end.error)


def test_typed_error_of_decide_keeps_its_type() -> None:
    """A ckptfs error in decide is raised as that type everywhere."""

    def body(control: Control) -> None:
        def decide(_: list[None]) -> None:
            raise FencedError("a newer owner", uri="file:///run")

        control.step("commit", lambda: None, decide)

    errors = [end.error for end in simulate(3, body)]
    assert all(isinstance(e, FencedError) and e.uri == "file:///run" for e in errors)


def test_death_ends_the_step_of_all_others() -> None:
    """A rank that dies inside a step is named by every other rank; its own end is its death."""

    def body(control: Control) -> None:
        def local() -> None:
            if control.rank == 2:
                raise SimulatedDeath

        control.step("write", local)

    ends = simulate(4, body)
    assert ends[2].died
    for rank in (0, 1, 3):
        error = ends[rank].error
        assert isinstance(error, CollectiveError)
        assert list(error.failures) == [2]


@pytest.mark.parametrize("who", [0, 1])
def test_rank_that_returns_early_fails_the_others(who: int) -> None:
    """A rank that has left is named, coordinator or not, instead of being waited for."""

    def body(control: Control) -> None:
        if control.rank != who:
            control.step("write", lambda: None)

    for end in simulate(3, body):
        if end.rank != who:
            assert isinstance(end.error, CollectiveError)
            assert list(end.error.failures) == [who]


def test_rank_that_neither_calls_nor_ends_is_silent() -> None:
    """A rank that hangs costs timeout_s and is named."""
    free = threading.Event()

    def body(control: Control) -> None:
        if control.rank == 1:
            free.wait(120)
        else:
            try:
                control.step("write", lambda: None)
            finally:
                free.set()

    error = simulate(3, body, timeout_s=0.2)[0].error
    assert isinstance(error, DeadlineError)
    assert error.silent == (1,)


def test_clones_do_not_mix_their_steps() -> None:
    """Steps of a clone on another thread meet the same clone's steps on the other ranks. Both threads of a
    rank are within a step before either of them has its answer.
    """

    def body(control: Control) -> tuple[list[str], list[str]]:
        clone = control.clone()
        found: list[list[str]] = []
        within = threading.Barrier(2, timeout=60)

        def value(text: str) -> str:
            within.wait()
            return f"{text}{control.rank}"

        thread = threading.Thread(target=lambda: found.append(clone.step("b", lambda: value("b"))))
        thread.start()
        mine = control.step("a", lambda: value("a"))
        thread.join()
        return mine, found[0]

    for end in simulate(3, body):
        assert end.get() == (["a0", "a1", "a2"], ["b0", "b1", "b2"])


def test_ranks_out_of_step_are_an_error_not_an_answer() -> None:
    """Two different calls that meet are distinguished by their labels."""

    def body(control: Control) -> None:
        control.step("save" if control.rank else "load", lambda: None)

    for end in simulate(2, body):
        assert isinstance(end.error, CollectiveError)
        assert "'load' on ranks [0]" in str(end.error)


def test_unpicklable_value_fails_as_between_processes() -> None:
    """What could not travel between processes does not travel between threads."""

    def body(control: Control) -> None:
        control.step("x", lambda: (lambda: None) if control.rank == 1 else None)

    error = simulate(2, body)[0].error
    assert isinstance(error, CollectiveError)
    assert list(error.failures) == [1]


def test_an_interrupted_coordinator_frees_the_other_ranks() -> None:
    """Ctrl-C in rank 0's part of a step: no other rank would decide, so the others learn it at once."""

    def work(control: Control) -> list[None]:
        def local() -> None:
            if control.rank == 0:
                raise KeyboardInterrupt

        return control.step("x", local)

    ends = simulate(3, work, timeout_s=3600)
    assert isinstance(ends[0].error, KeyboardInterrupt)
    for end in ends[1:]:
        assert isinstance(end.error, CollectiveError)
        assert list(end.error.failures) == [0]
