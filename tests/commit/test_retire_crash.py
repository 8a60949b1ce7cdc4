"""Deletes that die half-way, and what a job that dies again and again leaves on its disks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.crash.forks import Job, deaths
from tests.crash.rig import TWO_DOMAINS

ROOT = Path(__file__).resolve().parents[2]
KEEP = 2  # of tests/commit/restarts.py


def test_a_delete_killed_at_any_operation_is_completed_or_was_never_made() -> None:
    """From the claim over the entries, in two domains one after the other, to the last rename: the
    save is there, whole, or it is deleted for every reader; the next owner completes the delete in
    the domain that did not have it, and foreign files stay. Every third operation here, all of
    them in ``test_campaign_every_death_of_every_scenario``.
    """
    verdicts = deaths(Job("retire", TWO_DOMAINS, stride=3))
    bad = [f"{v.point}:\n{v.trouble}" for v in verdicts if v.trouble]
    assert not bad, f"{len(bad)} of {len(verdicts)} deaths:\n" + "\n".join(bad[:3])
    assert {v.end for v in verdicts} == {"old", "new"}
    assert len(verdicts) > 35


def test_debris_is_at_most_one_attempt_however_often_a_job_dies(tmp_path: Path) -> None:
    """45 lives on two nodes with a disk each, every one killed somewhere else: never more than one dead
    attempt, one trash directory with the pieces of one save, and keep_latest + 1 checkpoints on either
    disk; after the last life, which ends in peace, none of that.
    """
    told = subprocess.run(
        [sys.executable, "-m", "tests.commit.restarts", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=400,
    )
    lives = [json.loads(line) for line in told.stdout.splitlines()]
    assert [life["killed"] for life in lives] == [True] * (len(lives) - 1) + [False]
    for life in lives:
        for disk in life["disks"].values():
            assert disk["attempts"] <= 1
            assert disk["generations"] <= 2  # the dead one's, and the new one's that replaces it
            assert disk["trash"] <= 4
            assert disk["steps"] <= KEEP + 1
    seen = [disk for life in lives for disk in life["disks"].values()]
    assert any(disk["attempts"] for disk in seen), "no life died inside a save"
    assert any(disk["steps"] == KEEP + 1 for disk in seen), "no life died before a delete"
    for disk in lives[-1]["disks"].values():
        assert disk["attempts"] == disk["trash"] == 0
        assert (disk["generations"], disk["steps"]) == (1, KEEP)
