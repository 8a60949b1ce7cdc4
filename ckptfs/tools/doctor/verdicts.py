"""Findings and the report that they make. Pure.

ok       it does what ckptfs relies on
warn     it works, and something is weaker, slower or costlier than it could be
fail     a training job would fail here, or lose what it saved
unknown  not permitted to look, or nobody tells; no verdict either way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Finding", "Report", "Theme", "Verdict"]


class Verdict(Enum):
    """What one property, or the whole place, is worth."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Theme(Enum):
    """What a finding is about; the report is grouped by it, in this order."""

    ACCESS = "permissions"
    COMMIT = "commit"
    SHARING = "sharing"
    SPACE = "space"
    RULES = "bucket rules"
    MOUNT = "mount"
    SPEED = "speed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One property. name: fixed, for programs. seen: what was seen, with numbers and their units.

    meaning: what follows from it for a training job; advice: what to change. Both may be empty where
    all is well. data: the numbers behind ``seen``, as JSON values.
    """

    name: str
    theme: Theme
    verdict: Verdict
    seen: str
    meaning: str = ""
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "theme": self.theme.value,
            "verdict": self.verdict.value,
            "seen": self.seen,
            "meaning": self.meaning,
            "advice": self.advice,
            **({"data": dict(self.data)} if self.data else {}),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found at one URI; the same value on every rank.

    uri: credentials masked. id: of this visit; its corner was ``.ckptfs-doctor-<id>``. shape:
    "filesystem" or "object". nodes: their hosts, in order of rank, each once.
    """

    uri: str
    id: str
    shape: str
    ranks: int
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all; what is unknown counts for nothing."""
        found = {finding.verdict for finding in self.findings}
        return next((v for v in (Verdict.FAIL, Verdict.WARN) if v in found), Verdict.OK)

    def passed(self, *, strict: bool) -> bool:
        """Whether a job should start. strict: warnings count as failures."""
        return self.verdict is Verdict.OK or (self.verdict is Verdict.WARN and not strict)

    def finding(self, name: str) -> Finding:
        """The finding of that name. KeyError: it does not apply to this kind of place."""
        found = {finding.name: finding for finding in self.findings}
        return found[name]

    @property
    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "uri": self.uri,
            "id": self.id,
            "shape": self.shape,
            "ranks": self.ranks,
            "nodes": list(self.nodes),
            "verdict": self.verdict.value,
            "findings": [finding.document for finding in self.findings],
        }


def by_theme(findings: Sequence[Finding]) -> list[tuple[Theme, list[Finding]]]:
    """The findings of each theme that has some, in the order of themes."""
    groups = [(theme, [f for f in findings if f.theme is theme]) for theme in Theme]
    return [(theme, found) for theme, found in groups if found]
