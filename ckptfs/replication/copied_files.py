"""The bytes of a copy: which rank reads which file; each is compared with its digests on the way.

    manifest    __0_0.distcp + .xxh3   __1_0.distcp + .xxh3   ...
    tasks       a data file and its sidecar are one task; .metadata is not copied but written again
    shares      a domain's files among the ranks of that domain, by size: each byte is read once
    one task    FileCopier: reads ahead -> compared, block by block -> a thread that writes

A difference from the digests is an IntegrityError before the copied file gets its name, so a
damaged source is never committed as a copy. Memory is used for each file under way: as many windows
as its reader wants, two that wait to be written, and what its writer holds. From disk to disk no
byte is copied in memory: a window is read past the page cache, compared, and written from the same
place past the cache.

With ``target.kept``, a copy that dies leaves what it wrote, and the next one continues from that:

    whole       the file is there with its size: it is read again and compared. On an object store below
                the save_id this is not needed: the file was compared before it was completed, and no
                other program writes to that key
    begun       filesystems: what is there is compared block by block, and the rest is copied;
                elsewhere the file starts over

The bytes of a file are the same in each try: its path has the save_id of the attempt, and the
source is immutable.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial

from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.digests import BlockCheck, Check, FileDigestCheck, FileDigests, decode_digests
from ckptfs.commit.directory_checkpoints.read import DownloadThreads, windows
from ckptfs.commit.directory_checkpoints.write import BATCHED_BYTES, PlainNames
from ckptfs.commit.manifest import FileRecord, Manifest, digest_of
from ckptfs.commit.operations import read_limited
from ckptfs.commit.paths import METADATA
from ckptfs.commit.save.spec import WrittenPart
from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    IncompleteCheckpointError,
    IntegrityError,
    NotFoundError,
    StateError,
    StorageError,
    SymlinkError,
    TransientError,
)
from ckptfs.events import Counters
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.base import DataReader, DataWriter, Shape, Storage
from ckptfs.storage.threads import Pump, Threads

__all__ = [
    "CopyTask",
    "FileCopier",
    "Readable",
    "StoppedError",
    "Tally",
    "Writable",
    "copy_share",
    "new_path",
    "share_out",
    "tasks_of",
]


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One file to copy, with the sidecar of its digests, as the source's manifest lists them."""

    record: FileRecord
    sidecar: FileRecord | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of both files."""
        return self.record.size_bytes + (0 if self.sidecar is None else self.sidecar.size_bytes)


@dataclass(frozen=True, slots=True)
class Readable:
    """Where a rank reads the source's files. ``home`` is the one that ``catalog.find`` returns."""

    storage: Storage
    home: str
    rank: int

    def key(self, record: FileRecord) -> str:
        """Return the key of a listed file."""
        return file_key(record, self.home)


@dataclass(frozen=True, slots=True)
class Writable:
    """Where a rank writes the copy: ``prefix`` of the attempt (ends with "/"), its save_id, domain.

    ``plain``: the files keep their names, directly below ``prefix``. ``guard`` checks each of these
    first, if names are final before the commit. ``kept``: unfinished files outlive this process.
    """

    storage: Storage
    prefix: str
    save_id: str
    domain: str | None
    plain: bool = False
    guard: PlainNames | None = None
    kept: bool = False

    @property
    def is_its_alone(self) -> bool:
        """Whether a file with its name there is surely whole and of this attempt.

        Object stores complete only files that were compared, and these keys contain the save_id. A
        plain name may be another program's.
        """
        return not self.plain and self.storage.capabilities.shape is Shape.OBJECT

    def path(self, record: FileRecord, source_id: str) -> str:
        """Return a file's path in the copy."""
        return record.path if self.plain else new_path(record, source_id, self.save_id)

    def key(self, path: str) -> str:
        """Return where a file of the copy is until the commit."""
        return self.prefix + (path if self.plain else path.partition("/")[2])


