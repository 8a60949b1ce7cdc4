"""Whether the owner of a run is alive, by what this node's /proc and its signals say."""

from __future__ import annotations

import os

import pytest

from ckptfs.commit.log.entries import Fence, Generation
from ckptfs.commit.ownership.lease import alive_here, start_ticks


def owned_by(pid: int, started: str) -> Fence:
    """A fence of that process."""
    return Fence(Generation(1, "0a"), pid=pid, started=started)


def test_a_pid_that_was_given_away_is_nobody() -> None:
    """Another start time is another process, whosever it is now."""
    assert alive_here(owned_by(os.getpid(), start_ticks(os.getpid())))
    assert not alive_here(owned_by(1, "0" if start_ticks(1) != "0" else "1"))


def test_a_pid_of_another_user_that_was_given_away_is_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That it may not be signalled says nothing where /proc shows that it is another one."""

    def refused(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert not alive_here(owned_by(1, "0" if start_ticks(1) != "0" else "1"))
    assert alive_here(owned_by(2**22 + 1, "5"))  # beyond the largest pid: /proc has nothing


@pytest.mark.parametrize("pid", [2**22 + 1, 2**40])
def test_a_pid_that_cannot_be_is_nobody(pid: int) -> None:
    """Also one that the system call does not take."""
    assert not alive_here(owned_by(pid, "5"))


def test_who_left_no_start_time_is_watched() -> None:
    """Without /proc at its start only its lease can tell."""
    assert alive_here(owned_by(2**22 + 1, ""))
