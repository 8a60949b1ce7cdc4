"""Directories of files with plain names as checkpoints: how ``checkpoint_dir`` makes them a commit.

    mounted filesystem   the user writes into the attempt's directory itself; on leaving, the ranks of
                         a domain divide its files, and sync and digest them
    anything else        every rank gets a directory of its own and uploads it on leaving, each name
                         guarded (``plain_names``), because it is final before the commit

ckptfs did not see these bytes when they were written. So here, and only here, it reads them once more.

A local directory that another program wrote becomes one checkpoint:

    every node     lists the files that it sees in the directory
    coordinator    divides the files: each is sent once per domain, by a rank that sees it
    every rank     sends its share under plain names, and digests files that differ between nodes

On one shared disk all nodes see the same files. On node-local disks each node sees its own files, and a file
that several nodes have under one name (a config, a tokenizer) must have the same bytes everywhere.

    Sender(attempt, "/scratch/ckpt").send(names)     read, digest, write: each byte once

On object stores, a process that has lost a name to another one stops before it writes the next byte.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Protocol

import xxhash

from ckptfs.commit.log.entries import Generation
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import CONTROL, MANIFEST, AttemptKeys
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.plain_names import NameClaim, put_plain, still_free
from ckptfs.commit.save.spec import Committed, SaveSpec, WrittenPart
from ckptfs.commit.session import Known, RunSession
from ckptfs.control.control import Control
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    IncompleteCheckpointError,
    NotFoundError,
    StateError,
)
from ckptfs.events import Counters
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.inflight import WatchedFile, in_flight, walk
from ckptfs.storage.threads import Threads

__all__ = [
    "BATCHED_BYTES",
    "Collector",
    "FilesOfRank",
    "LocalFile",
    "PlainNames",
    "Publication",
    "Sender",
    "collected_files",
    "files_below",
    "leaving_together",
    "list_files",
    "refuse_own",
    "remove_source",
    "share_files",
    "writing_directory",
]

_CHUNK_BYTES = 4 << 20
BATCHED_BYTES = 16 << 20  # files up to this are sent or fetched many at a time


def files_below(top: str, skip: str | None = None) -> Iterator[str]:
    """Yield the relative paths of the files below ``top``, sorted.

    Links to directories are not followed.
    """
    for folder, folders, names in walk(top):
        folders[:] = sorted(f for f in folders if os.path.join(folder, f) != skip)
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), top)


class UploadTarget(Protocol):
    """The destination of files: a ``SaveAttempt``, after its begin()."""

    @property
    def session(self) -> RunSession:
        """The session; its capabilities decide how files are written."""

    @property
    def storage(self) -> Storage:
        """The storage, rooted at the run."""

    @property
    def keys(self) -> AttemptKeys:
        """The keys of the save."""

    @property
    def base(self) -> Generation:
        """The generation that the save carries."""

    @property
    def directory(self) -> str:
        """The key that the files' paths are relative to."""


class PlainNames:
    """Writes files with plain names as long as they belong to this attempt. Thread-safe."""

    def __init__(self, attempt: UploadTarget) -> None:
        self._attempt = attempt
        self._claim = NameClaim(attempt.keys, attempt.base, attempt.session.caps)
        self._known_log = Known()

    def check(self) -> None:
        """Check that the name still belongs to this attempt.

        Raises:
            FencedError: A newer owner took the run.
            CommitConflictError: Another save took the name.
        """
        self._known_log.learn(drive(still_free(self._claim, self._known()), self._attempt.storage))

    def put(self, key: str, data: bytes) -> None:
        """Write one small file, conditionally if the store can."""
        program = put_plain(self._claim, self._known(), key, data)
        self._known_log.learn(drive(program, self._attempt.storage))

    def _known(self) -> LogState | None:
        return self._known_log.state if self._claim.caps.exclusive_create else None


class _SendingStopped(Exception):  # noqa: N818 - not an error: another file has that
    """The send was stopped because another file of this rank could not be sent."""


