"""A committed directory as a local path, for tools that know nothing but ``open``.

    mounted, no into    the step directory itself
    elsewhere           one directory per node: its ranks download their shares, every file compared
                        with its digest as it passes by; removed when the last of them has left
    into=               the same, into a directory of the caller's that appears whole, and stays

What a killed process left in the scratch directory, the next fetch of the node removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ckptfs.commit.catalog import Found
from ckptfs.commit.comparing import BlockCheck, Check, WholeCheck
from ckptfs.commit.digests import decode_digests
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.ops import read_limited
from ckptfs.commit.scratch import NodeScratch
from ckptfs.commit.seat import Seat
from ckptfs.commit.sending import BATCHED_BYTES
from ckptfs.commit.shared_data import file_key
from ckptfs.commit.windows import ReadAhead, windows
from ckptfs.errors import (
    AlreadyExistsError,
    IntegrityError,
    StorageError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import Listing, Storage
from ckptfs.storage.inflight import WatchedFile, in_flight
from ckptfs.storage.threads import Threads
from ckptfs.topology.control import Control

__all__ = ["Item", "Wanted", "fetched", "items_of", "share_items"]

_PREFIX = "ckptfs-read-"
Wanted = Callable[[str, Sequence[int]], bool]  # a path, and the ranks of the node
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Item:
    """One file to download. size_bytes, record: as committed; None for what lies beside it, such as
    a driver's ``save_object``. digests: key of the sidecar.
    """

    path: str
    key: str
    size_bytes: int | None = None
    record: FileRecord | None = None
    digests: str | None = None


def items_of(storage: Storage, found: Found, domain: str | None) -> tuple[Item, ...]:
    """Local. What a directory consists of here: listed files of this domain, and what lies beside.

    UnsupportedError: it shares files with other checkpoints.
    """
    items: dict[str, Item] = {}
    manifest = found.manifest
    for record in () if manifest is None else manifest.files:
        if record.is_shared:
            raise UnsupportedError(
                "the checkpoint shares files with others and is no directory of its own",
                uri=storage.uri(found.home),
                hint="load it with ckptfs.load, or save with unchanged='write'",
            )
        if record.domain in (None, domain) or domain is None:
            sidecar = None if record.digests is None else f"{found.home}/{record.digests}"
            key = file_key(record, found.home)
            # Domains have a `.metadata` each under one path: which one is here cannot be told.
            known = None if record.path in items else record.size_bytes
            checked = None if record.path in items else record
            items[record.path] = Item(record.path, key, known, checked, sidecar)
    for path in _below(storage, found.home, "", set()):
        items.setdefault(path, Item(path, f"{found.home}/{path}"))
    return tuple(items[path] for path in sorted(items))


def _below(
    storage: Storage, home: str, folder: str, visited: set[tuple[int, int]]
) -> Iterator[str]:
    """Files below a folder; through links to directories where ``storage`` follows them.

    visited: the directories that links led to. SymlinkError: a link leads to one of them again. A maze
    of links would otherwise be as many paths as there are ways through it. StorageError: a name cannot be
    asked for, and what was fetched would lack it.
    """
    entries = storage.list(f"{home}/{folder}".rstrip("/"))
    if isinstance(entries, Listing) and entries.passed_by:
        raise StorageError(
            f"the checkpoint cannot be fetched whole: no key can have the name {entries.passed_by[0]!a}",
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
                    f"{where} leads to a directory that another link leads to as well",
                    uri=storage.uri(f"{home}/{path}"),
                    hint="leave one link to it",
                )
            visited.add((found.st_dev, found.st_ino))
        yield from _below(storage, home, path, visited)


def share_items(items: Sequence[Item], sharers: int) -> tuple[tuple[Item, ...], ...]:
    """What each of a node's ranks downloads: the largest first, each to the least loaded. Pure."""
    shares: list[list[Item]] = [[] for _ in range(sharers)]
    load = [0] * sharers
    for item in sorted(items, key=lambda i: (-(i.size_bytes or 0), i.path)):
        least = min(range(sharers), key=lambda n: (load[n], n))
        load[least] += (item.size_bytes or 0) + 1
        shares[least].append(item)
    return tuple(tuple(share) for share in shares)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a node's lead prepared: where to, and what."""

    node: str
    target: str
    items: tuple[Item, ...]


