"""What a verification found: one finding per damage, and a verdict that never takes "nothing looked
at" for "clean". Pure.

    clean      everything that was asked for was looked at, and is as it was written
    damaged    at least one finding
    unknown    no finding, but something could not be looked at, or had nothing to be compared with
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.uri import Uri

__all__ = ["Checked", "Damage", "Finding", "Verdict", "Verified", "worst"]


class Verdict(StrEnum):
    """Of one checkpoint, or of all."""

    CLEAN = "clean"
    UNKNOWN = "unknown"
    DAMAGED = "damaged"


class Damage(StrEnum):
    """How something is damaged."""

    LOG = "log"  # the run log cannot be read to its end
    MANIFEST = "manifest"  # missing, changed, or not to be decoded
    MISSING = "missing"  # a listed file is not there
    SIZE = "size"  # a listed file has another size
    SIDECAR = "sidecar"  # digests that are damaged, or of another file
    METADATA = "metadata"  # .metadata: changed, not to be decoded, or it names what is not there
    PROJECTION = "projection"  # what stock readers see differs from what was committed
    BYTES = "bytes"  # data that differs from its digests
    UNREADABLE = "unreadable"  # the storage could not read it


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage. uri: of the file. path: as the manifest lists it. start, stop: bytes of the file,
    None where all of it is meant. blocks: how many blocks of digests differ. tensors: keys that lie in
    these bytes. todo: what to do.
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

    origin: "log", "manifest" (valid by itself) or "stock". files, size_bytes: that were looked at.
    compared_bytes: of data that were held against digests, now or (resumed_bytes) by an earlier call.
    uncompared_bytes: of data that have no digest, or were damaged before they could be compared; None
    where nothing was to be compared.
    unchecked: what was not looked at or had nothing to be compared with, and why.
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
    """All that was asked for. findings: of runs, not of one checkpoint. deep: bytes were compared."""

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
    """Of several verdicts the one to act on; UNKNOWN of none."""
    told = set(verdicts)
    for verdict in (Verdict.DAMAGED, Verdict.UNKNOWN, Verdict.CLEAN):
        if verdict in told:
            return verdict
    return Verdict.UNKNOWN