class Sender:
    """Sends files below ``path`` for one rank.

    domain: The id of the domain that holds the files, or None for all domains.
    """

    def __init__(self, attempt: UploadTarget, path: str, domain: str | None = None) -> None:
        self._attempt = attempt
        self._path = path
        self._domain = domain
        self._stopped = threading.Event()
        is_final = attempt.keys.shape is Shape.OBJECT
        self._guard = PlainNames(attempt) if is_final else None

    def send(self, names: Sequence[str]) -> WrittenPart:
        """Send these files. On return they and their names are durable. Local.

        Small files are sent eight at a time, larger ones two at a time, because one of those keeps
        a connection pool busy by itself. In memory: a chunk for each, and what its writer holds (a
        small file completely).
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
        """Send some files, ``at_once`` at a time. The first failure stops the others."""
        failures: list[BaseException] = []

        def send(name: str) -> FileRecord:
            try:
                return self._send(name, sizes[name])
            except BaseException as error:
                if not isinstance(error, _SendingStopped):
                    failures.append(error)
                self._stopped.set()
                raise

        with Threads(at_once, "ckptfs-upload") as pool:
            futures = {name: pool.submit(send, name) for name in names}
            try:
                wait(futures.values())
            except BaseException:
                # Ctrl-C: no thread may continue to write below a name that is being cleaned up.
                self._stopped.set()
                raise
        if failures:
            raise failures[0]
        return {name: done.result() for name, done in futures.items()}

    def _send(self, name: str, size_hint_bytes: int) -> FileRecord:
        storage, key, guard = self._attempt.storage, self._key(name), self._guard
        if self._stopped.is_set():
            raise _SendingStopped
        storage.make_dir(key.rpartition("/")[0])
        if size_hint_bytes <= BATCHED_BYTES and guard is not None:
            with WatchedFile(os.path.join(self._path, name)) as source:
                data = source.read()
            guard.put(key, data)
            digest = xxhash.xxh3_128_hexdigest(data)
            return FileRecord(name, len(data), self._domain, None, digest)
        state, size = xxhash.xxh3_128(), 0
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, max(size_hint_bytes, 1))))
        # Read, not mapped: if another program truncates a mapped file, this process is killed.
        with (
            WatchedFile(os.path.join(self._path, name)) as file,
            storage.open_write(key, size_hint_bytes=size_hint_bytes) as writer,
        ):
            while count := file.readinto(chunk):
                if self._stopped.is_set():
                    raise _SendingStopped
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


logger = logging.getLogger("ckptfs.commit")


@dataclass(frozen=True, slots=True)
class LocalFile:
    """One file as a node sees it.

    path: Relative. mtime_ns: If it is equal on two nodes, they see one file.
    """

    path: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FilesOfRank:
    """The files of one rank.

    Attributes:
        send: Files that it sends.
        compare: Files that it only digests, because another node sends a different file of the same
            name and size.
    """

    send: tuple[LocalFile, ...] = ()
    compare: tuple[str, ...] = ()


def list_files(top: str) -> tuple[LocalFile, ...]:
    """Return the files below ``top``. A link to a file counts as its target. Local.

    Raises:
        NotFoundError: There is no such directory.
        StateError: Something cannot be committed: a link to a directory (its files would be left
            out), a run of ckptfs, or a name that is no valid path on other storage.
    """
    if not os.path.isdir(top):
        raise NotFoundError("there is no such directory on this node", uri=top)
    if os.path.isdir(os.path.join(top, CONTROL)):
        raise StateError("this is a run, not the directory of one step", uri=top)
    for folder, folders, _ in walk(top):
        linked = next((f for f in folders if os.path.islink(os.path.join(folder, f))), None)
        if linked is not None:
            raise StateError(
                f"{linked} is a link to a directory, and its files would be left out",
                uri=folder,
                hint="put a directory there",
            )
    found = []
    for path in files_below(top):
        if path == MANIFEST:
            continue  # that of the checkpoint that was copied here; the commit writes another
        if "\\" in path or "://" in path or "\0" in path:
            raise StateError(
                f"{path!r} cannot be a name on other storage", uri=top, hint="rename it"
            )
        with in_flight("stat", os.path.join(top, path)):
            stat = os.stat(os.path.join(top, path))
        found.append(LocalFile(path, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def share_files(
    listings: Sequence[tuple[LocalFile, ...] | None],
    nodes: Sequence[str],
    domains: Sequence[Sequence[int]],
) -> tuple[FilesOfRank, ...]:
    """Return what each rank sends. Pure.

    Args:
        listings: The listing of each rank, None for ranks that did not list (one rank of each node
            does).
        nodes: The node of each rank.
        domains: The ranks of each domain.

    Raises:
        StateError: Nodes of one domain hold different files under one name.
        IncompleteCheckpointError: There is no file at all.
    """
    if not any(listings):
        raise IncompleteCheckpointError(
            "there is no file in the directory",
            hint="save after the framework has written its files",
        )
    send: list[list[LocalFile]] = [[] for _ in nodes]
    compare: list[list[str]] = [[] for _ in nodes]
    load = [0] * len(nodes)
    for ranks in domains:
        for holders in _largest_first(_holders(listings, ranks)):
            first = holders[0][1]
            same = [rank for rank, file in holders if file == first]
            for rank, file in holders:
                if file.size_bytes != first.size_bytes:
                    raise StateError(
                        f"ranks {holders[0][0]} and {rank} see different files {first.path!r} "
                        f"({first.size_bytes} and {file.size_bytes} bytes)",
                        hint="put the node or the rank into the file's name",
                    )
                if file != first:
                    compare[rank].append(file.path)
            able = [r for r in ranks if any(nodes[r] == nodes[s] for s in same)]
            chosen = min(able, key=lambda r: (load[r], r))
            # A file costs a few requests whatever its size, so many small ones are divided too.
            load[chosen] += first.size_bytes + 1
            send[chosen].append(first)
    return tuple(FilesOfRank(tuple(s), tuple(c)) for s, c in zip(send, compare, strict=True))


def _holders(
    listings: Sequence[tuple[LocalFile, ...] | None], ranks: Sequence[int]
) -> Mapping[str, list[tuple[int, LocalFile]]]:
    found: dict[str, list[tuple[int, LocalFile]]] = {}
    for rank in ranks:
        for file in listings[rank] or ():
            found.setdefault(file.path, []).append((rank, file))
    return found


def _largest_first(
    holders: Mapping[str, list[tuple[int, LocalFile]]],
) -> list[list[tuple[int, LocalFile]]]:
    return sorted(holders.values(), key=lambda h: (-h[0][1].size_bytes, h[0][1].path))


class Publication:
    """One rank's part of a directory's commit: ``write`` and ``finish`` for ``SaveAttempt.commit``."""

    def __init__(
        self, attempt: SaveAttempt, session: RunSession, path: str, share: FilesOfRank
    ) -> None:
        is_local = session.caps.shape is Shape.FILESYSTEM
        domain = session.placement.mine.id if is_local else None
        self._sender = Sender(attempt, path, domain)
        self._path = path
        self._share = share

    def write(self) -> WrittenPart:
        """Send this rank's files. They are durable on return."""
        part = self._sender.send([file.path for file in self._share.send])
        for file, record in zip(self._share.send, part.files, strict=True):
            if record.size_bytes != file.size_bytes:
                raise StateError(
                    f"{file.path} changed while it was saved: {file.size_bytes} bytes, then "
                    f"{record.size_bytes}",
                    uri=self._path,
                    hint="leave the directory as it is until the save is committed",
                )
        digests = {path: self._digest(path) for path in self._share.compare}
        return replace(part, payload=json.dumps(digests).encode())

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """Check that all nodes have the same bytes under one name. Called on the coordinator."""
        sent = {(f.domain, f.path): f.digest for part in parts for f in part.files}
        for rank, part in enumerate(parts):
            for path, digest in json.loads(part.payload or b"{}").items():
                if digest not in {d for (_, p), d in sent.items() if p == path}:
                    raise StateError(
                        f"rank {rank} sees another file {path!r} than the one that was saved",
                        hint="put the node or the rank into the file's name",
                    )
        return {}

    def _digest(self, path: str) -> str:
        state = xxhash.xxh3_128()
        with WatchedFile(os.path.join(self._path, path)) as file:
            while chunk := file.read(_CHUNK_BYTES):
                state.update(chunk)
        return state.hexdigest()


