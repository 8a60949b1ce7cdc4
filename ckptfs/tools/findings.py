"""The targets and the results of a verification. Values only, no I/O.

Target      one checkpoint or part, with what its log says
Looked      what was seen of it: structure.look_at(target)
Finding     one damage
Verdict     the verdict over all findings; it is never "clean" if nothing was looked at

clean      everything that was requested was looked at, and is as it was written
damaged    at least one finding
unknown    no finding, but something could not be looked at, or had nothing to be compared with
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from ckptfs.commit.catalog.catalog import Found
from ckptfs.commit.digests import FileDigests
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.uri import Uri

__all__ = ["Checked", "Damage", "Finding", "Looked", "Target", "Verdict", "Verified", "worst"]


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
    found: Found | None = None
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
