"""A local directory that somebody else wrote, committed as one: who sends which file.

    every node     lists what it sees of the directory
    coordinator    shares the files out: each is sent once per domain, by the ranks that see it
    every rank     sends its share under plain names, and digests what two nodes hold differently

On one shared disk all nodes see the same files; on node-local disks each sees its own, and what
several hold under one name (a config, a tokenizer) has to be the same bytes everywhere.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.layout import CONTROL, MANIFEST
from ckptfs.commit.seat import Seat
from ckptfs.commit.sending import Sender, files_below
from ckptfs.commit.spec import WrittenPart
from ckptfs.errors import IncompleteCheckpointError, NotFoundError, StateError
from ckptfs.storage.base import Shape
from ckptfs.storage.inflight import WatchedFile, in_flight, walk

__all__ = [
    "Listed",
    "Publication",
    "Share",
    "list_files",
    "refuse_own",
    "remove_source",
    "share_files",
]

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Listed:
    """One file as a node sees it. path: relative. mtime_ns: equal on two nodes means one file."""

    path: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does. compare: files that it only digests, because another node sends another
    file of the same name and size.
    """

    send: tuple[Listed, ...] = ()
    compare: tuple[str, ...] = ()


def list_files(top: str) -> tuple[Listed, ...]:
    """Local. The files below ``top``; links to files count as what they lead to.

    NotFoundError: there is no such directory. StateError: something that cannot be committed: a link
    to a directory (its files would be left out), a run of ckptfs, a name that is no path elsewhere.
    """
    if not os.path.isdir(top):
        raise NotFoundError("there is no such directory on this node", uri=top)
    if os.path.isdir(os.path.join(top, CONTROL)):
        raise StateError("this is a run, not the directory of one step", uri=top)
    for folder, folders, _ in walk(top):
        linked = next((f for f in folders if os.path.islink(os.path.join(folder, f))), None)
        if linked is not None:
            raise StateError(
                f"{linked} is a link to a directory: its files would be left out",
                uri=folder,
                hint="put a directory there",
            )
    found = []
    for path in files_below(top):
        if path == MANIFEST:
            continue  # of the checkpoint that this was a copy of; the commit writes another
        if "\\" in path or "://" in path or "\0" in path:
            raise StateError(f"{path!r} is no name on other storage", uri=top, hint="rename it")
        with in_flight("stat", os.path.join(top, path)):
            stat = os.stat(os.path.join(top, path))
        found.append(Listed(path, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def share_files(
    listings: Sequence[tuple[Listed, ...] | None],
    nodes: Sequence[str],
    domains: Sequence[Sequence[int]],
) -> tuple[Share, ...]:
    """What each rank sends. Pure.

    listings: by rank, None from ranks that did not look (one of each node does). nodes: by rank.
    domains: their ranks. StateError: nodes of one domain hold different files under one name.
    IncompleteCheckpointError: there is no file at all.
    """
    if not any(listings):
        raise IncompleteCheckpointError(
            "there is no file in the directory", hint="save what the framework wrote, after it did"
        )
    send: list[list[Listed]] = [[] for _ in nodes]
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
            # A file costs a few requests whatever its size: many small ones are shared out too.
            load[chosen] += first.size_bytes + 1
            send[chosen].append(first)
    return tuple(Share(tuple(s), tuple(c)) for s, c in zip(send, compare, strict=True))


def _holders(
    listings: Sequence[tuple[Listed, ...] | None], ranks: Sequence[int]
) -> Mapping[str, list[tuple[int, Listed]]]:
    found: dict[str, list[tuple[int, Listed]]] = {}
    for rank in ranks:
        for file in listings[rank] or ():
            found.setdefault(file.path, []).append((rank, file))
    return found


def _largest_first(
    holders: Mapping[str, list[tuple[int, Listed]]],
) -> list[list[tuple[int, Listed]]]:
    return sorted(holders.values(), key=lambda h: (-h[0][1].size_bytes, h[0][1].path))


class Publication:
    """One rank's part of a directory's commit: ``write`` and ``finish`` for ``Attempt.commit``."""

    def __init__(self, attempt: Attempt, seat: Seat, path: str, share: Share) -> None:
        is_local = seat.caps.shape is Shape.FILESYSTEM
        domain = seat.placement.mine.id if is_local else None
        self._sender = Sender(attempt, path, domain)
        self._path = path
        self._share = share

    def write(self) -> WrittenPart:
        """Send this rank's files; durable on return."""
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
        """On the coordinator: what several nodes hold under one name is one file."""
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
    """Local, after the commit: what was handed over goes. A failure is logged, nothing depends on it."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s is committed elsewhere, and cannot be removed here: %s", path, error)


def refuse_own(path: str, run: str, name: str) -> None:
    """Local. StateError where removing ``path`` would take the run, a checkpoint of it, or what is to be
    the checkpoint ``name``.
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
