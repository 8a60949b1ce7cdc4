"""A script of the user's, killed at a storage operation, with the URI that the user gave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import helper
from ckptfs.storage.registry import open_storage

storage = open_storage(sys.argv[1])
for name in ("a", "b", "c"):
    with storage.open_write(name) as writer:
        writer.write(b"data")
print(__name__, sys.argv[1:], storage.root, helper.FOUND)
"""


def run(place: Path, fault: str) -> subprocess.CompletedProcess[str]:
    """The script under the victim, with a trace."""
    (place / "script.py").write_text(SCRIPT)
    (place / "helper.py").write_text("FOUND = True")
    (place / "run").mkdir()
    command = [sys.executable, "-m", "tests.faults.victim", str(place / "script.py")]
    more = {"CKPTFS_TEST_FAULT": fault, "CKPTFS_TEST_TRACE": str(place / "trace"), "RANK": "0"}
    return subprocess.run(
        [*command, str(place / "run"), "more"],
        env={**os.environ, **more},
        cwd=place.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_process_dies_at_the_operation_that_was_chosen(tmp_path: Path) -> None:
    """SIGKILL when the second file is closed: the first one is there, the second never was."""
    ended = run(tmp_path, "kill:close:*:2@0")
    assert ended.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path / "run") != []
    assert (tmp_path / "run" / "a").read_bytes() == b"data"
    assert not (tmp_path / "run" / "b").exists()
    assert (tmp_path / "trace.0").read_text().endswith("close b\n")


def test_a_script_that_nobody_kills_runs_as_ever(tmp_path: Path) -> None:
    """As __main__, with its own arguments and its own directory on the path, at its own URI."""
    ended = run(tmp_path, "kill:close:*:2@1")
    assert ended.returncode == 0, ended.stderr
    place = tmp_path / "run"
    assert ended.stdout == f"__main__ {[str(place), 'more']} file://{place} True\n"
