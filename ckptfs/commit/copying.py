"""The bytes of a copy: who reads which file, and each compared with its digests as it passes by.

    manifest    __0_0.distcp + .xxh3   __1_0.distcp + .xxh3   ...
    tasks       a data file and its sidecar are one; .metadata is written anew
    shares      a domain's files among the ranks of that domain, by size: each byte is read once
    one task    copy_file.py: reads ahead -> compared, block by block -> one writer

What differs from its digests is an IntegrityError before the copied file gets its name, so a damaged
source is never committed as a copy. In memory: of each file under way, as many windows as its reader
wants, and what its writer holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait

from ckptfs.commit.copy_file import FileCopier
from ckptfs.commit.copy_spec import (
    CopyTask,
    Readable,
    StoppedError,
    Tally,
    Writable,
    new_path,
)
from ckptfs.commit.layout import METADATA
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.commit.spec import WrittenPart
from ckptfs.events import Counters
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.threads import Threads

__all__ = [
    "CopyTask",
    "Readable",
    "Tally",
    "Writable",
    "copy_share",
    "new_path",
    "share_out",
    "tasks_of",
]


def tasks_of(manifest: Manifest) -> tuple[CopyTask, ...]:
    """What is to be copied of a save: every listed file but ``.metadata``. Pure.

    On node-local disks every domain lists its own copies of replicated items; all are copied.
    """
    by_place = {(f.path, f.domain): f for f in manifest.files}
    beside = {(f.digests, f.domain) for f in manifest.files if f.digests is not None}
    metadata = f"{manifest.save_id}/{METADATA}"
    tasks = {
        f.path: CopyTask(f, None if f.digests is None else by_place.get((f.digests, f.domain)))
        for f in manifest.files
        if f.path != metadata and (f.path, f.domain) not in beside
    }
    return tuple(tasks.values())


def share_out(
    tasks: Sequence[CopyTask], readers: Mapping[str | None, Sequence[int]], ranks: int
) -> tuple[tuple[CopyTask, ...], ...]:
    """Which rank copies which files: the largest first, each to the least loaded rank that sees it.
    Pure; every rank comes to the same answer.

    readers: the ranks that see a domain's files; None: files that every domain has.
    """
    shares: list[list[CopyTask]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    order = sorted(tasks, key=lambda t: (-t.size_bytes, t.record.path, t.record.domain or ""))
    for task in order:
        rank = min(readers[task.record.domain], key=lambda r: (load[r], r))
        # A file costs a few requests whatever its size: many small ones are shared out too.
        load[rank] += task.size_bytes + 1
        shares[rank].append(task)
    return tuple(tuple(share) for share in shares)


def copy_share(
    tasks: Sequence[CopyTask],
    source: Readable,
    target: Writable,
    source_id: str,
    stopped: threading.Event | None = None,
    *,
    meter: Meter = SILENT,
    jobs: int = 1,
    tally: Tally | None = None,
) -> WrittenPart:
    """Local. Copy this rank's files below ``target.prefix``; durable on return, names too.

    meter: counts their bytes. jobs: files at once. tally: what was sent, and what was there.

    IntegrityError, ManifestError: the source is damaged. IncompleteCheckpointError: a file of it is
    missing or cannot be read. StateError: ``stopped`` was set. Else the target's errors. Files that
    were copied before stay in the attempt: nobody commits it, or who goes on with it finds them.
    """
    started = time.perf_counter()
    copier = FileCopier(
        source,
        target,
        source_id,
        stopped=stopped,
        meter=meter,
        tally=tally or Tally(),
        at_once=max(1, min(jobs, len(tasks))),
    )
    files: list[FileRecord] = []
    if jobs == 1:
        for task in tasks:
            files += copier.copy(task)
    else:
        files += _all_at_once(copier, tasks, jobs)
    for folder in sorted({target.key(f.path).rpartition("/")[0] for f in files}):
        target.storage.sync(folder)
    size = sum(f.size_bytes for f in files)
    counters = Counters(
        size_bytes=size,
        payload_bytes=sum(t.record.size_bytes for t in tasks),
        files=len(files),
        items=len(tasks),
        write_s=time.perf_counter() - started,
    )
    return WrittenPart(tuple(files), counters)


def _all_at_once(copier: FileCopier, tasks: Sequence[CopyTask], jobs: int) -> Iterator[FileRecord]:
    """Some files at a time. The first failure stops the others and is raised."""
    failures: list[BaseException] = []

    def copy(task: CopyTask) -> list[FileRecord]:
        try:
            return copier.copy(task)
        except BaseException as error:
            if not isinstance(error, StoppedError):
                failures.append(error)
            copier.give_up.set()
            raise

    with Threads(jobs, "ckptfs-file") as pool:
        going = [pool.submit(copy, task) for task in tasks]
        try:
            wait(going)
        except BaseException:
            copier.give_up.set()  # Ctrl-C: nothing more is written
            raise
    if failures:
        raise failures[0]
    for done in going:
        yield from done.result()
