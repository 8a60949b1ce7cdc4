"""Work in forks of one warmed process: a text out of one, and verdicts out of many.

    in_fork(work, timeout_s)               the text that work returns
    verdicts(points, base, case)           one fork for each point, WORKERS at a time: (point, end, trouble)

The process that calls these holds no thread, so a fork of it inherits no lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

WORKERS = 2

PointT = TypeVar("PointT")
# Judges one death in a place of its own, writes its end and the trouble as JSON, and ends the process.
Case = Callable[[str, PointT, int], NoReturn]


def in_fork(work: Callable[[], str], timeout_s: float | None = None) -> str:
    """Return the text that ``work`` returns in a fork, so that no thread or client of it stays here.

    A fork that takes longer than ``timeout_s`` prints where its threads are, and ends. None for work that forks
    again and sets a limit there: the thread that waits would leave a lock taken in that fork.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        if timeout_s is not None:
            faulthandler.dump_traceback_later(timeout_s, exit=True)
        code = 1
        try:
            with os.fdopen(writer, "w") as pipe:
                pipe.write(work())
            code = 0
        except BaseException:  # noqa: BLE001 - reported by the exit code and stderr
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"a child of the warmed process failed: {status}"
    return text


def verdicts(
    points: Sequence[PointT], base: str, case: Case[PointT]
) -> Iterator[tuple[PointT, str, str]]:
    """Yield each point with what its case wrote: how it ended, and the trouble that was found.

    Each case gets a path below ``base`` of its own. A fork that ends without a word is trouble too.
    """
    running: dict[int, tuple[PointT, int]] = {}
    waiting = list(enumerate(points))[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < WORKERS:
                number, point = waiting.pop()
                reader, writer = os.pipe()
                if (pid := os.fork()) == 0:
                    os.close(reader)
                    case(f"{base}/case-{number}", point, writer)
                os.close(writer)
                running[pid] = (point, reader)
            pid, status = os.wait()
            point, reader = running.pop(pid)
            with os.fdopen(reader) as pipe:
                text = pipe.read()
            if status != 0 or not text:
                yield point, "", text or f"the case ended with status {status}"
                continue
            written = json.loads(text)
            yield point, written["end"], written["trouble"]
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
