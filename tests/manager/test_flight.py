"""Saves on their way: who waits, and who hears of a failure, how often."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from ckptfs.errors import NoSpaceError
from ckptfs.events import Counters, SaveResult
from ckptfs.manager.run_manager import PendingSaves


@dataclass
class _Save:
    uri: str
    future: Future[SaveResult] = field(default_factory=Future)

    def result(self, timeout_s: float | None = None) -> SaveResult:
        return self.future.result(timeout_s)

    def done(self) -> bool:
        return self.future.done()

    def end(self) -> SaveResult:
        result = SaveResult(self.uri, 1, self.uri, Counters(), Counters(), (), 0.0)
        self.future.set_result(result)
        return result


def test_settling_leaves_fewer_than_the_limit() -> None:
    """With two allowed the third waits for the first, and for it alone."""
    pending, saves = PendingSaves(), [_Save("a"), _Save("b")]
    for save in saves:
        pending.add(save)
    first = saves[0].end()
    assert pending.settle(2) == first
    assert len(pending) == 1
    assert pending.settle(2) is None
    assert not pending.oldest_is_done()


def test_a_failure_is_raised_once_and_only_after_the_others_ended() -> None:
    """What raises at the call must not leave a save behind that the next call waits for again."""
    pending, saves = PendingSaves(), [_Save("a"), _Save("b")]
    for save in saves:
        pending.add(save)
    saves[0].future.set_exception(NoSpaceError("full"))
    saves[1].end()
    with pytest.raises(NoSpaceError, match="full"):
        pending.settle(1)
    assert len(pending) == 0
    assert pending.settle(1) is None


def test_a_poll_raises_and_leaves_it_for_the_call_of_all_ranks() -> None:
    """Ranks poll at different moments: the failure is raised by the next collective call as well."""
    pending, save = PendingSaves(), _Save("a")
    pending.add(save)
    pending.poll()
    save.future.set_exception(NoSpaceError("full"))
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            pending.poll()
    with pytest.raises(NoSpaceError):
        pending.settle(1)
    pending.poll()
