"""Deaths of a process in the middle of a save, at every request that it makes, on a real server.

    test  --stdin: Job-->   python -m tests.servers.deaths  --fork-->  case  --fork-->  victim
          <-stdout: Verdicts--     (warm: torch is imported)            |   <--proxy-->  server
                                                                        `-- judge

The warmed process holds no thread and no client: a fork of it costs milliseconds. The case's proxy
counts the victim's requests and sends SIGKILL at one of them: when its head has arrived, in the
middle of its body, or when the server has acted and has not answered.

The judge reads with ckptfs and with stock torch, lets the next owner take the run and save, reads
again, and looks at every key that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.faults.proxy import At, FaultProxy, HttpFault, Nth, Reset
from tests.forked import in_fork, verdicts
from tests.lab.server import Server
from tests.servers.aftermath import judge, state, through
from tests.servers.warm import warm

ROOT = Path(__file__).resolve().parents[2]
CASE_TIMEOUT_S = 300
VICTIM_TIMEOUT_S = 200  # a hang is a verdict too


@dataclass(frozen=True)
class Job:
    """The deaths, by victim. scenario: "fresh" or "replace". stride: every n-th point.

    more: storage_options on top of the server's, for victim and judge. spoil: the name of a mistake
    of tests.servers.mistakes that victim and judge make: the judge must see it.
    """

    scenario: str
    server: Mapping[str, Any]
    more: Mapping[str, Any]
    stride: int = 1
    spoil: str | None = None
    first: bool = False


@dataclass(frozen=True)
class Point:
    """The moment of death: before, in or after request ``nth``."""

    nth: int
    at: str
    request: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of one death: "old" or "new", or the trouble that the judge found."""

    point: Point
    end: str
    trouble: str = ""


def deaths(job: Job) -> list[Verdict]:
    """Let the victim die at every point (every ``stride``-th) and judge each death."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.servers.deaths"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [Verdict(Point(**t["point"]), t["end"], t["trouble"]) for t in told]


# -- scenarios ----------------------------------------------------------------------------------

BEFORE = {"fresh": {"step_1": [1]}, "replace": {"step_1": [1, 2]}}
OLD = {"fresh": {"step_1": 1}, "replace": {"step_1": 2}}
NEW = {"fresh": {"step_1": 1, "step_2": 3}, "replace": {"step_1": 3}}


def _prepare(scenario: str, uri: str, options: Mapping[str, Any]) -> None:
    """What is there before the victim's save."""
    import ckptfs

    for name, values in BEFORE[scenario].items():
        for value in values:
            ckptfs.save(state(value), f"{uri}/{name}", if_exists="replace", storage_options=options)


def _save(scenario: str, uri: str, options: Mapping[str, Any]) -> None:
    """What the victim dies in."""
    import ckptfs

    if scenario == "fresh":
        ckptfs.save(state(3), f"{uri}/step_2", storage_options=options)
    else:
        ckptfs.save(state(3), f"{uri}/step_1", if_exists="replace", storage_options=options)


# -- the warmed process -------------------------------------------------------------------------


def _main() -> None:
    logging.disable(logging.CRITICAL)  # what the dying say is judged by what they leave
    told = json.load(sys.stdin)
    job = Job(**told)
    for name in (
        "ckptfs.dcp.api",
        "ckptfs.api",
        "obstore.fsspec",
        "torch.utils.serialization.config",
    ):
        importlib.import_module(name)
    warm(Server(**job.server).uri())
    if job.spoil:
        importlib.import_module("tests.servers.mistakes").make(job.spoil)
    gc.collect()
    gc.freeze()  # the forks share what is warm: collecting it would copy it
    base = Server(**job.server).fresh(f"deaths-{job.scenario}")
    found = json.loads(in_fork(lambda: _survey(job, f"{base}/survey")))
    # From the last one back: a sample without it may end before the commit.
    todo = [Point(**p) for p in found][:: -job.stride][::-1]
    for judged in verdicts(todo, base, functools.partial(_case, job)):
        verdict = Verdict(*judged)
        sys.stdout.write(json.dumps(asdict(verdict)) + "\n")
        sys.stdout.flush()
        if job.first and verdict.trouble:
            return