@dataclass(slots=True)
class Tally:
    """The totals of copying.

    Attributes:
        sent_bytes: Bytes that went to the target.
        existing_bytes: Bytes that were there from an earlier try.
        digests: How many digests were compared.
    """

    sent_bytes: int = 0
    existing_bytes: int = 0
    digests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, sent_bytes: int = 0, existing_bytes: int = 0, digests: int = 0) -> None:
        """Add to the totals, from any thread."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.existing_bytes += existing_bytes
            self.digests += digests


class StoppedError(StateError):
    """The copy was given up between two reads."""


def new_path(record: FileRecord, source_id: str, save_id: str) -> str:
    """Return the path of a file in the copy. Pure.

    It is in the copy's own directory, even if the source shares the file.
    """
    first, slash, remainder = record.path.partition("/")
    if not slash:
        return f"{save_id}/{first}"  # a file of torch's own writer
    # Two writers of shared files may have used one name.
    return f"{save_id}/{remainder}" if first == source_id else f"{save_id}/{first}.{remainder}"


_LOOK_BYTES = 4 << 20
_UNWRITTEN = 2  # windows that were compared: one is being written, one waits for it


class FileCopier:
    """Copies one rank's files. Several threads may share it."""

    def __init__(
        self,
        source: Readable,
        target: Writable,
        source_id: str,
        *,
        stopped: threading.Event | None,
        meter: Meter,
        tally: Tally,
        at_once: int = 1,
    ) -> None:
        self._source, self._target, self._source_id = source, target, source_id
        self._stopped, self._meter, self._tally = stopped, meter, tally
        self._at_once = at_once
        self.give_up = threading.Event()  # set by the thread that fails, so that the others end too

    def copy(self, task: CopyTask) -> list[FileRecord]:
        """Copy one file and its sidecar; return them as the copy's manifest lists them.

        Errors are those of copy_share.
        """
        self._go_on(task.record)
        sidecar = b""
        if task.sidecar is not None:
            with _reading(self._source, task.sidecar):
                sidecar = read_limited(self._source.storage, self._source.key(task.sidecar))
        made = self._copy_data(_Checks(task, sidecar, self._source))
        if task.sidecar is None:
            return [made]
        self._go_on(task.sidecar)
        sidecar_path = self._target.path(task.sidecar, self._source_id)
        key = self._target.key(sidecar_path)
        with self._target.storage.open_write(key, size_hint_bytes=len(sidecar)) as to:
            to.write(sidecar)
        self._tally.add(sent_bytes=len(sidecar))
        return [
            replace(made, digests=sidecar_path),
            FileRecord(sidecar_path, len(sidecar), self._target.domain, None, digest_of(sidecar)),
        ]

    def _copy_data(self, checks: _Checks) -> FileRecord:
        record, target = checks.record, self._target
        path = target.path(record, self._source_id)
        if target.plain:
            self._make_dir(target.key(path).rpartition("/")[0])
        digest = self._digest_if_complete(checks, path) if target.kept else None
        if digest is None:
            digest = self._bring(checks, path)
        return FileRecord(path, record.size_bytes, target.domain, None, digest or None)

    def _make_dir(self, folder: str) -> None:
        """Make the directory of a plain name.

        On filesystems this raises NotFoundError if the attempt is gone: another process has
        committed the same copy, and a new directory there would be merged over that copy.
        """
        target = self._target
        attempt = target.prefix.rstrip("/")
        if target.guard is None:
            target.storage.stat(attempt)
            if folder == attempt:
                return
        target.storage.make_dir(folder)

    # -- what is there already ---------------------------------------------------------------

    def _digest_if_complete(self, checks: _Checks, path: str) -> str | None:
        """Return the digest of a file that an earlier try copied; None if it is not there whole.

        The digest is "" if the sidecar has the digests.
        """
        record, target = checks.record, self._target
        key = target.key(path)
        try:
            if target.storage.stat(key).size_bytes != record.size_bytes:
                return None
        except NotFoundError:
            return None
        try:
            if target.is_its_alone:
                check = Check()
            else:
                check = self._through(target.storage, key, checks.fresh())
            digest = self._digest_of(checks, check)
        except IntegrityError:
            return None  # not whole, perhaps after a power cut: it is copied again
        self._meter.advance(record.size_bytes)
        self._tally.add(existing_bytes=record.size_bytes, digests=check.compared)
        return digest

    def _digest_of(self, checks: _Checks, present: Check) -> str | None:
        """Return the digest of a file that is there; None if it differs from the source."""
        record = checks.record
        if checks.digests is not None:
            return ""
        if record.digest is not None:
            return record.digest
        source = self._source
        with _reading(source, record):
            read = self._through(
                source.storage, source.key(record), FileDigestCheck(None, checks.damaged)
            )
        digest = _file_digest(read)
        same = not isinstance(present, FileDigestCheck) or _file_digest(present) == digest
        return digest if same else None

    def _through(self, storage: Storage, key: str, check: Check) -> Check:
        """Pass all of a file through a check, and return the check."""
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(storage.open_read(key))
            for data in windows(reader, DownloadThreads(stack), contextlib.nullcontext):
                check.update(data)
        check.finish()
        return check

    # -- bringing it -------------------------------------------------------------------------

    def _bring(self, checks: _Checks, path: str) -> str:
        source, record, target = self._source, checks.record, self._target
        with _reading(source, record):
            reader = source.storage.open_read(source.key(record))
        with reader, contextlib.ExitStack() as stack:
            if reader.size_bytes != record.size_bytes:
                why = f"it has {reader.size_bytes} bytes, but {record.size_bytes} are listed"
                raise checks.damaged(why)
            if target.guard is not None and record.size_bytes <= BATCHED_BYTES:
                return self._put(checks, reader, path, target.guard)
            pool = DownloadThreads(stack)
            try:
                return self._stream(checks, reader, path, pool, trusting=target.kept)
            except IntegrityError:
                if not target.kept or checks.digests is not None:
                    raise
            # One digest of the whole file cannot show which is wrong: what was there, or the source.
            return self._stream(checks, reader, path, pool, trusting=False)

    def _put(self, checks: _Checks, reader: DataReader, path: str, guard: PlainNames) -> str:
        data = memoryview(bytearray(reader.size_bytes))
        check = checks.fresh()
        if data:
            with _reading(self._source, checks.record):
                reader.read_into(0, data)
        check.update(data)
        check.finish()
        guard.put(self._target.key(path), bytes(data))
        self._meter.advance(len(data))
        self._tally.add(sent_bytes=len(data), digests=check.compared)
        return _file_digest(check)

    def _stream(
        self,
        checks: _Checks,
        reader: DataReader,
        path: str,
        pool: DownloadThreads,
        *,
        trusting: bool,
    ) -> str:
        record, target = checks.record, self._target
        key = target.key(path)
        writer = (
            target.storage.open_kept(key, size_bytes=record.size_bytes)
            if target.kept
            else target.storage.open_write(key, size_hint_bytes=record.size_bytes)
        )
        try:
            with writer:
                check, first = self._resumed(checks, writer) if trusting else (checks.fresh(), 0)
                reading = partial(_reading, self._source, record)
                # What is read but not written is lost with the process: read ahead as little as possible.
                ahead = windows(
                    reader, pool, reading, first, sharers=self._at_once, lasting=_UNWRITTEN
                )
                with Pump(writer) as pump:
                    for data in ahead:
                        self._go_on(record)
                        check.update(data)
                        pump.write(data)
                        self._meter.advance(len(data))
                # Before the file gets its name: no reader may find a damaged copy.
                check.finish()
                if target.guard is not None:
                    target.guard.check()
        except StorageError as error:
            # Another process may have completed the same file of the same copy. After any other error
            # the file there may be the wrong one that this file was to replace.
            digest = (
                self._digest_if_complete(checks, path)
                if target.kept and _was_removed(error)
                else None
            )
            if digest is None:
                raise
            return digest
        resumed_bytes = first + writer.spared_bytes
        self._tally.add(
            sent_bytes=record.size_bytes - resumed_bytes,
            existing_bytes=resumed_bytes,
            digests=check.compared,
        )
        return _file_digest(check)

    def _resumed(self, checks: _Checks, writer: DataWriter) -> tuple[Check, int]:
        """Compare what an earlier try left; return the check to continue with, and the offset."""
        present_bytes, check = writer.there_bytes, checks.fresh()
        buffer = memoryview(bytearray(min(_LOOK_BYTES, present_bytes)))
        with contextlib.suppress(IntegrityError):
            for at in range(0, present_bytes, _LOOK_BYTES):
                self._go_on(checks.record)
                view = buffer[: min(_LOOK_BYTES, present_bytes - at)]
                writer.read_there(at, view)
                check.update(view)
        if checks.digests is not None:
            first = check.sure_bytes
            check, before = checks.fresh(first), check.compared
            check.compared = before
        elif checks.record.digest is not None:
            first = present_bytes
        else:
            check, first = checks.fresh(), 0  # without a digest it cannot be checked
        writer.skip(first)
        self._meter.advance(first)
        return check, first

    def _go_on(self, record: FileRecord) -> None:
        outside = self._stopped is not None and self._stopped.is_set()
        if outside or self.give_up.is_set():
            raise StoppedError(
                "the copy was stopped half way",
                uri=self._source.storage.uri(self._source.key(record)),
                rank=self._source.rank,
                hint="nothing of it is committed; the next owner of the run copies it",
            )


