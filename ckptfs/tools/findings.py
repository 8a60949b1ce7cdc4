"""What verify finds in one checkpoint: its form, by its manifest and its seal. Reads no data.

    Target      one checkpoint or part, with what its log says
    Looked      what was seen of it: look_at(target)
    Finding     one damage
    Verdict     the verdict over all findings; it is never "clean" if nothing was looked at

    clean      everything that was requested was looked at, and is as it was written
    damaged    at least one finding
    unknown    no finding, but something could not be looked at, or had nothing to be compared with

The form of a checkpoint:

    manifest      it is the sealed one, by its digest             log -> manifest
                  it agrees with the log, and lists the files that a checkpoint cannot be without
    files         every listed file exists and has its size       manifest -> files
    sidecars      they are the committed ones, can be decoded, and belong to their files
    .metadata     it has its digest; ``verifying`` checks its content: this save, listed files,
                  ranges inside them
    projection    stock readers see what was committed

The checks continue after a damage was found. A digest binds a manifest to its seal, but not the seal to
its manifest. A copy without its log has only the manifest, and a manifest that lists no files would pass
all checks of files. So ``contradictions`` compares seal and manifest, and ``lacks`` looks for files that
must be listed.

No torch is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from ckptfs.commit.catalog.catalog import LocatedCheckpoint, find, unlogged
from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.digests import FileDigests, decode_digests
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.manifest import FileRecord, Manifest, decode_manifest, digest_of
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import LOG, MANIFEST, METADATA, AttemptKeys
from ckptfs.commit.save.foreign_metadata import is_known
from ckptfs.commit.save.planning import origins_of
from ckptfs.commit.state import Views, split_name
from ckptfs.errors import (
    IntegrityError,
    ManifestError,
    NotFoundError,
    StaleError,
    StorageError,
)
from ckptfs.storage.base import Shape, Stat, Storage
from ckptfs.uri import Uri

__all__ = [
    "Checked",
    "Damage",
    "Finding",
    "Looked",
    "Target",
    "Verdict",
    "Verified",
    "contradictions",
    "lacks",
    "look_at",
    "worst",
]


class Verdict(StrEnum):
    """The verdict on one checkpoint, or on all.

    Attributes:
        CLEAN: Nothing is damaged.
        UNKNOWN: Something could not be checked.
        DAMAGED: Something is damaged.
    """

    CLEAN = "clean"
    UNKNOWN = "unknown"
    DAMAGED = "damaged"


class Damage(StrEnum):
    """A kind of damage.

    Attributes:
        LOG: The run log cannot be read to its end.
        MANIFEST: The manifest is missing, changed, or cannot be decoded.
        MISSING: A listed file is not there.
        SIZE: A listed file has another size.
        SIDECAR: Digests are missing, damaged, or belong to another file.
        METADATA: ``.metadata`` is changed, cannot be decoded, or names something that is not there.
        PROJECTION: What stock readers see differs from what was committed.
        BYTES: Data differs from its digests.
        UNREADABLE: The storage could not read a file.
    """

    LOG = "log"
    MANIFEST = "manifest"
    MISSING = "missing"
    SIZE = "size"
    SIDECAR = "sidecar"
    METADATA = "metadata"
    PROJECTION = "projection"
    BYTES = "bytes"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage.

    Attributes:
        damage: The kind of damage.
        uri: The file.
        what: What was found.
        todo: What to do about it.
        path: The path of the file in the manifest.
        start: The first byte; None if the whole file is meant.
        stop: The byte after the last one; None if the whole file is meant.
        blocks: How many blocks of digests differ.
        tensors: The keys that some of these bytes belong to.
    """

    damage: Damage
    uri: Uri
    what: str
    todo: str
    path: str = ""
    start: int | None = None
    stop: int | None = None
    blocks: int = 0
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one checkpoint, or for one part of one.

    Attributes:
        uri: Where it is.
        name: Its name in the run.
        origin: "log", "manifest" (valid by itself) or "stock".
        save_id: The id of the save; None if it is not known.
        step: Completed optimizer steps; None if there is no number.
        files: How many files were checked.
        size_bytes: Their bytes.
        compared_bytes: Bytes of data that were compared with digests, by this call or an earlier one.
        resumed_bytes: The part of these bytes that an earlier call compared.
        findings: What is damaged.
        unchecked: What was not checked or had nothing to be compared with, and why.
        notes: Other observations.
        uncompared_bytes: Bytes of data that have no digest, or were damaged before they could be
            compared; None if no comparison was requested.
    """

    uri: Uri
    name: str
    origin: str
    save_id: str | None = None
    step: int | None = None
    files: int = 0
    size_bytes: int = 0
    compared_bytes: int = 0
    resumed_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    uncompared_bytes: int | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on this one."""
        if self.findings:
            return Verdict.DAMAGED
        return Verdict.UNKNOWN if self.unchecked else Verdict.CLEAN


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification.

    Attributes:
        deep: Whether bytes were compared.
        checkpoints: The results for the checkpoints and parts.
        findings: Damage of runs, not of one checkpoint.
        notes: Other observations.
    """

    deep: bool
    checkpoints: tuple[Checked, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """The findings of runs, then those of checkpoints."""
        return (*self.findings, *(f for one in self.checkpoints for f in one.findings))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all; UNKNOWN if there was nothing to verify."""
        if self.all_findings:
            return Verdict.DAMAGED
        return worst(one.verdict for one in self.checkpoints)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of ``verdicts``; UNKNOWN if there are none."""
    present = set(verdicts)
    for verdict in (Verdict.DAMAGED, Verdict.UNKNOWN, Verdict.CLEAN):
        if verdict in present:
            return verdict
    return Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint or part to check.

    Attributes:
        uri: Where it is.
        name: Its name in the run of the storage; for a part such as ``step_100/actor``.
        seal: Its seal; None if it is not in the log.
        digest: For a part outside the log, the digest of its manifest by the manifest of the whole; else
            None.
    """

    uri: Uri
    name: str
    seal: Seal | None = None
    digest: str | None = None


