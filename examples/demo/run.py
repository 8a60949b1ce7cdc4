"""The demo: kill a training job in the middle of a save, start it again, and compare.

    1  train.py to its end, on node-local disks                           -> what should come out
    2  on a shared directory, rank 3 killed half-way through its file     -> what is left?
    3  the same command again: recover, load the newest commit, train     -> to the end
    4  compare losses and every byte of the state; open it with stock torch

Every claim that is printed is checked; one that fails makes the exit status 1. ``--json`` prints
the claims and the facts for machines. Nothing runs on when this ends, however it ends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the demo also runs where nothing is installed

import look  # noqa: E402
from cluster import Cluster, End  # noqa: E402
from story import Story  # noqa: E402

import ckptfs  # noqa: E402
from ckptfs.text import size_text  # noqa: E402

EVERY = 10
STEPS = 30
SAVES = STEPS // EVERY
VICTIM = 3  # the rank that dies: not the coordinator, not on its node
VICTIM_FILE = f"__{VICTIM}_0.distcp"
ENTRIES_BEFORE = 2  # in the run log, when the second save begins: a fence and a seal
JOB_TIMEOUT_S = 300.0
READ_TIMEOUT_S = 240.0


class StockReader:
    """stock.py, started once: plain torch.distributed.checkpoint in a process of its own."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "stock.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def load(self, path: Path) -> dict[str, Any]:
        """What stock torch finds there."""
        asked, told = self._process.stdin, self._process.stdout
        assert asked is not None
        assert told is not None
        asked.write(f"{path}\n".encode())
        asked.flush()
        if not select.select([told], [], [], READ_TIMEOUT_S)[0]:
            raise TimeoutError(f"the stock reader does not answer: {self._log.read_text()}")
        answer: dict[str, Any] = json.loads(told.readline() or self._log.read_text())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@dataclass