@dataclass(frozen=True, slots=True)
class _Checks:
    """What one file is compared with."""

    task: CopyTask
    sidecar: bytes
    source: Readable
    digests: FileDigests | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.task.sidecar is not None:
            where = self.source.storage.uri(self.source.key(self.task.sidecar))
            object.__setattr__(self, "digests", decode_digests(self.sidecar, where))
            if self.task.sidecar.digest not in (None, digest_of(self.sidecar)):
                # If it was swapped together with its file, the copy would vouch for both.
                raise _damaged(self.source, self.task.sidecar, "it is not what was committed")

    @property
    def record(self) -> FileRecord:
        """The record of the file."""
        return self.task.record

    @property
    def damaged(self) -> Callable[[str], IntegrityError]:
        """Makes the error that names the file."""
        return lambda why: _damaged(self.source, self.record, why)

    def fresh(self, start: int = 0) -> Check:
        """Return a check that has seen nothing, or everything before ``start``."""
        if self.digests is not None:
            return BlockCheck(self.digests, self.damaged, start)
        return FileDigestCheck(self.record.digest, self.damaged)


def _was_removed(error: StorageError) -> bool:
    """Whether the unfinished file is gone or is another process's, which may have completed it."""
    gone = (NotFoundError, AlreadyExistsError)
    # The error of a vanished upload has the store's own error as its cause.
    return isinstance(error, gone) or isinstance(error.__cause__, NotFoundError)


