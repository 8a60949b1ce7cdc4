"""Chores of a run: in order, in parallel with the caller, never fatal, and done before a release returns."""

from __future__ import annotations

import logging
import threading
from uuid import uuid4

import pytest

from ckptfs.commit.operations import Program, Replace, drive
from ckptfs.commit.ownership.background_owner import Background
from ckptfs.errors import AccessError, FencedError, TransientError
from ckptfs.storage.registry import open_storage


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
        raise TransientError("no answer", uri="s3://bucket/run/step_1")

    with caplog.at_level(logging.WARNING):
        background.submit("clearing step_1", refuse)
        background.submit("next", lambda: done.append(1))
        assert background.drain(10)
    assert done == [1]
    assert "clearing step_1 failed" in caplog.text
    assert "no answer" in caplog.text
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
    """A release is not held endlessly: close says that something is still under way."""
    background, gate = Background(), threading.Event()
    background.submit("hanging", gate.wait)
    assert not background.close(0.01)
    gate.set()
    assert background.close(10)


def test_a_bug_in_a_chore_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Any exception is logged with its traceback, and the next chore is done."""
    background, done = Background(), []

    def broken() -> None:
        raise KeyError("Content-Length")

    with caplog.at_level(logging.ERROR):
        background.submit("broken", broken)
        background.submit("next", lambda: done.append(1))
        assert background.close(10)
    assert done == [1]
    assert "KeyError" in caplog.text


def test_what_is_refused_is_told_once_and_asked_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a refusal chores rest for a minute, then two; one warning; a success ends it."""
    now = [1000.0]
    background, tried = Background(lambda: now[0]), []
    refusing = [True]

    def chore() -> None:
        tried.append(now[0])
        if refusing[0]:
            raise AccessError("held by a lock")

    with caplog.at_level(logging.INFO):
        for second in range(0, 700, 10):
            now[0] = 1000.0 + second
            refusing[0] = second < 300
            background.submit("clearing", chore)
            background.drain(10)
    assert [at - 1000.0 for at in tried[:3]] == [0, 60, 180]
    assert len(tried) > 4, "a success ends the resting"
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
    background.close(10)


def test_a_chore_that_outlives_the_release_is_told_to_stop() -> None:
    """It sees the flag before its next operation."""
    background, gate = Background(), threading.Event()
    background.submit("hanging", gate.wait)
    assert not background.stopped.is_set()
    background.close(0.01)
    assert background.stopped.is_set()
    gate.set()


def test_a_stopped_program_does_nothing_more() -> None:
    """Between two operations the driver looks at the flag: the second is never done."""
    stopped, storage = threading.Event(), open_storage(f"memory://{uuid4().hex}/run?shape=object")

    def program() -> Program[None]:
        yield Replace("a", b"1")
        stopped.set()
        yield Replace("b", b"2")

    with pytest.raises(FencedError, match="released"):
        drive(program(), storage, stopped=stopped)
    assert [entry.name for entry in storage.list("")] == ["a"]
