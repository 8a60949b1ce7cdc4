"""Findings, the report that they make, and how ranks and times are written in them. Pure.

ok       the storage does what ckptfs relies on
warn     it works, but something is weaker, slower or costlier than it could be
fail     a training job would fail here, or lose what it saved
unknown  the doctor was not permitted to look, or the place does not say; no verdict either way
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ckptfs.control.world import World

__all__ = [
    "Finding",
    "Report",
    "Theme",
    "Verdict",
    "by_theme",
    "hosts",
    "on_ranks",
    "seconds",
]

_SHOWN = 4
_MINUTE_S = 60.0
_HOUR_S = 3600.0


class Verdict(Enum):
    """The verdict on one property, or on the whole storage.

    Attributes:
        OK: A job should start.
        WARN: A job may start, with a disadvantage.
        FAIL: A job should not start.
        UNKNOWN: It could not be found out.
    """

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Theme(Enum):
    """What a finding is about; the report is grouped by it, in this order.

    Attributes:
        ACCESS: Permissions.
        COMMIT: What a commit needs.
        SHARING: Who sees the same bytes.
        SPACE: Free space.
        RULES: Rules of the bucket.
        MOUNT: Options of the mount.
        SPEED: Bandwidth and latency.
    """

    ACCESS = "permissions"
    COMMIT = "commit"
    SHARING = "sharing"
    SPACE = "space"
    RULES = "bucket rules"
    MOUNT = "mount"
    SPEED = "speed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding on one property.

    Attributes:
        name: Its name, which never changes, for programs.
        theme: What it is about.
        verdict: The verdict on the property.
        seen: What was seen, with numbers and their units.
        meaning: What follows from it for a training job; may be empty if all is well.
        advice: What to change; may be empty if all is well.
        data: The numbers behind ``seen``, as JSON values.
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
        """The JSON document, as Python values."""
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

    Attributes:
        uri: The URI, with credentials masked.
        id: The id of this examination; its directory was ``.ckptfs-doctor-<id>``.
        shape: "filesystem" or "object".
        ranks: How many ranks took part.
        nodes: Their hosts, in order of rank, each once.
        findings: The findings, in order.
    """

    uri: str
    id: str
    shape: str
    ranks: int
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings; UNKNOWN does not count."""
        found = {finding.verdict for finding in self.findings}
        return next((v for v in (Verdict.FAIL, Verdict.WARN) if v in found), Verdict.OK)

    def passed(self, *, strict: bool) -> bool:
        """Whether a job should start; with ``strict`` warnings count as failures."""
        return self.verdict is Verdict.OK or (self.verdict is Verdict.WARN and not strict)

    def finding(self, name: str) -> Finding:
        """Return the finding of that name.

        Args:
            name: Its fixed name.

        Raises:
            KeyError: It does not apply to this kind of storage.
        """
        found = {finding.name: finding for finding in self.findings}
        return found[name]

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document, as Python values."""
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
    """Return the findings of each theme that has any, in the order of themes."""
    groups = [(theme, [f for f in findings if f.theme is theme]) for theme in Theme]
    return [(theme, found) for theme, found in groups if found]


def on_ranks(worlds: Sequence[World], ranks: Collection[int]) -> str:
    """Return ``rank 3 on host-b: `` if only some ranks are meant; "" if all are."""
    if len(ranks) == len(worlds):
        return ""
    shown = [f"rank {rank} on {worlds[rank].site}" for rank in sorted(ranks)[:_SHOWN]]
    more = len(ranks) - len(shown)
    return f"{', '.join(shown)}{f' and {more} more' if more else ''}: "


def hosts(worlds: Sequence[World], nodes: Sequence[str]) -> str:
    """Return the hosts of these nodes as text."""
    return ", ".join(next(w.site for w in worlds if w.node == node) for node in nodes)


def seconds(value: float) -> str:
    """Return a time as text: ``0.4 ms``, ``12 ms``, ``3.1 s``, ``4 min``, ``2.5 h``."""
    if value < 1:
        return f"{value * 1000:.2g} ms" if value < 0.01 else f"{value * 1000:.0f} ms"  # noqa: PLR2004 - two digits
    if value < 2 * _MINUTE_S:
        return f"{value:.1f} s"
    return f"{value / _MINUTE_S:.0f} min" if value < 2 * _HOUR_S else f"{value / _HOUR_S:.1f} h"