@dataclass(slots=True)
class Looked:
    """What was seen of one checkpoint.

    Attributes:
        target: What was to be checked.
        found: Where its files are; None if it was not found.
        findings: What is damaged.
        unchecked: What was not checked, and why.
        notes: Other observations.
        files: Its files that must be here, as the manifest lists them.
        sizes: Bytes of the listed files that exist, by path.
        stamps: Size, time and etag of files, by path; one of these differs after a rewrite.
        digests: Digests of data files, by path.
        proofs: Digests of the sidecars that ``digests`` came from, by path.
        is_live: False if it was deleted while it was being checked.
    """

    target: Target
    found: LocatedCheckpoint | None = None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: tuple[FileRecord, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)
    digests: dict[str, FileDigests] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)
    is_live: bool = True

    @property
    def manifest(self) -> Manifest | None:
        """The manifest that was found; None if there is none."""
        return None if self.found is None else self.found.manifest

    def add(self, damage: Damage, uri: Uri, what: str, todo: str, **where: object) -> None:
        """Add a finding. The arguments are as for ``Finding``.

        Args:
            damage: The kind of damage.
            uri: The file.
            what: What was found.
            todo: What to do about it.
            where: The other fields of ``Finding``.
        """
        self.findings.append(Finding(damage, uri, what, todo, **where))  # type: ignore[arg-type]


# -- the form ------------------------------------------------------------------------


