"""One committed checkpoint once more, at another place: collective, whole or not at all.

    find     every rank finds the save's files on its own disk; each listed domain by some rank
    begin    an attempt at the target, as for any save
    write    each file by one rank that sees it, compared with its digests on the way
    seal     the target's ordinary commit                        -> SaveResult

Shards that lie on the disks of several nodes become one checkpoint by this: on shared storage the
copy is one domain, with one ``.metadata`` that points to one of the nodes' copies of what is
replicated. Stock torch opens it. A source that is damaged is never committed as a copy.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.catalog import Found, find
from ckptfs.commit.copying import (
    CopyTask,
    Readable,
    Writable,
    copy_share,
    new_path,
    share_out,
    tasks_of,
)
from ckptfs.commit.entries import Generation, Kind, Seal
from ckptfs.commit.layout import METADATA
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.ops import drive
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import IfExists, SaveSpec, SmallFile, WrittenPart
from ckptfs.dcp.copies import Place, places_for
from ckptfs.dcp.metadata import decode_metadata, describe, encode_metadata
from ckptfs.dcp.opened import read_metadata
from ckptfs.errors import IncompleteCheckpointError, NotFoundError, StaleError, StateError
from ckptfs.events import SaveResult

__all__ = ["copy_checkpoint"]


def copy_checkpoint(
    source: Seat,
    seal: Seal,
    target: Seat,
    *,
    run: Generation | None = None,
    name: str | None = None,
    save_id: str | None = None,
    stopped: threading.Event | None = None,
) -> SaveResult:
    """Collective. Copy a committed save to another run; committed and durable when it returns.

    source, target: seats of the same ranks with one control; the source is only read. seal: of the
    save, as the source's catalog has it. run: the generation of the target's held run, which may
    replace an older save of the name; None is exclusive by name. name, save_id: in the target, None
    for those of the source. An id that was tried there and aborted is spent: pass a fresh one.
    stopped: set by any thread of any rank to give up between two reads.

    IncompleteCheckpointError: files of it, or a domain, are missing. What single ranks meet is a
    CollectiveError on all, with IntegrityError in its ``failures`` where the source is damaged.
    Otherwise as for ``ckptfs.save``: after an error or a crash the target is as it was.
    StateError: a directory of plain files, or a checkpoint that consists of parts.
    """
    started = time.perf_counter()
    if seal.artifact is Kind.DIRECTORY:
        raise StateError(
            f"{seal.name} is a directory of plain files, not a checkpoint of tensors",
            uri=source.storage.uri(seal.name),
            hint="copy it with any tool that copies files",
        )
    if seal.parts:
        raise StateError(
            f"{seal.name} consists of parts that several groups of processes wrote",
            uri=source.storage.uri(seal.name),
            hint="load each part and save it elsewhere",
        )
    control = source.control
    if stopped is not None:
        control.step("stopped?", lambda: _check_stopped(stopped, source, seal))
    held = _find(source, seal)
    spec = SaveSpec(
        name or seal.name,
        seal.step,
        IfExists.ERROR if run is None else IfExists.REPLACE,
        artifact=seal.artifact,
        run=run,
        failure=seal.failure,
        per_rank=held.manifest.per_rank,
        metrics=seal.metrics,
        save_id=save_id or seal.save_id,
        world_size=held.manifest.world_size,
    )
    attempt = Attempt(target, spec)

    def write() -> WrittenPart:
        return _write(source, held, attempt, stopped)

    def finish(parts: list[WrittenPart]) -> Mapping[str, SmallFile]:
        return _finish(parts, held, attempt)

    try:
        attempt.begin()
        committed = attempt.commit(write, finish)
    except BaseException:
        attempt.abandon()
        raise
    uri, wall_s = str(target.storage.uri(spec.name)), time.perf_counter() - started
    return committed.result(uri, spec.step, control.rank, wall_s)


def _check_stopped(stopped: threading.Event, source: Seat, seal: Seal) -> None:
    if stopped.is_set():
        raise StateError("the copy was stopped", uri=source.storage.uri(seal.name))


# -- find -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """What is copied, the same on all ranks but for ``found``: None on ranks that see none of it.

    readers: the ranks that see the files of a listed domain; None: files that each of them has.
    """

    manifest: Manifest
    found: Found | None
    readers: Mapping[str | None, Sequence[int]]

    @property
    def everybody(self) -> Sequence[int]:
        """The ranks that see any of it."""
        return self.readers[None]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank tells: owners send the manifest, for ranks that find none."""

    found: bool
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class _Shown:
    """The manifest, where some rank has found none by itself."""

    manifest: Manifest | None


def _find(source: Seat, seal: Seal) -> _Held:
    """Collective. Each listed domain is found by the ranks that see it."""
    kept: list[Found] = []

    def look() -> _Seen:
        if source.placement.mine.id not in seal.domains:
            return _Seen(found=False, manifest=None)  # a node that came later
        kept.append(_found_here(source, seal))
        return _Seen(found=True, manifest=kept[0].manifest if source.placement.is_owner else None)

    def decide(answers: Sequence[_Seen]) -> _Shown:
        here = {d.id for d in source.placement.domains}
        manifest = next((a.manifest for a in answers if a.manifest is not None), None)
        lost = [d for d in seal.domains if d not in here]
        if lost or manifest is None:
            raise _lost(lost, manifest, source, seal)
        # They are equal by the sealed digest; thousands of ranks need not be sent one.
        return _Shown(None if all(a.found for a in answers) else manifest)

    shown = source.control.step("find the source", look, decide)
    found = kept[0] if kept else None
    manifest = shown.manifest if found is None else found.manifest
    if manifest is None:
        raise AssertionError("a sealed save has a manifest")
    listed = [d for d in source.placement.domains if d.id in seal.domains]
    readers: dict[str | None, Sequence[int]] = {d.id: d.ranks for d in listed}
    readers[None] = tuple(sorted(rank for d in listed for rank in d.ranks))
    return _Held(manifest, found, readers)


