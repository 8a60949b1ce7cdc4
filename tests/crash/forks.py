"""One warmed process, one fork for every job, one for every death.

    test  --stdin: jobs-->  python -m tests.crash.forks  --fork-->  job  --fork-->  case  --fork-->  victim
          <-stdout: verdicts--                                                       `--> judge

The warmed process has imported the commit layer, once, and holds no thread: a fork of it costs
milliseconds and inherits no lock. Each case works on a copy of what lay there before.

    kill   SIGKILL to the process that holds all ranks
    alone  one rank dies, the others live on to see it
    cut    the power goes: what was not synced is gone, or (lucky) some of it is
"""

from __future__ import annotations

import collections
import faulthandler
import functools
import gc
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ckptfs.commit.session import RunSession
from ckptfs.errors import CkptfsError
from ckptfs.testing.disk import Fsync, PowerCut, SimulatedDisk
from ckptfs.testing.world import SimulatedDeath
from tests.crash.rig import (
    SCENARIOS,
    Layout,
    Mortal,
    Point,
    Scenario,
    Told,
    judge,
    points,
    prepare,
    sessions,
    values,
)
from tests.forked import in_fork, verdicts

ROOT = Path(__file__).resolve().parents[2]
CASE_TIMEOUT_S = 300
VICTIM_TIMEOUT_S = 200  # a hang is a verdict too
NEAR_CALLS = 30
# No system call has this number: the power goes when the victim has learned of its success. The number
# after its last one is none to name that moment: timers make calls too, on a busy machine before the end.
AFTER_ALL = 1 << 40
TOLD, ENDED = "told", "ended"  # keys of the lines that the warmed process writes


@dataclass(frozen=True)
class Job:
    """What the warmed process is asked: the deaths, by victim.

    how: kill, alone, cut, or "sites" (list the fsyncs). deaf: a site with fsyncs that the disk ignores.
    lucky: seeds of what survives a power cut unsynced; 0: nothing does. first: stop at a trouble.
    when: only moments of this kind (before, half, after).
    """

    scenario: str
    layout: Layout
    how: str = "kill"
    stride: int = 1
    deaf: str | None = None
    lucky: tuple[int, ...] = (0,)
    first: bool = False
    when: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of one death: "old" or "new", or the trouble that the judge found."""

    point: Point
    end: str
    trouble: str = ""


class _Warmed:
    """The warmed process: started by the first job, ended with the tests (its stdin closes)."""

    def __init__(self, *command: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "tests.crash.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            process_group=0,
        )

    def answers(self, job: Job) -> list[Any]:
        """What the fork of this job reports; AssertionError with its last words where it fails."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        told = []
        for line in self._process.stdout:
            if (status := json.loads(line).get(ENDED)) is None:
                told.append(json.loads(line)[TOLD])
                continue
            assert status == 0, self._said()
            return told
        raise AssertionError(f"the warmed process ended\n{self._said()}")

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def end(self) -> None:
        """It and the job that it does are not to be waited for."""
        # All forks have its standard output: what lives on of them would be waited for below.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()


@functools.cache
def _warmed() -> _Warmed:
    return _Warmed()


def ask(job: Job) -> list[Any]:
    """Run a job in a fork of the warmed process; its answers."""
    warmed = _warmed()
    try:
        return warmed.answers(job)
    except BaseException:  # the next job finds no answers of this one
        _warmed.cache_clear()
        warmed.end()
        raise


def deaths(job: Job) -> list[Verdict]:
    """Let the victim die at every point (every ``stride``-th) and judge each death."""
    return [Verdict(Point(**told["point"]), told["end"], told["trouble"]) for told in ask(job)]


def fsync_sites(scenario: str, layout: Layout) -> list[str]:
    """Every place in the code that calls fsync, named by what it syncs."""
    return [str(site) for site in ask(Job(scenario, layout, "sites"))]


