"""Parts of a checkpoint: what a group of processes does that cannot reach the run's home.

    read_home          the word of a home: what its log says, for domains that cannot reach it
    apply_word         record it in a domain: fence, publish, release, project    (owner of the domain)
    apply_everywhere   the same in every domain that a group reaches              (collective)
    part_attempt       save one part: as any save, but its seal is a promise

A part is a save of its own, ``step_100/actor``, with its own attempt. Its seal commits nothing: only the seal in
the home does, which lists the parts. Until that commit is recorded in a domain of a part, the part is kept there,
and is in doubt for processes that cannot reach the home.

Tickets and decisions carry the word. It is as reliable as the home's log up to the entry where it was read, because
entries are never removed. No save older than its fence can be committed in the home any more, so a save that is
older and not among the committed ones was given up or deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ckptfs.commit.decisions import Refusal, may_fence, may_seal_part
from ckptfs.commit.log.append import (
    Means,
    RefusedAppend,
    append,
    catch_up,
    make_log,
    write_snapshot,
)
from ckptfs.commit.log.entries import Body, Fence, Generation, Part, PartRef, Seal, Stamp
from ckptfs.commit.log.fold import LogState, SaveState
from ckptfs.commit.log.saves import Saves
from ckptfs.commit.operations import MakeDir, Program, drive
from ckptfs.commit.ownership.recovery import (
    DomainLog,
    plan_recovery,
    report,
    settle_plan,
    sweep_empty,
)
from ckptfs.commit.paths import ATTEMPTS
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.owner_steps import BegunHere, Here, Strategy, begin
from ckptfs.commit.save.planning import SavePlan
from ckptfs.commit.save.spec import SaveSpec, fresh_ids, fresh_save_id
from ckptfs.commit.session import RunSession, View
from ckptfs.commit.state import committed, part_name, promised_here
from ckptfs.control.control import step_keeping
from ckptfs.control.world import World
from ckptfs.errors import CommitConflictError, FencedError, StateError
from ckptfs.storage.base import Capabilities
from ckptfs.uri import Uri

__all__ = [
    "HomeWord",
    "PartPlan",
    "PartStrategy",
    "agreed_plan",
    "apply_everywhere",
    "apply_word",
    "part_attempt",
    "read_home",
    "reference_to",
    "state_from_word",
]

_LAST_ENDED = 256  # a part that is forgotten here is released by the next generation's word


@dataclass(frozen=True, slots=True)
class HomeWord:
    """The state of a run's home: who holds the run, and what became of saves with parts elsewhere.

    Attributes:
        home: The deciding domain.
        host: The host that reaches it.
        fence: The newest fence.
        live: Seals of committed, undeleted saves with parts in other domains.
        aborted: ids of aborted saves.
        deleted: ids of deleted saves.
    """

    home: str
    host: str
    fence: Fence
    live: tuple[Seal, ...] = ()
    aborted: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()

    @property
    def generation(self) -> Generation:
        """The generation that holds the run."""
        return self.fence.generation


def read_home(home: str, host: str, state: LogState) -> HomeWord:
    """Return the word of a home from its log. Pure."""
    live = tuple(
        save.seal for save in committed({home: state}) if set(save.seal.everywhere) != {home}
    )
    saves = state.saves
    lives = [save for save in saves.living.values() if save.part is None]
    aborted = [*saves.settled.aborted, *(save.save_id for save in lives if save.aborted)]
    deleted = [*saves.settled.deleted, *(save.save_id for save in lives if save.deleted)]
    return HomeWord(
        home,
        host,
        state.fence,
        live,
        tuple(aborted[-_LAST_ENDED:]),
        tuple(deleted[-_LAST_ENDED:]),
    )


def state_from_word(word: HomeWord, here: LogState) -> LogState:
    """Return a fold with the content of the home's word, as far as it concerns this log. Pure."""
    saves = {
        seal.save_id: SaveState(seal.save_id, seal, number) for number, seal in enumerate(word.live)
    }
    saves |= {save_id: SaveState(save_id, aborted=True) for save_id in word.aborted}
    # Old saves that the word leaves out do not exist any more, whatever became of them. They count
    # as deleted, because one of them may have been published here since this log was folded.
    gone = {*word.deleted, *_older(word, here)} - saves.keys()
    for save_id in sorted(gone):
        known = here.save(save_id).seal
        saves[save_id] = SaveState(save_id, known, deleted=True)
    return LogState(next=1, fence=word.fence, fence_at=0, saves=Saves.of(saves.values()))


