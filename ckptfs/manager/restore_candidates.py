"""What a restore may take, in which order, and what is wrong with what it may not take. Pure.

The candidates come from folded logs, in the order in which they are tried:

    choose(views, request)      -> Choice: candidates, newest commit first; or why there are none
    ahead(choices)              -> of several copies, the one that is furthest

Newest means commit order, never the largest step: a run that was restored at 50 and trained to 70
again must not resume at the rejected 100. A save that is in doubt keeps its place in that order:
skipping it silently would mean going back silently.

All ranks together find out what is wrong with a checkpoint, and one error reports it:

    every rank     Report: whether it finds the save, what is ``missing`` of its ``share_of`` the files
    coordinator    judge(reports) -> None, or a Damage that names domain, node, ranks and shards
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from ckptfs.commit.catalog.unlogged import Unlogged
from ckptfs.commit.delete.shared_data import file_key
from ckptfs.commit.log.entries import Kind, Part, Seal
from ckptfs.commit.manifest import FileRecord, Manifest
from ckptfs.commit.operations import List, Program, StatOf
from ckptfs.commit.state import (
    Standing,
    Views,
    catalog_of,
    commits,
    hidden,
    in_order,
    living,
    part_in,
    promise,
    seal_of,
    standing,
    used_overwrites,
)
from ckptfs.control.world import World
from ckptfs.dcp.read.load_planner import Allow
from ckptfs.errors import (
    ArgumentChoice,
    CkptfsError,
    CollectiveError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
)
from ckptfs.manager.load_targets import Reshard
from ckptfs.replication.backlog import origin_of
from ckptfs.storage.base import Entry, Shape

__all__ = [
    "Candidate",
    "Choice",
    "Contents",
    "Damage",
    "Fallback",
    "Flaw",
    "Missing",
    "PerRankPolicy",
    "Report",
    "RestoreRequest",
    "ahead",
    "choose",
    "contents_of",
    "damage_of",
    "doubt_of",
    "is_forked",
    "is_passed",
    "judge",
    "missing",
    "share_of",
]

_MOST = 8  # names in a message; the rest is counted
_HINT = (
    'bring it back, restore another step by number, or pass fallback="older" to allow an older one'
)


class Flaw(Enum):
    """How a checkpoint is damaged, and which error reports it."""

    INCOMPLETE = "incomplete"
    CHANGED = "changed"
    UNREADABLE = "unreadable"

    @property
    def error(self) -> type[CkptfsError]:
        """The type of the error."""
        return _ERRORS[self]


_ERRORS: dict[Flaw, type[CkptfsError]] = {
    Flaw.INCOMPLETE: IncompleteCheckpointError,
    Flaw.CHANGED: IntegrityError,
    Flaw.UNREADABLE: ManifestError,
}


@dataclass(frozen=True, slots=True)
class Missing:
    """One file that is not as it was written: it is absent, or has another size."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank found.

    Attributes:
        domain: Its own domain.
        flaw: How the save is damaged, if it cannot be read from here at all.
        why: The reason for that, in words.
        missing: What is missing of its share of the files.
    """

    domain: str
    flaw: Flaw | None = None
    why: str = ""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """What each domain of a checkpoint wrote, by domain id: hosts and ranks, and data files."""

    hosts: Mapping[str, str]
    shards: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a checkpoint cannot be taken."""

    flaw: Flaw
    why: str

    def error(self, name: str, uri: object) -> CkptfsError:
        """Return the error to raise; the same on every rank."""
        return self.flaw.error(f"{name} is damaged: {self.why}", uri=uri, hint=_HINT)