def remove_source(path: str) -> None:
    """Remove a consumed directory after the commit. Local.

    A failure is only logged, because nothing depends on it.
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s is committed, but the source cannot be removed: %s", path, error)


def refuse_own(path: str, run: str, name: str) -> None:
    """Refuse to consume a directory if removing ``path`` would remove data of the run. Local.

    Raises:
        StateError: It would remove the run, a checkpoint of it, or the future checkpoint ``name``.
    """
    source, root = os.path.realpath(path), os.path.realpath(run)
    final = os.path.join(root, name)
    holds_run = os.path.commonpath([source, final]) in (source, final)
    is_step = os.path.commonpath([source, root]) == root and os.path.isfile(
        os.path.join(source, MANIFEST)
    )
    if holds_run or is_step:
        raise StateError(
            "the directory is part of the run, and cannot be consumed",
            uri=path,
            hint="write it elsewhere, or consume=False",
        )


class Collector(Protocol):
    """Makes a part of the save from a rank's directory: ``path`` is the directory to write to."""

    path: str

    def share_out(self) -> None:
        """Divide the files among the ranks, after every rank has stopped writing. Collective."""

    def write(self) -> WrittenPart:
        """Make this rank's files durable and describe them."""

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """Check the parts against each other. Only the coordinator calls this."""


