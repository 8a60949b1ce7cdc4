"""The settings of the write engine for files, each beside the one that ckptfs has.

    python -m benchmarks.windows                                        minutes
    python -m benchmarks.windows --size 20MB --pairs 1 --only "2 MiB"      does it still run?

A process for each setting, all with the same state, saving in turn, each round another one first:

    ckptfs            as it is: windows of 8 MiB, two threads, staging on huge pages, past the page cache
    1 MiB, ...        windows of that size
    1 thread, ...     so many threads
    small pages       staging on pages of 4 KiB: huge ones are switched off for the process
    buffered          through the page cache, by as many threads as there are cores

Inside the clock is one ``ckptfs.save``, durable on return, into a run of its own. CPU seconds are those of the
process with all its threads. Nothing else about a save differs, so a setting that is better here is better.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks import telling
from ckptfs.bench.machine import filesystem
from ckptfs.bench.results import Engine, Result, Sample, Target, Workload
from ckptfs.bench.workloads import make_workload, parse_size

OURS: Final = "ckptfs"
PACKAGES: Final = ("ckptfs", "torch", "numpy", "xxhash")
TURN_S: Final = 300.0
_MIB: Final = 1 << 20
_PR_SET_THP_DISABLE: Final = 41


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs; None is what ckptfs has."""

    window_bytes: int | None = None
    threads: int | None = None
    huge_pages: bool = True
    engine: Literal["auto", "buffered"] = "auto"


SETTINGS: Final = {
    OURS: Setting(),
    **{f"{n} MiB": Setting(window_bytes=n * _MIB) for n in (1, 2, 4, 16)},
    "1 thread": Setting(threads=1),
    "3 threads": Setting(threads=3),
    "4 threads": Setting(threads=4),
    "small pages": Setting(huge_pages=False),
    "buffered": Setting(engine="buffered"),
}


def live(setting: Setting, size_bytes: int, directory: Path, orders: Connection) -> None:
    """One process: save whenever it is told to, answer with seconds and CPU seconds."""
    if not setting.huge_pages:
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    save = saving(setting, size_bytes)
    while (number := orders.recv()) is not None:
        where = directory / f"run-{number}"
        began, cpu = time.perf_counter(), time.process_time()
        save(f"{where}/step")
        found = time.perf_counter() - began, time.process_time() - cpu
        shutil.rmtree(where)
        orders.send(found)


def saving(setting: Setting, size_bytes: int) -> Callable[[str], object]:
    """What saves a state under a URI as the setting has it; for the rest of this process."""
    import ckptfs
    from ckptfs.bench.workloads import make_state
    from ckptfs.storage.io import ParallelWriter
    from ckptfs.storage.local import LocalStorage

    open_parallel = LocalStorage.open_parallel

    def shaped(storage: LocalStorage, key: str, **options: Any) -> ParallelWriter | None:
        writer = open_parallel(storage, key, **options)
        if writer is not None:
            writer.window_bytes = setting.window_bytes or writer.window_bytes
            writer.concurrency = setting.threads or writer.concurrency
        return writer

    LocalStorage.open_parallel = shaped  # type: ignore[method-assign,assignment]
    state = make_state(make_workload("llm", size_bytes=size_bytes))
    return lambda uri: ckptfs.save(state, uri, engine=setting.engine)


@contextmanager
def _worker(setting: Setting, size_bytes: int, directory: Path) -> Iterator[Connection]:
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=live, args=(setting, size_bytes, directory, theirs))
    process.start()
    theirs.close()  # or its death would not be seen here
    try:
        yield mine
        mine.send(None)
        process.join(TURN_S)
    finally:
        process.kill()
        process.join()


def _turn(worker: Connection, number: int) -> tuple[float, float]:
    os.sync()  # what another setting left to the disk must not be written in this one's time
    worker.send(number)
    if not worker.poll(TURN_S):
        raise TimeoutError(f"a save took longer than {TURN_S:.0f} s")
    found: tuple[float, float] = worker.recv()
    return found


def measured(size_bytes: int, pairs: int, names: list[str], within: Path) -> Result:
    """All settings in turn. within: on the disk to be measured."""
    started, load_before = datetime.now(UTC), os.getloadavg()
    workload = make_workload("llm", size_bytes=size_bytes)
    samples: list[Sample] = []
    with ExitStack() as stack:
        root = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptfs-windows-", dir=within))
        )
        workers = {}
        for name in names:
            (root / name).mkdir()
            workers[name] = stack.enter_context(_worker(SETTINGS[name], size_bytes, root / name))
        for number in range(-1, pairs):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                wall_s, cpu_s = _turn(workers[name], number)
                if number >= 0:
                    samples.append(
                        Sample(
                            name, workload.name, "directory", "save", number, wall_s, cpu_s,
                            workload.size_bytes,
                        )
                    )  # fmt: skip
    return Result(
        what="settings of the write engine for files",
        **telling.about("windows", within, PACKAGES, started, load_before),
        settings={"pairs": pairs},
        workloads=(Workload(workload.name, len(workload.tensors), workload.size_bytes),),
        targets=(Target("directory", filesystem(within)),),
        engines=tuple(Engine(name, "", "data, names, commit", "") for name in names),
        samples=tuple(samples),
    )


def main() -> int:
    """Measure, write the result, print the table."""
    options = _options()
    result = measured(options.size, options.pairs, options.only, options.dir)
    telling.finish(result, options.out, "windows")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="settings of the write engine for files")
    parser.add_argument("--size", type=parse_size, default=1_000_000_000, help="of the state: 1GB")
    parser.add_argument("--pairs", type=int, default=5, help="rounds that count; one comes first")
    parser.add_argument(
        "--only", type=_names, default=list(SETTINGS), help=", ".join(SETTINGS) + " (ckptfs always)"
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, help="the result's file")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    wanted = {OURS, *text.split(",")}
    if unknown := wanted - set(SETTINGS):
        raise argparse.ArgumentTypeError(f"no setting is called {', '.join(sorted(unknown))}")
    return [name for name in SETTINGS if name in wanted]


if __name__ == "__main__":
    sys.exit(main())