def contents_of(manifest: Manifest) -> Contents:
    """Return what messages need from a manifest."""
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
    """Return None if a save is whole, else how it is damaged."""
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
    """Return what is missing where: domains, nodes, ranks, shards."""
    reached = {r.domain for r in reports if r.flaw is None}
    findings = [_lost_domain(domain, contents) for domain in seal.domains if domain not in reached]
    blind = {n: r for n, r in enumerate(reports) if r.flaw is not None}
    for why in dict.fromkeys(r.why for r in blind.values()):
        ranks = [n for n, r in blind.items() if r.why == why]
        findings.append(f"{_places(ranks, worlds)}: {why}")
    for n, report in enumerate(reports):
        if report.missing:
            names = [f"{posixpath.basename(m.path)} {m.why}" for m in report.missing]
            findings.append(
                f"in domain {report.domain}, seen by {worlds[n].place}: {listed(names)}"
            )
    return "; ".join(findings)


def _lost_domain(domain: str, contents: Contents | None) -> str:
    if contents is None or domain not in contents.hosts:
        return f"domain {domain} is lost or cannot be reached"
    shards = [posixpath.basename(path) for path in contents.shards[domain]]
    return (
        f"domain {domain}, written on {contents.hosts[domain]}, is lost or cannot be reached, "
        f"with the shards {listed(shards)}"
    )


def _places(ranks: Sequence[int], worlds: Sequence[World]) -> str:
    nodes = dict.fromkeys(worlds[rank].place.rpartition(" (pid")[0] for rank in ranks)
    return f"rank {listed([str(r) for r in ranks])} on {listed([*nodes])}"


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


# Errors of single ranks during the read which mean that the checkpoint is damaged. Others, such as
# missing permission or a state that does not fit, would occur with an older checkpoint as well.
_WHILE_READING = {
    "IncompleteCheckpointError": Flaw.INCOMPLETE,
    "NotFoundError": Flaw.INCOMPLETE,
    "StaleError": Flaw.INCOMPLETE,
    "IntegrityError": Flaw.CHANGED,
    "ManifestError": Flaw.UNREADABLE,
    "StorageError": Flaw.CHANGED,  # no subclass: the disk itself could not read it
}


def damage_of(error: CollectiveError, worlds: Sequence[World]) -> Damage | None:
    """Return the damage that ranks found while they read; None if the error is anything else."""
    flaws = {
        rank: _WHILE_READING.get(failure.type.removeprefix("ckptfs.errors."))
        for rank, failure in error.failures.items()
    }
    found = [flaw for flaw in flaws.values() if flaw is not None]
    if not found or len(found) < len(flaws):
        return None
    messages = [
        f"rank {rank} on {worlds[rank].place}: {f.message}" for rank, f in error.failures.items()
    ]
    return Damage(found[0], listed(messages))


def doubt_of(domains: Sequence[str], damage: Damage | None) -> Damage:
    """Return the damage of a save in doubt: no reached domain knows whether it was committed.

    ``domains`` are those that know, ``damage`` is what else is lost of it.
    """
    why = f"; {damage.why}" if damage is not None else ""
    return Damage(
        Flaw.INCOMPLETE,
        f"its commit is in doubt, because the log of domain {listed(domains)} cannot be "
        f"reached{why}",
    )


class Fallback(ArgumentChoice, parameter="fallback"):
    """What to do if the newest checkpoint is damaged, partly lost, or in doubt."""

    ERROR = "error"
    OLDER = "older"  # take the next older one that is whole, and say what that costs


