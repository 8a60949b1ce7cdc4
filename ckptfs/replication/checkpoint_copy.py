"""One committed checkpoint, copied to another place: collective, whole or not at all.

    Original    the source as its catalog describes it: sealed in a log, or without a log
    find_held   every rank finds the save's files on its own disk; each listed domain is found by some rank
    begin       an attempt at the target, as for any save
    write       each file by one rank that sees it, compared with its digests on the way
    seal        the target's ordinary commit                        -> SaveResult

This makes one checkpoint from shards that are on the disks of several nodes. On shared storage the
copy is one domain with one ``.metadata``, which points to one node's copy of everything replicated,
and stock torch opens it. A damaged source is never committed as a copy. A source without a log is
trusted as ``ckptfs.load`` trusts it: by its manifest, or by its ``.metadata`` if stock torch wrote
it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field

import xxhash
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckptfs.commit.catalog.catalog import LocatedCheckpoint, find
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.directory_checkpoints.write import PlainNames
from ckptfs.commit.log.entries import Generation, Kind, Seal
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.parts.parts import part_attempt, reference_to
from ckptfs.commit.parts.tickets import SealedPart, Ticket, begin_parts
from ckptfs.commit.paths import METADATA
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.shared_attempt import AGAIN, origin_of
from ckptfs.commit.save.spec import Committed, IfExists, SaveSpec, SmallFile, WrittenPart
from ckptfs.commit.session import RunSession, step_of
from ckptfs.commit.state import part_name, piece
from ckptfs.dcp.loading import read_metadata
from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.metadata.metadata_writer import describe, encode_metadata
from ckptfs.dcp.planning.global_plan import Place, places_for
from ckptfs.errors import IncompleteCheckpointError, NotFoundError, StaleError, StateError
from ckptfs.events import Counters, SaveResult
from ckptfs.progress import SILENT, progress
from ckptfs.replication.copied_files import (
    CopyTask,
    Readable,
    Tally,
    Writable,
    copy_share,
    new_path,
    share_out,
    tasks_of,
)
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.registry import open_storage

__all__ = [
    "Manner",
    "Original",
    "copy_checkpoint",
    "copy_files",
    "copy_parts",
    "find_held",
    "spec_of",
    "stock_manifest",
]


@dataclass(frozen=True, slots=True)
class Original:
    """What is copied.

    Attributes:
        name: Its name in its run; that of a part is ``step_100/actor``.
        seal: None if no log lists it.
    """

    name: str
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Where the files to copy are. The same on all ranks except for ``found``.

    Attributes:
        found: The save as this rank found it; None on ranks that see none of it.
        readers: The ranks that see the files of each listed domain; None: files that each of them
            has.
    """

    manifest: Manifest
    found: LocatedCheckpoint | None
    readers: Mapping[str | None, Sequence[int]]

    @property
    def everybody(self) -> Sequence[int]:
        """The ranks that see any of it."""
        return self.readers[None]


@dataclass(frozen=True, slots=True)
class _SourceReport:
    """What one rank reports. Owners send the manifest, for ranks that find none."""

    found: bool
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class _Shown:
    """The manifest, if some rank has found none by itself."""

    manifest: Manifest | None


def find_held(source: RunSession, original: Original) -> Held:
    """Find all files of a checkpoint. Collective.

    Raises IncompleteCheckpointError if files or a domain are missing; it names the nodes that hold
    them.
    """
    if original.seal is None:
        return _find_unlogged(source, original.name)
    return _find_sealed(source, original.seal)


# -- sealed in a log ------------------------------------------------------------------------------


