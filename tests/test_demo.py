"""The demo keeps its word: a real torchrun job, killed in a save, resumes bit-identical."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo" / "run.py"
DEADLINE_S = 600.0
CLAIMS = {
    "one_commit_on_two_disks",
    "killed",
    "killed_in_save",
    "half_file_left",
    "latest_is_the_old_one",
    "stock_reads_the_old_one",
    "stock_sees_no_half",
    "fenced_then_aborted",
    "leftovers_removed",
    "resumed_from_the_old_one",
    "same_losses",
    "same_state",
    "stock_opens_the_result",
    "stock_opens_the_two_disks",
}


def _start(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO), "--json", "--dir", str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, so that it ends its jobs; nothing of it may outlive the test."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def _processes_of(home: Path) -> list[int]:
    """Agents and ranks of a demo: the directory is on their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
        if os.fsencode(home) in command:
            found.append(int(entry.name))
    return found


@pytest.mark.campaign  # a minute; .ci/run plays it by `make demo`, which fails where a claim does not hold
def test_demo_holds_every_claim(tmp_path: Path) -> None:
    """torchrun, 4 ranks as 2 nodes: every claim that the demo prints was true, and nothing stays."""
    home = tmp_path / "demo"
    process = _start(home)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        _end(process)
    assert process.returncode == 0, f"{out}\n{err}"
    told = json.loads(out)
    assert told["claims"] == dict.fromkeys(CLAIMS, True)
    assert told["facts"]["kill"].startswith("kill-half:write:*/__3_0.distcp:")
    losses = told["facts"]["losses"]
    assert losses[-1] < losses[0]  # it trained: a model that does not change is equal to anything
    assert _processes_of(home) == []


@pytest.mark.skipif(sys.platform != "linux", reason="finds the jobs in /proc")
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    """SIGTERM in the middle of a job ends agents and ranks too."""
    home = tmp_path / "demo"
    process = _start(home)
    try:
        deadline = time.monotonic() + 240
        while len(_processes_of(home)) < 1 + 2 + 4:  # itself, two agents, four ranks
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        _end(process)
    left = _processes_of(home)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert process.returncode == 128 + signal.SIGTERM
    assert left == []


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ranks_whose_agent_was_killed_are_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the cluster can end the ranks of an agent that ended without doing so."""
    monkeypatch.syspath_prepend(str(DEMO.parent))
    from cluster import Cluster  # type: ignore[import-not-found]

    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], 'rank' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "parent = os.getppid()\n"
        "while not all(pathlib.Path(sys.argv[1], f'rank{n}').exists() for n in range(4)):\n"
        "    time.sleep(0.02)\n"
        "if os.environ['LOCAL_RANK'] == '0':\n"
        "    os.kill(parent, 9)\n"
        "time.sleep(600)\n"
    )
    with Cluster(tmp_path / "logs") as cluster:
        end = cluster.run("killed", [str(script), str(tmp_path)], timeout_s=240)
    assert not end.ok
    assert len(list(tmp_path.glob("rank[0-9]"))) == 4
    assert _processes_of(tmp_path) == []


def test_a_false_claim_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """One claim that does not hold is enough, and no claims at all are no success."""
    monkeypatch.syspath_prepend(str(DEMO.parent))
    from story import Story  # type: ignore[import-not-found]

    story = Story(quiet=True)
    assert not story.all_hold
    story.claim("true", holds=True, text="holds")
    assert story.all_hold
    story.claim("false", holds=False, text="does not")
    assert not story.all_hold
