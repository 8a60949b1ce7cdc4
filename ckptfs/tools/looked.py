"""What is looked at when a checkpoint is verified, and what was seen of it: values, no I/O.

Target    one checkpoint or part, with what its log says    -> structure.look_at -> Looked
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptfs.commit.catalog import Found
from ckptfs.commit.digests import FileDigests
from ckptfs.commit.entries import Seal
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.tools.findings import Damage, Finding
from ckptfs.uri import Uri

__all__ = ["Looked", "Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be looked at. name: in the run that the storage is of; of a part ``step_100/actor``.
    seal: of one that the log knows. digest: of the manifest of a part whose whole says it.
    """

    uri: Uri
    name: str
    seal: Seal | None = None
    digest: str | None = None


@dataclass(slots=True)
class Looked:
    """What was seen. sizes: of the listed files that are there, by path; stamps: size, time and etag, of
    which one differs where a file was written since. digests: of data files; proofs: digests of those.
    is_live: False once it was deleted while it was looked at.
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
        """One more finding."""
        self.findings.append(Finding(damage, uri, what, todo, **where))  # type: ignore[arg-type]
