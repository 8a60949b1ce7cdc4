"""Files with plain names, written by anybody: how ``checkpoint_dir`` makes them a commit.

    mounted filesystem   the attempt's directory itself is handed out; on leaving, the ranks of a
                         domain sync and digest its files between them
    anything else        every rank gets a directory of its own and uploads it on leaving, each name
                         guarded (``plain``): it is final before the commit

Nobody counted these bytes when they were written, so here, and only here, they are read once more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import BinaryIO, Protocol

import xxhash

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.fold import LogState
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.ops import drive
from ckptfs.commit.plain import Mine, put_plain, still_free
from ckptfs.commit.seat import Known
from ckptfs.commit.spec import WrittenPart
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.events import Counters

__all__ = ["Collector", "collected_files"]

_CHUNK_BYTES = 4 << 20
_SMALL_BYTES = 16 << 20  # files up to this are uploaded many at a time


class Collector(Protocol):
    """What a rank's directory becomes: ``path`` to write to, then a part of the save."""

    path: str

    def write(self) -> WrittenPart:
        """Make this rank's files durable and describe them."""

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """On the coordinator: check the parts against each other."""


@contextlib.contextmanager
def collected_files(attempt: Attempt) -> Iterator[Collector]:
    """The collector for this attempt's storage; call after ``attempt.begin()``."""
    attempt.storage.make_dir(attempt.directory)
    mounted = attempt.storage.local_path(attempt.directory)
    if mounted is not None:
        yield _Mounted(attempt, mounted)
        return
    scratch = tempfile.mkdtemp(prefix="ckptfs-")
    try:
        yield _Uploaded(attempt, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _walk(top: str, skip: str | None) -> Iterator[str]:
    """Relative paths of the files below ``top``, sorted; links to directories are not followed."""
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(f for f in folders if os.path.join(folder, f) != skip)
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), top)


class PlainNames:
    """Puts plain names while they are this attempt's to put. Thread-safe."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._mine = Mine(attempt.keys, attempt.base, attempt.seat.caps)
        self._seen = Known()

    def check(self) -> None:
        """FencedError, CommitConflictError: another's by now."""
        self._seen.learn(drive(still_free(self._mine, self._known()), self._attempt.storage))

    def put(self, key: str, data: bytes) -> None:
        """One small file, conditionally where the store can."""
        program = put_plain(self._mine, self._known(), key, data)
        self._seen.learn(drive(program, self._attempt.storage))

    def _known(self) -> LogState | None:
        return self._seen.state if self._mine.caps.exclusive_create else None


class _Mounted:
    def __init__(self, attempt: Attempt, path: str) -> None:
        self.path = path
        self._attempt = attempt
        self._skip = os.path.join(path, attempt.save_id)

    def write(self) -> WrittenPart:
        """Sync everything that this node may hold dirty; digest this rank's share of the files.

        Only after a barrier: every rank has left the block.
        """
        started = time.perf_counter()
        seat = self._attempt.seat
        ranks = seat.placement.mine.ranks
        share = ranks.index(seat.control.rank)
        records, size = [], 0
        for at, name in enumerate(_walk(self.path, self._skip)):
            mine = at % len(ranks) == share
            if not (mine or seat.placement.is_node_lead):
                continue
            with open(os.path.join(self.path, name), "rb") as file:
                os.fsync(file.fileno())
                if mine:
                    digest, length = _digest(file)
                    size += length
                    records.append(FileRecord(name, length, seat.placement.mine.id, None, digest))
        if seat.placement.is_owner:
            self._sync_folders()
        counters = Counters(
            size_bytes=size,
            payload_bytes=size,
            files=len(records),
            items=len(records),
            sync_s=time.perf_counter() - started,
        )
        return WrittenPart(tuple(records), counters)

    def _sync_folders(self) -> None:
        storage, top = self._attempt.storage, self._attempt.directory
        for folder, _, _ in os.walk(self.path):
            below = os.path.relpath(folder, self.path)
            storage.sync(top if below == "." else f"{top}/{below}")

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """Refuse an empty artifact: somebody wrote it elsewhere."""
        return _checked(parts)