def _survey(job: Job, uri: str) -> str:
    """Every moment of the victim's life, found by letting it live once."""
    with _victim(job, uri, None) as (proxy, pid, told):
        _wait(pid)
        said = _all_of(told)
        assert said == "BA", f"the victim does not even live: {said}"
        assert proxy.settle()
        points: list[Point] = []
        for e in proxy.log:
            request = f"{e.method} {e.target}"
            points.append(Point(e.number, "before", request))
            if e.sent_bytes > 1:
                points.append(Point(e.number, "request", request))
            if e.method not in ("GET", "HEAD"):
                points.append(Point(e.number, "acted", request))
    judge(Server(**job.server), uri, job.more, OLD[job.scenario], NEW[job.scenario], told=True)
    return json.dumps([asdict(p) for p in points])


@contextlib.contextmanager
def _victim(job: Job, uri: str, point: Point | None) -> Iterator[tuple[FaultProxy, int, int]]:
    """A victim behind a proxy that kills it at ``point``; the pipe on which it says how far it is."""
    server = Server(**job.server)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    told, tell = os.pipe()
    # Before the proxy's thread exists: a fork of a process with threads may inherit their locks.
    if (pid := os.fork()) == 0:
        listener.close()
        os.close(told)
        _live(job, server, uri, f"http://127.0.0.1:{port}", tell)
    os.close(tell)
    faults = []
    if point is not None:
        cut = Reset(At(point.at), do=lambda _: os.kill(pid, signal.SIGKILL))
        faults.append(HttpFault("*", "*", Nth(point.nth), cut))
    try:
        with FaultProxy(server.endpoint, faults, listener=listener) as proxy:
            yield proxy, pid, told
    finally:
        os.close(told)


def _live(job: Job, server: Server, uri: str, proxy: str, tell: int) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive its judge
    faulthandler.dump_traceback_later(VICTIM_TIMEOUT_S, exit=True)
    code = 1
    try:
        _prepare(job.scenario, uri, server.storage_options(**job.more))
        os.write(tell, b"B")
        _save(job.scenario, uri, through(server, proxy, **job.more))
        os.write(tell, b"A")
        code = 0
    except BaseException:  # noqa: BLE001 - an exit status and a text are all that leaves a fork
        os.write(tell, traceback.format_exc()[-4000:].encode())
    finally:
        os._exit(code)


def _all_of(told: int) -> str:
    """What a process said before its end: B, its world was prepared; A, its save returned."""
    pieces = iter(lambda: os.read(told, 1 << 16), b"")
    return b"".join(pieces).decode()


def _wait(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return status


def _case(job: Job, uri: str, point: Point, writer: int) -> NoReturn:
    """One death and its judgement, in a fork; ends the process."""
    signal.alarm(CASE_TIMEOUT_S)
    end, trouble = "", ""
    try:
        with _victim(job, uri, point) as (proxy, pid, told):
            status = _wait(pid)
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            said = _all_of(told)
            assert killed or status == 0, f"the victim ended with status {status}: {said}"
            assert proxy.settle(), "a request of the dead is still under way"
            assert said.startswith("B"), "it died before its time"
        old, new = OLD[job.scenario], NEW[job.scenario]
        end = judge(Server(**job.server), uri, job.more, old, new, told=said == "BA")
    except BaseException:  # noqa: BLE001 - the verdict of this case
        trouble = traceback.format_exc()
    with os.fdopen(writer, "w") as pipe:
        json.dump({"end": end, "trouble": trouble}, pipe)
    os._exit(0)


if __name__ == "__main__":
    _main()