def contradictions(seal: Seal, manifest: Manifest) -> list[str]:
    """Return texts that say where the log and the manifest disagree.

    The seal of a part takes the other fields from its whole, so only the part's own fields are compared.

    Args:
        seal: The entry of the log.
        manifest: The manifest of the same save.
    """
    name, part = split_name(seal.name)
    pairs: dict[str, tuple[object, object]] = {
        "save": (seal.save_id, manifest.save_id),
        "name": (part or name, manifest.name),
        "step": (seal.step, manifest.step),
        "domains": (set(seal.domains), {d.id for d in manifest.domains}),
    }
    if part is None:
        pairs |= {
            "kind": (seal.artifact.value, manifest.artifact.value),
            "generation": (seal.base, manifest.base),
            "references": (set(seal.references), set(manifest.references)),
            "origins": (set(seal.origins), set(origins_of(manifest))),
            "parts": (_ids(seal), _ids(manifest)),
        }
    return [
        f"{what} {_shown(logged)} in the log, {_shown(recorded)} in the manifest"
        for what, (logged, recorded) in pairs.items()
        if logged != recorded
    ]


def lacks(manifest: Manifest) -> str:
    """Return the path of the ``.metadata`` that ``manifest`` ought to list and does not; else "".
    Training states and weights need one.
    """
    if manifest.parts or manifest.artifact is Kind.DIRECTORY:
        return ""
    path = f"{manifest.save_id}/{METADATA}"
    return "" if any(f.path == path for f in manifest.files) else path


def _ids(of: Seal | Manifest) -> set[tuple[str, str, str]]:
    return {(ref.name, ref.save_id, ref.digest) for ref in of.parts}


def _shown(value: object) -> str:
    if isinstance(value, (set, tuple)):
        return ", ".join(sorted(str(one) for one in value)) or "none"
    return str(value)


_BRING_BACK = "copy it back from another place, or restore another checkpoint"
_SIDECAR_BACK = 'copy it back; the data may be whole: it loads with verify="off", unverified'
_UNBOUND = (
    "unchecked: an older version wrote the manifest without the digests of the sidecars. A data file that "
    "was replaced together with its sidecar looks intact"
)
_ENTRY = "copy the entry back from another place; else copy what is whole to a new run"
_SAVED_OVER = (
    "stock torch loads that one; move it away with its files to load ours, and the next job of the "
    "run shows ours again"
)
_REWRITE = "our readers do not need it; stock ones see what is there: copy {} over it"
T = TypeVar("T")
R = TypeVar("R")


def look_at(storage: Storage, target: Target, views: Views, domain: str, *, at_once: int) -> Looked:
    """Check one checkpoint that has no parts, or a whole without its parts. Local, read-only.

    Args:
        storage: The run's.
        target: What is to be checked.
        views: The logs that were reached.
        domain: The id of the domain that is seen from here; "" for none.
        at_once: How many requests run at the same time.

    Returns:
        What was seen.

    Raises:
        NotFoundError: The checkpoint does not exist.
        StorageError: The storage failed in a way that says nothing about the checkpoint.
    """
    result = Looked(target)
    if target.seal is not None and domain not in target.seal.domains:
        lost = ", ".join(target.seal.domains)
        result.unchecked.append(
            f"it is in domain {lost}, which cannot be seen from here; verify it there"
        )
        return result
    result.found = _open(storage, target, views, result)
    manifest = result.manifest
    if result.found is None or manifest is None:
        return result
    _look_at_manifest(storage, result, manifest)
    result.files = _expected(storage, result, manifest, domain, at_once)
    _look_at_files(storage, result, at_once)
    _look_at_sidecars(storage, result, at_once)
    _look_at_small(storage, result, manifest)
    _look_at_projection(storage, result, manifest, views)
    return result


# -- manifest ------------------------------------------------------------------------


