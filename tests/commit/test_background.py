"""Chores of a run: in order, beside the caller, never fatal, and done before a release returns."""

from __future__ import annotations

import logging
import threading

import pytest

from ckptfs.commit.background import Background
from ckptfs.errors import AccessError


def test_the_caller_goes_on_while_a_chore_runs() -> None:
    """submit returns although the chore before it has not ended."""
    background, gate, done = Background(), threading.Event(), []
    background.submit("waiting", gate.wait)
    background.submit("second", lambda: done.append(2))
    assert done == []
    gate.set()
    assert background.close(10)
    assert done == [2]


def test_a_failed_chore_is_told_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    """An error is a line in the log with what failed; the thread lives on."""
    background, done = Background(), []

    def refuse() -> None:
        raise AccessError("held by a lock", uri="s3://bucket/run/step_1")

    with caplog.at_level(logging.WARNING):
        background.submit("clearing step_1", refuse)
        background.submit("next", lambda: done.append(1))
        assert background.drain(10)
    assert done == [1]
    assert "clearing step_1 failed" in caplog.text
    assert "held by a lock" in caplog.text
    background.close(10)


def test_close_waits_and_later_chores_are_left() -> None:
    """What was submitted is done when close returns; what comes after belongs to the next owner."""
    background, done = Background(), []
    for number in range(20):
        background.submit("chore", lambda n=number: done.append(n))  # type: ignore[misc]
    assert background.close(10)
    background.submit("late", lambda: done.append(-1))
    assert done == list(range(20))
    assert background.close(10)
    assert background.drain(0)


def test_close_gives_up_on_a_chore_that_hangs() -> None:
    """A release is not held for ever: close says that something is still under way."""
    background, gate = Background(), threading.Event()
    background.submit("hanging", gate.wait)
    assert not background.close(0.01)
    gate.set()
    assert background.close(10)
