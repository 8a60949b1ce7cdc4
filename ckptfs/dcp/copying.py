"""One committed checkpoint once more, at another place: collective, whole or not at all.

    find     every rank finds the save's files on its own disk            copy_source.py
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
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.copying import (
    CopyTask,
    Readable,
    Tally,
    Writable,
    copy_share,
    new_path,
    share_out,
    tasks_of,
)
from ckptfs.commit.entries import Generation, Kind, Seal
from ckptfs.commit.layout import METADATA
from ckptfs.commit.manifest import Manifest
from ckptfs.commit.seat import Seat
from ckptfs.commit.sending import PlainNames
from ckptfs.commit.spec import Committed, IfExists, SaveSpec, SmallFile, WrittenPart
from ckptfs.dcp.copies import Place, places_for
from ckptfs.dcp.copy_source import Held, Original, find_held
from ckptfs.dcp.metadata import decode_metadata, describe, encode_metadata
from ckptfs.dcp.opened import read_metadata
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.events import SaveResult
from ckptfs.progress import SILENT, progress
from ckptfs.storage.base import Shape, Storage

__all__ = ["Manner", "copy_checkpoint", "copy_files", "spec_of"]


@dataclass(frozen=True, slots=True)
class Manner:
    """How files are copied. jobs: at once, by each rank. kept: what is on its way outlives this
    process. stopped: set by any thread of any rank to give up between two reads. shows: somebody waits
    for it in a terminal. tally: this rank's. follow_links: copy what links in a checkpoint lead to.
    """

    jobs: int = 1
    kept: bool = False
    stopped: threading.Event | None = None
    shows: bool = False
    tally: Tally = field(default_factory=Tally)
    follow_links: bool = False

    def readable(self, storage: Storage, home: str, rank: int) -> Readable:
        """Where a rank reads the files of a source."""
        return Readable(storage if self.follow_links else storage.refusing_links(home), home, rank)


def copy_checkpoint(
    source: Seat,
    seal: Seal,
    target: Seat,
    *,
    run: Generation | None = None,
    name: str | None = None,
    save_id: str | None = None,
    stopped: threading.Event | None = None,
    shows: bool = False,
) -> SaveResult:
    """Collective. Copy a committed save to another run; committed and durable when it returns.

    source, target: seats of the same ranks with one control; the source is only read. seal: of the
    save, as the source's catalog has it. run: the generation of the target's held run, which may
    replace an older save of the name; None is exclusive by name. name, save_id: in the target, None
    for those of the source. An id that was tried there and aborted is spent: pass a fresh one.
    stopped: set by any thread of any rank to give up between two reads. shows: somebody waits for it
    in a terminal, and rank 0 draws how far its share has come.

    IncompleteCheckpointError: files of it, or a domain, are missing. What single ranks meet is a
    CollectiveError on all, with IntegrityError in its ``failures`` where the source is damaged.
    Otherwise as for ``ckptfs.save``: after an error or a crash the target is as it was.
    StateError: a directory of plain files, or a checkpoint that consists of parts (``ckptfs cp``).
    """
    started = time.perf_counter()
    if seal.artifact is Kind.DIRECTORY:
        raise StateError(
            f"{seal.name} is a directory of plain files, not a checkpoint of tensors",
            uri=source.storage.uri(seal.name),
            hint="copy it with ckptfs cp",
        )
    if seal.parts:
        raise StateError(
            f"{seal.name} consists of parts that several groups of processes wrote",
            uri=source.storage.uri(seal.name),
            hint="copy it with ckptfs cp, or load each part and save it elsewhere",
        )
    control = source.control
    if stopped is not None:
        control.step("stopped?", lambda: _check_stopped(stopped, source, seal))
    held = find_held(source, Original(seal.name, seal))
    spec = spec_of(held, seal, name or seal.name, run, save_id or seal.save_id)
    attempt = Attempt(target, spec)
    manner = Manner(stopped=stopped, shows=shows)
    committed = copy_files(source, held, attempt, manner)
    uri, wall_s = str(target.storage.uri(spec.name)), time.perf_counter() - started
    return committed.result(uri, spec.step, control.rank, wall_s)


def spec_of(
    held: Held, seal: Seal | None, name: str, run: Generation | None, save_id: str
) -> SaveSpec:
    """What the copy is to be: as the original, under its name and id there."""
    manifest = held.manifest
    return SaveSpec(
        name,
        manifest.step,
        IfExists.ERROR if run is None else IfExists.REPLACE,
        artifact=manifest.artifact,
        run=run,
        failure=seal is not None and seal.failure,
        per_rank=manifest.per_rank,
        metrics=() if seal is None else seal.metrics,
        save_id=save_id,
        world_size=manifest.world_size,
    )


def copy_files(source: Seat, held: Held, attempt: Attempt, manner: Manner = Manner()) -> Committed:
    """Collective. The save ``attempt``, of the files that ``held`` tells; committed when it returns.
    Errors as for ``copy_checkpoint``.
    """

    def write() -> WrittenPart:
        return _write(source, held, attempt, manner)

    def finish(parts: list[WrittenPart]) -> Mapping[str, SmallFile]:
        return _finish(parts, held, attempt)

    try:
        attempt.begin()
        return attempt.commit(write, finish)
    except BaseException:
        attempt.abandon()
        raise


def _check_stopped(stopped: threading.Event, source: Seat, seal: Seal) -> None:
    if stopped.is_set():
        raise StateError("the copy was stopped", uri=source.storage.uri(seal.name))


# -- write ----------------------------------------------------------------------------------------


def _write(source: Seat, held: Held, attempt: Attempt, manner: Manner) -> WrittenPart:
    """Local. This rank's share of the files, and where it is asked to, its domain's metadata."""
    found, rank = held.found, source.control.rank
    if found is None:
        return WrittenPart(())
    tasks = tasks_of(held.manifest)
    mine = share_out(tasks, held.readers, source.control.size)[rank]
    title = f"copying {source.storage.uri(held.manifest.name)}"
    total = sum(task.record.size_bytes for task in mine)
    with progress(title, total, rank=rank) if manner.shows else nullcontext(SILENT) as meter:
        part = copy_share(
            mine,
            manner.readable(source.storage, found.home, rank),
            _place(attempt, kept=manner.kept),
            held.manifest.save_id,
            manner.stopped,
            meter=meter,
            jobs=manner.jobs,
            tally=manner.tally,
        )
    if attempt.spec.artifact is Kind.DIRECTORY or rank not in _tellers(held, attempt.seat):
        return part
    metadata = _moved(read_metadata(source.storage, found), tasks, held.manifest, attempt)
    return dataclasses.replace(part, payload=encode_metadata(metadata))


def _place(attempt: Attempt, *, kept: bool) -> Writable:
    """Where files of an attempt go. Plain names keep theirs; on object stores these are final."""
    domain, is_object = attempt.seat.placement.mine.id, attempt.keys.shape is Shape.OBJECT
    storage, save_id = attempt.storage, attempt.save_id
    if attempt.spec.artifact is not Kind.DIRECTORY:
        return Writable(storage, attempt.prefix, save_id, domain, kept=kept)
    guard = PlainNames(attempt) if is_object else None
    if guard is not None:
        guard.check()  # before the files too: a conflict costs no upload
    prefix, held_by = f"{attempt.directory}/", None if is_object else domain
    return Writable(storage, prefix, save_id, held_by, plain=True, guard=guard, kept=kept)


def _tellers(held: Held, target: Seat) -> set[int]:
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


def _finish(parts: Sequence[WrittenPart], held: Held, attempt: Attempt) -> dict[str, SmallFile]:
    """``.metadata`` of the copy, after everything that was to be copied is known to be there."""
    _check_all_copied(parts, held.manifest, attempt)
    if attempt.spec.artifact is Kind.DIRECTORY:
        return {}
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
    plain = attempt.spec.artifact is Kind.DIRECTORY
    wanted = {
        (
            record.path if plain else new_path(record, manifest.save_id, attempt.save_id),
            record.size_bytes,
        )
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