def _find_sealed(source: RunSession, seal: Seal) -> Held:
    found_here: list[LocatedCheckpoint] = []

    def look() -> _SourceReport:
        if source.placement.mine.id not in seal.domains:
            return _SourceReport(found=False, manifest=None)  # this node joined after the save
        found_here.append(_found_here(source, seal))
        return _SourceReport(
            found=True, manifest=found_here[0].manifest if source.placement.is_owner else None
        )

    def decide(answers: Sequence[_SourceReport]) -> _Shown:
        here = {d.id for d in source.placement.domains}
        manifest = next((a.manifest for a in answers if a.manifest is not None), None)
        lost = [d for d in seal.domains if d not in here]
        if lost or manifest is None:
            raise _lost(lost, manifest, source, seal)
        # All manifests are equal by the sealed digest, so it is not sent to thousands of ranks.
        return _Shown(None if all(a.found for a in answers) else manifest)

    shown = source.control.step("find the source", look, decide)
    found = found_here[0] if found_here else None
    manifest = shown.manifest if found is None else found.manifest
    if manifest is None:
        raise AssertionError("a sealed save has a manifest")
    listed = [d for d in source.placement.domains if d.id in seal.domains]
    readers: dict[str | None, Sequence[int]] = {d.id: d.ranks for d in listed}
    readers[None] = tuple(sorted(rank for d in listed for rank in d.ranks))
    return Held(manifest, found, readers)


def _found_here(source: RunSession, seal: Seal) -> LocatedCheckpoint:
    try:
        return drive(find(seal, source.caps.shape, source.storage.root), source.storage)
    except (NotFoundError, StaleError) as error:
        raise IncompleteCheckpointError(
            f"{seal.name} cannot be copied: {error.message}",
            uri=source.storage.uri(seal.name),
            rank=source.control.rank,
            hint="it was removed by hand, or this node cannot see its disk",
        ) from error


def _lost(
    lost: Sequence[str], manifest: Manifest | None, source: RunSession, seal: Seal
) -> IncompleteCheckpointError:
    hosts = {d.id: ", ".join(d.hosts) for d in (() if manifest is None else manifest.domains)}
    places = ", ".join(f"{d} ({hosts[d]})" if hosts.get(d) else d for d in lost)
    return IncompleteCheckpointError(
        f"{seal.name} cannot be copied: no rank can see its domains {places}",
        uri=source.storage.uri(seal.name),
        hint="start on the nodes that hold them",
    )


# -- without a log --------------------------------------------------------------------------------


def _find_unlogged(source: RunSession, name: str) -> Held:
    if len(source.placement.domains) > 1:
        raise StateError(
            "it has no log to show which node has which file",
            uri=source.storage.uri(name),
            hint="copy it from one node, where all of its files are",
        )
    found = locate(source, name)
    manifest = found.manifest
    if manifest is None:
        shown = source.control.step(
            "what stock torch wrote",
            lambda: None,
            lambda _: _Shown(stock_manifest(source.storage, name)),
        )
        manifest = shown.manifest
    if manifest is None:
        raise AssertionError("the coordinator described it")
    ranks = tuple(range(source.control.size))
    readers: dict[str | None, Sequence[int]] = dict.fromkeys(
        (f.domain for f in manifest.files), ranks
    )
    readers[None] = ranks
    return Held(manifest, found, readers)


def stock_manifest(storage: Storage, name: str) -> Manifest:
    """Return a manifest that describes a plain DCP checkpoint. Local.

    Its id is made from the content, so that the same checkpoint always gets the same id. Raises
    IncompleteCheckpointError if a file is missing or too short.
    """
    raw = read_limited(storage, f"{name}/.metadata")
    metadata = decode_metadata(raw, storage.uri(name))
    needs: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needs[info.relative_path] = max(end, needs.get(info.relative_path, 0))
    files, hasher = [], xxhash.xxh3_128(raw)
    for path, least in sorted(needs.items()):
        size, version = _look(storage, f"{name}/{path}")
        if size < least:
            raise IncompleteCheckpointError(
                f"{path} has {size} bytes, but its items need {least}", uri=storage.uri(name)
            )
        files.append(FileRecord(path, size))
        hasher.update(f"{path} {size} {version}".encode())
    save_id = f"dcp-{hasher.hexdigest()[:16]}"
    return Manifest(save_id, name, step_of(name, None), tuple(files), (), world_size=len(files))


def _look(storage: Storage, key: str) -> tuple[int, str]:
    """Return a file's size, and a value that changes when the file is written again.

    Retraining uses the same names.
    """
    try:
        found = storage.stat(key)
    except NotFoundError as error:
        raise IncompleteCheckpointError(
            f"{key} cannot be copied: it does not exist", uri=storage.uri(key)
        ) from error
    path = storage.local_path(key)
    return found.size_bytes, found.etag or ("" if path is None else str(os.stat(path).st_mtime_ns))


