"""What is looked at when a checkpoint is verified, and what was seen of it: values, no I/O.

Target    one checkpoint or part, with what its log says    -> structure.look_at -> Looked
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptfs.commit.catalog.catalog import Found
from ckptfs.commit.digests import FileDigests
from ckptfs.commit.log.entries import Seal
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.tools.findings import Damage, Finding
from ckptfs.uri import Uri

__all__ = ["Looked", "Target"]


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
