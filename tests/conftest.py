"""What every test runs under."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.ending import pytest_configure, pytest_runtest_protocol, pytest_unconfigure
from tests.skips import sum_up

__all__ = ["pytest_configure", "pytest_runtest_protocol", "pytest_unconfigure"]

# torch's TCPStore server looks up the name of every address that connects, in the one thread that
# serves all ranks. Where a name server does not answer, each connection would cost 5 s: one is
# enough to notice it. Read by glibc at the first look-up, inherited by every rank.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A suite that was started in the background inherits that SIGINT is ignored, and so would every
# process that it starts: what Ctrl-C does could not be shown.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

ROOT = Path(__file__).parent
# Where a single test or the file as a whole takes long: below tests/, a file or a directory.
LONG = (
    "test_demo.py",
    "scale",
    "test_manual.py",
    "test_bench.py",
    "crash",
    "servers/test_kill_every_request.py",
    "servers/test_memory.py",
    "servers/test_commit_race.py",
    "servers/test_object_bench.py",
    "servers/test_faults_ranks.py",
    "servers/test_faults_every_store.py",
    "cli/test_bench.py",
    "cli/test_doctor.py",
    "cli/test_gc.py",
    "cli/test_verify.py",
    "multiprocess",
    "model",
    "soak",
    "tools/test_copying.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, each takes a file when it is free: the long ones first,
    or the last one would be alone with one of them while the others wait.
    """
    if not hasattr(config, "workerinput"):
        return

    def place(item: pytest.Item) -> int:
        below = item.path.relative_to(ROOT)
        found = (n for n, name in enumerate(LONG) if below.is_relative_to(name))
        return next(found, len(LONG))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """The skipped tests in one line below pytest's list, with the command that brings what they lack."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    reasons = (report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple))
    if line := sum_up(reasons):
        terminalreporter.write_line(line)