@dataclass(frozen=True, slots=True)
class Manner:
    """How files are copied.

    Attributes:
        jobs: How many files each rank copies at once.
        kept: What was copied of an unfinished file outlives this process.
        stopped: Set by any thread of any rank, to give up between two reads.
        shows: Draw progress in a terminal.
        tally: This rank's counts.
        follow_links: Copy the targets of symbolic links in a checkpoint.
    """

    jobs: int = 1
    kept: bool = False
    stopped: threading.Event | None = None
    shows: bool = False
    tally: Tally = field(default_factory=Tally)
    follow_links: bool = False

    def readable(self, storage: Storage, home: str, rank: int) -> Readable:
        """Return where a rank reads the files of a source."""
        return Readable(storage if self.follow_links else storage.refusing_links(home), home, rank)


def copy_checkpoint(
    source: RunSession,
    seal: Seal,
    target: RunSession,
    *,
    run: Generation | None = None,
    name: str | None = None,
    save_id: str | None = None,
    stopped: threading.Event | None = None,
    shows: bool = False,
) -> SaveResult:
    """Copy a committed save to another run. Collective; committed and durable when it returns.

    ``source`` and ``target`` are sessions of the same ranks with one control; the source is only read.
    ``seal`` is the save's, as the source's catalog has it. ``run`` is the generation of the
    target's held run, which may replace an older save of the name; with None the name must be free.
    ``name`` and ``save_id`` are those in the target; None: as in the source. An id that was tried
    there and aborted is spent: pass a fresh one. ``stopped`` is set by any thread of any rank to
    give up between two reads. With ``shows``, rank 0 draws the progress of its share in a terminal.

    Raises IncompleteCheckpointError if files or a domain are missing. An error of single ranks is a
    CollectiveError on all, with IntegrityError in its ``failures`` if the source is damaged. Files
    with plain names are never replaced: CommitConflictError if the name is taken. Other errors are
    those of ``ckptfs.save``. After an error or a crash the target is as it was. For a checkpoint of
    parts, use ``copy_parts``.
    """
    started = time.perf_counter()
    control = source.control
    if stopped is not None:
        control.step("stopped?", lambda: _check_stopped(stopped, source, seal))
    held = find_held(source, Original(seal.name, seal))
    spec = spec_of(held, seal, name or seal.name, run, save_id or seal.save_id)
    attempt = SaveAttempt(target, spec)
    manner = Manner(stopped=stopped, shows=shows)
    committed = copy_files(source, held, attempt, manner)
    uri, wall_s = str(target.storage.uri(spec.name)), time.perf_counter() - started
    return committed.result(uri, spec.step, control.rank, wall_s)


def spec_of(
    held: Held, seal: Seal | None, name: str, run: Generation | None, save_id: str
) -> SaveSpec:
    """Return what the copy will be: like the original, under its own name and id."""
    manifest = held.manifest
    plain = manifest.artifact is Kind.DIRECTORY  # no two saves may share the names of its files
    return SaveSpec(
        name,
        manifest.step,
        IfExists.ERROR if run is None or plain else IfExists.REPLACE,
        artifact=manifest.artifact,
        run=run,
        failure=seal is not None and seal.failure,
        per_rank=manifest.per_rank,
        metrics=() if seal is None else seal.metrics,
        save_id=save_id,
        world_size=manifest.world_size,
    )