class PerRankPolicy(ArgumentChoice, parameter="per_rank"):
    """What to do with what ranks of another world size kept for themselves."""

    ERROR = "error"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore.

    Attributes:
        step_of: Of the template; a save with a name that it does not match is no candidate.
        step: Exactly this one, also of a failing run; None: the newest.
        reshard: Makes the state of a new rank from the states of all old ranks, by fnmatch pattern
            of keys.
        part: The part to restore, of a checkpoint that several groups wrote; ranks of other groups
            restore other parts.
        unlogged: What to do if another program saved after the newest commit.
        strict: As for ``ckptfs.load``, like allow and objects.
    """

    step_of: Callable[[str], int | None]
    step: int | None = None
    kind: Kind = Kind.CHECKPOINT
    fallback: Fallback = Fallback.ERROR
    include_failures: bool = False
    per_rank: PerRankPolicy = PerRankPolicy.ERROR
    reshard: Mapping[str, Reshard] = field(default_factory=dict)
    strict: bool = True
    part: str | None = None
    unlogged: Unlogged = Unlogged.ERROR
    allow: Allow = ()
    objects: Literal["load", "refuse"] = "load"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One checkpoint that may be taken.

    ``doubt`` has the ids of unreachable domains that know whether it was committed; () if it was.
    """

    seal: Seal
    step: int
    doubt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """What one place offers to a restore.

    Attributes:
        candidates: Newest commit first.
        steps: The steps that may be named.
        unfit: The names of live saves of this kind that were left out, by the reason.
        known: All saves that the logs mention, by the ids of the originals.
        names: The names of these saves.
    """

    candidates: tuple[Candidate, ...] = ()
    steps: tuple[int, ...] = ()
    unfit: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def of(self, save_id: str) -> Candidate | None:
        """Return the candidate that is this save or a copy of it; None if there is none."""
        origin = origin_of(save_id)
        return next((c for c in self.candidates if origin_of(c.seal.save_id) == origin), None)


ODD_NAMES = "named otherwise"
FAILURES = "saved by a failing run"


def choose(views: Views, request: RestoreRequest) -> Choice:
    """Return the candidates of one run, from the logs of its reached domains."""
    seals = [s for s in _seals(views) if s.artifact is request.kind]
    named = [s for s in seals if request.step_of(s.name) is not None]
    wanted = named
    if request.step is not None:
        wanted = [s for s in named if request.step_of(s.name) == request.step]
    elif not request.include_failures:
        wanted = [s for s in named if not s.failure]
    unfit = {
        ODD_NAMES: tuple(s.name for s in seals if request.step_of(s.name) is None),
        FAILURES: tuple(s.name for s in named if s.failure),
    }
    return Choice(
        tuple(_candidate(s, views, request) for s in reversed(wanted)),
        tuple(step for s in named if (step := request.step_of(s.name)) is not None),
        {why: names for why, names in unfit.items() if names},
        frozenset(origin_of(save_id) for view in views.values() for save_id in view.saves),
        frozenset[str]().union(*(view.saves.names() for view in views.values())),
    )


def _candidate(seal: Seal, views: Views, request: RestoreRequest) -> Candidate:
    lost: tuple[str, ...] = ()
    if standing(seal.save_id, views) is Standing.IN_DOUBT:
        known = part_in(seal.save_id, views)
        deciding = seal.domains if known is None else (known.home,)
        lost = tuple(d for d in deciding if d not in views)
    step = request.step_of(seal.name)
    return Candidate(seal, -1 if step is None else step, lost)


def _seals(views: Views) -> list[Seal]:
    """Return, in commit order, live saves and those in doubt that no later commit replaced."""
    lives = commits(views)
    used = used_overwrites(views, lives)
    catalogued = {live.seal.save_id for live in catalog_of(lives, views)}
    doubtful: dict[str, Seal] = {}
    for save_id in set(living(views)) - catalogued:
        if standing(save_id, views) is not Standing.IN_DOUBT:
            continue
        seal, part = seal_of(save_id, views), part_in(save_id, views)
        if seal is None and part is not None:
            seal = replace(promise(part), name=part.name, seq=_seq_before(part, views))
        if seal is None:
            continue
        doubtful[save_id] = seal
    every = in_order([*(live.seal for live in lives), *doubtful.values()], views)
    newest = {live.seal.name: live.key for live in every if live.seal.save_id not in doubtful}
    return [
        seal
        for seal, key in ((live.seal, live.key) for live in every)
        if seal.save_id in catalogued
        or (
            seal.save_id in doubtful
            and not newest.get(seal.name, key) > key
            and not hidden(seal, views, used)
        )
    ]


