"""Files of a local directory, sent under their plain names into an attempt.

    Sender(attempt, "/scratch/ckpt").send(names)     read, digest, write: each byte once

On filesystems the names lie in the attempt, which nobody sees. On object stores they are final before
the commit, so each is guarded (``plain``): whoever lost the name stops before the next byte.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from typing import Protocol

import xxhash

from ckptfs.commit.entries import Generation
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import AttemptKeys
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.ops import drive
from ckptfs.commit.plain import Mine, put_plain, still_free
from ckptfs.commit.seat import Known, Seat
from ckptfs.commit.spec import WrittenPart
from ckptfs.events import Counters
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.inflight import WatchedFile, in_flight, walk
from ckptfs.storage.threads import Threads

__all__ = ["BATCHED_BYTES", "PlainNames", "Sender", "files_below"]

_CHUNK_BYTES = 4 << 20
BATCHED_BYTES = 16 << 20  # files up to this are sent or fetched many at a time


def files_below(top: str, skip: str | None = None) -> Iterator[str]:
    """Relative paths of the files below ``top``, sorted; links to directories are not followed."""
    for folder, folders, names in walk(top):
        folders[:] = sorted(f for f in folders if os.path.join(folder, f) != skip)
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), top)


class Target(Protocol):
    """Where files go: an ``Attempt``, after its begin()."""

    @property
    def seat(self) -> Seat:
        """Whose capabilities count."""

    @property
    def storage(self) -> Storage:
        """Rooted at the run."""

    @property
    def keys(self) -> AttemptKeys:
        """Of the save."""

    @property
    def base(self) -> Generation:
        """The generation that the save carries."""

    @property
    def directory(self) -> str:
        """The key that the files' paths are relative to."""


class PlainNames:
    """Puts plain names while they are this attempt's to put. Thread-safe."""

    def __init__(self, attempt: Target) -> None:
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


class _Stopped(Exception):  # noqa: N818 - not an error: another file has that
    """Another file of this rank could not be sent."""


class Sender:
    """Sends files of ``path``, one rank's. domain: the id of the domain that holds them, None: all."""

    def __init__(self, attempt: Target, path: str, domain: str | None = None) -> None:
        self._attempt = attempt
        self._path = path
        self._domain = domain
        self._stopped = threading.Event()
        is_final = attempt.keys.shape is Shape.OBJECT
        self._guard = PlainNames(attempt) if is_final else None

    def send(self, names: Sequence[str]) -> WrittenPart:
        """Local. Send these files; durable on return, names too.

        Small ones eight at a time, larger ones two at a time: one of these keeps a connection pool
        busy by itself. In memory: a chunk for each, and what its writer holds (a small file whole).
        """
        started = time.perf_counter()
        sizes = {name: self._size_bytes(name) for name in names}
        small = [name for name in names if sizes[name] <= BATCHED_BYTES]
        large = [name for name in names if sizes[name] > BATCHED_BYTES]
        self._go_on()  # before the files too: a conflict costs no upload
        found = {**self._send_all(small, sizes, 8), **self._send_all(large, sizes, 2)}
        for folder in sorted({self._key(name).rpartition("/")[0] for name in names}):
            self._attempt.storage.sync(folder)
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

    def _send_all(
        self, names: Sequence[str], sizes: Mapping[str, int], at_once: int
    ) -> dict[str, FileRecord]:
        """Some files, so many at a time. The first failure stops the others and is raised."""
        failures: list[BaseException] = []

        def send(name: str) -> FileRecord:
            try:
                return self._send(name, sizes[name])
            except BaseException as error:
                if not isinstance(error, _Stopped):
                    failures.append(error)
                self._stopped.set()
                raise

        with Threads(at_once, "ckptfs-upload") as pool:
            going = {name: pool.submit(send, name) for name in names}
            try:
                wait(going.values())
            except BaseException:
                # Ctrl-C: nobody may go on writing below a name that is being cleaned up.
                self._stopped.set()
                raise
        if failures:
            raise failures[0]
        return {name: done.result() for name, done in going.items()}

    def _send(self, name: str, size_hint_bytes: int) -> FileRecord:
        storage, key, guard = self._attempt.storage, self._key(name), self._guard
        if self._stopped.is_set():
            raise _Stopped
        storage.make_dir(key.rpartition("/")[0])
        if size_hint_bytes <= BATCHED_BYTES and guard is not None:
            with WatchedFile(os.path.join(self._path, name)) as whole:
                data = whole.read()
            guard.put(key, data)
            digest = xxhash.xxh3_128_hexdigest(data)
            return FileRecord(name, len(data), self._domain, None, digest)
        state, size = xxhash.xxh3_128(), 0
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, max(size_hint_bytes, 1))))
        # Read, not mapped: a file that somebody cuts short while it is mapped kills the process.
        with (
            WatchedFile(os.path.join(self._path, name)) as file,
            storage.open_write(key, size_hint_bytes=size_hint_bytes) as writer,
        ):
            while count := file.readinto(chunk):
                if self._stopped.is_set():
                    raise _Stopped
                state.update(chunk[:count])
                size += count
                writer.write(chunk[:count])
            self._go_on()
        return FileRecord(name, size, self._domain, None, state.hexdigest())

    def _size_bytes(self, name: str) -> int:
        path = os.path.join(self._path, name)
        with in_flight("stat", path):
            return os.path.getsize(path)

    def _key(self, name: str) -> str:
        return f"{self._attempt.directory}/{name}"

    def _go_on(self) -> None:
        if self._guard is not None:
            self._guard.check()