def copy_files(
    source: RunSession, held: Held, attempt: SaveAttempt, manner: Manner = Manner()
) -> Committed:
    """Commit the save ``attempt`` from the files in ``held``.

    Collective; committed when it returns. Errors are those of ``copy_checkpoint``.
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


# -- of parts --------------------------------------------------------------------------------------


def copy_parts(
    source: RunSession,
    seal: Seal,
    target: Run,
    *,
    name: str,
    save_id: str,
    manner: Manner,
    replaces: bool = False,
) -> Committed:
    """Copy a checkpoint of parts, with the same parts, into a held run of the same ranks.

    Collective. The ranks must see all of its parts. ``save_id`` is the id in the target, and must
    not have been tried there. ``replaces`` allows the copy to replace an older save of the name.
    The copy is committed when this returns. Errors are those of ``copy_checkpoint``. An interrupted
    copy starts over: its parts are gone, or the next owner of the target removes them.
    """
    if manner.stopped is not None:
        stopped = manner.stopped
        source.control.step("stopped?", lambda: _check_stopped(stopped, source, seal))
    ticket = begin_parts(
        target,
        name,
        seal.step,
        [ref.name for ref in seal.parts],
        if_exists=IfExists.REPLACE if replaces else IfExists.ERROR,
        artifact=seal.artifact,
        save_id=save_id,
    )
    try:
        manner = dataclasses.replace(manner, kept=False)
        with _files_of_checkpoint(source, seal, manner) as folder:
            sealed = _copy_each_part(source, seal, target, ticket, manner)
            ticket.commit(sealed, metrics=dict(seal.metrics), beside=folder)
    except BaseException:
        ticket.abandon()
        raise
    ranks = range(source.control.size)
    counters = (Counters.together([s.result.per_rank[rank] for s in sealed]) for rank in ranks)
    return Committed(save_id, tuple(counters), 0.0)


def _copy_each_part(
    source: RunSession, seal: Seal, target: Run, ticket: Ticket, manner: Manner
) -> list[SealedPart]:
    sealed = []
    # An abort spends a part's id, like that of any save: the next try needs other ids.
    again = ticket.save_id.partition(AGAIN)[2]
    for ref in seal.parts:
        one = piece(seal, ref)
        held = find_held(source, Original(one.name, one))
        plan = ticket.part(ref.name).plan
        name = part_name(ticket.uri.name, ref.name)
        part_id = f"{origin_of(ref.save_id)}{AGAIN}{again}" if again else ref.save_id
        spec = spec_of(held, one, name, target.generation, part_id)
        attempt = part_attempt(target.session, plan, spec)
        committed = copy_files(source, held, attempt, manner)
        result = committed.result(str(ticket.uri / ref.name), seal.step, source.control.rank, 0.0)
        sealed.append(SealedPart(ref.name, plan.of, reference_to(attempt, plan), result))
    return sealed


@contextmanager
def _files_of_checkpoint(source: RunSession, seal: Seal, manner: Manner) -> Iterator[str | None]:
    """Yield a local directory with the files that are in no part; None if there are none."""

    def listed() -> tuple[str, tuple[FileRecord, ...]]:
        try:
            found = drive(find(seal, source.caps.shape, source.storage.root), source.storage)
        except NotFoundError:
            return "", ()  # it is on a disk that this node does not see
        return found.home, () if found.manifest is None else found.manifest.files

    home, files = listed() if source.placement.mine.id in seal.domains else ("", ())
    here = source.control.step("find files outside the parts", lambda: bool(files))
    if any(here) and not here[0]:
        raise StateError(
            f"rank 0 cannot see the additional files of {seal.name}",
            uri=source.storage.uri(seal.name),
            hint="start rank 0 on the node that committed it",
        )
    if source.control.rank or not files:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ckptfs-") as scratch:
        with closing(open_storage(scratch, {})) as storage:
            tasks = [CopyTask(file) for file in files]
            place = Writable(storage, "", "", None, plain=True)
            reading = manner.readable(source.storage, home, source.control.rank)
            for file in files:
                os.makedirs(os.path.dirname(os.path.join(scratch, file.path)), exist_ok=True)
            copy_share(tasks, reading, place, seal.save_id, tally=manner.tally)
        yield scratch


def _check_stopped(stopped: threading.Event, source: RunSession, seal: Seal) -> None:
    if stopped.is_set():
        raise StateError("the copy was stopped", uri=source.storage.uri(seal.name))


# -- write ----------------------------------------------------------------------------------------


def _write(source: RunSession, held: Held, attempt: SaveAttempt, manner: Manner) -> WrittenPart:
    """Copy this rank's share of the files, with its domain's metadata if it must send that.

    Local.
    """
    found, rank = held.found, source.control.rank
    if found is None:
        return WrittenPart(())
    tasks = tasks_of(held.manifest)
    share = share_out(tasks, held.readers, source.control.size)[rank]
    title = f"copying {source.storage.uri(held.manifest.name)}"
    total = sum(task.record.size_bytes for task in share)
    with progress(title, total, rank=rank) if manner.shows else nullcontext(SILENT) as meter:
        part = copy_share(
            share,
            manner.readable(source.storage, found.home, rank),
            _place(attempt, is_resumable=manner.kept),
            held.manifest.save_id,
            manner.stopped,
            meter=meter,
            jobs=manner.jobs,
            tally=manner.tally,
        )
    if attempt.spec.artifact is Kind.DIRECTORY or rank not in _tellers(held, attempt.session):
        return part
    metadata = _moved(read_metadata(source.storage, found), tasks, held.manifest, attempt)
    return dataclasses.replace(part, payload=encode_metadata(metadata))


def _place(attempt: SaveAttempt, *, is_resumable: bool) -> Writable:
    """Return where files of an attempt go.

    Plain names are kept; on object stores they are final before the commit.
    """
    domain, is_object = attempt.session.placement.mine.id, attempt.keys.shape is Shape.OBJECT
    storage, save_id = attempt.storage, attempt.save_id
    if attempt.spec.artifact is not Kind.DIRECTORY:
        return Writable(storage, attempt.prefix, save_id, domain, kept=is_resumable)
    guard = PlainNames(attempt) if is_object else None
    if guard is not None:
        guard.check()  # before the files as well, so that a conflict costs no upload
    prefix, held_by = f"{attempt.directory}/", None if is_object else domain
    return Writable(storage, prefix, save_id, held_by, plain=True, guard=guard, kept=is_resumable)


def _tellers(held: Held, target: RunSession) -> set[int]:
    """Return the ranks that send their domain's metadata: one rank if the copy is one domain."""
    if len(target.placement.domains) == 1:
        return {min(held.everybody)}
    return {min(ranks) for ranks in held.readers.values()}