_UNIQUE = (
    (r"\d{8}T\d{6}-[0-9a-f]{12}(?![0-9a-f])", "<save>"),
    (r"\d{8}T\d{6}-[0-9a-f]{16}", "<write>"),
    (r"\.(partial|probe)-[0-9a-f]+", r".\1"),
    (r"/\d+-[0-9a-f]{8}", "/<generation>"),
    (r"[0-9a-f]{32}", "<id>"),
)


def _plain(path: str, base: str) -> str:
    """A path without what is unique to one run of the victim."""
    key = path.removeprefix(base)
    for pattern, name in _UNIQUE:
        key = re.sub(pattern, name, key)
    return key or "/"


class Sites:
    """Names the place in the code that each fsync of one victim comes from.

    Lines of the storage by their functions (make_dirs has several: by the directory too); the
    commit layer's own ``Sync`` operations, which all come through one line of the storage, by the
    directory and for which time; the bytes of files, which come through one line too, by their directory and
    which of its files it is.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._seen: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def name(self, call: Fsync) -> str:
        """The name of the place; to be asked once for each call, in order."""
        if call.site.endswith(">_finish"):
            folder = os.path.dirname(call.path)
            with self._lock:
                self._seen[folder] += 1
                return f"{call.site} {_plain(folder, self._base)} #{self._seen[folder]}"
        site = f"{call.site} {_plain(call.path, self._base)}"
        # The directory of files that are written together is named like one that is synced alone.
        site = site.removeprefix("write_files>")
        # Both come through one line of make_dirs.
        site = site.replace("make_dir_unsynced>", "make_dir>")
        if site.startswith("sync>"):
            with self._lock:
                self._seen[site] += 1
                return f"{site} #{self._seen[site]}"
        return site if "make_dirs" in site else call.site


# -- the warmed process -------------------------------------------------------------------------


def _main() -> None:
    logging.disable(logging.CRITICAL)  # what the dying say is judged by what they leave
    gc.collect()
    gc.freeze()  # the forks share what is warm: collecting it would copy it
    for line in sys.stdin:
        told = json.loads(line)
        job = Job(**{**told, "layout": Layout(**told["layout"])})
        if (pid := os.fork()) == 0:
            code = 1
            try:
                _do(job)
                code = 0
            except BaseException:  # noqa: BLE001 - an exit status and a text are all that leaves
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({ENDED: status}), flush=True)


def _do(job: Job) -> None:
    scenario = SCENARIOS[job.scenario]
    base = tempfile.mkdtemp(prefix="crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        found = json.loads(in_fork(lambda: _survey(job, scenario, base), VICTIM_TIMEOUT_S))
        if job.how == "sites":
            for site in found:
                print(json.dumps({TOLD: site}), flush=True)
            return
        todo = _sample([Point(**p) for p in found], job.stride)
        case = functools.partial(_case, job, scenario, base)
        for judged in verdicts(todo, base, case):
            verdict = Verdict(*judged)
            print(json.dumps({TOLD: asdict(verdict)}), flush=True)
            if job.first and verdict.trouble:
                return
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert "torch" not in sys.modules, "the commit layer imported torch"


def _sample(points: list[Point], stride: int) -> list[Point]:
    """Every ``stride``-th of each rank, from its last one back: without that one, a sample may end before
    the commit.
    """
    ranks = dict.fromkeys(point.rank for point in points)
    each = ([point for point in points if point.rank == rank] for rank in ranks)
    return [point for own in each for point in own[::-stride][::-1]]


def _survey(job: Job, scenario: Scenario, base: str) -> str:
    """Make what lay there before; find where the victim can die."""
    prepare(scenario, job.layout, f"{base}/before")
    trial = f"{base}/trial"
    shutil.copytree(f"{base}/before", trial)
    if job.how in ("kill", "alone"):
        found = points(scenario, job.layout, trial)
        return json.dumps([asdict(p) for p in found if job.when in (None, p.when)])
    sites, names, ignored = Sites(trial), [], []

    def hear(call: Fsync) -> bool:
        names.append(sites.name(call))
        if names[-1] == job.deaf:
            ignored.append(disk.calls)
        return names[-1] == job.deaf

    disk = SimulatedDisk(trial, deaf_to=hear)
    values(sessions(job.layout, trial, scenario.victim, job="victim", posix=disk))
    if job.how == "sites":
        return json.dumps(sorted(set(names)))
    # The cut after everything was acknowledged comes first: it shows most.
    moments = [AFTER_ALL, *range(1, disk.calls + 1)]
    if job.deaf is not None:
        # What one fsync guards shows soon after it, or at the end.
        close = {n for at in ignored for n in range(at + 1, at + 1 + NEAR_CALLS)}
        moments = [AFTER_ALL, *sorted(close)]
    return json.dumps([asdict(Point(s, n, "cut")) for s in job.lucky for n in moments])


def _case(
    job: Job, scenario: Scenario, base: str, place: str, point: Point, writer: int
) -> NoReturn:
    """One death and its judgement, in a fork; ends the process."""
    signal.alarm(CASE_TIMEOUT_S)
    end, trouble = "", ""
    try:
        shutil.copytree(f"{base}/before", place)
        if job.how == "cut":
            # In a fork: to the next owner the machine's processes are as dead as its memory.
            told = _told(in_fork(lambda: _cut(job, scenario, place, point), VICTIM_TIMEOUT_S))
        else:
            told = _die(job, scenario, place, point)
        end = judge(scenario, job.layout, place, told)
    except BaseException:  # noqa: BLE001 - the verdict of this case
        trouble = traceback.format_exc()
    shutil.rmtree(place, ignore_errors=True)
    with os.fdopen(writer, "w") as pipe:
        json.dump({"end": end, "trouble": trouble}, pipe)
    os._exit(0)


def _told(text: str) -> Told:
    assert "?" not in text, f"a survivor met an error of no type of ours: {text}"
    fences = [int(n) for n in re.findall(r"A(\d+);", text)]
    return Told(acknowledged=bool(fences), failed="F" in text, fence=max(fences, default=0))


def _die(job: Job, scenario: Scenario, base: str, point: Point) -> Told:
    """Let the victim run into its death, in a fork."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        faulthandler.dump_traceback_later(VICTIM_TIMEOUT_S, exit=True)
        plan = Mortal(point.nth, point.when, alone=job.how == "alone")
        body = _reporting(scenario.victim, writer)
        sessions(job.layout, base, body, job="victim", plans={point.rank: plan})
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the victim ended with status {status}: {told}"
    return _told(told)