@contextlib.contextmanager
def collected_files(attempt: SaveAttempt) -> Iterator[Collector]:
    """Yield the collector for this attempt's storage. Call it after ``attempt.begin()``."""
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
def writing_directory(session: RunSession, spec: SaveSpec, done: list[Committed]) -> Iterator[str]:
    """Yield a path to write into, and commit when all ranks have left.

    Collective to enter and to leave. An exception inside, on any rank, commits nothing and is
    raised on all ranks.

    done: Receives the commit.
    """
    attempt = SaveAttempt(session, spec)
    try:
        attempt.begin()
        with contextlib.ExitStack() as stack:
            # A failure to make the directory is covered too: the other ranks wait where they leave.
            with leaving_together(session.control):
                collector = stack.enter_context(collected_files(attempt))
                yield collector.path
            # No rank lists and digests before all ranks have stopped writing.
            collector.share_out()
            done.append(attempt.commit(collector.write, collector.finish))
    except BaseException:
        attempt.abandon()
        raise


@contextlib.contextmanager
def leaving_together(control: Control) -> Iterator[None]:
    """Leave the block on all ranks together. Collective to leave.

    No rank continues before all have left. If one rank raises an error, all ranks raise it.
    """
    try:
        yield
    except BaseException as error:
        # All ranks have a collective error already: with the rank's number it would differ between them.
        if isinstance(error, CkptfsError) and not isinstance(error, CollectiveError):
            error.rank = control.rank if error.rank is None else error.rank
        with contextlib.suppress(Exception):
            control.step("leave", _raiser(error))
        raise
    control.step("leave", lambda: None)


def _raiser(error: BaseException) -> Callable[[], None]:
    def leave() -> None:
        # The other ranks wait at the end of their blocks and get the error from this step.
        raise StateError(f"left its directory by {type(error).__name__}: {error}") from error

    return leave


class _Mounted:
    def __init__(self, attempt: SaveAttempt, path: str) -> None:
        self.path = path
        self._attempt = attempt
        self._skip = os.path.join(path, attempt.save_id)
        self._here: tuple[str, ...] = ()
        self._share: frozenset[str] = frozenset()

    def share_out(self) -> None:
        """Divide the files among the ranks of each domain that see them.

        Over NFS the directory listing of a node may be old; it is certain only about the files that
        this node wrote. So the listings of all nodes count, and a file goes to a rank that can see
        it.
        """
        session = self._attempt.session

        def tell() -> tuple[str, ...] | None:
            if not session.placement.is_node_lead:
                return None
            self._here = tuple(files_below(self.path, self._skip))
            return self._here

        def decide(listed: list[tuple[str, ...] | None]) -> dict[int, list[str]]:
            return _shares(session, listed)

        shares = session.control.step("files", tell, decide)
        self._share = frozenset(shares.get(session.control.rank, ()))

    def write(self) -> WrittenPart:
        """Sync all files that this node may hold dirty, and digest this rank's share of them."""
        started = time.perf_counter()
        session = self._attempt.session
        records, size = [], 0
        for name in sorted(self._share.union(self._here)):
            is_in_share = name in self._share
            with WatchedFile(os.path.join(self.path, name)) as file:
                file.sync()
                if is_in_share:
                    digest, length = _digest(file)
                    size += length
                    records.append(
                        FileRecord(name, length, session.placement.mine.id, None, digest)
                    )
        if session.placement.is_owner:
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
        """Refuse an empty checkpoint: the files were written to another place."""
        return _checked(parts)


def _shares(session: RunSession, listed: list[tuple[str, ...] | None]) -> dict[int, list[str]]:
    """Assign each file of a domain to one of its ranks, on a node that lists it. Pure."""
    nodes = [world.node for world in session.control.worlds]
    shares: dict[int, list[str]] = {}
    for domain in session.placement.domains:
        listing_nodes: dict[str, set[str]] = {}
        for rank in domain.ranks:
            for name in listed[rank] or ():
                listing_nodes.setdefault(name, set()).add(nodes[rank])
        for at, name in enumerate(sorted(listing_nodes)):
            able = [rank for rank in domain.ranks if nodes[rank] in listing_nodes[name]]
            shares.setdefault(able[at % len(able)], []).append(name)
    return shares


class _Uploaded:
    def __init__(self, attempt: SaveAttempt, path: str) -> None:
        self.path = path
        self._sender = Sender(attempt, path)

    def share_out(self) -> None:
        """Do nothing: every rank has a directory of its own."""

    def write(self) -> WrittenPart:
        """Send this rank's files under their plain names."""
        return self._sender.send([file.path for file in list_files(self.path)])

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """Check that no two ranks wrote different files under one name."""
        written: dict[str, tuple[int, str | None]] = {}
        for rank, part in enumerate(parts):
            for record in part.files:
                first, digest = written.setdefault(record.path, (rank, record.digest))
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
            hint="write below the path that the block received",
        )
    return {}
