"""What a verification looks at, and what it found: values, no I/O.

Target      one checkpoint or part, with what its log says
Looked      what was seen of it: structure.look_at(target)
Finding     one damage
Verdict     of all of them; it never takes "nothing looked at" for "clean"

clean      everything that was asked for was looked at, and is as it was written
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
    """Of one checkpoint, or of all.

    Attributes:
        CLEAN: Nothing is damaged.
        UNKNOWN: Something could not be checked.
        DAMAGED: Something is damaged.
    """

    CLEAN = "clean"
    UNKNOWN = "unknown"
    DAMAGED = "damaged"


class Damage(StrEnum):
    """How something is damaged.

    Attributes:
        LOG: The run log cannot be read to its end.
        MANIFEST: The manifest is missing, changed, or cannot be decoded.
        MISSING: A listed file is not there.
        SIZE: A listed file has another size.
        SIDECAR: Digests are damaged, or of another file.
        METADATA: ``.metadata`` is changed, cannot be decoded, or names what is not there.
        PROJECTION: What stock readers see differs from what was committed.
        BYTES: Data differs from its digests.
        UNREADABLE: The storage could not read it.
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
        damage: What kind.
        uri: The file.
        what: What was found.
        todo: What to do.
        path: As the manifest lists the file.
        start: The first byte; None where all of the file is meant.
        stop: The byte after the last one; None where all of the file is meant.
        blocks: How many blocks of digests differ.
        tensors: Keys that have some of these bytes.
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
    """One checkpoint, or one part of one.

    Attributes:
        uri: Where it is.
        name: Its name in the run.
        origin: "log", "manifest" (valid by itself) or "stock".
        save_id: The id of the save; None where it is not known.
        step: Completed optimizer steps; None where there is no number.
        files: How many files were checked.
        size_bytes: Their bytes.
        compared_bytes: Bytes of data that were compared with digests, by this call or an earlier one.
        resumed_bytes: Bytes of these that an earlier call compared.
        findings: What is damaged.
        unchecked: What was not checked or had nothing to be compared with, and why.
        notes: What else was noticed.
        uncompared_bytes: Bytes of data that have no digest, or were damaged before they could be compared;
            None where nothing was to be compared.
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
        """Of this one."""
        if self.findings:
            return Verdict.DAMAGED
        return Verdict.UNKNOWN if self.unchecked else Verdict.CLEAN


@dataclass(frozen=True, slots=True)
class Verified:
    """All that was to be verified.

    Attributes:
        deep: Bytes were compared.
        checkpoints: The checkpoints and parts.
        findings: Damage of runs, not of one checkpoint.
        notes: What else was noticed.
    """

    deep: bool
    checkpoints: tuple[Checked, ...]
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Of runs, then of checkpoints."""
        return (*self.findings, *(f for one in self.checkpoints for f in one.findings))

    @property
    def verdict(self) -> Verdict:
        """The worst of all; UNKNOWN where there was nothing."""
        if self.all_findings:
            return Verdict.DAMAGED
        return worst(one.verdict for one in self.checkpoints)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return of several ``verdicts`` the one to act on; UNKNOWN of none."""
    told = set(verdicts)
    for verdict in (Verdict.DAMAGED, Verdict.UNKNOWN, Verdict.CLEAN):
        if verdict in told:
            return verdict
    return Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be checked.

    Attributes:
        uri: Where it is.
        name: Its name in the run that the storage is of; of a part ``step_100/actor``.
        seal: Of one that the log knows; else None.
        digest: Of the manifest of a part, as its whole has it; else None.
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
        found: Where its files are; None where it was not found.
        findings: What is damaged.
        unchecked: What was not checked, and why.
        notes: What else was noticed.
        files: Its files, as the manifest lists them.
        sizes: Bytes of the listed files that are there, by path.
        stamps: Size, time and etag, by path; one of them differs where a file was written since.
        digests: Of data files, by path.
        proofs: Digests of ``digests``, by path.
        is_live: False once it was deleted while it was checked.
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
        """As it was found, None where there is none."""
        return None if self.found is None else self.found.manifest

    def add(self, damage: Damage, uri: Uri, what: str, todo: str, **where: object) -> None:
        """Add one more finding. The arguments are as for ``Finding``.

        Args:
            damage: What kind.
            uri: The file.
            what: What was found.
            todo: What to do.
            where: The other fields of ``Finding``.
        """
        self.findings.append(Finding(damage, uri, what, todo, **where))  # type: ignore[arg-type]