class _Stopped(Exception):  # noqa: N818 - not an error: another upload has that
    """Another file of this rank could not be uploaded."""


class _Uploaded:
    def __init__(self, attempt: Attempt, path: str) -> None:
        self.path = path
        self._attempt = attempt
        self._stopped = threading.Event()
        self._guard = PlainNames(attempt)

    def write(self) -> WrittenPart:
        """Upload this rank's files under their plain names.

        Small ones eight at a time, larger ones two at a time: one of these keeps a connection pool
        busy by itself. In memory: a chunk for each, and what its writer holds (a small file whole).
        """
        started = time.perf_counter()
        names = list(_walk(self.path, skip=None))
        sizes = {name: os.path.getsize(os.path.join(self.path, name)) for name in names}
        small = [name for name in names if sizes[name] <= _SMALL_BYTES]
        large = [name for name in names if sizes[name] > _SMALL_BYTES]
        self._guard.check()  # before the files too: a conflict costs no upload
        found = {**self._upload_all(small, sizes, 8), **self._upload_all(large, sizes, 2)}
        records = [found[name] for name in names]
        size = sum(r.size_bytes for r in records)
        counters = Counters(
            size_bytes=size,
            payload_bytes=size,
            files=len(records),
            items=len(records),
            write_s=time.perf_counter() - started,
        )
        return WrittenPart(tuple(records), counters)

    def _upload_all(
        self, names: Sequence[str], sizes: Mapping[str, int], at_once: int
    ) -> dict[str, FileRecord]:
        """Some files, so many at a time. The first failure stops the others and is raised."""
        failures: list[BaseException] = []

        def upload(name: str) -> FileRecord:
            try:
                return self._upload(name, sizes[name])
            except BaseException as error:
                if not isinstance(error, _Stopped):
                    failures.append(error)
                self._stopped.set()
                raise

        with ThreadPoolExecutor(at_once, thread_name_prefix="ckptfs-upload") as pool:
            going = {name: pool.submit(upload, name) for name in names}
            try:
                wait(going.values())
            except BaseException:
                # Ctrl-C: nobody may go on uploading below a name that is being cleaned up.
                self._stopped.set()
                raise
        if failures:
            raise failures[0]
        return {name: done.result() for name, done in going.items()}

    def _upload(self, name: str, size_hint_bytes: int) -> FileRecord:
        storage, key = self._attempt.storage, f"{self._attempt.directory}/{name}"
        self._go_on()
        storage.make_dir(key.rsplit("/", 1)[0])
        if size_hint_bytes <= _SMALL_BYTES:
            with open(os.path.join(self.path, name), "rb") as whole:
                data = whole.read()
            self._guard.put(key, data)
            return FileRecord(name, len(data), None, None, xxhash.xxh3_128_hexdigest(data))
        digest, size = xxhash.xxh3_128(), 0
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, max(size_hint_bytes, 1))))
        # Read, not mapped: a file that somebody cuts short while it is mapped kills the process.
        with (
            open(os.path.join(self.path, name), "rb", buffering=0) as file,
            storage.open_write(key, size_hint_bytes=size_hint_bytes) as writer,
        ):
            while count := file.readinto(chunk):
                self._go_on()
                digest.update(chunk[:count])
                size += count
                writer.write(chunk[:count])
            self._guard.check()
        return FileRecord(name, size, None, None, digest.hexdigest())

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise _Stopped

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """Two ranks must not have written different files under one name."""
        seen: dict[str, tuple[int, str | None]] = {}
        for rank, part in enumerate(parts):
            for record in part.files:
                first, digest = seen.setdefault(record.path, (rank, record.digest))
                if digest != record.digest:
                    raise StateError(
                        f"ranks {first} and {rank} wrote different files {record.path!r}",
                        hint="put the rank into the file's name",
                    )
        return _checked(parts)


def _digest(file: BinaryIO) -> tuple[str, int]:
    digest, size = xxhash.xxh3_128(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def _checked(parts: list[WrittenPart]) -> Mapping[str, bytes]:
    if not any(part.files for part in parts):
        raise IncompleteCheckpointError(
            "no rank wrote a file into its checkpoint_dir",
            hint="write below the path that the block was given",
        )
    return {}
