"""What is wrong with a checkpoint, found by all ranks together and told in one error. Pure.

every rank     Report: does it find the save, what is missing of its share
coordinator    judge(reports) -> None, or a Damage that names domain, node, ranks and shards
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ckptfs.commit.entries import Seal
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
)
from ckptfs.manager.survey import Missing
from ckptfs.topology.world import World

__all__ = [
    "Contents",
    "Damage",
    "Flaw",
    "Report",
    "contents_of",
    "damage_of",
    "doubt_of",
    "judge",
]

_MOST = 8  # names in a message; the rest is counted
_HINT = 'bring it back, restore another step by number, or allow an older one: fallback="older"'


class Flaw(Enum):
    """How a checkpoint is damaged, and with which error that is told."""

    INCOMPLETE = "incomplete"
    CHANGED = "changed"
    UNREADABLE = "unreadable"

    @property
    def error(self) -> type[CkptfsError]:
        """The error's type."""
        return _ERRORS[self]


_ERRORS: dict[Flaw, type[CkptfsError]] = {
    Flaw.INCOMPLETE: IncompleteCheckpointError,
    Flaw.CHANGED: IntegrityError,
    Flaw.UNREADABLE: ManifestError,
}


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank found. domain: its own. flaw, why: the save is not to be read from here at all.
    missing: of its share of the files.
    """

    domain: str
    flaw: Flaw | None = None
    why: str = ""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """Who wrote what, by domain id: hosts and ranks, and data files."""

    hosts: Mapping[str, str]
    shards: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a checkpoint cannot be taken."""

    flaw: Flaw
    why: str

    def error(self, name: str, uri: object) -> CkptfsError:
        """The error to raise; the same on every rank."""
        return self.flaw.error(f"{name} is damaged: {self.why}", uri=uri, hint=_HINT)


def contents_of(manifest: Manifest) -> Contents:
    """What a message may need of a manifest."""
    hosts = {
        d.id: f"{', '.join(d.hosts)} (ranks {listed([str(r) for r in d.ranks])})"
        for d in manifest.domains
    }
    shards = {
        d.id: tuple(f.path for f in manifest.files if f.domain == d.id and _is_data(f))
        for d in manifest.domains
    }
    return Contents(hosts, shards)


def _is_data(record: FileRecord) -> bool:
    return record.digests is not None


def judge(seal: Seal, reports: Sequence[Report]) -> Flaw | None:
    """Whether a save is whole: None, or how it is not."""
    flaws = [r.flaw for r in reports if r.flaw is not None]
    changed = next((f for f in flaws if f is not Flaw.INCOMPLETE), None)
    if changed is not None:
        return changed
    reached = {r.domain for r in reports if r.flaw is None}
    if flaws or set(seal.domains) - reached or any(r.missing for r in reports):
        return Flaw.INCOMPLETE
    return None


def describe(
    seal: Seal, reports: Sequence[Report], worlds: Sequence[World], contents: Contents | None
) -> str:
    """What is missing where: domains, nodes, ranks, shards."""
    reached = {r.domain for r in reports if r.flaw is None}
    told = [_lost_domain(domain, contents) for domain in seal.domains if domain not in reached]
    blind = {n: r for n, r in enumerate(reports) if r.flaw is not None}
    for why in dict.fromkeys(r.why for r in blind.values()):
        ranks = [n for n, r in blind.items() if r.why == why]
        told.append(f"{_places(ranks, worlds)}: {why}")
    for n, report in enumerate(reports):
        if report.missing:
            names = [f"{posixpath.basename(m.path)} {m.why}" for m in report.missing]
            told.append(f"in domain {report.domain}, seen by {worlds[n].place}: {listed(names)}")
    return "; ".join(told)


def _lost_domain(domain: str, contents: Contents | None) -> str:
    if contents is None or domain not in contents.hosts:
        return f"domain {domain} is lost or out of reach"
    shards = [posixpath.basename(path) for path in contents.shards[domain]]
    return (
        f"domain {domain}, written on {contents.hosts[domain]}, is lost or out of reach, with the "
        f"shards {listed(shards)}"
    )


def _places(ranks: Sequence[int], worlds: Sequence[World]) -> str:
    nodes = dict.fromkeys(worlds[rank].place.rpartition(" (pid")[0] for rank in ranks)
    return f"rank {listed([str(r) for r in ranks])} on {listed([*nodes])}"


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


# Errors of single ranks while they read that mean that the checkpoint is damaged. Others, such as no
# permission or a state that does not fit, would meet an older checkpoint as well.
_WHILE_READING = {
    "IncompleteCheckpointError": Flaw.INCOMPLETE,
    "NotFoundError": Flaw.INCOMPLETE,
    "StaleError": Flaw.INCOMPLETE,
    "IntegrityError": Flaw.CHANGED,
    "ManifestError": Flaw.UNREADABLE,
    "StorageError": Flaw.CHANGED,  # no subclass: the disk itself could not read it
}


def damage_of(error: CollectiveError, worlds: Sequence[World]) -> Damage | None:
    """The damage that ranks met while they read; None where it is anything else."""
    flaws = {
        rank: _WHILE_READING.get(failure.type.removeprefix("ckptfs.errors."))
        for rank, failure in error.failures.items()
    }
    found = [flaw for flaw in flaws.values() if flaw is not None]
    if not found or len(found) < len(flaws):
        return None
    told = [
        f"rank {rank} on {worlds[rank].place}: {f.message}" for rank, f in error.failures.items()
    ]
    return Damage(found[0], listed(told))


def doubt_of(domains: Sequence[str], damage: Damage | None) -> Damage:
    """A save that no reached domain knows the outcome of, and what is lost of it. domains: that do."""
    why = f"; {damage.why}" if damage is not None else ""
    return Damage(
        Flaw.INCOMPLETE,
        "whether it was committed is in doubt, because the log of domain "
        f"{listed(domains)} is out of reach{why}",
    )