class Demo:
    """The four acts over one directory."""

    home: Path
    story: Story
    cluster: Cluster
    stock: StockReader

    def play(self) -> None:
        """Play all of it."""
        self.story.title(STEPS, EVERY)
        whole = self.uninterrupted()
        self.killed(whole)
        resumed = self.resumed()
        self.compared(whole, resumed)

    # -- 1

    def uninterrupted(self) -> list[dict[str, Any]]:
        """Train to the end, each node with a disk of its own; returns what rank 0 reported."""
        # The fault wrapper without a fault: it writes down every storage operation of every rank.
        end, told = self._job(
            "whole",
            f"faults+nodes+file://{self.home}/@node/whole",
            CKPTFS_TEST_TRACE=str(self.home / "logs/whole-trace"),
        )
        self._must_end_well(end)
        story, name = self.story, f"step_{STEPS}"
        story.act(f"1  {STEPS} steps without interruption, on node-local disks", end.wall_s)
        disks = {node: self.home / node / "whole" for node in ("node0", "node1")}
        story.saves(Path("whole"), _of(told, "saved"))
        held = {
            n: sorted(p.name for p in run.rglob(f"{name}/*/*.distcp")) for n, run in disks.items()
        }
        story.nodes(held)
        newest = [ckptfs.latest(run) for run in disks.values()]
        story.claim(
            "one_commit_on_two_disks",
            [n and n.uri.name for n in newest] == [name, name]
            and held
            == {
                "node0": ["__0_0.distcp", "__1_0.distcp"],
                "node1": ["__2_0.distcp", "__3_0.distcp"],
            },
            f"each node has its own ranks' files, and both logs say that {name} is the newest",
        )
        return told

    # -- 2

    def killed(self, whole: list[dict[str, Any]]) -> None:
        """Train until rank 3 is killed in the middle of the second save, and look around."""
        run = self.home / "run"
        trace = self.home / "logs/killed-trace"
        writes = self._writes_per_save()
        half = math.ceil(writes / 2)
        # Rank 0 stops before the entry that would void the save: whether the survivors clean up before
        # the scheduler ends them is a race, and this act shows what is left if they do not.
        held = f"hold={self.home}/held:create:*/log/*:{ENTRIES_BEFORE + 1}@0"
        fault = f"kill-half:write:*/{VICTIM_FILE}:{writes + half}@{VICTIM};{held}"
        end, told = self._job(
            "killed",
            f"faults+file://{run}",
            CKPTFS_TEST_FAULT=fault,
            CKPTFS_TEST_TRACE=str(trace),
        )
        story, saved = self.story, _of(told, "saved")
        story.act(
            "2  The same on a shared directory, killed in the middle of the second save", end.wall_s
        )
        last = look.operations(Path(f"{trace}.{VICTIM}"))[-1]
        story.kill(VICTIM, last, half, writes)
        story.claim(
            "killed",
            end.killed_ranks == (VICTIM,) and not end.ok,
            f"SIGKILL ended rank {VICTIM}, "
            "and with it the job: torchrun and the scheduler ended the other ranks",
        )
        story.claim(
            "killed_in_save",
            last.op == "write" and last.key.endswith(VICTIM_FILE),
            "its last storage operation was that write",
        )
        (left,) = look.leftovers(run)
        whole_file = next(s for s in whole if s["event"] == "saved")["rank_bytes"][VICTIM]
        partial = [size for path, size in left.files.items() if ".partial" in path]
        story.leftovers(run, left)
        story.claim(
            "half_file_left",
            bool(partial) and all(0 < size < whole_file for size in partial),
            f"half a file of rank {VICTIM} lies there, under no name that anybody reads",
        )
        newest = ckptfs.latest(run)
        story.claim(
            "latest_is_the_old_one",
            newest is not None and newest.uri.name == f"step_{EVERY}",
            f"ckptfs.latest(run) is step_{EVERY}; of step_{2 * EVERY} there is no trace in the catalog",
        )
        self._stock_sees_no_half(run, saved)
        story.facts["left_bytes"] = left.size_bytes
        story.facts["kill"] = fault

    def _stock_sees_no_half(self, run: Path, saved: list[dict[str, Any]]) -> None:
        old = self.stock.load(run / f"step_{EVERY}")
        new = self.stock.load(run / f"step_{2 * EVERY}")
        self.story.claim(
            "stock_reads_the_old_one",
            old.get("fingerprint") == saved[0]["fingerprint"],
            f"torch.distributed.checkpoint.load opens step_{EVERY}: what was in memory, bit for bit",
        )
        self.story.claim(
            "stock_sees_no_half",
            "error" in new,
            f"and finds no half checkpoint: step_{2 * EVERY} does not exist",
        )

    def _writes_per_save(self) -> int:
        """How many writes make rank 3's file, from the trace of the uninterrupted run."""
        trace = look.operations(self.home / f"logs/whole-trace.{VICTIM}")
        writes = sum(o.op == "write" and o.key.endswith(VICTIM_FILE) for o in trace)
        if writes == 0 or writes % SAVES:
            raise RuntimeError(f"{writes} writes in {SAVES} equal saves: where is half of one?")
        return writes // SAVES

    # -- 3

    def resumed(self) -> list[dict[str, Any]]:
        """The same command without the fault, to the end; returns what rank 0 reported."""
        run = self.home / "run"
        (left,) = look.leftovers(run)
        before = len(look.log_entries(run))
        end, told = self._job("resumed", str(run))
        self._must_end_well(end)
        story = self.story
        story.act("3  Started again", end.wall_s)
        entries = look.log_entries(run)
        prepared, loaded = _of(told, "prepared")[0], _of(told, "loaded")
        story.recovery(entries[before:], left, prepared["generation"])
        kinds = [e["kind"] for e in entries[before:] if e.get("save_id") in (None, left.save_id)]
        story.claim(
            "fenced_then_aborted",
            kinds[:2] == ["fence", "abort"],
            "prepare_run fenced the dead job first, then recorded that its save is void",
        )
        story.claim(
            "leftovers_removed",
            not look.leftovers(run) and not list(run.rglob("*.partial*")),
            f"and removed what it had left ({size_text(left.size_bytes)})",
        )
        story.claim(
            "resumed_from_the_old_one",
            [(e["name"], e["step"]) for e in loaded] == [(f"step_{EVERY}", EVERY)],
            f"training went on from step_{EVERY}",
        )
        story.loaded(loaded[0] if loaded else {})
        story.saves(run, _of(told, "saved"))
        return told

    # -- 4

    def compared(self, whole: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
        """Both runs, bit for bit; then stock torch."""
        story = self.story
        story.act("4  Bit-identical?")
        one, two = _of(whole, "done")[0], _of(resumed, "done")[0]
        story.claim(
            "same_losses",
            one["losses"] == two["losses"] and all(one["losses"]),
            f"all {STEPS} losses are equal, {one['losses'][0]:.4f} to {one['losses'][-1]:.4f}",
        )
        story.claim(
            "same_state",
            one["fingerprint"] == two["fingerprint"],
            f"so are parameters, AdamW state, loader, random state: sha256 {one['fingerprint'][:16]}",
        )
        name = f"step_{STEPS}"
        together = self.home / "together" / name
        for node in ("node0", "node1"):
            shutil.copytree(self.home / node / "whole" / name, together, dirs_exist_ok=True)
        copied = self.stock.load(together)
        final = self.stock.load(self.home / "run" / name)
        story.claim(
            "stock_opens_the_result",
            final.get("fingerprint") == one["fingerprint"] and not final["knows_ckptfs"],
            "plain torch.distributed.checkpoint.load, in one process, finds the same sha256",
        )
        story.claim(
            "stock_opens_the_two_disks",
            copied.get("fingerprint") == one["fingerprint"],
            "and in the two disks of the other run, copied together with cp -r",
        )
        story.facts["fingerprint"] = one["fingerprint"]
        story.facts["losses"] = one["losses"]

    # -- jobs

    def _job(self, name: str, uri: str, **environment: str) -> tuple[End, list[dict[str, Any]]]:
        told = self.home / f"logs/{name}.events"
        script = [str(HERE / "train.py"), uri, "--steps", str(STEPS), "--every", str(EVERY)]
        end = self.cluster.run(
            name,
            [*script, "--events", str(told)],
            timeout_s=JOB_TIMEOUT_S,
            environment=environment,
        )
        self.story.facts[f"{name}_s"] = round(end.wall_s, 2)
        if not told.exists():
            raise RuntimeError(f"the job {name!r} never began\n{end.tail()}")
        return end, look.events(told)

    def _must_end_well(self, end: End) -> None:
        if not end.ok:
            raise RuntimeError(f"a job failed that was left alone\n{end.tail()}")


def _of(told: Sequence[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in told if line["event"] == event]


def _on_sigterm(*_: object) -> NoReturn:
    raise SystemExit(143)  # through every finally: the jobs end with us


def main() -> int:
    """Play the demo; 0 when every claim holds."""
    parser = argparse.ArgumentParser(
        description="kill a job in the middle of a save, resume, compare"
    )
    parser.add_argument(
        "--dir", type=Path, help="work here and keep it (default: removed at the end)"
    )
    parser.add_argument("--json", action="store_true", help="print claims and facts as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _on_sigterm)
    started = time.monotonic()
    home = (options.dir or Path(tempfile.mkdtemp(prefix="ckptfs-demo-"))).resolve()
    home.mkdir(parents=True, exist_ok=True)
    if any(home.iterdir()):
        parser.error(f"{home} is not empty")
    story = Story(quiet=options.json)
    with Cluster(home / "logs") as cluster:
        stock = StockReader(home / "logs/stock.log")
        try:
            Demo(home, story, cluster, stock).play()
        except BaseException:
            print(f"logs and checkpoints lie in {home}", file=sys.stderr)
            raise
        finally:
            stock.close()
    keep = options.dir is not None or not story.all_hold
    story.end(time.monotonic() - started, home if keep else None)
    if options.json:
        print(json.dumps({"claims": story.claims, "facts": story.facts}, indent=2))
    if not keep:
        shutil.rmtree(home)
    return 0 if story.all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
