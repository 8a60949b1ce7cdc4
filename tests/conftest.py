"""What every test runs under."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.ending import pytest_configure, pytest_runtest_protocol, pytest_unconfigure
from tests.skips import name_failures, sum_up

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

# Where `make test` collects what failed, to say it last of all. Taken out of the environment: a pytest that
# a test starts has failures of its own.
FAILURES = os.environ.pop("CKPTFS_FAILURES", "")

ROOT = Path(__file__).parent
MEMORY = Path("/dev/shm")
# Tests of the protocol and of what is reported, not of a disk: fsync costs nothing in memory.
IN_MEMORY = (
    *("cli", "commit", "manager", "tools"),
    *("servers/test_fsspec_suite.py", "test_api.py"),
)
ON_DISK = (
    "cli/test_bench.py",
    "cli/test_doctor.py",
    "manager/test_not_closed.py",
    "tools/test_doctor.py",
)
# What takes longest as a whole, by measurement: below tests/, a file or a directory.
LONG = (
    "versions",
    "crash",
    "servers/test_kill_every_request.py",
    "servers/test_trees.py",
    "multiprocess",
    "servers/test_fsspec_suite.py",
    "tools/test_copying.py",
    "hostile",
    "cli/test_bench.py",
    "cli/test_doctor.py",
    "mutants",
    "model",
    "test_misplaced.py",
    "test_suite.py",
    "servers",
    "manager",
    "commit",
    "cli",
    "storage/test_s3_scripted.py",
    "scale",
    "soak",
    "test_api.py",
    "test_schema.py",
    "dcp/test_every_way.py",
)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What is collected and imported stays to the end: Python's collector does not look at it again.

    Each full collection would cost 0.4 s otherwise, while the suite is collected and in every tenth test
    or so.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


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


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's own; for the tests of IN_MEMORY a directory in memory, where the machine has one, that goes
    when the test ends.
    """
    below = request.path.relative_to(ROOT)
    in_memory, on_disk = (
        any(below.is_relative_to(name) for name in names) for names in (IN_MEMORY, ON_DISK)
    )
    if on_disk or not in_memory or not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(
        prefix="ckptfs-test-", dir=MEMORY, ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """The skipped tests in one line below pytest's list, with the command that brings what they lack."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    reasons = (report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple))
    if line := sum_up(reasons):
        terminalreporter.write_line(line)
    if FAILURES:
        with Path(FAILURES).open("a") as file:
            file.writelines(name_failures(terminalreporter.stats))
