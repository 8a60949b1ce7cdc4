"""A committed directory as a local path, for tools that can only ``open`` files.

    mounted, no into    the step directory itself
    elsewhere           one directory per node: its ranks download their shares, and compare every file
                        with its digest while they read it; removed when the last rank has left
    into=               the same, into a directory of the caller that appears complete, and stays

A download without ``into`` goes into a scratch directory:

    <parent>/<prefix>xxxx/      the directory on the local disk that all ranks of a node share
      files/    the downloaded files
      users/    one name per rank, with the pid and start time of its process
      place     the pid namespace in which these pids are valid

The last rank to leave removes it. If the processes were killed, the next fetch on the node removes it, because
no process of its users is alive. No rank waits for another to leave. In memory, each file that is being read
has as many windows as its reader wants to read ahead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from ckptfs.commit.catalog.catalog import LocatedCheckpoint
from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.digests import BlockCheck, Check, FileDigestCheck, decode_digests
from ckptfs.commit.directory_checkpoints.write import BATCHED_BYTES
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import read_limited
from ckptfs.commit.ownership.lease import start_ticks, who_am_i
from ckptfs.commit.session import RunSession
from ckptfs.control.control import Control
from ckptfs.errors import (
    AlreadyExistsError,
    IntegrityError,
    StorageError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import DataReader, Listing, Storage
from ckptfs.storage.inflight import WatchedFile, in_flight
from ckptfs.storage.io import Reach, buffer_pool
from ckptfs.storage.threads import Threads

__all__ = [
    "DownloadItem",
    "DownloadThreads",
    "NodeScratch",
    "Wanted",
    "fetched",
    "items_of",
    "share_items",
    "sweep",
    "windows",
]


_ALIGNED_FROM_BYTES = 1 << 20


class DownloadThreads:
    """Threads and memory for reading ahead, until ``stack`` is left."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._threads: Threads | None = None
        self._buffers: list[memoryview] = []
        stack.callback(self._end)

    def buffers(self, count: int, size_bytes: int, reach: Reach) -> list[memoryview]:
        """Return memory for ``count`` windows, each of at least ``size_bytes``.

        Large windows of a local file get aligned memory, which is read and written past the page
        cache without a copy.
        """
        if reach is Reach.REMOTE or size_bytes < _ALIGNED_FROM_BYTES:
            return [memoryview(bytearray(size_bytes)) for _ in range(count)]
        made = [buffer_pool().acquire(size_bytes) for _ in range(count)]
        self._buffers += made
        return made

    def submit(self, count: int, read: Callable[[], memoryview]) -> Future[memoryview]:
        """Run ``read`` on one of ``count`` threads."""
        if self._threads is None:
            self._threads = Threads(count, "ckptfs-copy")
        return self._threads.submit(read)

    def _end(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        # Not after Ctrl-C in the wait: a read that has not returned would write into memory that is in use
        # by another caller by then.
        for buffer in self._buffers:
            buffer_pool().release(buffer)


def windows(
    reader: DataReader,
    pool: DownloadThreads,
    reading: Callable[[], AbstractContextManager[None]],
    first: int = 0,
    *,
    sharers: int = 1,
    lasting: int = 0,
) -> Iterator[memoryview]:
    """Yield the file's bytes in order, from ``first``.

    Each view keeps its bytes until the next view is requested, or until ``lasting`` more views have
    been.

    sharers: How many files are read at the same time. They share the number of reads that is worth
    having in flight.
    """
    window = max(1, reader.window_bytes)
    # All but the first begin at multiples of the window: direct I/O needs whole pages.
    later = range((first // window + 1) * window, reader.size_bytes, window)
    starts = [first, *later] if first < reader.size_bytes else []
    ahead = max(1, min(reader.concurrency // sharers, len(starts)))
    count = min(ahead + lasting, len(starts))
    spare = pool.buffers(count, min(window, reader.size_bytes), reader.reach)

    def read(start: int, buffer: memoryview) -> memoryview:
        view = buffer[: min(window - start % window, reader.size_bytes - start)]
        with reading():
            reader.read_into(start, view)
        return view

    if ahead == 1:
        for number, start in enumerate(starts):
            yield read(start, spare[number % count])
        return
    under_way: deque[tuple[Future[memoryview], memoryview]] = deque()
    used: deque[memoryview] = deque()
    left = iter(starts)

    def begin() -> None:
        start = next(left, None)
        if start is not None:
            buffer = spare.pop()
            under_way.append((pool.submit(ahead, lambda: read(start, buffer)), buffer))

    try:
        for _ in range(ahead):
            begin()
        while under_way:
            future, buffer = under_way.popleft()
            yield future.result()
            used.append(buffer)
            if len(used) > lasting:
                spare.append(used.popleft())
            begin()
    finally:
        for future, _ in under_way:
            future.cancel()


_FILES, _USERS, _PLACE = "files", "users", "place"


class NodeScratch:
    """The scratch directory of a node, as one of its ranks sees it.

    The lead calls ``make`` and sends the path to the other ranks, which set ``target``.

    Args:
        control: The control plane of all ranks.
        prefix: The beginning of the directory's name.
        parent: The directory to make it in; None is the temporary directory.

    Attributes:
        node: The node of this rank.
        mates: The ranks of the node.
        target: The directory for files; empty until it is known.
    """

    def __init__(self, control: Control, prefix: str, parent: str | None = None) -> None:
        self._control = control
        self._prefix = prefix
        self._parent = parent or tempfile.gettempdir()
        self.node = control.world.node
        self.mates = [r for r, world in enumerate(control.worlds) if world.node == self.node]
        self.target = ""

    @property
    def is_lead(self) -> bool:
        """Whether this rank is the lowest of its node."""
        return self.mates[0] == self._control.rank

    @property
    def path(self) -> str:
        """The directory for files."""
        return self.target

    def make(self) -> str:
        """Make the directory. Only the lead calls this.

        Returns:
            The path for files, which the lead sends to the node's other ranks.
        """
        os.makedirs(self._parent, exist_ok=True)
        place = who_am_i(self._control.world).node
        sweep(self._parent, self._prefix, place)
        top = tempfile.mkdtemp(prefix=self._prefix, dir=self._parent)
        os.mkdir(os.path.join(top, _USERS))
        for rank in self.mates:
            pid = self._control.worlds[rank].pid
            _write(os.path.join(top, _USERS, f"{rank}.{pid}.{start_ticks(pid)}"), "")
        _write(os.path.join(top, _PLACE), place)
        self.target = os.path.join(top, _FILES)
        os.mkdir(self.target)
        return self.target

    def leave(self) -> None:
        """End this rank's use of the directory. The node's last rank to leave removes it."""
        top = os.path.dirname(self.target)
        users = os.path.join(top, _USERS)
        with contextlib.suppress(OSError):
            for name in os.listdir(users):
                if name.startswith(f"{self._control.rank}."):
                    os.unlink(os.path.join(users, name))
            os.rmdir(users)  # succeeds for the last one only
            shutil.rmtree(top, ignore_errors=True)

    def discard(self) -> None:
        """Remove the whole directory after a failure of all ranks. Every rank may call this."""
        if self.target:
            shutil.rmtree(os.path.dirname(self.target), ignore_errors=True)


def sweep(parent: str, prefix: str, place: str) -> None:
    """Remove scratch directories if no process that uses them is alive. Local.

    place: The pid namespace of this process. Directories of another container are left alone,
    because its pids mean nothing here.
    """
    for name in os.listdir(parent):
        top = os.path.join(parent, name)
        if not name.startswith(prefix) or _read(os.path.join(top, _PLACE)) != place:
            continue
        with contextlib.suppress(OSError):
            users_dir = os.path.join(top, _USERS)
            # No users directory: the last user was killed while it removed the rest.
            users = (
                [u.split(".") for u in os.listdir(users_dir)] if os.path.isdir(users_dir) else []
            )
            if not any(start_ticks(int(pid)) == ticks for _, pid, ticks in users):
                shutil.rmtree(top, ignore_errors=True)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


_PREFIX = "ckptfs-read-"
Wanted = Callable[[str, Sequence[int]], bool]  # a path, and the ranks of the node
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class DownloadItem:
    """One file to download.

    Attributes:
        path: The path, relative to the checkpoint.
        key: The key in the storage.
        size_bytes: The committed size; None for a file that the manifest does not list.
        record: The committed record; None for a file that the manifest does not list, such as one
            that a driver wrote with ``save_object``.
        digests: The key of the sidecar, or None.
    """

    path: str
    key: str
    size_bytes: int | None = None
    record: FileRecord | None = None
    digests: str | None = None


def items_of(
    storage: Storage, found: LocatedCheckpoint, domain: str | None
) -> tuple[DownloadItem, ...]:
    """Return the files of a directory that are in this domain. Local.

    These are the listed files of this domain, and the files next to them that the manifest does not
    list.

    Raises:
        UnsupportedError: The checkpoint shares files with other checkpoints.
    """
    items: dict[str, DownloadItem] = {}
    manifest = found.manifest
    for record in () if manifest is None else manifest.files:
        if record.is_shared:
            raise UnsupportedError(
                "the checkpoint shares files with others, so it is not a directory of its own",
                uri=storage.uri(found.home),
                hint="load it with ckptfs.load, or save with unchanged='write'",
            )
        if record.domain in (None, domain) or domain is None:
            sidecar = None if record.digests is None else f"{found.home}/{record.digests}"
            key = file_key(record, found.home)
            # Each domain has its own `.metadata` under one path: it is not known which of them is here.
            known = None if record.path in items else record.size_bytes
            checked = None if record.path in items else record
            items[record.path] = DownloadItem(record.path, key, known, checked, sidecar)
    for path in _below(storage, found.home, "", set()):
        items.setdefault(path, DownloadItem(path, f"{found.home}/{path}"))
    return tuple(items[path] for path in sorted(items))


def _below(
    storage: Storage, home: str, folder: str, visited: set[tuple[int, int]]
) -> Iterator[str]:
    """Yield the files below a folder, also through links to directories.

    Links are followed if ``storage`` follows them. visited: The directories that links led to.

    Raises:
        SymlinkError: A link leads to one of them again. Otherwise a maze of links would have as
            many paths as there are ways through it.
        StorageError: A name cannot be requested from the storage, so the fetched files would be
            incomplete.
    """
    entries = storage.list(f"{home}/{folder}".rstrip("/"))
    if isinstance(entries, Listing) and entries.passed_by:
        raise StorageError(
            "the checkpoint cannot be fetched completely: no key can have the name "
            f"{entries.passed_by[0]!a}",
            errno=errno.EILSEQ,
            uri=storage.uri(f"{home}/{folder}".rstrip("/")),
            hint="rename that file or directory, or remove it",
        )
    for entry in entries:
        path = f"{folder}/{entry.name}".lstrip("/")
        if not entry.is_dir:
            yield path
            continue
        where = storage.local_path(f"{home}/{path}") if entry.is_link else None
        if where is not None:
            found = os.stat(where)
            if (found.st_dev, found.st_ino) in visited:
                raise SymlinkError(
                    f"{where} leads to the same directory as another link",
                    uri=storage.uri(f"{home}/{path}"),
                    hint="leave one link to it",
                )
            visited.add((found.st_dev, found.st_ino))
        yield from _below(storage, home, path, visited)


def share_items(
    items: Sequence[DownloadItem], sharers: int
) -> tuple[tuple[DownloadItem, ...], ...]:
    """Return what each of a node's ranks downloads. Pure.

    Files are assigned from the largest to the smallest, each to the least loaded rank.
    """
    shares: list[list[DownloadItem]] = [[] for _ in range(sharers)]
    load = [0] * sharers
    for item in sorted(items, key=lambda i: (-(i.size_bytes or 0), i.path)):
        least = min(range(sharers), key=lambda n: (load[n], n))
        load[least] += (item.size_bytes or 0) + 1
        shares[least].append(item)
    return tuple(tuple(share) for share in shares)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a node's lead prepared: the target directory, and the files to download."""

    node: str
    target: str
    items: tuple[DownloadItem, ...]


@contextlib.contextmanager
def fetched(
    session: RunSession,
    found: LocatedCheckpoint,
    *,
    into: str | None = None,
    scratch: str | None = None,
    only: Wanted | None = None,
    follow_links: bool = False,
) -> Iterator[str]:
    """Yield a path with the files of ``found``. Collective to enter, local to leave, read-only.

    Args:
        session: The session at the run.
        found: The checkpoint.
        into: A directory that does not exist yet, or is empty; one process per node fills it.
        scratch: The directory to download to otherwise; None is the temporary directory.
        only: Says which files this node needs; called on one of its ranks.
        follow_links: Download files outside the checkpoint that links in it lead to; otherwise a
            SymlinkError.

    Yields:
        The path.

    Raises:
        AlreadyExistsError: ``into`` has files.
        CollectiveError: A rank got an IntegrityError or an error of the storage; then nothing is
            left behind.
    """
    storage, control = session.storage, session.control
    mounted = None if into is not None else storage.local_path(found.home)
    if mounted is not None:
        yield mounted
        return
    if not follow_links:
        storage = storage.refusing_links(found.home)
    place = NodeScratch(control, _PREFIX, scratch) if into is None else _Into(control, into)

    def begin() -> _Begun | None:
        if not place.is_lead:
            return None
        items = items_of(storage, found, _domain_of(session))
        wanted = [i for i in items if only is None or only(i.path, place.mates)]
        return _Begun(place.node, place.make(), tuple(wanted))

    try:
        answers = control.step("begin to fetch", begin)
        own = next(begun for begun in answers if begun is not None and begun.node == place.node)
        place.target = own.target
        share = share_items(own.items, len(place.mates))[place.mates.index(control.rank)]
        control.step("fetch", lambda: _download(storage, share, own.target))
        if isinstance(place, _Into):
            publish = partial(place.publish, own.items)
            control.step("publish", lambda: publish() if place.is_lead else None)
    except BaseException:
        place.discard()
        raise
    try:
        yield place.path
    finally:
        place.leave()


def _domain_of(session: RunSession) -> str | None:
    return session.placement.mine.id or None


# -- into a directory of the caller's ---------------------------------------------------------------


class _Into(NodeScratch):
    """A directory of the caller. It appears complete, under its name, and stays."""

    def __init__(self, control: Control, into: str) -> None:
        self._into = os.path.abspath(into)
        parent, name = os.path.split(self._into)
        super().__init__(control, f".{name}.partial-", parent)

    @property
    def path(self) -> str:
        """The path of the directory that the caller gave."""
        return self._into

    def make(self) -> str:
        """See ``NodeScratch.make``.

        Raises:
            AlreadyExistsError: The directory has files already.
        """
        with in_flight("listing", self._into):
            has_files = os.path.isdir(self._into) and bool(os.listdir(self._into))
        if has_files:
            raise AlreadyExistsError(
                "the directory to fetch into has files", uri=self._into, hint="choose another"
            )
        return super().make()

    def publish(self, items: Sequence[DownloadItem]) -> None:
        """Rename the complete directory to its name. Only the lead calls this."""
        try:
            with in_flight("rename", self._into):
                os.rename(self.target, self._into)
        except OSError as error:
            # Another node that shares this disk may have been first. Then the same files are there.
            if not all(os.path.isfile(os.path.join(self._into, item.path)) for item in items):
                raise AlreadyExistsError(
                    f"the fetched directory cannot get its name: {error}", uri=self._into
                ) from error
        self.discard()

    def leave(self) -> None:
        """Do nothing: the directory stays."""


# -- over the wire ---------------------------------------------------------------------------------


def _download(storage: Storage, share: Sequence[DownloadItem], target: str) -> None:
    """Download this rank's files, several small ones at a time, a large one by itself. Local."""
    for folder in {os.path.dirname(os.path.join(target, item.path)) for item in share}:
        with in_flight("mkdir", folder):
            os.makedirs(folder, exist_ok=True)
    small = [i for i in share if i.size_bytes is not None and i.size_bytes <= BATCHED_BYTES]
    large = [i for i in share if i not in small]
    with Threads(_AT_ONCE, "ckptfs-fetch") as pool:
        futures = [pool.submit(_one, storage, item, target) for item in small]
        try:
            for item in large:
                _one(storage, item, target)
            for done in futures:
                done.result()
        finally:
            for done in futures:
                done.cancel()


def _one(storage: Storage, item: DownloadItem, target: str) -> None:
    check = _check_of(storage, item)
    with (
        contextlib.ExitStack() as stack,
        storage.open_read(item.key) as reader,
        WatchedFile(os.path.join(target, item.path), "wb") as file,
    ):
        if item.size_bytes is not None and reader.size_bytes != item.size_bytes:
            raise _damaged_at(storage, item)(
                f"it has {reader.size_bytes} bytes, {item.size_bytes} were committed"
            )
        for data in windows(reader, DownloadThreads(stack), contextlib.nullcontext):
            check.update(data)
            _write_all(file, data)
        check.finish()


def _write_all(file: WatchedFile, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += file.write(data[at:])


def _check_of(storage: Storage, item: DownloadItem) -> Check:
    if item.record is None:
        return Check()
    damaged = _damaged_at(storage, item)
    if item.digests is not None:
        raw = read_limited(storage, item.digests)
        return BlockCheck(decode_digests(raw, storage.uri(item.digests)), damaged)
    digest = item.record.digest
    return Check() if digest is None else FileDigestCheck(digest, damaged)


def _damaged_at(storage: Storage, item: DownloadItem) -> Callable[[str], IntegrityError]:
    def damaged(why: str) -> IntegrityError:
        return IntegrityError(
            f"{item.path} differs from what was committed: {why}",
            uri=storage.uri(item.key),
            hint="the file was changed after the commit; restore it or read another checkpoint",
        )

    return damaged
