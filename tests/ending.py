"""A test that hangs ends, whatever it hangs in.

pytest-timeout interrupts Python: its signal is handled when the main thread is back from a call. One that
never comes back (a wait in torch's store, a lock, a system call that is taken up again) would hold the whole
suite. So each test has a second limit, a minute behind the first: a thread of C prints every stack and ends
the process. With several processes (``-n``) that is a failed test and a new process; without, the end of
the run.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

__all__ = ["GRACE_S", "limit_s"]

GRACE_S = 60.0
_terminal = pytest.StashKey[int]()


def limit_s(item: pytest.Item) -> float:
    """After how many seconds pytest-timeout interrupts this test: its mark, the option, or the file. 0: never."""
    mark = item.get_closest_marker("timeout")
    values = [
        *(mark.args[:1] if mark else ()),
        mark.kwargs.get("timeout") if mark else None,
        item.config.getoption("timeout"),
        item.config.getini("timeout"),
    ]
    return next((float(value) for value in values if value not in (None, "")), 0.0)


def pytest_configure(config: pytest.Config) -> None:
    """The descriptor that people see: while a test runs, 2 is a file that is lost with the process."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[_terminal] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Closed again: a suite may run in a process that lives on."""
    os.close(config.stash[_terminal])


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From the first fixture to the last."""
    if limit := limit_s(item):
        file = item.config.stash[_terminal]
        faulthandler.dump_traceback_later(limit + GRACE_S, exit=True, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