def _older(word: HomeWord, here: LogState) -> Iterator[str]:
    """Yield saves of this home that began before its fence and that this log knows.

    The log knows them by a part or a seal.
    """
    for save_id, parts in promised_here(here).items():
        if any(p.home == word.home and p.base < word.generation for p in parts):
            yield save_id
    for seal in (save.seal for save in here.saves.living.values()):
        is_of_home = seal is not None and seal.parts and seal.domains == (word.home,)
        if seal is not None and is_of_home and seal.base < word.generation:
            yield seal.save_id


def apply_word(
    word: HomeWord, domain: str, caps: Capabilities, *, ids: Iterator[str], stamp: Stamp = Stamp()
) -> Program[LogState]:
    """Record the word of the home in this domain, and return the fold after it.

    If this is the home, it only reads. After a crash during this call, the next one does the same
    again.

    Raises:
        FencedError: This domain has the fence of a newer owner, or the home's log is not the one
            that was claimed.
    """
    yield from make_log()
    yield MakeDir(ATTEMPTS)
    state = yield from catch_up()
    if domain == word.home:
        _refuse_other(word, domain, state)
        return state
    if state.generation < word.generation:
        fenced = yield from append(
            lambda current: may_fence(current, word.fence),
            write_id=next(ids),
            stamp=stamp,
            state=state,
        )
        state = fenced.state
    _refuse_other(word, domain, state)
    found = yield from report(domain, word.generation, caps, state)
    reports = {
        domain: found,
        word.home: DomainLog(word.home, state_from_word(word, found.state), ()),
    }
    plan = plan_recovery(reports, word.generation)
    means = Means(domain, caps, ids, stamp).held_by(word.generation)
    views = yield from settle_plan(plan, means)
    yield from sweep_empty(domain, views, caps)
    return (yield from write_snapshot(views[domain], write_id=next(ids), stamp=stamp))


def apply_everywhere(session: RunSession, word: HomeWord) -> LogState | None:
    """Record the word in every domain of the session. Collective.

    Returns the owner's fold, and None on other ranks. Errors as for ``apply_word``.
    """
    domain, stamp = session.placement.mine.id, session.stamp()

    def here() -> tuple[FencedError | None, LogState | None]:
        if not session.placement.is_owner:
            return None, None
        program = apply_word(word, domain, session.caps, ids=fresh_ids(), stamp=stamp)
        try:
            state = drive(program, session.storage)
        except FencedError as error:
            error.uri = str(session.storage.root)
            return error, None  # a value, so that it is raised as its type on all ranks
        if domain != word.home:
            session.touch_log_later()
        return None, state

    _, state = step_keeping(session.control, "heed", here, _raise_first)
    return state


def _raise_first(errors: Sequence[FencedError | None]) -> None:
    fenced = next((error for error in errors if error is not None), None)
    if fenced is not None:
        raise fenced


