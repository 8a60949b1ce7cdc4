"""Several decisions in one step: the answers and the errors are those of one step after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from ckptfs.control.control import Control, SoloControl, step_keeping, step_of_stages
from ckptfs.control.messages import Stage, apart
from ckptfs.errors import CkptfsError, CollectiveError, StateError, StorageError
from ckptfs.testing.world import simulate


def _fails(*ranks: int, error: type[Exception] = StateError) -> Callable[[int], int]:
    def local(rank: int) -> int:
        if rank in ranks:
            raise error(f"no {rank}")
        return rank

    return local


def _refuses(_: Sequence[int]) -> int:
    raise StateError("the ranks differ")


_Part = tuple[str, Callable[[int], int], Callable[..., Any]]


def _stages(rank: int, *parts: _Part) -> list[Stage]:
    return [Stage(name, partial(local, rank), decide) for name, local, decide in parts]


def _in_one(control: Control, *parts: Any) -> list[Any]:
    return step_of_stages(control, "all", _stages(control.rank, *parts))


def _in_turn(control: Control, *parts: Any) -> list[Any]:
    stages = _stages(control.rank, *parts)
    return [control.step(stage.label, stage.local, stage.decide) for stage in stages]


FINE: _Part = ("fine", _fails(), sum)
CASES: dict[str, list[_Part]] = {
    "fine": [FINE, ("pieces", _fails(), lambda v: apart(sum(v), [2 * n for n in v])), FINE],
    "no pieces": [("common", _fails(), lambda v: apart(sum(v))), FINE],
    "first of two failures": [FINE, ("a", _fails(2), sum), ("b", _fails(0, 1), sum)],
    "a failure before a refusal": [("a", _fails(1), sum), ("b", _fails(), _refuses)],
    "a refusal before a failure": [("a", _fails(), _refuses), ("b", _fails(0), sum)],
    "a failure in the last": [FINE, ("b", _fails(0, 1, 2), sum)],
    "one type": [("a", _fails(1, 2, error=StorageError), sum), ("b", _fails(0), sum)],
    "a bug of the coordinator": [FINE, ("a", _fails(), lambda v: v[7]), ("b", _fails(0), sum)],
}


def _end(end: Any) -> object:
    if end.error is None:
        return end.value
    error = end.error
    failures = {r: (f.type, f.message) for r, f in getattr(error, "failures", {}).items()}
    return type(error).__name__, str(error), error.rank, failures, repr(error.__cause__)


@pytest.mark.parametrize("case", CASES)
def test_stages_end_as_steps_of_their_own_do(case: str) -> None:
    """The same answers, or the error of the same stage, with the same text, type, failures and cause."""
    one = simulate(3, lambda control: _in_one(control, *CASES[case]))
    turns = simulate(3, lambda control: _in_turn(control, *CASES[case]))
    assert [_end(end) for end in one] == [_end(end) for end in turns]
    assert case in ("fine", "no pieces") or all(isinstance(e.error, CkptfsError) for e in one)


def test_a_process_alone_gets_the_same_error_and_its_cause() -> None:
    """The failure of the stage is what the error was raised from."""
    with pytest.raises(CollectiveError, match=r"a failed on 1 of 1 ranks: .*no 0") as raised:
        _in_one(SoloControl(), FINE, ("a", _fails(0), sum), ("b", _fails(0), sum))
    assert isinstance(raised.value.__cause__, StateError)


def test_a_stage_that_talks_runs_on_a_rank_that_failed_before() -> None:
    """Another rank would wait for it. A stage that does not is left out there."""
    ran: list[str] = []

    def fails() -> None:
        raise StateError("no")

    def note(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    stages = [
        Stage("a", fails, len),
        Stage("left out", note("left out"), len),
        Stage("talks", note("talks"), len, always=True),
    ]
    with pytest.raises(StateError, match="a failed"):
        step_of_stages(SoloControl(), "all", stages)
    assert ran == ["talks"]


def test_an_interrupt_is_raised_on_its_own_rank_alone() -> None:
    """It ends the step for the others with an error that names the rank."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    def live(control: Control) -> None:
        local = interrupted if control.rank == 1 else int
        step_of_stages(control, "all", [Stage("a", int, sum), Stage("b", local, sum)])

    ends = simulate(2, live)
    assert isinstance(ends[1].error, KeyboardInterrupt)
    assert isinstance(ends[0].error, CollectiveError)
    assert list(ends[0].error.failures) == [1]


def test_what_a_rank_keeps_is_not_sent() -> None:
    """Each rank gets the common answer, and its own value, which could not be pickled."""

    def body(control: Control) -> tuple[int, Any]:
        own = threading.Lock()

        def local() -> tuple[int, threading.Lock]:
            return control.rank, own

        answer, kept = step_keeping(control, "keep", local, len)
        assert kept is own
        return answer, type(kept)

    for end in simulate(3, body, nodes=["a", "b", "c"]):
        assert end.get() == (3, type(threading.Lock()))