def _moved(
    metadata: Metadata, tasks: Sequence[CopyTask], manifest: Manifest, attempt: SaveAttempt
) -> Metadata:
    """Return the source's metadata with the paths of the copy.

    Raises IncompleteCheckpointError if it points to a file that is not copied.
    """
    copied = {t.record.path: t.record for t in tasks}
    for index, info in metadata.storage_data.items():
        record = copied.get(info.relative_path)
        if record is None or info.offset + info.length > record.size_bytes:
            raise IncompleteCheckpointError(
                f"{index.fqn!r} is in {info.relative_path}, but the manifest does not list it "
                "there",
                uri=attempt.storage.uri(manifest.name),
                hint="the checkpoint was changed after it was committed",
            )
        path = new_path(record, manifest.save_id, attempt.save_id)
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=path)
    where = str(attempt.storage.uri(attempt.spec.name))
    metadata.storage_meta = StorageMeta(checkpoint_id=where, save_id=attempt.save_id)
    return metadata


# -- finish: coordinator only ---------------------------------------------------------------------


def _finish(parts: Sequence[WrittenPart], held: Held, attempt: SaveAttempt) -> dict[str, SmallFile]:
    """Return the ``.metadata`` of the copy, once every file to copy is known to be there."""
    _check_all_copied(parts, held.manifest, attempt)
    if attempt.spec.artifact is Kind.DIRECTORY:
        return {}
    payloads = [part.payload for part in parts if part.payload]
    domains = attempt.session.placement.domains
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


def _check_all_copied(
    parts: Sequence[WrittenPart], manifest: Manifest, attempt: SaveAttempt
) -> None:
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
            f"{len(wanted)} files had to be copied, but {len(made)} were",
            uri=attempt.storage.uri(manifest.name),
            hint="nothing was committed; ranks that share a disk saw different files",
        )


def _by_writer(
    parts: Sequence[WrittenPart], sources: Sequence[Metadata]
) -> list[dict[MetadataIndex, Place]]:
    """Return each rank's items in the files that it copied, by any source domain's metadata."""
    writer = {f.path: rank for rank, part in enumerate(parts) for f in part.files}
    written: list[dict[MetadataIndex, Place]] = [{} for _ in parts]
    for metadata in sources:
        for index, info in metadata.storage_data.items():
            place = (info.relative_path, info.offset, info.length)
            written[writer[info.relative_path]][index] = place
    return written
