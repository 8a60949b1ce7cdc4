"""The disk is full, or refuses, at every operation that would write: one typed error on all ranks,
what was committed stays, and once there is room again the next writer continues.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.errors import CkptfsError, CollectiveError, CommitConflictError
from ckptfs.testing.faults import Action, Fail, Fault, Plan
from ckptfs.testing.world import End
from tests.crash.rig import (
    ONE_DOMAIN,
    SCENARIOS,
    TWO_DOMAINS,
    Layout,
    Mortal,
    Told,
    judge,
    prepare,
    sessions,
    values,
)

GROWING = frozenset({"create", "replace", "open_write", "write", "close", "make_dir"})
WRITING = GROWING | {"rename", "sync", "remove", "remove_dir", "remove_tree"}


class Broken(Plan):
    """From its ``nth`` operation on (or at it alone), operations of these kinds fail."""

    def __init__(self, nth: int, number: int, kinds: frozenset[str], *, once: bool) -> None:
        super().__init__()
        self._nth, self._number, self._kinds, self._once = nth, number, kinds, once
        self._count = 0

    def begin(self, op: str, key: str) -> Action | None:
        if op == "touch":
            return None
        with self._lock:
            self._count += 1
            due = self._count == self._nth if self._once else self._count >= self._nth
        if due and op in self._kinds:
            return Fail(OSError(self._number, os.strerror(self._number)))
        return None


def moments(base: Path, scenario: str, layout: Layout) -> Iterator[tuple[int, int, str, str]]:
    """(rank, nth, op, key) of every operation of the victim that writes."""
    shutil.copytree(base / "before", base / "trial")
    plans = {rank: Mortal(None, "before", alone=True) for rank in range(len(layout.nodes))}
    trial = str(base / "trial")
    values(sessions(layout, trial, SCENARIOS[scenario].victim, job="victim", plans=plans))
    for rank, plan in plans.items():
        for nth, (op, key) in enumerate(plan.names, 1):
            if op in WRITING:
                yield rank, nth, op, key


def one_outcome(ends: list[End[object]]) -> CkptfsError | None:
    """All ranks ended alike; their error, None for success."""
    told = {(type(end.error).__name__, str(end.error)) for end in ends}
    assert len(told) == 1, f"ranks were told different things: {told}"
    error = ends[0].error
    assert error is None or isinstance(error, CkptfsError), repr(error)
    return error


def run_case(
    base: Path, scenario: str, layout: Layout, rank: int, plan: Plan, name: str
) -> tuple[CkptfsError | None, str]:
    """One victim with one broken disk, judged after the disk was mended."""
    place = str(base / name)
    shutil.copytree(base / "before", place)
    victim = SCENARIOS[scenario].victim
    ends = sessions(layout, place, victim, job="victim", plans={rank: plan})
    error = one_outcome(ends)
    told = Told(acknowledged=error is None, failed=error is not None and error.outcome == "failed")
    end = judge(SCENARIOS[scenario], layout, place, told, next_job="victim")
    shutil.rmtree(place)
    return error, end


@pytest.mark.parametrize(
    ("scenario", "layout", "stride"),
    [("fresh", ONE_DOMAIN, 3), ("fenced", TWO_DOMAINS, 7), ("replace", ONE_DOMAIN, 5)],
)
def test_a_disk_that_fills_up_at_any_write_loses_nothing(
    memory_path: Path, scenario: str, layout: Layout, stride: int
) -> None:
    """ENOSPC from any growing operation on, the log's own entries included: NoSpaceError by name,
    URI and rank on every rank; or, after the commit, a success with the rest left undone.
    """
    prepare(SCENARIOS[scenario], layout, str(memory_path / "before"))
    cases = [m for m in moments(memory_path, scenario, layout) if m[2] in GROWING]
    for at, (rank, nth, op, key) in enumerate(cases[::stride]):
        plan: Plan = Broken(nth, errno.ENOSPC, GROWING, once=False)
        error, _ = run_case(memory_path, scenario, layout, rank, plan, f"case-{at}")
        if error is None:
            continue
        text = str(error)
        assert "NoSpaceError" in text or "No space left" in text, f"{op} {key}: {text}"
        assert "run" in text, f"{op} {key}: no URI in {text}"
        assert "free space" in text or error.hint, f"{op} {key}: nothing to do in {text}"
        if isinstance(error, CollectiveError):
            assert list(error.failures) == [rank], f"{op} {key}: {error.failures}"
    for rank in {rank for rank, _, op, key in cases if op == "create" and "/log/" in key}:
        full = Fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        plan = Plan([Fault("create", "*/log/*", None, full)])
        error, _ = run_case(memory_path, scenario, layout, rank, plan, f"log-{rank}")
        assert error is not None
        assert "/log/" in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS], ids=["EIO", "EROFS"])
@pytest.mark.parametrize(("scenario", "layout"), [("fenced", ONE_DOMAIN), ("fresh", TWO_DOMAINS)])
def test_one_failed_operation_is_one_error_on_all_ranks(
    memory_path: Path, scenario: str, layout: Layout, number: int
) -> None:
    """A single operation that fails, whichever it is: the same typed error everywhere, old or new
    state as reported, and the next writer is not hindered.
    """
    prepare(SCENARIOS[scenario], layout, str(memory_path / "before"))
    failures = 0
    for at, (rank, nth, op, key) in enumerate(list(moments(memory_path, scenario, layout))[::8]):
        plan = Broken(nth, number, WRITING, once=True)
        error, _ = run_case(memory_path, scenario, layout, rank, plan, f"case-{at}")
        if error is not None:
            failures += 1
            assert "run" in str(error), f"{op} {key}: no URI in {error}"
    assert failures


def test_a_name_sealed_in_one_domain_only_is_refused_before_a_byte_is_written(
    memory_path: Path,
) -> None:
    """The other domain was full at the seal: the save failed, and until prepare_run settles it the
    name is refused at begin, with that advice.
    """
    prepare(SCENARIOS["fresh"], TWO_DOMAINS, str(memory_path / "before"))
    seal = next(m for m in moments(memory_path, "fresh", TWO_DOMAINS) if "/log/" in m[3])
    place = str(memory_path / "before")
    full = Broken(seal[1], errno.ENOSPC, GROWING, once=False)
    assert one_outcome(
        sessions(TWO_DOMAINS, place, SCENARIOS["fresh"].victim, job="first", plans={seal[0]: full})
    )

    counting = Mortal(None, "before", alone=True)
    again = sessions(
        TWO_DOMAINS, place, SCENARIOS["fresh"].victim, job="second", plans={0: counting}
    )
    error = one_outcome(again)
    assert isinstance(error, CommitConflictError)
    assert "is in doubt" in str(error)
    assert "prepare_run" in str(error.hint)
    assert "write" not in {op for op, _ in counting.names}
    told = Told(failed=True)
    assert judge(SCENARIOS["fresh"], TWO_DOMAINS, place, told) == "old"
