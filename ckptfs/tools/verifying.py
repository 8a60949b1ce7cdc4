"""Verify that checkpoints are whole: their form, and with ``deep`` every byte.

    verify(["s3://bucket/run"], deep=True, jobs=8, resume="verified.json")      -> Verified

    a run           its log, every live save, every directory in it that looks like a checkpoint
    a checkpoint    the checkpoint, and what its run's log says of it; every part if it has parts
    a part          run/step_100/actor

    with aimed_at(uri, options) as aim:
        aim.targets     every checkpoint to look at, with what the log says of it
        aim.findings    what is wrong with the log itself

    places_of(storage, found)        path -> (start, stop, key), for messages; {} if it is not known
    look_into(storage, seen)         checks .metadata: it names this save, listed files and ranges inside
                                     them, and the chunks of each tensor fill it
    look_at_stock(storage, seen)     the same for a plain DCP checkpoint, which has sizes but no digests

Read-only and local: it needs only read permission, and no torch. Files that cannot be seen from here (disks of other nodes) or have nothing to be compared with (stock
checkpoints) are reported, and never count as clean.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptfs.commit.catalog.catalog import (
    LocatedCheckpoint,
    list_live,
    live_of,
    look_at_log,
    opened_log,
    part_of,
)
from ckptfs.commit.catalog.unlogged import look_at_directory, unlogged_names
from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.log.entries import Kind, PartRef, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord, decode_manifest, digest_of
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import LOG, MANIFEST, METADATA, step_in
from ckptfs.commit.state import Standing, part_name, piece, standing
from ckptfs.errors import (
    AccessError,
    CkptfsError,
    ManifestError,
    NotFoundError,
    StateError,
    StorageError,
    UriError,
)
from ckptfs.progress import SILENT, Meter
from ckptfs.storage.base import Storage
from ckptfs.tools.digesting import BadRange, Compared, DeepFile, Resumed, compare_files
from ckptfs.tools.findings import Checked, Damage, Finding, Looked, Target, Verified, look_at
from ckptfs.tools.runlog import Condition, lines_of
from ckptfs.uri import Uri, options_of

if TYPE_CHECKING:
    from ckptfs.dcp.metadata.metadata_reader import Description

__all__ = [
    "JOBS",
    "Aim",
    "Doubt",
    "Places",
    "aimed_at",
    "is_live",
    "keys_in",
    "look_at_stock",
    "look_into",
    "places_of",
    "verify",
]


@dataclass(frozen=True, slots=True)
class Doubt:
    """A save that is in doubt: it is not known from here whether it was committed.

    Attributes:
        uri: Where it would be.
        name: Its name in the run.
        save_id: The id of the save.
        why: The reason.
    """

    uri: Uri
    name: str
    save_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Aim:
    """What is to be verified at one URI.

    Attributes:
        storage: The storage of the run, open until the block is left.
        views: Its log, by domain.
        domain: The id of the domain that is seen from here; "" for none.
        targets: The checkpoints and parts.
        doubts: Saves that may be committed.
        findings: Damage of the run.
        notes: Other observations.
    """

    storage: Storage
    views: Mapping[str, LogState]
    domain: str
    targets: tuple[Target, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to look at."""
        return not (self.targets or self.doubts or self.findings)


