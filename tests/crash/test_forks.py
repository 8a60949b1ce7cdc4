"""The warmed process of the crash tests ends on demand, whatever its forks do."""

from __future__ import annotations

import sys

import pytest

from tests.crash.forks import _Warmed

# It has forked a job that never ends, which has its standard output.
BUSY = """
import os, time
if os.fork() == 0:
    print("working", flush=True)
    time.sleep(1000)
input()
"""


@pytest.mark.timeout(60)
def test_a_job_that_is_given_up_is_not_waited_for() -> None:
    """A test that ran into its limit ends then, and not when the last fork of its job does."""
    warmed = _Warmed(sys.executable, "-c", BUSY)
    assert warmed._process.stdout is not None
    assert warmed._process.stdout.readline() == "working\n"
    warmed.end()
    assert warmed._process.returncode != 0
