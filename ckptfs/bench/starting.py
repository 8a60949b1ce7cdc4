"""Ranks as processes of this machine: started, listened to, ended with whoever started them.

    rank 0 hosts a store and tells its port; then the others are started with it. Findings come from
    rank 0 through a pipe, until it says "done". Any rank that ends badly ends them all.

Orders, with storage options in them, go through standard input: never on a command line or in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ckptfs
from ckptfs import errors
from ckptfs.bench.ask import Asked, encode_asked
from ckptfs.bench.told import Told, decode_told
from ckptfs.errors import CkptfsError
from ckptfs.uri import mask_credentials

__all__ = ["OMP_NUM_THREADS", "run_ranks"]

OMP_NUM_THREADS = "1"  # as torchrun has it, unless the environment says otherwise
_TAIL = 2000  # characters of a dead rank's standard error


@dataclass(frozen=True, slots=True)
class _Ended:
    rank: int
    code: int


@dataclass
class _Ranks:
    """The processes, and one queue of all that they tell."""

    scratch: Path
    heard: queue.SimpleQueue[dict[str, Any] | _Ended] = field(default_factory=queue.SimpleQueue)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, rank: int, asked: Asked, port: int | None) -> None:
        reading, writing = os.pipe()
        with open(self._log(rank), "w", encoding="utf-8") as log:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ckptfs.bench.rank"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment(rank, asked.ranks),
                    pass_fds=(writing,),
                    text=True,
                    # A terminal's Ctrl-C is ours: the ranks end when we say so.
                    start_new_session=True,
                )
            finally:
                os.close(writing)
        self.processes.append(process)
        self._watch(rank, process, os.fdopen(reading, encoding="utf-8"))
        orders = {"rank": rank, "ranks": asked.ranks, "port": port, "line": writing}
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):  # it died at once: the watch says so
            process.stdin.write(json.dumps(orders | {"asked": encode_asked(asked)}) + "\n")
            process.stdin.flush()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def last_words(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return mask_credentials(self._log(rank).read_text(errors="replace")[-_TAIL:]).strip()
        return ""

    def _watch(self, rank: int, process: subprocess.Popen[str], line: IO[str]) -> None:
        def listen() -> None:
            with line:
                for text in line:
                    self.heard.put(json.loads(text))
            self.heard.put(_Ended(rank, process.wait()))

        threading.Thread(target=listen, name=f"bench-rank-{rank}", daemon=True).start()

    def _log(self, rank: int) -> Path:
        return self.scratch / f"rank_{rank}.log"

    def _environment(self, rank: int, ranks: int) -> dict[str, str]:
        root = str(Path(ckptfs.__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "OMP_NUM_THREADS": OMP_NUM_THREADS,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TMPDIR": str(self.scratch),  # removed by whoever started the ranks, however they end
            "CKPTFS_PROGRESS": "0",  # nothing is drawn inside a measured time
        }
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment


def run_ranks(asked: Asked, scratch: str, take: Callable[[Told], None]) -> None:
    """Measure with ``asked.ranks`` processes. No process is left on any end.

    Args:
        asked: What is to be measured.
        scratch: A directory of the caller's for their logs and temporary files.
        take: Called with each result.

    Raises:
        CkptfsError: What they failed with.
    """
    with _started(Path(scratch)) as ranks:
        ranks.start(0, asked, None)
        left = asked.ranks
        while left:
            heard = ranks.heard.get()
            if isinstance(heard, _Ended):
                if heard.code:
                    raise _died(ranks, heard)
                left -= 1
            elif "failed" in heard:
                raise _error(heard["failed"])
            elif "port" in heard:
                for rank in range(1, asked.ranks):
                    ranks.start(rank, asked, heard["port"])
            elif "kind" in heard:
                take(decode_told(heard))


@contextlib.contextmanager
def _started(scratch: Path) -> Iterator[_Ranks]:
    ranks = _Ranks(scratch)
    try:
        yield ranks
    finally:
        ranks.end()


def _died(ranks: _Ranks, ended: _Ended) -> CkptfsError:
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    said = ranks.last_words(ended.rank)
    return CkptfsError(
        f"rank {ended.rank} of the benchmark ended with {how}" + (f":\n{said}" if said else ""),
        rank=ended.rank,
    )


def _error(told: dict[str, Any]) -> CkptfsError:
    kind = getattr(errors, told["type"], CkptfsError)
    try:
        found = kind(told["message"], uri=told["uri"], hint=told["hint"], rank=told["rank"])
    except TypeError:  # a class that wants more: CollectiveError and its failures
        found = CkptfsError(
            f"{told['type']}: {told['message']}", uri=told["uri"], hint=told["hint"]
        )
    return found if isinstance(found, CkptfsError) else CkptfsError(told["message"])