def _refuse_other(word: HomeWord, domain: str, state: LogState) -> None:
    fence, claimed = state.fence, word.generation
    who = f"generation {fence.generation.number} ({fence.host} pid {fence.pid})"
    if fence.generation > claimed and domain == word.home:
        raise FencedError(
            f"the run was taken over by {who}",
            hint="this ticket is no longer valid: begin another one under the new owner",
        )
    if fence.generation > claimed:
        raise FencedError(
            f"the ticket's generation {claimed.number} is older than what this disk knows, {who}",
            hint="begin a ticket under the newer owner; if the home of the run is new, claim the "
            "run once from processes on all of its disks",
        )
    if fence.generation < claimed:
        raise FencedError(
            "the claimed run is gone: its log was removed or replaced",
            hint="stop, check what is left of the run, and claim it again with prepare_run()",
        )


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The part and its save.

    Attributes:
        of: The id of the whole.
        name: The name of the whole.
        part: The name of the part.
        step: Completed optimizer steps; None where there is no number.
        word: The word of the home.
    """

    of: str
    name: str
    part: str
    step: int | None
    word: HomeWord


def agreed_plan(plans: Sequence[PartPlan]) -> PartPlan:
    """Return the part that all ranks of a group have a ticket for. StateError if they differ."""
    other = next((p for p in plans if (p.of, p.part) != (plans[0].of, plans[0].part)), None)
    if other is not None:
        raise StateError(
            f"ranks were given different tickets: {plans[0].name}/{plans[0].part} and "
            f"{other.name}/{other.part}",
            hint="all ranks of a group save the same part with copies of one ticket",
        )
    return plans[0]


def part_attempt(session: RunSession, plan: PartPlan, spec: SaveSpec) -> SaveAttempt:
    """Return the attempt of one part, on one rank of the group that writes it.

    After ``commit`` the part is sealed, not committed: nothing is projected, and the home's seal will contain
    the ``reference_to`` it.
    """
    return SaveAttempt(session, spec, strategy=PartStrategy(plan))


def reference_to(attempt: SaveAttempt, plan: PartPlan) -> PartRef:
    """Return the reference to a part for the home's seal, after its ``commit``."""
    placement, worlds = attempt.session.placement, attempt.session.control.worlds
    hosts = tuple(_hosts(worlds, domain.ranks) for domain in placement.domains)
    seal = attempt.seal
    return PartRef(plan.part, seal.save_id, seal.digest, seal.domains, hosts)


@dataclass(frozen=True, slots=True)
class PartStrategy(Strategy):
    """A part of a checkpoint: its seal is a promise, which the home's seal makes a commit.

    Attributes:
        part: The part, by its ticket.
    """

    surveys_ahead = False  # the survey comes after every domain has applied the ticket's word
    reads_log = False
    projects = False

    part: PartPlan

    @property
    def asks_for(self) -> Collection[str]:
        """The id of the whole: its outcome is looked up by that."""
        return (self.part.of,)

    def before_begin(self, session: RunSession) -> LogState | None:
        """Apply the ticket's word in every domain. Collective."""
        return apply_everywhere(session, self.part.word)

    def plan(self, spec: SaveSpec, views: Sequence[View | None], session: RunSession) -> SavePlan:
        """Refuse a part that comes too late; else it has the generation of the word."""
        del spec
        where = session.storage.uri(part_name(self.part.name, self.part.part))
        for state in (view[1] for view in views if view is not None):
            checkpoint = state.save(self.part.of)
            if checkpoint.seal is not None or checkpoint.deleted or checkpoint.aborted:
                raise _too_late(self.part, where, committed=checkpoint.seal is not None)
        domains = tuple(d.id for d in session.placement.domains)
        return SavePlan(fresh_save_id(), self.part.word.generation, 0, domains)

    def begin(self, here: Here) -> BegunHere:
        """Make a record that names the whole and its home."""
        of, home = self.part.of, self.part.word.home
        drive(begin(here.keys, here.base, of=of, home=home), here.session.storage)
        return BegunHere()

    def decision(
        self, seal: Seal, spec: SaveSpec
    ) -> Callable[[LogState], Body | RefusedAppend[Refusal]]:
        """Seal it as a part."""
        del spec
        what, word = self.part, self.part.word
        part = Part(
            save_id=seal.save_id,
            of=what.of,
            part=what.part,
            base=seal.base,
            name=what.name,
            step=what.step,
            home=word.home,
            home_host=word.host,
            domains=seal.domains,
            digest=seal.digest,
        )
        return lambda current: may_seal_part(current, part)


def _too_late(what: PartPlan, where: Uri, *, committed: bool) -> CommitConflictError:
    became = "committed without this part" if committed else "given up"
    return CommitConflictError(
        f"{what.name} was {became}", uri=where, hint="begin a ticket for the next checkpoint"
    )


def _hosts(worlds: Sequence[World], ranks: Sequence[int]) -> str:
    return ", ".join(dict.fromkeys(worlds[rank].site for rank in ranks))
