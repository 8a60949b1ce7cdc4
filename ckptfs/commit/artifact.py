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
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import xxhash

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.publishing import list_files
from ckptfs.commit.seat import Seat
from ckptfs.commit.sending import Sender, files_below
from ckptfs.commit.spec import Committed, SaveSpec, WrittenPart
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    IncompleteCheckpointError,
    StateError,
)
from ckptfs.events import Counters
from ckptfs.storage.inflight import WatchedFile, walk
from ckptfs.topology.control import Control

__all__ = ["Collector", "collected_files", "leaving_together", "writing_directory"]

_CHUNK_BYTES = 4 << 20


class Collector(Protocol):
    """What a rank's directory becomes: ``path`` to write to, then a part of the save."""

    path: str

    def share_out(self) -> None:
        """Collective, when every rank has stopped writing: which files there are, and whose."""

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


@contextlib.contextmanager
def writing_directory(seat: Seat, spec: SaveSpec, done: list[Committed]) -> Iterator[str]:
    """Collective to enter and to leave. Yields a path to write into; committed when all have left.

    done: gets the commit. An exception inside, on any rank, commits nothing and is raised on all.
    """
    attempt = Attempt(seat, spec)
    try:
        attempt.begin()
        with contextlib.ExitStack() as stack:
            # Also what fails while the directory is made: the others wait where they leave.
            with leaving_together(seat.control):
                collector = stack.enter_context(collected_files(attempt))
                yield collector.path
            # Nobody lists and digests before everybody has stopped writing.
            collector.share_out()
            done.append(attempt.commit(collector.write, collector.finish))
    except BaseException:
        attempt.abandon()
        raise


@contextlib.contextmanager
def leaving_together(control: Control) -> Iterator[None]:
    """Collective to leave: nobody goes on before all have left, and what one raises all hear of."""
    try:
        yield
    except BaseException as error:
        # A collective error is all ranks' already: with one's number it would differ between them.
        if isinstance(error, CkptfsError) and not isinstance(error, CollectiveError):
            error.rank = control.rank if error.rank is None else error.rank
        with contextlib.suppress(Exception):
            control.step("leave", _raiser(error))
        raise
    control.step("leave", lambda: None)


def _raiser(error: BaseException) -> Callable[[], None]:
    def leave() -> None:
        # The others wait at the end of their blocks: this is how they hear of it.
        raise StateError(f"left its directory by {type(error).__name__}: {error}") from error

    return leave


class _Mounted:
    def __init__(self, attempt: Attempt, path: str) -> None:
        self.path = path
        self._attempt = attempt
        self._skip = os.path.join(path, attempt.save_id)
        self._here: tuple[str, ...] = ()
        self._mine: frozenset[str] = frozenset()

    def share_out(self) -> None:
        """A node's listing is sure of nothing but what that node has written: over NFS a directory may
        look as it did a moment ago. So all of them count, and a file goes to a rank that can see it.
        """
        seat = self._attempt.seat

        def tell() -> tuple[str, ...] | None:
            if not seat.placement.is_node_lead:
                return None
            self._here = tuple(files_below(self.path, self._skip))
            return self._here

        def decide(told: list[tuple[str, ...] | None]) -> dict[int, list[str]]:
            return _shares(seat, told)

        shares = seat.control.step("files", tell, decide)
        self._mine = frozenset(shares.get(seat.control.rank, ()))

    def write(self) -> WrittenPart:
        """Sync everything that this node may hold dirty; digest this rank's share of the files."""
        started = time.perf_counter()
        seat = self._attempt.seat
        records, size = [], 0
        for name in sorted(self._mine.union(self._here)):
            mine = name in self._mine
            with WatchedFile(os.path.join(self.path, name)) as file:
                file.sync()
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
        for folder, _, _ in walk(self.path):
            below = os.path.relpath(folder, self.path)
            storage.sync(top if below == "." else f"{top}/{below}")

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """Refuse an empty artifact: somebody wrote it elsewhere."""
        return _checked(parts)


def _shares(seat: Seat, told: list[tuple[str, ...] | None]) -> dict[int, list[str]]:
    """Each file of a domain to one of its ranks, on a node that lists it. Pure."""
    nodes = [world.node for world in seat.control.worlds]
    shares: dict[int, list[str]] = {}
    for domain in seat.placement.domains:
        seen: dict[str, set[str]] = {}
        for rank in domain.ranks:
            for name in told[rank] or ():
                seen.setdefault(name, set()).add(nodes[rank])
        for at, name in enumerate(sorted(seen)):
            able = [rank for rank in domain.ranks if nodes[rank] in seen[name]]
            shares.setdefault(able[at % len(able)], []).append(name)
    return shares


class _Uploaded:
    def __init__(self, attempt: Attempt, path: str) -> None:
        self.path = path
        self._sender = Sender(attempt, path)

    def share_out(self) -> None:
        """Every rank has a directory of its own."""

    def write(self) -> WrittenPart:
        """Send this rank's files under their plain names."""
        return self._sender.send([file.path for file in list_files(self.path)])

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


def _digest(file: WatchedFile) -> tuple[str, int]:
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