def _open(
    storage: Storage, target: Target, views: Views, result: Looked
) -> LocatedCheckpoint | None:
    """Find the files of the target; by the projected manifest if the sealed one is damaged."""
    if target.seal is None:
        return _open_unlogged(storage, target, views, result)
    seal = target.seal
    key = f"{target.name}/{seal.save_id}/{MANIFEST}"
    try:
        return drive(find(seal, storage.capabilities.shape, target.uri), storage)
    except (NotFoundError, StaleError):
        result.add(Damage.MANIFEST, storage.uri(key), "the sealed manifest is missing", _BRING_BACK)
    except (IntegrityError, ManifestError) as error:
        result.add(Damage.MANIFEST, storage.uri(key), error.message, _BRING_BACK)
    try:
        raw = read_limited(storage, f"{target.name}/{MANIFEST}")
    except NotFoundError:
        return None
    if digest_of(raw) != seal.digest:
        return None
    # The projected copy is whole, so the rest can be checked by it.
    result.findings[-1] = Finding(
        Damage.MANIFEST,
        storage.uri(key),
        result.findings[-1].what,
        f"{storage.uri(target.name)}/{MANIFEST} is whole: copy it there",
    )
    manifest = decode_manifest(raw, storage.uri(target.name))
    return LocatedCheckpoint(
        target.name, f"{target.name}/{seal.save_id}/{METADATA}", manifest, seal
    )


def _open_unlogged(
    storage: Storage, target: Target, views: Views, result: Looked
) -> LocatedCheckpoint | None:
    where = storage.uri(f"{target.name}/{MANIFEST}")
    try:
        found = drive(unlogged(target.name, views, target.uri), storage)
    except ManifestError as error:
        result.add(Damage.MANIFEST, where, error.message, error.hint or _BRING_BACK)
        return None
    manifest = found.manifest
    if manifest is None:
        if views:
            result.notes.append(
                "another program saved it, so it is not in the log; load it by its name"
            )
        return found
    inner = storage.uri(f"{target.name}/{manifest.save_id}/{MANIFEST}")
    try:
        raw = read_limited(storage, f"{target.name}/{manifest.save_id}/{MANIFEST}")
    except NotFoundError:
        result.add(Damage.MANIFEST, inner, "the immutable manifest is missing", _BRING_BACK)
        return found
    outer = read_limited(storage, f"{target.name}/{MANIFEST}")
    if raw != outer:
        result.add(Damage.MANIFEST, inner, f"it differs from {where}", _BRING_BACK)
    elif target.digest is not None and digest_of(raw) != target.digest:
        result.add(
            Damage.MANIFEST,
            inner,
            "it is not the save that the checkpoint of parts names",
            _BRING_BACK,
        )
    return found


def _look_at_manifest(storage: Storage, result: Looked, manifest: Manifest) -> None:
    """Compare the manifest with the log, and check that it lists files: only these are checked."""
    seal, name = result.target.seal, result.target.name
    for what in contradictions(seal, manifest) if seal is not None else ():
        result.add(Damage.LOG, storage.uri(LOG), f"its entry of {name} was changed: {what}", _ENTRY)
    missing, uri = lacks(manifest), storage.uri(f"{name}/{manifest.save_id}/{MANIFEST}")
    if missing:
        what = f"it does not list {missing}, without which the checkpoint cannot be read"
        result.add(Damage.MANIFEST, uri, what, _BRING_BACK)
    elif not manifest.files and not manifest.parts:
        result.unchecked.append("the manifest lists no file")


# -- files ---------------------------------------------------------------------------


def _expected(
    storage: Storage, result: Looked, manifest: Manifest, domain: str, at_once: int
) -> tuple[FileRecord, ...]:
    """Return the files that must be seen from here. Note files on other nodes as unchecked."""
    ids = [d.id for d in manifest.domains]
    if domain in ids and result.target.seal is not None:
        away = [d for d in manifest.domains if d.id != domain]
    elif len(ids) > 1:
        # A copy: a domain without any file here was not copied.
        here = {
            f.domain
            for f, stat in _stats(storage, result, manifest.files, at_once)
            if stat is not None
        }
        away = [d for d in manifest.domains if d.id not in here]
    else:
        away = []
    for lost in away:
        hosts = f" on {', '.join(lost.hosts)}" if lost.hosts else ""
        count = sum(f.domain == lost.id for f in manifest.files)
        result.unchecked.append(
            f"domain {lost.id}{hosts}, {count} files: they cannot be seen from here; verify them there"
        )
    gone = {lost.id for lost in away}
    files = [f for f in manifest.files if f.domain not in gone]
    # Each domain has a `.metadata` of its own under the same path: only one of them is here.
    return tuple({f.path: f for f in files}.values())


