"""Runs the lives of a schedule and judges what each leaves behind.

    soak = Soak(place, ranks=4, size_bytes=..., options={...})
    for life in schedule(seed, ranks=4): soak.live(life)
    soak.finish()                 one more job in peace; then nothing may be left over
    soak.report                   what happened, for people

After each job: what it restored was a committed step, whole and bit for bit; every rank got the
same of each save; a step that was reported as committed is there; no rank hangs; descriptors,
threads, memory and directories do not grow.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ckptfs
from tests.multiprocess.harness import Ranks, Result, launch
from tests.soak.job import train
from tests.soak.schedule import Ending, Life

__all__ = ["Place", "Soak"]

KEEP = 3
JOB_TIMEOUT_S = 600.0
MIB = 1 << 20


@dataclass(frozen=True)
class Place:
    """A run. uri: as ranks get it, faults and all; plain: as we look at it; disk: where it is a disk."""

    uri: str
    plain: str
    disk: Path | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    plain_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Soak:
    """One tortured run from its birth on. options: of every manager. deadline_s: of jobs in which ranks die."""

    place: Place
    ranks: int
    size_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 60.0
    # In order; some rank got that answer. Begun since then, and no rank got the answer that it failed.
    committed: list[int] = field(default_factory=list)
    doubtful: set[int] = field(default_factory=set)
    report: collections.Counter[str] = field(default_factory=collections.Counter)
    debris: int = 0

    def live(self, life: Life) -> None:
        """One job from its start to its end, and everything that must hold after it."""
        with launch(
            train, self.ranks, args=self._args(life), env=lambda rank: _environment(life, rank)
        ) as ranks:
            results = self._end(ranks, life)
            said = [list(p.events) for p in ranks._processes]
            logs = ranks.logs() + "\n" + "\n".join(f"{r}: {e}" for r, e in enumerate(said))
        try:
            self._judge(life, results, said)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{life}\n{dict(self.report)}\n{logs}") from error

    def finish(self) -> None:
        """A job in peace, then a count of everything."""
        before = self.report["commits"]
        self.live(Life(KEEP + 1))
        assert self.report["commits"] == before + KEEP + 1, dict(self.report)
        if self.place.disk is not None:
            control = self.place.disk / ".ckptfs"
            assert os.listdir(control / "attempts") == []
            left = [p for p in (control / "trash").rglob("*") if p.is_file()]
            assert left == [], f"in the trash: {left}"
            assert sorted(os.listdir(control / "tmp")) == []

    # -- one job ------------------------------------------------------------------------------

    def _args(self, life: Life) -> dict[str, Any]:
        options = {
            "keep_latest": KEEP,
            "storage_options": dict(self.place.storage_options),
            # A survivor waits so long for a dead rank, in each of two calls; they have no other use.
            "timeout_s": 60.0 if life.ending is Ending.WELL else self.deadline_s,
            **self.options,
        }
        return {
            "uri": self.place.uri,
            "bytes": self.size_bytes,
            "saves": life.saves,
            "options": options,
        }

    def _end(self, ranks: Ranks, life: Life) -> list[Result]:
        if life.ending is Ending.KILL_ALL:
            # Its own death is at an operation; the others follow wherever they happen to be.
            (first,) = ranks.results(ranks=[life.victim], timeout_s=JOB_TIMEOUT_S)
            if first.died:
                for rank in range(self.ranks):
                    ranks.kill(rank)
        return ranks.results(timeout_s=JOB_TIMEOUT_S)

    # -- what it leaves -----------------------------------------------------------------------

    def _judge(self, life: Life, results: list[Result], said: list[list[tuple[str, Any]]]) -> None:
        died = [r.rank for r in results if r.died]
        self.report["jobs"] += 1
        self.report["killed"] += len(died)
        self._judge_restored(said)
        self._judge_outcomes(said)
        if not died:
            assert [r.value for r in results] == ["done"] * self.ranks, [r.error for r in results]
        for result in results:
            # A survivor of a rank gets an error, ends by itself, and gets no nonsense.
            assert result.error is None or died, result.error
        self._judge_resources(said, died=bool(died))
        self._judge_run(said, died=bool(died))

    def _judge_restored(self, said: list[list[tuple[str, Any]]]) -> None:
        told = [data for events in said for name, data in events if name == "restored"]
        if not told:
            return  # they were killed before
        assert {t["wrong"] for t in told} == {""}, f"not bit for bit: {told}"
        steps = {t["step"] for t in told}
        assert len(steps) == 1, f"ranks restored different steps: {steps}"
        (step,) = steps
        newest = self.committed[-1] if self.committed else 0
        assert step == newest or step in self.doubtful, (
            f"restored {step}, committed {newest}, in doubt {sorted(self.doubtful)}"
        )
        if step != newest:
            self.committed.append(step)
        self.doubtful.clear()
        self.report["restores"] += 1

    def _judge_outcomes(self, said: list[list[tuple[str, Any]]]) -> None:
        steps: dict[int, set[str]] = collections.defaultdict(set)
        for events in said:
            for name, data in events:
                if name == "began":
                    steps[data["step"]].add("began")
                elif name == "committed":
                    steps[data["step"]].add("committed")
                elif name == "failed":
                    steps[data["step"]].add(data["outcome"])
                elif name == "raised":
                    self.report[data["type"].rsplit(".", 1)[-1]] += 1
        for step in sorted(steps):
            told = steps[step]
            self.report["saves"] += 1
            assert not {"committed", "failed"} <= told, f"step {step}: {told}"
            if "committed" in told:
                self.committed.append(step)
                self.doubtful.clear()
                self.report["commits"] += 1
            elif "failed" in told:
                self.report["failed saves"] += 1
                self.debris += 1
            else:
                self.doubtful.add(step)
                self.report["saves in doubt"] += 1
                self.debris += 1

    def _judge_resources(self, said: list[list[tuple[str, Any]]], *, died: bool) -> None:
        for rank, events in enumerate(said):
            used = [data for name, data in events if name == "used"]
            if len(used) >= 2:
                first, last = used[0], used[-1]
                assert last["fds"] <= first["fds"] + 2, f"rank {rank}: {first} {last}"
                ours, before = _threads(last), _threads(first)
                # The thread of removals starts with the first of them.
                assert len(ours) <= len(before) + 1, f"rank {rank}: {ours}, before {before}"
                room = 48 * MIB + self.size_bytes // self.ranks // 2
                assert last["rss_bytes"] <= first["rss_bytes"] + room, (
                    f"rank {rank}: {(last['rss_bytes'] - first['rss_bytes']) / MIB:.0f} MiB more"
                )
            closed = [data for name, data in events if name == "closed"]
            for data in closed:
                # A wait for a dead rank's answer is left to its own deadline.
                left = _threads(data)
                assert died or not left, f"rank {rank}: threads after close: {left}"

    def _judge_run(self, said: list[list[tuple[str, Any]]], *, died: bool) -> None:
        live = ckptfs.list_checkpoints(
            self.place.plain, storage_options=dict(self.place.plain_options) or None
        )
        steps = [c.step for c in live]
        assert len(steps) == len(set(steps))
        extra = [s for s in steps if s not in self.committed and s not in self.doubtful]
        assert not extra, f"nobody was told of {extra}"
        kept = self.committed[-KEEP:] if not died else self.committed[-1:]
        assert set(kept) <= set(steps), f"kept: {kept}, there: {steps}"
        if not died and steps:
            # A delete that failed is tried again after the next commit.
            assert len(steps) <= KEEP + 2, steps
        if self.place.disk is not None and self.place.disk.exists():
            attempts = os.listdir(self.place.disk / ".ckptfs" / "attempts")
            assert len(attempts) <= max(1, self.debris), attempts
            if not died and any(name == "committed" for events in said for name, _ in events):
                self.debris = len(attempts)


def _threads(used: Mapping[str, Any]) -> list[str]:
    """The lasting ones; a timer that touches the log lives for a moment. The process has one thread for all
    runs that somebody dropped without a release, from its first run on.
    """
    ours = [name for name in used["threads"] if name.startswith("ckptfs")]
    return [name for name in ours if name != "ckptfs-collected"]


def _environment(life: Life, rank: int) -> dict[str, str]:
    mine = [fault for fault in life.faults if fault.endswith(f"@{rank}")]
    # The forked rank knows its number by its spec; a fault asks the variable.
    return {"RANK": str(rank), "CKPTFS_TEST_FAULT": ";".join(mine), "CKPTFS_JOB_ID": "soak"}