@contextlib.contextmanager
def fetched(
    seat: Seat,
    found: Found,
    *,
    into: str | None = None,
    scratch: str | None = None,
    only: Wanted | None = None,
    follow_links: bool = False,
) -> Iterator[str]:
    """Collective to enter, local to leave, read-only. A path with the files of ``found``.

    into: a directory that does not exist yet, or is empty; one process per node fills it. scratch:
    where else to download to, by default the temporary directory. only: what this node needs of it;
    asked on one of its ranks. follow_links: download what links lead to that lead out of it; a SymlinkError
    otherwise.
    AlreadyExistsError: into has files.
    IntegrityError and the storage's errors come as CollectiveError; then nothing is left behind.
    """
    storage, control = seat.storage, seat.control
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
        items = items_of(storage, found, _domain_of(seat))
        wanted = [i for i in items if only is None or only(i.path, place.mates)]
        return _Begun(place.node, place.make(), tuple(wanted))

    try:
        told = control.step("begin to fetch", begin)
        mine = next(begun for begun in told if begun is not None and begun.node == place.node)
        place.target = mine.target
        share = share_items(mine.items, len(place.mates))[place.mates.index(control.rank)]
        control.step("fetch", lambda: _download(storage, share, mine.target))
        if isinstance(place, _Into):
            publish = partial(place.publish, mine.items)
            control.step("publish", lambda: publish() if place.is_lead else None)
    except BaseException:
        place.discard()
        raise
    try:
        yield place.path
    finally:
        place.leave()


def _domain_of(seat: Seat) -> str | None:
    return seat.placement.mine.id or None


# -- into a directory of the caller's ---------------------------------------------------------------


class _Into(NodeScratch):
    """The caller's directory: it appears whole, under its name, and stays."""

    def __init__(self, control: Control, into: str) -> None:
        self._into = os.path.abspath(into)
        parent, name = os.path.split(self._into)
        super().__init__(control, f".{name}.partial-", parent)

    @property
    def path(self) -> str:
        """What the caller sees."""
        return self._into

    def make(self) -> str:
        """As in NodeScratch. AlreadyExistsError: there are files already."""
        with in_flight("listing", self._into):
            taken = os.path.isdir(self._into) and bool(os.listdir(self._into))
        if taken:
            raise AlreadyExistsError(
                "the directory to fetch into has files", uri=self._into, hint="choose another"
            )
        return super().make()

    def publish(self, items: Sequence[Item]) -> None:
        """On the lead: the whole directory appears under its name."""
        try:
            with in_flight("rename", self._into):
                os.rename(self.target, self._into)
        except OSError as error:
            # Another node, which shares this disk, was first: with the same files, if it was.
            if not all(os.path.isfile(os.path.join(self._into, item.path)) for item in items):
                raise AlreadyExistsError(
                    f"the fetched directory cannot get its name: {error}", uri=self._into
                ) from error
        self.discard()

    def leave(self) -> None:
        """It stays."""


# -- over the wire ---------------------------------------------------------------------------------


def _download(storage: Storage, share: Sequence[Item], target: str) -> None:
    """Local. This rank's files; several small ones at once, a large one by itself."""
    for folder in {os.path.dirname(os.path.join(target, item.path)) for item in share}:
        with in_flight("mkdir", folder):
            os.makedirs(folder, exist_ok=True)
    small = [i for i in share if i.size_bytes is not None and i.size_bytes <= BATCHED_BYTES]
    large = [i for i in share if i not in small]
    with Threads(_AT_ONCE, "ckptfs-fetch") as pool:
        going = [pool.submit(_one, storage, item, target) for item in small]
        try:
            for item in large:
                _one(storage, item, target)
            for done in going:
                done.result()
        finally:
            for done in going:
                done.cancel()


def _one(storage: Storage, item: Item, target: str) -> None:
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
        for data in windows(reader, ReadAhead(stack), contextlib.nullcontext):
            check.update(data)
            _write_all(file, data)
        check.finish()


def _write_all(file: WatchedFile, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += file.write(data[at:])


def _check_of(storage: Storage, item: Item) -> Check:
    if item.record is None:
        return Check()
    damaged = _damaged_at(storage, item)
    if item.digests is not None:
        raw = read_limited(storage, item.digests)
        return BlockCheck(decode_digests(raw, storage.uri(item.digests)), damaged)
    digest = item.record.digest
    return Check() if digest is None else WholeCheck(digest, damaged)


def _damaged_at(storage: Storage, item: Item) -> Callable[[str], IntegrityError]:
    def damaged(why: str) -> IntegrityError:
        return IntegrityError(
            f"{item.path} is not what was committed: {why}",
            uri=storage.uri(item.key),
            hint="the file was changed after the commit; restore it or read another checkpoint",
        )

    return damaged
