"""Sixteen writers that save one name at the same moment, round after round, on a real server.

    python -m tests.servers.racers < job    (JSON of Job)    -> one line of JSON per round

Every writer is a process with clients of its own. In each round all of them begin, write their data
and their manifest, wait for each other, and then append their seals at once.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec, WrittenPart
from ckptfs.commit.session import Place, RunSession, open_session
from ckptfs.control.control import open_control
from ckptfs.errors import CkptfsError
from ckptfs.uri import Uri
from tests.servers.warm import warm

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
DATA = b"data of one of the racing writers\n" * 100


@dataclass(frozen=True)
class Job:
    """Who races for what, and where."""

    uri: str
    options: Mapping[str, Any]
    writers: int = 16
    rounds: int = 5


@dataclass(frozen=True)
class Outcome:
    """How one writer's save ended: error is "" for the winner, else the type and its text."""

    save_id: str
    error: str = ""
    text: str = ""


def race(job: Job) -> list[list[Outcome]]:
    """Run a job in a process of its own; the outcomes of all writers by round."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.servers.racers"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [[Outcome(**o) for o in json.loads(line)] for line in done.stdout.splitlines()]


def save_once(session: RunSession, name: str, together: Barrier) -> Outcome:
    """One writer's save of ``name``; one that fails early lets the others continue."""
    attempt = SaveAttempt(session, SaveSpec(name, None))

    def write() -> WrittenPart:
        with session.storage.open_write(f"{attempt.prefix}__0_0.distcp") as writer:
            writer.write(DATA)
        domain = session.placement.mine.id
        return WrittenPart((FileRecord(f"{attempt.save_id}/__0_0.distcp", len(DATA), domain),))

    def finish(parts: list[WrittenPart]) -> dict[str, bytes]:
        together.wait(WAIT_S)
        return {".metadata": b"stand-in"}

    try:
        attempt.begin()
        attempt.commit(write, finish)
    except CkptfsError as error:
        attempt.abandon()
        return Outcome(attempt.save_id, type(error).__name__, str(error))
    return Outcome(attempt.save_id)


def _writer(job: Job, together: Barrier, answers: Any) -> None:
    logging.disable(logging.CRITICAL)
    with (
        open_control() as control,
        open_session(Uri.parse(job.uri), control, Place(job.options), write=True) as session,
    ):
        for number in range(job.rounds):
            together.wait(WAIT_S)
            try:
                outcome = save_once(session, f"step_{number}", together)
            except BaseException:  # noqa: BLE001 - passed to the test, whatever it is
                together.abort()
                outcome = Outcome("", "unexpected", traceback.format_exc())
            answers.put((number, asdict(outcome)))
            if outcome.error == "unexpected":
                return


def main() -> int:
    """Fork the writers, collect what became of each."""
    told = json.load(sys.stdin)
    job = Job(**told)
    warm(job.uri)
    fork = multiprocessing.get_context("fork")
    together, answers = fork.Barrier(job.writers), fork.SimpleQueue()
    writers = [
        fork.Process(target=_writer, args=(job, together, answers)) for _ in range(job.writers)
    ]
    for writer in writers:
        writer.start()
    rounds: list[list[Any]] = [[] for _ in range(job.rounds)]
    for _ in range(job.rounds * job.writers):
        number, outcome = answers.get()
        rounds[number].append(outcome)
        if outcome["error"] == "unexpected":
            sys.stderr.write(outcome["text"])
            for writer in writers:
                writer.kill()
            return 1
    for writer in writers:
        writer.join()
    for outcomes in rounds:
        sys.stdout.write(json.dumps(outcomes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