@contextlib.contextmanager
def aimed_at(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[Aim]:
    """Yield what there is to verify. Local, read-only.

    Args:
        uri: A run, a checkpoint, or a part of one.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Raises:
        NotFoundError: There is nothing to verify.
        IncompleteCheckpointError: It is in doubt whether the checkpoint was committed.
        StorageError: The storage failed.
    """
    target = Uri.parse(uri)
    options = {**options_of(uri), **(storage_options or {})}
    with contextlib.ExitStack() as opened:

        def at(root: Uri) -> Storage:
            return opened.enter_context(opened_log(root, options))

        here = at(target)
        run = _complete_log(_sight(here))
        if run.domain or run.findings:
            yield _found(_of_run(here, run), target)
            return
        refused: AccessError | None = None
        try:
            one = _one(at, target)
        except AccessError as error:
            refused = error  # the directory above a run may be forbidden
            one = run
        if one.is_nothing:
            one = _of_run(here, run)
        if one.is_nothing and refused is not None:
            raise refused
        yield _found(one, target)


def is_live(aim: Aim, seal: Seal) -> bool:
    """Whether the log of ``aim``, read again, still has the save ``seal``.

    A checkpoint that is deleted while it is being verified is not damaged.

    Args:
        aim: The target of the verification.
        seal: The save, or a part of one.
    """
    views = _sight(aim.storage).views
    known = {live.save_id for live in list_live(views)}
    return seal.save_id in known or any(
        ref.save_id == seal.save_id for live in list_live(views) for ref in live.parts
    )


def _found(aim: Aim, target: Uri) -> Aim:
    if aim.is_nothing:
        raise NotFoundError(
            "there is nothing to verify: no committed checkpoint",
            uri=target,
            hint="give a run, a checkpoint, or a part of one; ckptfs ls lists them",
        )
    return aim


def _sight(storage: Storage) -> Aim:
    """Read the log and what is wrong with it; the result has no targets yet."""
    try:
        sight = drive(look_at_log(), storage)
    except ManifestError as error:
        return Aim(storage, {}, "", findings=(_of_log(storage, error.message),))
    state, domain = sight.state, sight.domain or ""
    views = {} if state is None or not domain else {domain: state}
    findings = () if sight.unread is None else (_of_log(storage, sight.unread),)
    notes: tuple[str, ...] = ()
    if state is not None and state.foreign:
        notes = ("the log has entries that this version does not know; they were ignored",)
    return Aim(storage, views, domain, findings=findings, notes=notes)


def _complete_log(run: Aim) -> Aim:
    """Return the run with findings for damaged or missing entries, also below a snapshot.

    Readers that start from a snapshot never meet these entries, but readers without one do.
    """
    if run.findings or not run.domain:
        return run
    bad = {Condition.DAMAGED: "is none", Condition.MISSING: "is missing"}
    findings = tuple(
        _of_log(run.storage, f"entry {line.number} {bad[line.condition]}: {line.why}")
        for line in lines_of(run.storage)
        if line.condition in bad
    )
    return replace(run, findings=findings)


def _of_log(storage: Storage, why: str) -> Finding:
    return Finding(
        Damage.LOG,
        storage.uri(LOG),
        why,
        "copy the entry back from another place; else copy what is whole to a new run",
        path=LOG,
    )


def _of_run(storage: Storage, run: Aim) -> Aim:
    targets: list[Target] = []
    for seal in list_live(run.views):
        targets += _with_parts(storage.uri(seal.name), seal)
    try:
        entries = storage.list("")
    except (NotFoundError, NotADirectoryError):
        entries = []
    for name in unlogged_names(entries, run.views):
        if drive(look_at_directory(name, run.views, storage.root), storage) is not None:
            targets += _copied(storage, name, storage.uri(name))
    return Aim(
        storage,
        run.views,
        run.domain,
        tuple(targets),
        tuple(_doubts(storage, run.views)),
        run.findings,
        run.notes,
    )


def _one(at: Callable[[Uri], Storage], target: Uri) -> Aim:
    """Return the aim for one checkpoint or part, by its log or, without one, by its own files."""
    parent = at(target.parent)
    run, name = _complete_log(_sight(parent)), target.name
    seal = live_of(name, run.views, target) if name else None
    if seal is None and not run.domain:
        # The directory above a copied checkpoint may be forbidden, or not a run.
        with contextlib.suppress(StorageError, ManifestError, UriError):
            part = _of_part(at(target.parent.parent), target)
            if not part.is_nothing:
                return part
    targets = _with_parts(target, seal) if seal is not None else _copied(parent, name, target)
    if not targets:
        return Aim(parent, run.views, run.domain)
    return Aim(parent, run.views, run.domain, tuple(targets), (), run.findings, run.notes)


def _of_part(storage: Storage, target: Uri) -> Aim:
    run, step = _complete_log(_sight(storage)), target.parent.name
    checkpoint_seal = live_of(step, run.views, target) if step else None
    if checkpoint_seal is None:
        return Aim(storage, run.views, run.domain)
    seal, _ = part_of(checkpoint_seal, target.name, target)
    only = Target(target, part_name(step, target.name), seal)
    return Aim(storage, run.views, run.domain, (only,), (), run.findings, run.notes)


def _with_parts(uri: Uri, seal: Seal) -> list[Target]:
    checkpoint = Target(uri, seal.name, seal)
    return [checkpoint, *(_part(uri, seal, ref) for ref in seal.parts)]


def _part(uri: Uri, seal: Seal, ref: PartRef) -> Target:
    return Target(uri / ref.name, part_name(seal.name, ref.name), piece(seal, ref))


def _copied(storage: Storage, name: str, uri: Uri) -> list[Target]:
    """Return targets for a directory outside the log: a checkpoint and its parts, or none."""
    storage.refresh(name)
    try:
        manifest = decode_manifest(read_limited(storage, f"{name}/{MANIFEST}"), uri)
    except (NotFoundError, NotADirectoryError):
        return [Target(uri, name)] if _exists(storage, f"{name}/{METADATA}") else []
    except ManifestError:
        return [Target(uri, name)]  # the check of it reports what is wrong
    parts = [
        Target(uri / ref.name, part_name(name, ref.name), None, ref.digest)
        for ref in manifest.parts
    ]
    return [Target(uri, name), *parts]


def _exists(storage: Storage, key: str) -> bool:
    try:
        storage.stat(key)
    except (NotFoundError, NotADirectoryError):
        return False
    return True


def _doubts(storage: Storage, views: Mapping[str, LogState]) -> Iterator[Doubt]:
    living = {s: v for view in views.values() for s, v in view.saves.living.items()}
    for save_id, save in living.items():
        if save.seal is None or standing(save_id, views) is not Standing.IN_DOUBT:
            continue
        lost = sorted(set(save.seal.domains) - set(views))
        why = f"in doubt: domain {', '.join(lost)}, which cannot be reached, also decides whether it was committed"
        yield Doubt(storage.uri(save.seal.name), save.seal.name, save_id, why)


JOBS = min(8, 2 * (os.cpu_count() or 1))
_NO_DIGESTS = "its original bytes are unknown: compare it with another copy, or save it again"
_DO = "copy it back from another place, or restore another checkpoint"


def verify(
    uris: Sequence[Any],
    storage_options: Mapping[str, Any] | None = None,
    *,
    deep: bool = False,
    jobs: int = JOBS,
    resume: str | os.PathLike[str] | None = None,
    meter: Meter = SILENT,
) -> Verified:
    """Verify runs, checkpoints or parts. Local, read-only.

    Args:
        uris: What to verify.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        deep: Read every byte that has a digest, and compare it.
        jobs: How many files, or segments of files, are read at the same time.
        resume: A file that records what was compared, also across a kill. A later call with the same file
            skips that. None: no such file.
        meter: Counts the bytes that are read.

    Returns:
        What was found.

    Raises:
        NotFoundError: There is nothing to verify.
        StateError: ``resume`` is not such a file or cannot be written, or ``jobs`` is below 1.
        StorageError: The storage failed in a way that says nothing about a checkpoint: no permission, no
            network.
    """
    if jobs < 1:
        raise StateError(f"jobs is {jobs}", hint="at least 1")
    resumed = Resumed(resume)
    checkpoints: list[Checked] = []
    findings: list[Finding] = []
    notes: list[str] = []
    expected_bytes = 0
    for uri in uris:
        with aimed_at(uri, storage_options) as aim:
            one = _Pass(aim, jobs, resumed, meter, notes)
            result = list(one.look())
            if deep:
                expected_bytes += sum(f.size_bytes for s in result for f in one.deep_files(s))
                meter.expect(expected_bytes)
            comparisons = ((s, one.compare(s)) if deep else (s, None) for s in result)
            checkpoints += [_checked(s, compared) for s, compared in comparisons if s.is_live]
            checkpoints += [_doubted(doubt) for doubt in aim.doubts]
            findings += aim.findings
            notes += aim.notes
    return Verified(deep, tuple(checkpoints), tuple(findings), tuple(dict.fromkeys(notes)))


@dataclass(slots=True)
class _Pass:
    """The verification of one URI. compared: results by key, because saves can share files."""

    aim: Aim
    jobs: int
    resumed: Resumed
    meter: Meter
    notes: list[str]
    compared: dict[str, Compared] = field(default_factory=dict)

    def look(self) -> Iterator[Looked]:
        """Check the form of every target that was not deleted since."""
        aim = self.aim
        for target in aim.targets:
            try:
                result = look_at(aim.storage, target, aim.views, aim.domain, at_once=self.jobs)
            except NotFoundError:
                if not self._is_deleted(target):
                    raise
                continue
            if result.findings and self._is_deleted(target):
                continue
            if result.manifest is None and result.found is not None:
                look_at_stock(self.aim.storage, result)
            self._name_tensors(result)
            yield result

    def deep_files(self, result: Looked) -> list[DeepFile]:
        """Return the files to compare: they have digests, and all their bytes or some of them."""
        manifest, home = result.manifest, result.found.home if result.found else ""
        # These are small and were compared when the form was checked.
        done = {f"{_save_id(result)}/{METADATA}", *(f.digests for f in result.files)}
        files = []
        for record in result.files if manifest is not None else ():
            size, path = result.sizes.get(record.path), record.path
            if size is None or path in done:
                continue
            key = file_key(record, home)
            name, now = str(self.aim.storage.uri(key)), result.stamps[path]
            digests = result.digests.get(path)
            if digests is not None:
                held, size = f"{result.proofs[path]} {now}", min(size, record.size_bytes)
                files.append(DeepFile(key, name, path, size, held, digests))
            elif record.digest is not None and size == record.size_bytes:
                held = f"{record.digest} {now}"
                files.append(DeepFile(key, name, path, size, held, None, record.digest))
        return files

    def compare(self, result: Looked) -> tuple[Compared, ...]:
        """Compare every byte of one checkpoint, and add findings to ``result``."""
        if result.manifest is not None:
            look_into(self.aim.storage, result)
        files = self.deep_files(result)
        fresh = [f for f in files if f.key not in self.compared]
        try:
            done = compare_files(
                self.aim.storage, fresh, jobs=self.jobs, resumed=self.resumed, meter=self.meter
            )
        except NotFoundError:
            if not self._is_deleted(result.target):
                raise
            result.is_live = False
            return ()
        self.compared.update(done)
        outcomes = tuple(self.compared[f.key] for f in files)
        for bad in (bad for one in outcomes for bad in one.bad):
            result.findings.append(self._finding(result, bad))
        self._tell_uncompared(result, files)
        self._name_tensors(result)
        return outcomes

    def _finding(self, result: Looked, bad: BadRange) -> Finding:
        uri = self.aim.storage.uri(bad.file.key)
        at = {"path": bad.file.path, "start": bad.start, "stop": bad.stop, "blocks": bad.blocks}
        if bad.why:
            return Finding(Damage.UNREADABLE, uri, bad.why, _DO, **at)  # type: ignore[arg-type]
        what = f"bytes {bad.start} to {bad.stop} differ from what was written"
        if bad.file.whole is not None:
            what = "its bytes differ from what was written"
        return Finding(Damage.BYTES, uri, what, _DO, **at)  # type: ignore[arg-type]

    def _tell_uncompared(self, result: Looked, files: Sequence[DeepFile]) -> None:
        if result.found is not None and result.manifest is None:
            result.unchecked.append("it has no digests: only sizes were compared")
            return
        covered = {f.path for f in result.findings} | {f.path for f in files}
        sidecars = {f.digests for f in result.files if f.digests is not None}
        uncompared = [
            f
            for f in result.files
            if f.path in result.sizes and not _is_covered(f, covered, sidecars)
        ]
        # A damaged or missing sidecar has a finding already.
        own = [
            f
            for f in uncompared
            if f.path.startswith(f"{_save_id(result)}/") and f.digests not in covered
        ]
        # An empty sidecar counts as missing: readers refuse the file.
        own += [
            record
            for record in result.files
            if (digests := result.digests.get(record.path)) is not None and not digests.items
        ]
        for record in own:
            size = result.sizes.get(record.path, 0)
            if size and record.path != f"{_save_id(result)}/{METADATA}":
                uri = self.aim.storage.uri(
                    file_key(record, result.found.home if result.found else "")
                )
                what = f"it has no digests: none of its {size} bytes could be compared"
                result.add(Damage.SIDECAR, uri, what, _NO_DIGESTS, path=record.path)
        uncompared = [f for f in uncompared if not f.path.startswith(f"{_save_id(result)}/")]
        if uncompared:
            count = f"{len(uncompared)} files" if len(uncompared) > 1 else uncompared[0].path
            result.unchecked.append(f"{count} without digests: only sizes could be compared")

    def _name_tensors(self, result: Looked) -> None:
        """Add tensor keys to findings of damaged bytes."""
        by_data = {f.digests: f.path for f in result.files if f.digests is not None}
        paths = {f.path for f in result.files if f.digests is not None or f.digest is not None}
        hurt = [
            f for f in result.findings if not f.tensors and (f.path in paths or f.path in by_data)
        ]
        if result.found is None or not hurt:
            return
        places = places_of(self.aim.storage, result.found)
        for number, finding in enumerate(result.findings):
            path = by_data.get(finding.path, finding.path)
            start, stop = finding.start or 0, finding.stop
            keys = keys_in(places, path, start, (1 << 62) if stop is None else stop)
            if finding in hurt:
                result.findings[number] = replace(finding, tensors=tuple(dict.fromkeys(keys)))

    def _is_deleted(self, target: Target) -> bool:
        if target.seal is None or is_live(self.aim, target.seal):
            return False
        self.notes.append(f"{target.name} was deleted while it was being verified")
        return True


def _is_covered(record: FileRecord, named: set[str], sidecars: set[str]) -> bool:
    return record.path in named or record.path in sidecars


def _save_id(result: Looked) -> str:
    return "" if result.manifest is None else result.manifest.save_id


def _step(result: Looked) -> int | None:
    if result.target.seal is not None:
        return result.target.seal.step
    if result.manifest is not None:
        return result.manifest.step
    return None if result.found is None else step_in(result.target.name)  # a stock checkpoint


def _checked(result: Looked, compared: Sequence[Compared] | None) -> Checked:
    manifest, seal = result.manifest, result.target.seal
    origin = "log" if seal is not None else "manifest"
    if result.found is not None and manifest is None:
        origin = "stock"
    return Checked(
        result.target.uri,
        result.target.name,
        origin,
        seal.save_id if seal is not None else _save_id(result) or None,
        _step(result),
        len(result.sizes),
        sum(result.sizes.values()),
        sum(one.compared_bytes for one in compared or ()),
        sum(one.resumed_bytes for one in compared or ()),
        tuple(result.findings),
        tuple(result.unchecked),
        tuple(result.notes),
        None if compared is None else _uncompared_bytes(result, compared),
    )


def _uncompared_bytes(result: Looked, compared: Sequence[Compared]) -> int:
    """Return the uncompared bytes of data files, not of ``.metadata`` and sidecars.

    These two are compared as wholes when the form is checked.
    """
    small = {f.digests for f in result.files} | {f"{_save_id(result)}/{METADATA}", METADATA}
    data = sum(size for path, size in result.sizes.items() if path not in small)
    return max(0, data - sum(one.compared_bytes for one in compared))


def _doubted(doubt: Doubt) -> Checked:
    return Checked(doubt.uri, doubt.name, "log", doubt.save_id, unchecked=(doubt.why,))


# -- the bytes of tensors ---------------------------------------------------------------------
#
# What follows imports in its functions: of our own checkpoints it is needed with ``deep`` or after a finding.

Places = Mapping[str, Sequence[tuple[int, int, str]]]
_MOST = 5


def places_of(storage: Storage, found: LocatedCheckpoint) -> Places:
    """Return the byte ranges of the leaves of ``found`` in ``storage``; empty if unknown."""
    from ckptfs.dcp.read.data_file import Verify
    from ckptfs.dcp.safetensors.safetensors_reader import read_layout

    manifest = found.manifest
    try:
        if manifest is not None and manifest.artifact is Kind.DIRECTORY:
            return _by_path(read_layout(storage, found, Verify.OFF))
        return _by_path(_decoded(storage, found))
    except CkptfsError:
        return {}  # of damaged .metadata: a finding of its own


def keys_in(places: Places, path: str, start: int, stop: int) -> tuple[str, ...]:
    """Return the leaves that use any of these bytes of a file, in their order in the file. Pure.

    Args:
        places: The byte ranges of the leaves.
        path: The file.
        start: The first byte.
        stop: The byte after the last one.
    """
    return tuple(key for low, high, key in places.get(path, ()) if low < stop and start < high)


def look_into(storage: Storage, seen: Looked) -> None:
    """Check ``.metadata`` in ``storage`` and add findings to ``seen``.

    This finds a change that was made to ``.metadata`` and to the manifest alike.

    Args:
        storage: The run's.
        seen: The checkpoint.
    """
    found, manifest = seen.found, seen.manifest
    if found is None or manifest is None or manifest.artifact is Kind.DIRECTORY or manifest.parts:
        return
    path = f"{manifest.save_id}/{METADATA}"
    if path not in seen.sizes or any(finding.path == path for finding in seen.findings):
        return  # it belongs to another domain, or has a finding already
    uri = storage.uri(found.metadata)
    try:
        described = _decoded(storage, found)
    except ManifestError as error:
        seen.add(Damage.METADATA, uri, error.message, _DO, path=path)
        return
    named_save = described.save_id
    if named_save not in (None, manifest.save_id):
        what = f"it names save {named_save} instead of {manifest.save_id}"
        seen.add(Damage.METADATA, uri, what, _DO, path=path)
    sizes = {f.path: f.size_bytes for f in manifest.files}
    for what in _outside(_by_path(described), sizes):
        seen.add(Damage.METADATA, uri, what, _DO, path=path)
    _look_at_chunks(seen, described, uri, path, is_complete=len(manifest.domains) <= 1)


def look_at_stock(storage: Storage, seen: Looked) -> None:
    """Check a plain DCP checkpoint in ``storage`` by its sizes, and add findings to ``seen``."""
    found = seen.found
    if found is None:
        return
    seen.notes.append("it has no digests: only sizes were compared")
    uri = storage.uri(found.metadata)
    try:
        described = _decoded(storage, found)
        places = _by_path(described)
    except ManifestError as error:
        seen.add(Damage.METADATA, uri, error.message, _DO, path=METADATA)
        return
    _look_at_chunks(seen, described, uri, METADATA, is_complete=True)
    seen.sizes[METADATA] = storage.stat(found.metadata).size_bytes
    for path, ranges in sorted(places.items()):
        needed, keys = max(stop for _, stop, _ in ranges), tuple(key for _, _, key in ranges)
        where = storage.uri(f"{found.home}/{path}")
        try:
            size = storage.stat(f"{found.home}/{path}").size_bytes
        except NotFoundError:
            seen.add(Damage.MISSING, where, "it is missing", _DO, path=path, tensors=keys)
            continue
        seen.sizes[path] = size
        if size < needed:
            lost = keys_in(places, path, size, needed)
            what = f"it has {size} bytes, but .metadata needs {needed}"
            details = {"path": path, "start": size, "stop": needed, "tensors": lost}
            seen.add(Damage.SIZE, where, what, _DO, **details)


def _look_at_chunks(
    result: Looked, described: Description, uri: Uri, path: str, *, is_complete: bool
) -> None:
    """Add a finding for each tensor with chunks that overlap or leave a gap: a load refuses it.

    is_complete: whether all chunks are described here, and none in the ``.metadata`` of another domain.
    """
    from ckptfs.dcp.boxes import fills, untiled

    for key in described.keys:
        tensor = described.describe(key)
        if tensor is None or fills(tensor.boxes, tensor.sizes):
            continue
        held = sum(math.prod(lengths) for _, lengths in tensor.boxes)
        if is_complete or held >= math.prod(tensor.sizes):
            what = untiled(key, tensor.boxes, tensor.sizes).message
            result.add(Damage.METADATA, uri, what, _DO, path=path, tensors=(key,))


def _decoded(storage: Storage, found: LocatedCheckpoint) -> Description:
    from ckptfs.dcp.metadata.metadata_reader import read_inventory

    raw, manifest = read_limited(storage, found.metadata), found.manifest
    if manifest is not None:
        path = f"{manifest.save_id}/{METADATA}"
        sealed = {f.digest for f in manifest.files if f.path == path}
        if sealed and digest_of(raw) not in sealed:
            raise ManifestError("it differs from what was committed")
    return read_inventory(raw, storage.uri(found.metadata), found.shared)


def _by_path(described: Description) -> dict[str, list[tuple[int, int, str]]]:
    found: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for (key, _), place in described.places().items():
        found[place.path].append((place.offset, place.offset + place.length, key))
    for ranges in found.values():
        ranges.sort()
    return found


def _outside(places: Places, sizes: Mapping[str, int]) -> list[str]:
    wrong = [
        f"it places {key!r} in {path}, which the manifest does not list"
        if path not in sizes
        else f"it places {key!r} at {stop} of {path}, which has {sizes[path]} bytes"
        for path, ranges in places.items()
        for _, stop, key in ranges
        if stop > sizes.get(path, -1)
    ]
    more = [f"and {len(wrong) - _MOST} more places that cannot be"] if len(wrong) > _MOST else []
    return wrong[:_MOST] + more