def _found_here(source: Seat, seal: Seal) -> Found:
    try:
        return drive(find(seal, source.caps.shape, source.storage.root), source.storage)
    except (NotFoundError, StaleError) as error:
        raise IncompleteCheckpointError(
            f"{seal.name} cannot be copied: {error.message}",
            uri=source.storage.uri(seal.name),
            rank=source.control.rank,
            hint="it was removed by hand, or this node does not see the disk that holds it",
        ) from error


def _lost(
    lost: Sequence[str], manifest: Manifest | None, source: Seat, seal: Seal
) -> IncompleteCheckpointError:
    hosts = {d.id: ", ".join(d.hosts) for d in (() if manifest is None else manifest.domains)}
    places = ", ".join(f"{d} ({hosts[d]})" if hosts.get(d) else d for d in lost)
    return IncompleteCheckpointError(
        f"{seal.name} cannot be copied: no rank sees its domains {places}",
        uri=source.storage.uri(seal.name),
        hint="start on the nodes that hold them",
    )


# -- write ----------------------------------------------------------------------------------------


def _write(
    source: Seat, held: _Held, attempt: Attempt, stopped: threading.Event | None
) -> WrittenPart:
    """Local. This rank's share of the files, and where it is asked to, its domain's metadata."""
    found, rank = held.found, source.control.rank
    if found is None:
        return WrittenPart(())
    tasks = tasks_of(held.manifest)
    part = copy_share(
        share_out(tasks, held.readers, source.control.size)[rank],
        Readable(source.storage, found.home, rank),
        Writable(attempt.storage, attempt.prefix, attempt.save_id, attempt.seat.placement.mine.id),
        held.manifest.save_id,
        stopped,
    )
    if rank not in _tellers(held, attempt.seat):
        return part
    metadata = _moved(read_metadata(source.storage, found), tasks, held.manifest, attempt)
    return dataclasses.replace(part, payload=encode_metadata(metadata))


def _tellers(held: _Held, target: Seat) -> set[int]:
    """The ranks that send their domain's metadata: one, where the copy is one domain."""
    if len(target.placement.domains) == 1:
        return {min(held.everybody)}
    return {min(ranks) for ranks in held.readers.values()}


def _moved(
    metadata: Metadata, tasks: Sequence[CopyTask], manifest: Manifest, attempt: Attempt
) -> Metadata:
    """The source's metadata with the paths of the copy. IncompleteCheckpointError: it points to what
    is not copied.
    """
    copied = {t.record.path: t.record for t in tasks}
    for index, info in metadata.storage_data.items():
        record = copied.get(info.relative_path)
        if record is None or info.offset + info.length > record.size_bytes:
            raise IncompleteCheckpointError(
                f"{index.fqn!r} lies in {info.relative_path}, which the manifest does not list so",
                uri=attempt.storage.uri(manifest.name),
                hint="the checkpoint was changed after its commit",
            )
        path = new_path(record, manifest.save_id, attempt.save_id)
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=path)
    where = str(attempt.storage.uri(attempt.spec.name))
    metadata.storage_meta = StorageMeta(checkpoint_id=where, save_id=attempt.save_id)
    return metadata


# -- finish: coordinator only ---------------------------------------------------------------------


def _finish(parts: Sequence[WrittenPart], held: _Held, attempt: Attempt) -> dict[str, SmallFile]:
    """``.metadata`` of the copy, after everything that was to be copied is known to be there."""
    _check_all_copied(parts, held.manifest, attempt)
    payloads = [part.payload for part in parts if part.payload]
    domains = attempt.seat.placement.domains
    if len(domains) == 1:
        return {METADATA: payloads[0]}
    where = attempt.storage.uri(attempt.spec.name)
    merged = [decode_metadata(payload, where) for payload in payloads]
    written = _by_writer(parts, merged)
    files: dict[str, bytes] = {}
    for domain in domains:
        described = describe(
            merged[0],
            places_for(domain.ranks, written),
            checkpoint_id=str(where),
            save_id=attempt.save_id,
        )
        files[domain.id] = encode_metadata(described)
    return {METADATA: files}


def _check_all_copied(parts: Sequence[WrittenPart], manifest: Manifest, attempt: Attempt) -> None:
    wanted = {
        (new_path(record, manifest.save_id, attempt.save_id), record.size_bytes)
        for task in tasks_of(manifest)
        for record in (task.record, task.sidecar)
        if record is not None
    }
    made = [(f.path, f.size_bytes) for part in parts for f in part.files]
    if set(made) != wanted or len(made) != len(wanted):
        raise IncompleteCheckpointError(
            f"{len(wanted)} files were to be copied, {len(made)} were",
            uri=attempt.storage.uri(manifest.name),
            hint="nothing was committed; ranks that share a disk did not agree about what is there",
        )


def _by_writer(
    parts: Sequence[WrittenPart], sources: Sequence[Metadata]
) -> list[dict[MetadataIndex, Place]]:
    """Per rank: the items in the files that it copied, by any source domain's metadata."""
    writer = {f.path: rank for rank, part in enumerate(parts) for f in part.files}
    written: list[dict[MetadataIndex, Place]] = [{} for _ in parts]
    for metadata in sources:
        for index, info in metadata.storage_data.items():
            place = (info.relative_path, info.offset, info.length)
            written[writer[info.relative_path]][index] = place
    return written
