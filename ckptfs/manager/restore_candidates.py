"""What a restore may take, in which order, and what is wrong with what it may not take. Pure.

Which checkpoint a restore takes: the order in which they are tried, from folded logs. Pure.

    choose(views, request)      -> Choice: candidates, newest commit first; or why there are none
    ahead(choices)              -> of several copies, the one that is furthest

Newest means commit order, never the largest step: a run restored at 50 and retrained to 70 must not
wake up at the rejected 100. A save that is in doubt stands in its place of that order: passing it by
without a word would be going back without a word.

What is wrong with a checkpoint, found by all ranks together and told in one error. Pure.

every rank     Report: does it find the save, what is missing of its share
coordinator    judge(reports) -> None, or a Damage that names domain, node, ranks and shards
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from ckptfs.commit.catalog.unlogged import Unlogged
from ckptfs.commit.log.entries import Kind, Part, Seal
from ckptfs.commit.manifest import FileRecord, Manifest
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
)
from ckptfs.manager.load_targets import Reshard
from ckptfs.manager.survey import Missing
from ckptfs.replication.backlog import origin_of

__all__ = [
    "Candidate",
    "Choice",
    "Contents",
    "Damage",
    "Fallback",
    "Flaw",
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
]

_MOST = 8  # names in a message; the rest is counted
_HINT = (
    'bring it back, restore another step by number, or pass fallback="older" to allow an older one'
)


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
        f"its commit is in doubt, because the log of domain {listed(domains)} cannot be "
        f"reached{why}",
    )


class Fallback(ArgumentChoice, parameter="fallback"):
    """What to do where the newest checkpoint is damaged, lost in part, or in doubt."""

    ERROR = "error"
    OLDER = "older"  # take the next older one that is whole, and say what that costs


class PerRankPolicy(ArgumentChoice, parameter="per_rank"):
    """What to do with what ranks of another world size kept for themselves."""

    ERROR = "error"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore.

    step_of: the template's; names that it does not know are not candidates. step: exactly this one,
    a failing run's included; None is the newest. reshard: fnmatch patterns of keys -> what makes the
    new rank's state of all old ranks' states. strict, allow, objects: as for ``ckptfs.load``. part: of a checkpoint
    that several groups wrote, the one to restore; ranks outside its group have others. unlogged: what to
    do where another program saved after the newest commit.
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
    """One checkpoint that may be taken. doubt: ids of domains out of reach that could tell whether it
    was committed; () for one that was.
    """

    seal: Seal
    step: int
    doubt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates, newest commit first. steps: of all that may be named. unfit: live saves of this
    kind that were left out, and why each group was. known: every save that the logs ever heard of, by
    the ids of the originals; names: theirs.
    """

    candidates: tuple[Candidate, ...] = ()
    steps: tuple[int, ...] = ()
    unfit: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def of(self, save_id: str) -> Candidate | None:
        """The candidate that is this save, or a copy of it; None where there is none."""
        origin = origin_of(save_id)
        return next((c for c in self.candidates if origin_of(c.seal.save_id) == origin), None)


ODD_NAMES = "named otherwise"
FAILURES = "saved by a failing run"


def choose(views: Views, request: RestoreRequest) -> Choice:
    """The candidates of one run, from its reached domains' logs."""
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
    """Live saves, and those in doubt that no later commit replaced, in commit order."""
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
    """A part's place among its base's saves, which only its home knows: after all that were sealed
    where it was sealed, before it was.
    """
    view = next(views[d] for d in part.domains if d in views)
    at = view.save(part.save_id).sealed_at or 0
    before = [s.seal for s in view.saves.values() if s.seal is not None and (s.sealed_at or 0) < at]
    return 1 + max((seal.seq for seal in before if seal.base == part.base), default=0)


def is_passed(mine: Choice, other: Choice) -> bool:
    """Whether another place of the run has this one's newest save, and went on to one that this place
    never heard of: the run moved on elsewhere, and this is what it left.
    """
    if not mine.candidates or not other.candidates:
        return False
    here, there = (origin_of(c.candidates[0].seal.save_id) for c in (mine, other))
    return here != there and here in other.known and there not in mine.known


def is_forked(mine: Choice, other: Choice) -> bool:
    """Whether both places went on by themselves from what they have in common, the other one further.

    A disk of an earlier allocation whose newest save was never copied looks like that: its job died,
    and the next one went on elsewhere. By steps, because no log knows both.
    """
    if not mine.candidates or not other.candidates or not mine.known & other.known:
        return False
    here, there = mine.candidates[0], other.candidates[0]
    apart = (
        origin_of(here.seal.save_id) not in other.known
        and origin_of(there.seal.save_id) not in mine.known
    )
    return apart and there.step > here.step


def ahead(choices: Sequence[Choice]) -> int | None:
    """Which of several copies of one run to go on from; None where none has a candidate.

    A copy whose newest save another one knows and has passed is behind it; of the rest the one with
    the greatest step, of equals the first.
    """
    fit = [n for n, choice in enumerate(choices) if choice.candidates]

    left = [n for n in fit if not any(is_passed(choices[n], choices[m]) for m in fit)]
    return max(left, key=lambda n: (choices[n].candidates[0].step, -n), default=None)
