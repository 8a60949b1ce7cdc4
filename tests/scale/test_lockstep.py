"""Ranks that take turns get the answers, and the errors, that ranks under a real control get."""

from __future__ import annotations

import threading

import pytest

from ckptfs.control.control import Control, SoloControl
from ckptfs.control.messages import apart
from ckptfs.errors import CollectiveError, StateError
from ckptfs.testing.world import simulate
from tests.scale.lockstep import lockstep


def _two_steps(control: Control) -> tuple[object, object, object]:
    everything = control.step("a", lambda: control.rank * 10)
    total = control.step("b", lambda: everything[control.rank] + 1, len)
    common, mine = control.step(
        "c", lambda: total, lambda said: apart(said[0], [n * n for n in range(control.size)])
    )
    return everything, common, mine


def test_values_and_pieces_are_those_of_threads_that_race() -> None:
    """The same function returns the same on every rank, taking turns and racing."""
    taken, steps = lockstep(5, _two_steps)
    assert [end.get() for end in taken] == [end.get() for end in simulate(5, _two_steps)]
    assert [end.get()[2] for end in taken] == [0, 1, 4, 9, 16]
    assert [step.label for step in steps] == ["a", "b", "c"]
    assert [step.pieces_bytes > 0 for step in steps] == [False, False, True]
    assert _two_steps(SoloControl()) == ([0], 1, 0)


def test_a_failure_and_an_early_end_reach_all() -> None:
    """What one rank raises all raise, and a rank that is missing is named."""

    def work(control: Control) -> None:
        if control.rank == 2:
            control.step("write", lambda: 1 // 0)
        control.step("write", lambda: None)

    for end in lockstep(4, work)[0]:
        with pytest.raises(CollectiveError) as caught:
            end.get()
        assert set(caught.value.failures) == {2}

    def leave(control: Control) -> None:
        if control.rank != 1:
            control.step("go on", lambda: None)

    ends, _ = lockstep(3, leave)
    assert ends[1].get() is None
    for rank in (0, 2):
        with pytest.raises(CollectiveError, match="left"):
            ends[rank].get()


def test_a_value_that_cannot_be_pickled_is_its_ranks_failure() -> None:
    """As between processes: all learn which rank it was, and raise nothing else."""

    def work(control: Control) -> None:
        control.step("tell", lambda: threading.Lock() if control.rank == 1 else None)

    for ends in (lockstep(3, work)[0], simulate(3, work)):
        for end in ends:
            with pytest.raises(CollectiveError) as caught:
                end.get()
            assert list(caught.value.failures) == [1]


def test_different_calls_are_told_apart() -> None:
    """Ranks that make different calls at the same time all learn which."""
    ends, _ = lockstep(2, lambda control: control.step(f"call {control.rank}", lambda: None))
    for end in ends:
        with pytest.raises(CollectiveError, match="call 0"):
            end.get()


def test_a_clone_that_only_some_use_is_an_error_and_no_hang() -> None:
    """In turns no rank hangs: ranks in different controls get an error."""

    def work(control: Control) -> None:
        other = control.clone()
        (other if control.rank else control).step("x", lambda: None)

    ends, _ = lockstep(2, work)
    with pytest.raises(StateError, match="another control"):
        ends[0].get()
    with pytest.raises(CollectiveError, match="left"):
        ends[1].get()
