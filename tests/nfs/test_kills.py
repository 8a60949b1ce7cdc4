"""SIGKILL of one rank of four, on two NFS clients, at random moments; then a new job continues.

A moment is a random time after the ranks have met, within what a life takes that finds what a death
left: in the claim, a restore, any part of a save, between two of them. After each death:

* the survivors get a typed error within the deadline;
* the next job restores a step that was committed, or the one after it, with every bit right.
"""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab.nfs import NfsLab
from tests.nfs.crowd import Crowd
from tests.nfs.lives import live

SIZE = 4
SAVES = 2
LONGER = 1.3  # than a life in peace: it tidies up after a death
# The deadline of a silence. A death after the first message is known in seconds; of a rank that dies
# before it has said anything only its silence is known.
SILENCE_S = 30
TOLD_WITHIN_S = SILENCE_S + 90.0  # the machine of the tests may be busy
TOLD = {"CollectiveError", "CommitInDoubtError", "ControlPlaneLostError", "DeadlineError"}


@dataclass
class Lives:
    """One run that job after job continues. committed: the newest step that any rank learned of."""

    lab: NfsLab
    chance: random.Random
    run: str = ""
    committed: int = 0
    peace_s: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    in_doubt: int = 0
    in_saves: int = 0  # deaths that a survivor, who had come to its saves, learned of

    def __post_init__(self) -> None:
        self.run = self.lab.fresh("lives")

    def in_peace(self) -> None:
        """A life without a death: all of it works."""
        values = self._live({"saves": SAVES})
        for value in values:
            assert value["error"] is None, value
            assert len(value["committed"]) == SAVES
        self.peace_s.append(max(value["lived_s"] for value in values))

    def with_a_death_of(self, victim: int) -> None:
        """Lives until one ends by the death of that rank: it may be done before its moment comes."""
        for _ in range(20):
            moment_s = self.chance.uniform(0.0, LONGER * statistics.median(self.peace_s[-5:]))
            args = {"saves": SAVES, "victim": victim, "kill_after_s": moment_s}
            values = self._live(args, victim=victim)
            if len(values) < SIZE:
                return
            self.peace_s.append(max(value["lived_s"] for value in values))
        raise AssertionError(f"rank {victim} was never killed in time: {self.peace_s}")

    def told(self) -> str:
        """The history until now."""
        return (
            f"{self.in_saves} in saves, step {self.committed}, {self.in_doubt} saves that nobody was told of were committed, "
            f"the slowest survivor raised after {self.slowest_s:.1f} s"
        )

    def _live(self, args: dict[str, Any], *, victim: int | None = None) -> list[dict[str, Any]]:
        environment = {"CKPTFS_TIMEOUT_S": str(SILENCE_S)}
        with Crowd(
            self.lab, live, {"run": self.run, **args}, job="lives", own=lambda _: environment
        ) as crowd:
            ends = crowd.ends()
        values = []
        for rank, end in enumerate(ends):
            if isinstance(end, ConnectionError) and rank == victim:
                continue
            assert isinstance(end, dict), f"rank {rank} ended otherwise: {end!r}"
            values.append(end)
        self._judge(values, died=len(values) < SIZE)
        return values

    def _judge(self, values: list[dict[str, Any]], *, died: bool) -> None:
        assert {value["wrong"] for value in values} == {""}, values
        restored = {value["restored"] for value in values if value["restored"]}
        assert len(restored) <= 1, values
        for step in restored:
            assert step in (self.committed, self.committed + 1), (self.committed, values)
            self.in_doubt += step > self.committed
            self.committed = step
        for value in values:
            if value["error"] is not None:
                assert died, value
                assert value["error"]["type"] in TOLD, value
                assert value["error"]["after_s"] < TOLD_WITHIN_S, value
                self.slowest_s = max(self.slowest_s, value["error"]["after_s"])
        self.in_saves += died and any(value["saving"] for value in values)
        self.committed = max([self.committed, *(s for v in values for s in v["committed"])])


def kill_each_rank(lab: NfsLab, times: int, seed: int) -> Lives:
    """Every rank in turn, ``times`` times."""
    lives = Lives(lab, random.Random(seed))
    lives.in_peace()
    lives.peace_s.clear()  # it found nothing to restore
    lives.in_peace()
    for done in range(times):
        for victim in range(SIZE):
            lives.with_a_death_of(victim)
        print(f"{done + 1} deaths of each rank, {lives.told()}", flush=True)
    lives.in_peace()
    return lives


@pytest.mark.timeout(600)
@pytest.mark.campaign
def test_after_a_rank_was_killed_the_next_job_goes_on(lab42: NfsLab) -> None:
    """Each of four ranks on two clients dies at random moments; the others get an error, nothing is lost."""
    kill_each_rank(lab42, 1, seed=random.randrange(1 << 30))


@pytest.mark.campaign
def test_campaign_each_rank_is_killed_at_100_moments(lab: NfsLab) -> None:
    """400 deaths on each version of NFS; CKPTFS_KILLS says how often, CKPTFS_KILLS_SEED repeats."""
    seed = int(os.environ.get("CKPTFS_KILLS_SEED", random.randrange(1 << 30)))
    print(f"\nv{lab.version}: CKPTFS_KILLS_SEED={seed}", flush=True)
    kill_each_rank(lab, int(os.environ.get("CKPTFS_KILLS", "100")), seed)