def _reporting(victim: Callable[[RunSession], Any], writer: int) -> Callable[[RunSession], None]:
    """A for a success (and the number of the fence that it took), F, U or ? for an error."""

    def body(session: RunSession) -> None:
        try:
            fence = victim(session)
        except (SimulatedDeath, PowerCut):
            raise
        except CkptfsError as error:
            os.write(writer, b"F" if error.outcome == "failed" else b"U")
            raise
        except BaseException as error:
            os.write(writer, f"? {error!r}".encode())
            raise
        os.write(writer, f"A{fence or 0};".encode())

    return body


def _cut(job: Job, scenario: Scenario, place: str, point: Point) -> str:
    """Cut the power at a system call and leave what the machine finds again; what was reported before."""
    threading.excepthook = lambda _: None  # timers of a machine without power
    sites, seed = Sites(place), point.rank
    disk = SimulatedDisk(
        place, crash_at=point.nth, deaf_to=lambda call: sites.name(call) == job.deaf
    )
    reader, writer = os.pipe()
    body = _reporting(scenario.victim, writer)
    sessions(job.layout, place, body, job="victim", posix=disk)
    if not disk.is_off:
        disk.cut()
    disk.materialise(
        f"{place}-on",
        lucky=lambda path: (
            seed > 0 and random.Random(f"{seed} {_plain(path, place)}").random() < 0.5
        ),
    )
    shutil.rmtree(place)
    os.rename(f"{place}-on", place)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return pipe.read()


if __name__ == "__main__":
    _main()