def _file_digest(check: Check) -> str:
    """Return the digest of a whole file, "" if its blocks have digests."""
    return check.digest if isinstance(check, FileDigestCheck) else ""


@contextlib.contextmanager
def _reading(source: Readable, record: FileRecord) -> Iterator[None]:
    """Raise errors of the source as IncompleteCheckpointError, so that the target is not blamed."""
    try:
        yield
    except (TransientError, AnswerLostError):
        raise  # worth another try, on whichever side it happened
    except StorageError as error:
        raise IncompleteCheckpointError(
            f"{record.path} cannot be copied: {error.message}",
            uri=source.storage.uri(source.key(record)),
            rank=source.rank,
            hint=error.hint
            if isinstance(error, SymlinkError)
            else "restore the file, or continue without a copy of this checkpoint",
        ) from error


def _damaged(source: Readable, record: FileRecord, why: str) -> IntegrityError:
    return IntegrityError(
        f"data file {record.path} is damaged and was not copied: {why}",
        uri=source.storage.uri(source.key(record)),
        rank=source.rank,
        hint="restore the file, or load another checkpoint",
    )


def tasks_of(manifest: Manifest) -> tuple[CopyTask, ...]:
    """Return what is to be copied of a save: every listed file but ``.metadata``. Pure.

    On node-local disks every domain lists its own copies of replicated items; all are copied.
    """
    by_place = {(f.path, f.domain): f for f in manifest.files}
    sidecars = {(f.digests, f.domain) for f in manifest.files if f.digests is not None}
    metadata = f"{manifest.save_id}/{METADATA}"
    tasks = {
        f.path: CopyTask(f, None if f.digests is None else by_place.get((f.digests, f.domain)))
        for f in manifest.files
        if f.path != metadata and (f.path, f.domain) not in sidecars
    }
    return tuple(tasks.values())


def share_out(
    tasks: Sequence[CopyTask], readers: Mapping[str | None, Sequence[int]], ranks: int
) -> tuple[tuple[CopyTask, ...], ...]:
    """Return which rank copies which files. Pure; every rank gets the same answer.

    The largest files come first, each to the least loaded rank that sees it. ``readers`` has the
    ranks that see each domain's files; None: files that every domain has.
    """
    shares: list[list[CopyTask]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    order = sorted(tasks, key=lambda t: (-t.size_bytes, t.record.path, t.record.domain or ""))
    for task in order:
        rank = min(readers[task.record.domain], key=lambda r: (load[r], r))
        # A file costs a few requests whatever its size, so many small ones are shared out too.
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
    """Copy this rank's files below ``target.prefix``. Local; durable on return, names too.

    ``meter`` counts their bytes, ``jobs`` is how many files are copied at once, ``tally`` counts
    what was sent and what was there.

    Raises IntegrityError or ManifestError if the source is damaged, IncompleteCheckpointError if
    one of its files is missing or cannot be read, StateError if ``stopped`` was set, and otherwise
    the target's errors. Files that were copied before stay in the attempt: it is never committed,
    or a later try continues with them.
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
    """Copy several files at a time. The first failure stops the others and is raised."""
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
        futures = [pool.submit(copy, task) for task in tasks]
        try:
            wait(futures)
        except BaseException:
            copier.give_up.set()  # after Ctrl-C nothing more may be written
            raise
    if failures:
        raise failures[0]
    for done in futures:
        yield from done.result()