def _stats(
    storage: Storage, result: Looked, files: Sequence[FileRecord], at_once: int
) -> Iterator[tuple[FileRecord, Stat | None]]:
    def stat_of(record: FileRecord) -> Stat | None:
        try:
            return storage.stat(_key(result, record))
        except (NotFoundError, NotADirectoryError):
            return None

    yield from zip(files, _map(stat_of, files, at_once), strict=True)


def _look_at_files(storage: Storage, result: Looked, at_once: int) -> None:
    sidecars = {record.digests for record in result.files}
    for record, stat in _stats(storage, result, result.files, at_once):
        uri = storage.uri(_key(result, record))
        if stat is None:
            todo = _SIDECAR_BACK if record.path in sidecars else _BRING_BACK
            result.add(Damage.MISSING, uri, "it is missing", todo, path=record.path)
            continue
        size = result.sizes[record.path] = stat.size_bytes
        result.stamps[record.path] = f"{size} {stat.modified_s} {stat.etag}"
        if size != record.size_bytes:
            result.add(
                Damage.SIZE,
                uri,
                f"it has {size} bytes, but {record.size_bytes} were written",
                _BRING_BACK,
                path=record.path,
                start=min(size, record.size_bytes),
                stop=record.size_bytes,
            )


def _look_at_sidecars(storage: Storage, result: Looked, at_once: int) -> None:
    by_path = {record.path: record for record in result.files}
    pairs = [
        (data, by_path[data.digests])
        for data in result.files
        if data.digests in result.sizes and data.digests in by_path
    ]

    def read(pair: tuple[FileRecord, FileRecord]) -> tuple[FileDigests, str] | tuple[str, str]:
        data, sidecar = pair
        try:
            raw = read_limited(storage, _key(result, sidecar))
            digests = decode_digests(raw, storage.uri(_key(result, sidecar)))
        except ManifestError as error:
            return error.message, _SIDECAR_BACK
        except StorageError as error:
            return _of_the_disk(error), _SIDECAR_BACK
        if sidecar.digest not in (None, digest_of(raw)):
            # It may have been replaced together with its data file, which is wrong too then.
            return "it is not the one that was committed", _BRING_BACK
        end = max((item.offset + item.length for item in digests.items), default=0)
        if end > data.size_bytes:
            return f"it describes {end} bytes of a file of {data.size_bytes}", _SIDECAR_BACK
        return digests, digest_of(raw)

    if any(sidecar.digest is None for _, sidecar in pairs):
        result.notes.append(_UNBOUND)
    for (data, sidecar), answer in zip(pairs, _map(read, pairs, at_once), strict=True):
        outcome, more = answer
        if isinstance(outcome, FileDigests):
            result.digests[data.path], result.proofs[data.path] = outcome, more
        else:
            uri = storage.uri(_key(result, sidecar))
            result.add(Damage.SIDECAR, uri, outcome, more, path=sidecar.path)


def _look_at_small(storage: Storage, result: Looked, manifest: Manifest) -> None:
    """Compare ``.metadata`` with its digest. Other files that have one count as data."""
    known, path = _digests_of(manifest, METADATA), f"{manifest.save_id}/{METADATA}"
    record = next((f for f in result.files if f.path == path), None)
    if record is None or result.sizes.get(path) != record.size_bytes or not known:
        return
    uri = storage.uri(_key(result, record))
    try:
        raw = read_limited(storage, _key(result, record))
    except StorageError as error:
        result.add(Damage.UNREADABLE, uri, _of_the_disk(error), _BRING_BACK, path=path)
        return
    if digest_of(raw) not in known:
        result.add(Damage.METADATA, uri, "it is not what was committed", _BRING_BACK, path=path)


