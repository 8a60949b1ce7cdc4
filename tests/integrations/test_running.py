"""The harness of the stories: its kills are those of the fault plan, and nothing outlives a run."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from ckptfs.testing.faults import Fault, When, parse_faults
from ckptfs.testing.faults import Kill as PlannedKill
from tests.integrations import running
from tests.integrations.running import Kill, Store, run_example, run_words

SCRIPT = """
import sys
from ckptfs.storage.registry import open_storage

open_storage(sys.argv[1]).make_dir("there")
print("resumed", "none")
print("final", "abc")
"""
LEAVES = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("resumed", left.pid, flush=True)
sys.exit(3)
"""


def test_a_kill_is_what_the_plan_reads() -> None:
    """Its text means the same operation, number, moment and rank."""
    told = str(Kill("close", "*.distcp", nth=2, rank=1, when="after"))
    assert parse_faults(told) == [Fault("close", "*.distcp", 2, PlannedKill(When.AFTER), "1")]
    assert parse_faults(str(Kill("*")))[0].rank is None


def test_a_kill_that_meets_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operations that there were: a story with a victim that lived would show nothing."""
    (tmp_path / "small_example.py").write_text(SCRIPT)
    monkeypatch.setattr(running, "EXAMPLES", tmp_path)
    monkeypatch.setenv("RANK", "0")
    store = Store("file", str(tmp_path / "run"))
    with pytest.raises(AssertionError, match=r"met nothing(?s:.*)make_dir there"):
        run_example("small", store, "sync", launcher="python", kill=Kill("make_dir", nth=2))
    ended = run_example("small", store, "sync", launcher="python", kill=Kill("make_dir"))
    assert (ended.rc, ended.final) == (-9, None)
    whole = run_example("small", store, "sync", launcher="python")
    assert (whole.rc, whole.resumed, whole.final) == (0, "none", "abc")


def test_a_lock_that_a_killed_run_left_holds_up_nobody() -> None:
    """torch's lock of an extension that is compiled: a file, which stays where its owner is killed."""
    lock = Path(os.environ[running.EXTENSIONS], "some_extension", "lock")
    script = "import os, sys; os.makedirs(os.path.dirname(sys.argv[1])); open(sys.argv[1], 'x')"
    assert run_words([sys.executable, "-c", script, str(lock)], {}).rc == 0
    assert lock.parent.is_dir()
    assert not lock.exists()


def test_nothing_outlives_a_run() -> None:
    """What it started in a session of its own, as launchers and Ray do, is dead when it has ended."""
    ended = run_words([sys.executable, "-c", LEAVES], {})
    assert ended.rc == 3
    environment = Path(f"/proc/{ended.resumed}/environ")
    with contextlib.suppress(OSError):  # it is gone
        assert environment.read_bytes() == b"", "it lives"  # it is dying, or was not waited for
