"""``ckptfs cp`` in processes that die where a test says: forked from one that imported torch once.

    with victims() as run:
        ended = run(["cp", source, target], CKPTFS_TEST_FAULT="kill:write:*__1_0.distcp:3")
        ended.status                     -9, or the exit code; ended.out, ended.err

``start`` does not wait: two copies at once. Every storage that the process opens follows the plan, see
``tests.faults.victim``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers.warm import warm

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a command ended: a negative status is the signal that killed it."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which is one JSON document."""
        return json.loads(self.out)


Start = Callable[..., Callable[[], Ended]]


@contextlib.contextmanager
def victims() -> Iterator[Start]:
    """A warm process; ``start(words, **environment)`` begins a command and returns what waits for it."""
    warm = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.copy_victims"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert warm.stdin
    assert warm.stdout
    commands, answers = warm.stdin, warm.stdout
    try:
        with tempfile.TemporaryDirectory(prefix="victims-") as scratch:
            number = 0

            def start(words: list[object], **environment: str) -> Callable[[], Ended]:
                nonlocal number
                number += 1
                said = f"{scratch}/{number}"
                job = {"words": [str(w) for w in words], "env": environment, "said": said}
                commands.write(json.dumps(job) + "\n")
                commands.flush()
                return lambda: ended_of(answers, commands, said)

            yield start
    finally:
        warm.stdin.close()
        warm.wait(120)
        warm.stdout.close()


def ended_of(answers: Any, commands: Any, said: str) -> Ended:
    """Wait for one command."""
    commands.write(json.dumps({"wait": said}) + "\n")
    commands.flush()
    status = json.loads(answers.readline())["status"]
    return Ended(status, Path(f"{said}.out").read_text(), Path(f"{said}.err").read_text())


def _serve() -> None:
    # What every command needs; no client and no thread of ours is made by it.
    import ckptfs.cli.copy
    import ckptfs.replication.copier  # noqa: F401

    warm("s3://bucket")

    pids: dict[str, int] = {}
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            _, status = os.waitpid(pids.pop(job["wait"]), 0)
            sys.stdout.write(json.dumps({"status": os.waitstatus_to_exitcode(status)}) + "\n")
            sys.stdout.flush()
            continue
        pid = os.fork()
        if pid == 0:
            _be_victim(job)
        pids[job["said"]] = pid


def _be_victim(job: dict[str, Any]) -> None:
    from ckptfs.cli.main import main
    from tests.faults import victim

    code = 99
    try:
        os.environ.update(job["env"])
        with (
            open(f"{job['said']}.out", "w", buffering=1) as out,
            open(f"{job['said']}.err", "w", buffering=1) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            victim.install()
            main(job["words"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