# -- projection ----------------------------------------------------------------------


def _look_at_projection(storage: Storage, result: Looked, manifest: Manifest, views: Views) -> None:
    """Check what people and stock readers see of a checkpoint."""
    home = "" if result.found is None else result.found.home
    seal, wanted = result.target.seal, {METADATA: _digests_of(manifest, METADATA)}
    if seal is not None and home != result.target.name:
        result.notes.append(
            "it is committed and not projected yet: stock readers do not see it; the next writer "
            "of the run, or prepare_run, does that"
        )
        return
    if seal is not None:
        wanted[MANIFEST] = {seal.digest}  # the manifest of a copy was compared when it was opened
    keys = AttemptKeys(storage.capabilities.shape, result.target.name, manifest.save_id)
    note = (
        "it is committed, but its projection is incomplete: stock readers see the save that it replaces; "
        "the next writer of the run, or prepare_run, completes it"
    )
    for name, digests in wanted.items():
        if not digests:
            continue  # directories of files and checkpoints of parts have no `.metadata`
        key = f"{result.target.name}/{name}"
        why = _difference(storage, key, digests)
        if why and seal is not None and _is_on_its_way(storage, keys, name, digests):
            if note not in result.notes:
                result.notes.append(note)
            continue
        # It may have been completed between the two looks.
        if why and (why := _difference(storage, key, digests)):
            source = storage.uri(f"{result.target.name}/{manifest.save_id}/{name}")
            todo = _REWRITE.format(source)
            if (
                seal is not None
                and name == METADATA
                and _is_foreign(storage, result.target.name, views)
            ):
                why, todo = "another program overwrote it", _SAVED_OVER
            result.add(Damage.PROJECTION, storage.uri(key), why, todo, path=name)


def _is_foreign(storage: Storage, name: str, views: Views) -> bool:
    """Whether the ``.metadata`` there is another program's."""
    try:
        data = storage.read(f"{name}/{METADATA}")
    except NotFoundError:
        return False
    return not any(is_known(name, data, view) for view in views.values())


def _difference(storage: Storage, key: str, digests: set[str]) -> str:
    """Return what is wrong with one small file; "" if it is what was committed."""
    try:
        return (
            ""
            if digest_of(read_limited(storage, key)) in digests
            else "it is not what was committed"
        )
    except NotFoundError:
        return "it is missing"


def _is_on_its_way(storage: Storage, keys: AttemptKeys, piece: str, digests: set[str]) -> bool:
    """Whether this file still waits in its attempt to be projected: its writer is at work, or died.

    An attempt without the file proves nothing: its directory may have stayed after a finished projection.
    On an object store projected files are copies, so the record of the attempt decides.
    """
    if storage.capabilities.shape is Shape.FILESYSTEM:
        return not _difference(storage, f"{keys.attempt}/{piece}", digests)
    try:
        storage.stat(keys.record)
    except NotFoundError:
        return False
    return True


def _digests_of(manifest: Manifest, name: str) -> set[str]:
    """Return the digests of one of our small files; each domain may have a file of its own."""
    path = f"{manifest.save_id}/{name}"
    return {f.digest for f in manifest.files if f.path == path and f.digest}


# -- helpers -------------------------------------------------------------------------


def _key(result: Looked, record: FileRecord) -> str:
    return file_key(record, "" if result.found is None else result.found.home)


def _of_the_disk(error: StorageError) -> str:
    """Return the message of an error about these bytes; raise any other error."""
    if isinstance(error, NotFoundError) or type(error) is StorageError:
        return error.message
    raise error


def _map(job: Callable[[T], R], things: Iterable[T], at_once: int) -> list[R]:
    todo: Sequence[T] = list(things)
    if at_once < 2 or len(todo) < 2:  # noqa: PLR2004
        return [job(thing) for thing in todo]
    with ThreadPoolExecutor(at_once, thread_name_prefix="ckptfs-verify") as pool:
        return list(pool.map(job, todo))
