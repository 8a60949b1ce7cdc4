"""Run a whole benchmark: checks, ranks, measurements, clean-up, the result.

    measure(asked, command) -> Result      under torchrun: collective; None on all ranks but 0

Without torchrun this process starts the ranks as processes of this machine. It never imports torch, and
it removes what the ranks wrote, also after an error, Ctrl-C, SIGTERM or SIGHUP. If this process itself
gets a SIGKILL, one name stays at each target, ``ckptfs-bench-...``.

Rank 0 hosts a store and sends its port, which the other ranks get. Each rank has one connection to
this process: it receives the request, and rank 0 sends what it finds. A rank that fails ends all ranks, and
a rank ends when its connection closes. Requests contain storage options, so they are never on a command
line, in a file or in the environment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ckptfs
from ckptfs.bench.analysis import rows_of
from ckptfs.bench.engines import choose
from ckptfs.bench.machine import available_memory_bytes, describe, versions
from ckptfs.bench.messages import (
    Asked,
    Gathered,
    Progress,
    StoreAt,
    TargetAsked,
    Told,
    settings_of,
)
from ckptfs.bench.results import Result, phase_text
from ckptfs.bench.target import Home
from ckptfs.errors import CkptfsError, StateError, StorageError
from ckptfs.text import size_text
from ckptfs.uri import HasProtocol, Uri, mask_credentials

__all__ = ["OMP_NUM_THREADS", "home_name", "measure", "run_ranks", "target_asked", "under_torchrun"]

OMP_NUM_THREADS = "1"  # as torchrun sets it, unless the environment says otherwise
_TAIL = 2000  # characters of a dead rank's standard error


@dataclass(frozen=True, slots=True)
class _ExitStatus:
    rank: int
    code: int


@dataclass
class _Ranks:
    """The processes of the ranks, and one queue for all their messages."""

    scratch: Path
    messages: queue.SimpleQueue[StoreAt | Told | CkptfsError | _ExitStatus] = field(
        default_factory=queue.SimpleQueue
    )
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def start(self, rank: int, request: Asked) -> None:
        ours, theirs = multiprocessing.Pipe()
        with open(self._log(rank), "w", encoding="utf-8") as log, theirs:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, and a number
                [sys.executable, "-P", "-m", "ckptfs.bench.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(rank, request.ranks),
                pass_fds=(theirs.fileno(),),
                # A terminal's Ctrl-C must reach only this process, which then ends the ranks.
                start_new_session=True,
            )
        self.processes.append(process)
        self.connections.append(ours)
        self._watch(rank, process, ours)
        self.send(rank, request)

    def send(self, rank: int, message: Asked | StoreAt) -> None:
        with contextlib.suppress(OSError):  # it is dead, which its thread reports
            self.connections[rank].send(message)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def last_words(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return mask_credentials(self._log(rank).read_text(errors="replace")[-_TAIL:]).strip()
        return ""

    def _watch(self, rank: int, process: subprocess.Popen[bytes], ours: Connection) -> None:
        def listen() -> None:
            # An OSError: it died in the middle of a message, or without having read one of ours.
            with ours, contextlib.suppress(EOFError, OSError):
                while True:
                    self.messages.put(ours.recv())
            self.messages.put(_ExitStatus(rank, process.wait()))

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
            "TMPDIR": str(self.scratch),  # the process that started the ranks removes it
            "CKPTFS_PROGRESS": "0",  # drawing would take part of the measured time
        }
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment


def run_ranks(asked: Asked, scratch: str, take: Callable[[Told], None]) -> None:
    """Measure with ``asked.ranks`` processes. All of them have ended when this returns or raises.

    Args:
        asked: What to measure.
        scratch: The caller's directory for their logs and temporary files.
        take: Called with each result.

    Raises:
        CkptfsError: The error that they failed with.
    """
    with _started(Path(scratch)) as ranks:
        for rank in range(asked.ranks):
            ranks.start(rank, asked)
        left = asked.ranks
        while left:
            message = ranks.messages.get()
            if isinstance(message, _ExitStatus):
                if message.code:
                    raise _died(ranks, message)
                left -= 1
            elif isinstance(message, CkptfsError):
                raise message
            elif isinstance(message, StoreAt):
                for rank in range(1, asked.ranks):
                    ranks.send(rank, message)
            else:
                take(message)


@contextlib.contextmanager
def _started(scratch: Path) -> Iterator[_Ranks]:
    ranks = _Ranks(scratch)
    try:
        yield ranks
    finally:
        ranks.end()


def _died(ranks: _Ranks, ended: _ExitStatus) -> CkptfsError:
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    last_words = ranks.last_words(ended.rank)
    return CkptfsError(
        f"rank {ended.rank} of the benchmark ended with {how}"
        + (f":\n{last_words}" if last_words else ""),
        rank=ended.rank,
    )


PACKAGES = ("ckptfs", "torch", "numpy", "xxhash", "fsspec")
_PASSED = 0.95  # of the limit's seconds; a smaller difference is within the spread
_PROGRESS = "CKPTFS_PROGRESS"
_CLIENTS = ("s3fs", "gcsfs", "adlfs", "obstore", "aiobotocore", "safetensors", "s3torchconnector")


def target_asked(
    uri: str | os.PathLike[Any] | HasProtocol | Uri,
    storage_options: Mapping[str, Any] | None = None,
) -> TargetAsked:
    """Return a target with a new home.

    Args:
        uri: The place.
        storage_options: Options for fsspec's filesystem of that protocol; None: no options.

    Raises:
        UriError: ``uri`` is not a valid URI.
    """
    return TargetAsked(Uri.parse(uri).full, home_name(), dict(storage_options or {}))


def home_name() -> str:
    """The new, unique name of one benchmark's directory or prefix."""
    return f"ckptfs-bench-{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def under_torchrun() -> bool:
    """Whether a launcher started this process as one rank of many."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def measure(
    asked: Asked,
    *,
    command: str = "",
    progress: Callable[[str], None] | None = None,
    first: Callable[[], None] | None = None,
) -> Result | None:
    """Measure everything that ``asked`` names.

    Afterwards the targets are as they were, unless the process got a SIGKILL or ``asked.keep`` is set.

    Args:
        asked: What to measure.
        command: The command for the result, without credentials.
        progress: Called with a text that says what is under way; None: no call.
        first: Called once, on rank 0, before anything is written. A CkptfsError that it raises ends the
            call on every rank. None: no call.

    Returns:
        The result; None on the other ranks.

    Raises:
        NoSpaceError: It does not fit the storage. Nothing was written.
        StateError: It does not fit the memory, or no engine has that name. Nothing was written.
        MissingDriverError: An engine that was named is not installed. Nothing was written.
        CkptfsError: The error that ckptfs, or an engine that was named, failed with.
    """
    show = progress or (lambda _: None)
    gathered = Gathered()

    def take(report: Told) -> None:
        if isinstance(report, Progress):
            show(report.text)
        gathered.take(report)

    for target in asked.targets:
        choose(asked.engines, target.place)  # an unknown name is reported at once
    started = datetime.now(UTC)
    load_before = list(os.getloadavg())
    with _terminable():
        if under_torchrun():
            asked, machine = _as_one_of_many(asked, take, first)
            if machine is None:
                return None
        else:
            if first is not None:
                first()
            machine = _here(asked, take)
    result = gathered.result(
        date=started.isoformat(timespec="seconds"),
        command=command,
        machine={
            **machine,
            "load_average": {"before": load_before, "after": list(os.getloadavg())},
        },
        versions={n: v for n, v in versions(*PACKAGES, *_CLIENTS).items() if v != "none"},
        settings=settings_of(asked)
        | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS", OMP_NUM_THREADS)},
    )
    return replace(result, notes=(*result.notes, *_beaten(result)))


def _beaten(result: Result) -> Iterator[str]:
    """Yield a note for each engine that was faster than its limit: ratios to it mislead then."""
    for row in rows_of(result):
        if row.to_limit is not None and row.to_limit.ratio < _PASSED:
            yield (
                f"{row.engine} took {row.to_limit.ratio:.2f} times as long as {row.limit} in "
                f"{phase_text(row.phase)} of {row.workload} at {row.target}: the limit was beaten, "
                "it is no limit there"
            )


def _here(request: Asked, take: Callable[[Told], None]) -> dict[str, Any]:
    homes = [Home(target) for target in request.targets]
    check_fits(request, homes, request.ranks)
    with cleaned(homes, keep=request.keep):
        machine = describe(_local_directory(homes))
        with tempfile.TemporaryDirectory(prefix="ckptfs-bench-") as scratch:
            run_ranks(request, scratch, take)
    return machine


def _as_one_of_many(
    request: Asked, take: Callable[[Told], None], first: Callable[[], None] | None
) -> tuple[Asked, dict[str, Any] | None]:
    from ckptfs.bench.clock import together
    from ckptfs.bench.measure import measure_ranks
    from ckptfs.bench.rank import joined_group

    group = joined_group()
    # Every rank made names of homes; those of rank 0 are used.
    request = replace(group.gather(request)[0], ranks=group.size)
    homes = [Home(target) for target in request.targets]
    if first is not None:
        together(group, lambda: first() if group.rank == 0 else None)
    _agree(group.gather(_refused(request, homes) if group.is_first_of_node else None))
    own_homes = [
        h for h in homes if (group.is_first_of_node if h.place.is_local else group.rank == 0)
    ]
    with _undrawn(), cleaned(own_homes, keep=request.keep):
        group.barrier()
        machine = describe(_local_directory(homes)) if group.rank == 0 else None
        measure_ranks(request, group, take)
        group.barrier()
    group.barrier()
    return request, machine


def _agree(errors: Iterable[CkptfsError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _refused(request: Asked, homes: list[Home]) -> CkptfsError | None:
    try:
        check_fits(request, homes, int(os.environ.get("LOCAL_WORLD_SIZE", request.ranks)))
    except CkptfsError as error:
        return error
    return None


def check_fits(request: Asked, homes: list[Home], local_ranks: int) -> None:
    """Raise NoSpaceError or StateError if the benchmark does not fit the storage or memory here.

    local_ranks: how many of the ranks run on this machine.
    """
    largest = most = 0
    for workload in request.workloads:
        size_bytes = workload.made().size_bytes
        saves = (request.loop.steps - 1) // request.loop.every if workload.kind == "loop" else 1
        largest = max(largest, size_bytes)
        most = max(most, size_bytes * saves)
    engines = len(request.engines) or 6
    stored_bytes = (
        sum(w.made().size_bytes for w in request.workloads) * engines if request.keep else 0
    )
    for home in homes:
        home.check_space(most + stored_bytes)
    # The state, the tensors to load into, and what torch.load and others hold in addition.
    needed = 3 * largest * local_ranks // request.ranks
    free = available_memory_bytes()
    if free is not None and needed > free:
        raise StateError(
            f"this needs {size_text(needed)} of memory here, three times the state, and "
            f"{size_text(free)} are available",
            hint="give a smaller --size or --params, or more machines under torchrun",
        )


@contextlib.contextmanager
def cleaned(homes: list[Home], *, keep: bool) -> Iterator[None]:
    """Make the homes, and remove them afterwards, with the directories that were made for them.

    keep: leave what was written if all went well. A failure to remove is raised only if nothing else
    failed.
    """
    made = [_missing(home) for home in homes]
    succeeded = False
    try:
        for home in homes:
            home.make()
        yield
        succeeded = True
    finally:
        if not (keep and succeeded):
            failures: list[StorageError] = []
            for home, directories in zip(homes, made, strict=True):
                try:
                    home.remove()
                except StorageError as error:
                    failures.append(error)
                for directory in directories:
                    with contextlib.suppress(OSError):
                        directory.rmdir()
            if failures and succeeded:
                raise failures[0]


def _missing(home: Home) -> list[Path]:
    """Return those of the target's directory and its parents that do not exist, deepest first."""
    if not home.place.is_local:
        return []
    path = Path(home.place.local_path)
    return [p for p in (path, *path.parents) if not p.exists()]


def _local_directory(homes: list[Home]) -> Path:
    """Return the first home that is a directory, else the temporary directory.

    ``describe`` measures the fsync of its disk.
    """
    return next((home.path for home in homes if home.path is not None), Path(tempfile.gettempdir()))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C.

    So nothing is left behind when a scheduler or the end of a terminal ends the process. A signal that is
    ignored (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    """Disable the progress bar of ckptfs: drawing would take part of the measured time."""
    before = os.environ.get(_PROGRESS)
    os.environ[_PROGRESS] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PROGRESS]
        else:
            os.environ[_PROGRESS] = before