def _seq_before(part: Part, views: Views) -> int:
    """Return a place in the order for a part, among the saves of its base.

    Only the part's home knows the real one. This one comes after all saves that were sealed in the
    part's domain before it.
    """
    view = next(views[d] for d in part.domains if d in views)
    at = view.save(part.save_id).sealed_at or 0
    before = [s.seal for s in view.saves.values() if s.seal is not None and (s.sealed_at or 0) < at]
    return 1 + max((seal.seq for seal in before if seal.base == part.base), default=0)


def is_passed(own: Choice, other: Choice) -> bool:
    """Whether ``other`` has the newest save of ``own`` and continued to one unknown to ``own``.

    The run then moved on elsewhere, and ``own`` is what it left.
    """
    if not own.candidates or not other.candidates:
        return False
    own_id, other_id = (origin_of(c.candidates[0].seal.save_id) for c in (own, other))
    return own_id != other_id and own_id in other.known and other_id not in own.known


def is_forked(own: Choice, other: Choice) -> bool:
    """Whether both places continued separately from a common state, and ``other`` is further.

    A disk of an earlier allocation looks like that if its newest save was never copied: its job
    died, and the next job continued elsewhere. The steps decide which is further, because no log
    knows both.
    """
    if not own.candidates or not other.candidates or not own.known & other.known:
        return False
    own_newest, other_newest = own.candidates[0], other.candidates[0]
    apart = (
        origin_of(own_newest.seal.save_id) not in other.known
        and origin_of(other_newest.seal.save_id) not in own.known
    )
    return apart and other_newest.step > own_newest.step


def ahead(choices: Sequence[Choice]) -> int | None:
    """Return which of several copies of one run to resume from; None if none has a candidate.

    A copy is behind if another copy knows its newest save and has passed it. Of the others, the one
    with the greatest step is taken, and the first of equals.
    """
    fit = [n for n, choice in enumerate(choices) if choice.candidates]

    left = [n for n in fit if not any(is_passed(choices[n], choices[m]) for m in fit)]
    return max(left, key=lambda n: (choices[n].candidates[0].step, -n), default=None)


# -- the files of a candidate -----------------------------------------------------------------------


def share_of(files: Sequence[FileRecord], domain: str, number: int, size: int) -> list[FileRecord]:
    """Return the part of a domain's files that one of its ``size`` ranks checks."""
    here = sorted((f for f in files if f.domain in (None, domain)), key=lambda f: f.path)
    return here[number::size]


def missing(files: Sequence[FileRecord], home: str, shape: Shape) -> Program[tuple[Missing, ...]]:
    """Return the files that are absent, or have another size.

    On object stores this takes one listing per 1,000 files of a directory: an object is whole or
    not there, and its size is checked when it is opened.
    """
    if shape is Shape.OBJECT:
        return (yield from _not_listed(files, home))
    found: tuple[Missing, ...] = ()
    for record in files:
        try:
            size = (yield StatOf(file_key(record, home))).size_bytes
        except NotFoundError:
            found += (Missing(record.path, "is missing"),)
            continue
        if size != record.size_bytes:
            why = f"has {size} bytes, but {record.size_bytes} were written"
            found += (Missing(record.path, why),)
    return found


def _not_listed(files: Sequence[FileRecord], home: str) -> Program[tuple[Missing, ...]]:
    found: tuple[Missing, ...] = ()
    for directory, records in _by_directory(files, home):
        try:
            entries: list[Entry] = yield List(directory)
        except NotFoundError:
            entries = []
        names = {entry.name for entry in entries}
        gone = [r for r in records if posixpath.basename(r.path) not in names]
        found += tuple(Missing(r.path, "is missing") for r in gone)
    return found


def _by_directory(files: Sequence[FileRecord], home: str) -> Iterator[tuple[str, list[FileRecord]]]:
    directories: dict[str, list[FileRecord]] = {}
    for record in files:
        directory = posixpath.dirname(file_key(record, home))
        directories.setdefault(directory, []).append(record)
    yield from directories.items()
