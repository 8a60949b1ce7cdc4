"""Restore from the newest checkpoint that is whole on all domains, decided once for all ranks.

    survey    one process per node folds its domain's log      -> candidates, newest commit first
    check     every rank finds the save, reads `.metadata`, looks at its share of the files
                                                               -> whole, or damaged: what, where
    load      plan, read, verify, hand over                    -> outcome
    again     if damaged: a copy of the same save; an older save if the caller allows that; else an error

Collective and read-only. None means that the run is truly empty: nothing was ever committed, and
nothing there looks like a checkpoint. In every other case an error says what is wrong.

``Places`` are the places that a restore may read from, as all ranks know them together: the run and
its copies. Each call is collective, and its answer is the same on every rank:

    survey(n)         one process per node folds its domain's log    -> candidates of one place
    refuse_unfit(n)   there are checkpoints, but none may be taken   -> StateError
    check_nothing()   no place has anything that looks like a checkpoint, or an error says what it is

``check`` finds out whether one save is whole, by all ranks of a place together:

    check the checkpoint    every rank finds the save, reads `.metadata`, looks at its share of the files
    name what is missing    only if something is
"""

from __future__ import annotations

import fnmatch
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.catalog.catalog import (
    LocatedCheckpoint,
    Sight,
    find,
    look_at_log,
    part_of,
    refuse_no_run,
)
from ckptfs.commit.catalog.unlogged import (
    Unlogged,
    leftovers,
    newer_unlogged,
    unlogged_at,
    unlogged_error,
)
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import number_order
from ckptfs.commit.session import RunSession
from ckptfs.dcp.async_api import CopySize, size_of_tensors
from ckptfs.dcp.loading import Loadable, load_into, read_metadata
from ckptfs.dcp.planning.saved_state import Saved
from ckptfs.dcp.planning.state_dicts import unmarked_key, view_for
from ckptfs.errors import (
    CollectiveError,
    IncompleteCheckpointError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StaleError,
    StateError,
    StorageError,
)
from ckptfs.events import LoadResult, Restored
from ckptfs.manager.load_targets import Blank, Marks, Moving, Reshard, blank_of, moved_keys
from ckptfs.manager.restore_candidates import (
    FAILURES,
    ODD_NAMES,
    Candidate,
    Choice,
    Contents,
    Damage,
    Fallback,
    Flaw,
    PerRankPolicy,
    Report,
    RestoreRequest,
    ahead,
    choose,
    contents_of,
    damage_of,
    describe,
    doubt_of,
    is_forked,
    is_passed,
    judge,
    listed,
    missing,
    share_of,
)
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.inflight import log_fields
from ckptfs.uri import Uri

__all__ = ["Opened", "Places", "RestoreOutcome", "Surveyed", "check", "restore"]

logger = logging.getLogger("ckptfs.manager")

# A save as this rank found it, and its metadata.
Opened = tuple[LocatedCheckpoint, Metadata]
ReadMetadata = Callable[[Storage, LocatedCheckpoint], Metadata]


def check(
    session: RunSession, seal: Seal, held: list[Opened], read: ReadMetadata = read_metadata
) -> Damage | None:
    """Return None if every rank finds the save and every file is there with its size. Collective.

    ``held`` receives what this rank found, for the load that follows. ``read`` reads the metadata;
    directories have none.
    """
    reports: list[Report] = []

    def decide(answers: list[Report]) -> Flaw | None:
        reports.extend(answers)
        return judge(seal, answers)

    flaw = session.control.step(
        "check the checkpoint", lambda: _report(session, seal, held, read), decide
    )
    if flaw is None:
        return None

    def contents() -> Contents | None:
        manifest = held[0][0].manifest if held else None
        return None if manifest is None else contents_of(manifest)

    def tell(answers: Sequence[Contents | None]) -> str:
        known = next((a for a in answers if a is not None), None)
        return describe(seal, reports, session.control.worlds, known)

    return Damage(flaw, session.control.step("name what is missing", contents, tell))


def _report(session: RunSession, seal: Seal, held: list[Opened], read: ReadMetadata) -> Report:
    """Return what this rank finds of a save. Local."""
    own_domain, storage, shape = session.placement.mine, session.storage, session.caps.shape
    try:
        found = drive(find(seal, shape, storage.uri(seal.name)), storage)
        held.append((found, read(storage, found)))
        files = () if found.manifest is None else found.manifest.files
        # One rank lists on an object store; elsewhere the ranks of a domain share the work.
        ranks = own_domain.ranks[:1] if shape is Shape.OBJECT else own_domain.ranks
        share: list[FileRecord] = []
        if session.control.rank in ranks:
            share = share_of(files, own_domain.id, ranks.index(session.control.rank), len(ranks))
        return Report(own_domain.id, missing=drive(missing(share, found.home, shape), storage))
    except (NotFoundError, StaleError, IncompleteCheckpointError) as error:
        return Report(own_domain.id, Flaw.INCOMPLETE, error.message)
    except IntegrityError as error:
        return Report(own_domain.id, Flaw.CHANGED, f"{error.message} ({error.uri})")
    except ManifestError as error:
        return Report(own_domain.id, Flaw.UNREADABLE, f"{error.message} ({error.uri})")
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # no permission, no network: an older checkpoint would fare no better
        return Report(own_domain.id, Flaw.CHANGED, f"{error.message} ({error.uri})")


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What all ranks know of one source.

    Attributes:
        unreached: Why nothing could be read; None: it could be read.
        unlogged: What another program saved there after the newest commit.
    """

    choice: Choice
    has_log: bool
    unreached: str | None = None
    unlogged: tuple[str, ...] = ()


class Places:
    """The places that a restore may read from, the run first."""

    def __init__(self, sessions: Sequence[RunSession], request: RestoreRequest) -> None:
        self.sessions = tuple(sessions)
        self._request = request
        self._surveyed: dict[int, Surveyed] = {}

    def __len__(self) -> int:
        return len(self.sessions)

    def forget(self) -> None:
        """Forget all surveys, so that each place is read again."""
        self._surveyed.clear()

    def uri(self, source: int) -> Uri:
        """Return the URI of the run at this place."""
        return self.sessions[source].storage.root

    def survey(self, source: int) -> Surveyed:
        """Return the candidates, from the logs of the reached domains.

        Collective; read once per source.
        """
        if source not in self._surveyed:
            self._surveyed[source] = self.look_again(source)
        return self._surveyed[source]

    def look_again(self, source: int) -> Surveyed:
        """Return the candidates as they are now. Collective."""
        session = self.sessions[source]

        def local() -> Sight | StorageError | None:
            if not _looks(session):
                return None
            try:
                sight = drive(look_at_log(), session.storage)
                return self._with_unlogged(source, sight)
            except StorageError as error:
                if len(self.sessions) == 1:
                    raise
                return error  # a copy may replace a place that is down

        def decide(answers: Sequence[Sight | StorageError | None]) -> Surveyed:
            errors = [a for a in answers if isinstance(a, StorageError)]
            if errors:
                return Surveyed(Choice(), has_log=False, unreached=str(errors[0]))
            sights = [a for a in answers if isinstance(a, Sight)]
            unread = next((s.unread for s in sights if s.unread), None)
            if unread is not None:
                raise IncompleteCheckpointError(
                    f"the run log cannot be read to its end: {unread}",
                    uri=self.uri(source),
                    hint="ckptfs never removes an entry: bring the directory back as it was",
                )
            views: dict[str, LogState] = {}
            for sight in sights:
                if sight.domain is None or sight.state is None:
                    continue
                known = views.get(sight.domain)
                # Of two nodes of one domain, one may still see less of its log.
                if known is None or known.next < sight.state.next:
                    views[sight.domain] = sight.state
            foreign = {name for sight in sights for name in sight.unlogged}
            unlogged = tuple(sorted(foreign, key=number_order))
            found = choose(views, self._request)
            return Surveyed(found, has_log=bool(views), unlogged=unlogged)

        return session.control.step("survey the run", local, decide)

    def _with_unlogged(self, source: int, sight: Sight) -> Sight:
        """Add what another program saved after the newest commit.

        Only the run is searched, not its copies, by one process of each domain.
        """
        session, request = self.sessions[source], self._request
        is_searched = source == 0 and request.kind is not Kind.WEIGHTS
        if not is_searched or request.unlogged is Unlogged.IGNORE or not session.placement.is_owner:
            return sight
        if sight.domain is None or sight.state is None:
            return sight
        views, shape = {sight.domain: sight.state}, session.caps.shape
        if request.step is None:
            names = newer_unlogged(views, shape)
        else:
            seals = [candidate.seal for candidate in choose(views, request).candidates]
            names = unlogged_at(
                views, seals, lambda name: request.step_of(name) == request.step, shape
            )
        return replace(sight, unlogged=drive(names, session.storage))

    def refuse_unlogged(self) -> None:
        """Refuse to restore if another program's save is newer than the run's newest commit.

        Stock torch, for example, may have saved there, or over the step that was asked for.
        Restoring the commit of ckptfs would lose the later save. Raises AmbiguousCheckpointError.
        """
        sight = self.survey(0)
        if sight.unlogged:
            ours = sight.choice.candidates[0].seal if sight.choice.candidates else None
            raise unlogged_error(sight.unlogged, ours, self.uri(0))

    def allow_unreached(self, why: str) -> None:
        """Allow older copies to replace a run that cannot be read, or raise.

        Raises IncompleteCheckpointError unless the caller passed ``fallback="older"`` and there are
        copies.
        """
        if len(self.sessions) > 1 and self._request.fallback is Fallback.OLDER:
            logger.warning("%s cannot be read; its copies are tried: %s", self.uri(0), why)
            return
        raise IncompleteCheckpointError(
            f"the run cannot be read: {why}",
            uri=self.uri(0),
            hint='copies may be older: pass fallback="older" to take the newest of them'
            if len(self.sessions) > 1
            else "make the storage reachable: it may have a checkpoint",
        )

    def is_passed(self) -> bool:
        """Whether a copy has the run's newest save and continued from there. Collective.

        Node-local disks of an earlier allocation look like that.
        """
        own = self.survey(0).choice
        return any(is_passed(own, self.survey(n).choice) for n in range(1, len(self.sessions)))

    def refuse_fork(self) -> None:
        """Raise StateError if a copy and the run have diverged. Collective.

        The copy then has a later step that is not in the run's log, and the run's newest save was
        never copied. A person has to decide which of the two is the run.
        """
        own = self.survey(0).choice
        for n in range(1, len(self.sessions)):
            other = self.survey(n).choice
            if self._request.step is None and is_forked(own, other):
                only_here, only_in_copy = own.candidates[0].seal.name, other.candidates[0].seal.name
                raise StateError(
                    f"the run and its copy {self.uri(n)} have diverged: {only_here} is not in the "
                    f"copy, and {only_in_copy} is not in the run",
                    uri=self.uri(0),
                    hint="one of them is left from an earlier allocation or belongs to another "
                    "job: restore by step=, or move the wrong one away",
                )

    def home(self) -> int | None:
        """Return the place that has the newest checkpoint; None: nothing was ever committed.

        Collective. The run decides which checkpoint is the newest. A copy replaces the run if the
        run is empty, or if the run continued elsewhere from a copy. Errors are those of
        ``restore``.
        """
        primary = self.survey(0)
        if primary.unreached is not None:
            self.allow_unreached(primary.unreached)
        home: int | None = 0
        if not primary.choice.candidates:
            self.refuse_unfit(0)
            home = self.furthest_copy()
        elif self.is_passed():
            home = self.furthest_copy()
            logger.warning("%s is an old state of the run, which continued elsewhere", self.uri(0))
        else:
            self.refuse_fork()
            self.refuse_unlogged()
        if home is None:
            self.check_nothing()
        elif home:
            logger.warning(
                "restoring from a copy of %s, which is ahead of it: %s", self.uri(0), self.uri(home)
            )
        return home

    def furthest_copy(self) -> int | None:
        """Return the copy to resume from if the run has nothing."""
        choices = [self.survey(n).choice for n in range(1, len(self.sessions))]
        found = ahead(choices)
        return None if found is None else found + 1

    def refuse_unfit(self, source: int) -> None:
        """Raise StateError if there are checkpoints, but none that may be taken."""
        unfit = self.survey(source).choice.unfit
        where = self.uri(source)
        if FAILURES in unfit and self._request.step is None:
            raise StateError(
                f"the run has only checkpoints of failing runs: {listed(unfit[FAILURES])}",
                uri=where,
                hint="restore one by its step, or pass include_failures=True to allow them",
            )
        if ODD_NAMES in unfit and self._request.step is None:
            raise StateError(
                "the run has checkpoints that do not match the name template: "
                f"{listed(unfit[ODD_NAMES])}",
                uri=where,
                hint="pass the name= that they were saved with to the manager",
            )

    def check_nothing(self) -> None:
        """Raise an error unless nothing was ever committed.

        It is a StateError, a NotFoundError or an IncompleteCheckpointError.
        """
        if self._request.step is not None:
            self.refuse_unlogged()
        for source, session in enumerate(self.sessions):
            self.refuse_unfit(source)
            self._refuse_leftovers(source, session)
        if self._request.step is not None:
            steps = sorted({s for x in self._surveyed.values() for s in x.choice.steps})
            existing = f"there are {listed([str(s) for s in steps])}" if steps else "there is none"
            raise NotFoundError(
                f"no checkpoint of step {self._request.step}: {existing}", uri=self.uri(0)
            )
        unreached = next((x.unreached for x in self._surveyed.values() if x.unreached), None)
        if unreached is not None:
            raise IncompleteCheckpointError(
                f"a place that may have checkpoints cannot be read: {unreached}", uri=self.uri(0)
            )
        logger.info("%s is empty: nothing to restore", self.uri(0))

    def _refuse_leftovers(self, source: int, session: RunSession) -> None:
        surveyed = self.survey(source)
        if surveyed.unreached is not None:
            return

        def local() -> tuple[str, ...] | StateError:
            if not _looks(session):
                return ()
            step_of, known = self._request.step_of, surveyed.choice.names
            if not surveyed.has_log:
                try:
                    drive(refuse_no_run(self.uri(source), session.caps.shape), session.storage)
                except StateError as error:
                    return error  # returned, so that ``decide`` can raise it as its own type
            return drive(leftovers(step_of, known, has_log=surveyed.has_log), session.storage)

        def decide(answers: Sequence[tuple[str, ...] | StateError]) -> None:
            for answer in answers:
                if isinstance(answer, StateError):
                    raise answer
            found = {name for one in answers if isinstance(one, tuple) for name in one}
            names = sorted(found, key=number_order)
            if names:
                raise StateError(
                    f"this run has checkpoints that no log lists: {listed(names)}",
                    uri=self.uri(source),
                    hint="load one with ckptfs.load() and begin a run elsewhere, or remove them: "
                    "a restart must not begin at step 0 next to them",
                )

        session.control.step("look for leftovers", local, decide)


def _looks(session: RunSession) -> bool:
    """Whether this process reads: one per node, or one of all on an object store.

    Nodes may see different things on a filesystem.
    """
    if session.caps.shape is Shape.OBJECT:
        return session.placement.is_owner
    return session.placement.is_node_lead


TRIES = 5  # a run that changes while it is read settles at the second look


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """A restore that is done.

    Attributes:
        save_id: The save that retention must not delete before the next commit.
        source: The index of the place that it was read from; 0 is the run.
        copied: The memory that a copy of this rank's part of it takes.
    """

    restored: Restored
    save_id: str
    source: int
    loaded: LoadResult
    copied: CopySize


class _MovedError(Exception):
    """The run changed while it was read; all ranks read it again."""


def restore(
    sources: Sequence[RunSession], state: Any, request: RestoreRequest
) -> RestoreOutcome | None:
    """Restore ``state`` in place from the newest whole checkpoint. Collective, read-only.

    ``sources`` are the run, then its copies, with one control. The run decides which checkpoint is
    the newest. A copy serves a save that the run has lost, and all saves if the run is truly empty.
    Returns None if nothing was ever committed anywhere.

    Raises NotFoundError if there is no such step. Raises IncompleteCheckpointError, IntegrityError
    or ManifestError if the newest is damaged, partly lost, or in doubt; the message says what is
    missing where. Raises StateError if the state does not fit, or if the place has checkpoints that
    are not this run's, or that another program saved after its newest commit. After an error while
    reading, tensors are undefined.
    """
    if request.part is not None and request.fallback is Fallback.OLDER:
        raise StateError(
            f'part {request.part!r} with fallback="older": each group could take a different step',
            hint="choose the step once, for all groups, and restore it by number",
        )
    work = _Restore(sources, state, request)
    run = sources[0]
    for _ in range(TRIES):
        try:
            with log_fields(run=str(run.storage.root), rank=run.control.rank):
                return work.run()
        except _MovedError:
            continue
    raise IncompleteCheckpointError(
        f"the run changed during each of {TRIES} reads",
        uri=sources[0].storage.root,
        hint="its owner deletes faster than this process reads: keep more checkpoints, or set "
        "delete_grace_s",
    )


class _Restore:
    """One restore. Every branch depends only on verdicts, so all ranks take the same one."""

    def __init__(self, sources: Sequence[RunSession], state: Any, request: RestoreRequest) -> None:
        self._places = Places(sources, request)
        self._control = sources[0].control
        self._state = state
        self._request = request
        self._skipped: list[tuple[Candidate, str]] = []
        self._started = time.perf_counter()

    def run(self) -> RestoreOutcome | None:
        """Restore the newest whole checkpoint; None: the run is truly empty."""
        places = self._places
        places.forget()
        self._skipped.clear()
        home = places.home()
        if home is None:
            return None
        return self._take(home)

    # -- taking one ----------------------------------------------------------------------------

    def _take(self, home: int) -> RestoreOutcome:
        candidates = self._places.survey(home).choice.candidates
        only = self._request.fallback is Fallback.ERROR or self._request.step is not None
        for candidate in candidates:
            outcome = self._take_one(home, candidate)
            if isinstance(outcome, RestoreOutcome):
                return outcome
            if only:
                raise outcome.error(
                    candidate.seal.name, self._places.uri(home) / candidate.seal.name
                )
            self._skipped.append((candidate, outcome.why))
        why = "; ".join(f"{c.seal.name}: {text}" for c, text in self._skipped)
        raise IncompleteCheckpointError(
            f"none of {len(candidates)} checkpoints is complete: {why}",
            uri=self._places.uri(home),
            hint="bring one of them back; ckptfs never restarts a run from the beginning on its "
            "own",
        )

    def _take_one(self, home: int, candidate: Candidate) -> RestoreOutcome | Damage:
        """Take the save from where it was found, or else from a copy that is whole."""
        first = self._try(home, candidate)
        if isinstance(first, RestoreOutcome):
            return first
        for other in range(len(self._places)):
            same = None
            if other != home:
                same = self._places.survey(other).choice.of(candidate.seal.save_id)
            if same is None:
                continue
            logger.warning(
                "%s: %s; trying its copy in %s", same.seal.name, first.why, self._places.uri(other)
            )
            again = self._try(other, same)
            if isinstance(again, RestoreOutcome):
                return again
        return first

    def _try(self, source: int, candidate: Candidate) -> RestoreOutcome | Damage:
        first = self._try_now(source, candidate)
        if isinstance(first, Damage) and first.flaw is Flaw.INCOMPLETE:
            # It may have been projected between the survey and the read: only what is missing twice counts.
            return self._try_now(source, candidate)
        return first

    def _try_now(self, source: int, candidate: Candidate) -> RestoreOutcome | Damage:
        session = self._places.sessions[source]
        seal = self._piece(source, candidate)
        held: list[Opened] = []
        damage = check(session, seal, held)
        if candidate.doubt:
            damage = doubt_of(candidate.doubt, damage)
        if damage is None:
            try:
                return self._load(source, candidate, seal, held[0])
            except CollectiveError as error:
                damage = damage_of(error, self._control.worlds)
                if damage is None:
                    raise
        if self._places.look_again(source).choice.of(candidate.seal.save_id) is None:
            raise _MovedError
        return damage

    def _piece(self, source: int, candidate: Candidate) -> Seal:
        """Return the save to look for: the candidate, or the part of it that was asked for."""
        if candidate.doubt:
            return candidate.seal
        where = self._places.uri(source) / candidate.seal.name
        return part_of(candidate.seal, self._request.part, where)[0]

    # -- loading -------------------------------------------------------------------------------

    def _load(
        self, source: int, candidate: Candidate, seal: Seal, opened: Opened
    ) -> RestoreOutcome:
        session, control = self._places.sessions[source], self._control
        found, metadata = opened
        manifest = found.manifest
        world = control.size if manifest is None else manifest.world_size
        view = view_for(metadata, control.rank, control.size, world, ())
        saved = Saved(view)
        marks = Marks(saved, moves=world != control.size)
        hooks, dropped = self._decide_moves(marks, world)
        moving = Moving(marks, hooks, control.rank, control.size)
        targets: list[Blank] = []
        # A step, because an object may fit on all ranks but one.
        control.step(
            "look at the state", lambda: targets.append(blank_of(self._state, saved, moving))
        )
        uri = self._places.uri(source) / seal.name
        # No object knows its state before it is loaded.
        copied = size_of_tensors(targets[0].state_dict)
        loaded = load_into(
            Loadable(targets[0].state_dict, targets[0].give_back),
            _without(metadata, hooks) if dropped else metadata,
            session,
            uri,
            found,
            strict=self._request.strict,
            allow=self._request.allow,
            objects=self._request.objects,
            started=self._started,
        )
        restored = Restored(
            uri=str(uri),
            step=candidate.step,
            skipped=self._tell_skipped(candidate),
            wall_s=time.perf_counter() - self._started,
            dropped=dropped,
            copy_of=str(self._places.uri(0)) if source else None,
        )
        if dropped:
            logger.warning("per-rank state of %d ranks was dropped: %s", world, listed(dropped))
        return RestoreOutcome(restored, candidate.seal.save_id, source, loaded, copied)

    def _decide_moves(
        self, marks: Marks, world: int
    ) -> tuple[Mapping[str, Reshard], tuple[str, ...]]:
        """Return the hooks by key, and the keys to drop, if another number of ranks kept state.

        Collective in that case.
        """
        if not marks.keys:
            return {}, ()

        def decide(answers: Sequence[tuple[str, ...]]) -> tuple[dict[str, str], tuple[str, ...]]:
            keys = sorted({key for one in answers for key in one})
            hooked = {k: p for k in keys if (p := self._pattern(k)) is not None}
            unused = [k for k in keys if k not in hooked]
            if self._request.per_rank is PerRankPolicy.ERROR:
                if unused:
                    raise StateError(
                        f"{world} ranks saved state of their own, but {self._control.size} "
                        f"ranks restore: {listed(unused)} of ranks 0 to {world - 1} would be "
                        "unused",
                        hint='pass reshard={"key": function} to make the new state, or '
                        'per_rank="drop" to continue without it',
                    )
                return hooked, ()
            return hooked, tuple(unused)

        patterns, unused = self._control.step(
            "per-rank state", lambda: moved_keys(self._state, marks), decide
        )
        hooks = {key: self._request.reshard[p] for key, p in patterns.items()}
        if self._request.per_rank is PerRankPolicy.ERROR:
            return hooks, ()
        reported = (*unused, *hooks)
        unreported = (
            k for k in marks.keys if not any(a == k or a.startswith(f"{k}.") for a in reported)
        )
        return hooks, (*unused, *unreported)

    def _pattern(self, key: str) -> str | None:
        return next((p for p in self._request.reshard if fnmatch.fnmatchcase(key, p)), None)

    def _tell_skipped(self, chosen: Candidate) -> tuple[str, ...]:
        descriptions = tuple(
            f"{one.seal.name}, {one.step - chosen.step} steps later: {why}"
            for one, why in self._skipped
        )
        if descriptions:
            lost = self._skipped[0][0].step - chosen.step
            logger.warning(
                "restored step %d; %d steps are lost: %s",
                chosen.step,
                lost,
                "; ".join(descriptions),
            )
        return descriptions


def _without(metadata: Metadata, hooks: Collection[str]) -> Metadata:
    """Return the metadata without what old ranks kept for themselves, except what hooks use."""

    def is_wanted(key: str) -> bool:
        own = unmarked_key(key)
        return own is None or any(own[0] == k or own[0].startswith(f"{k}.") for k in hooks)

    remaining = {k: v for k, v in metadata.state_dict_metadata.items() if is_wanted(k)}
    return replace(metadata, state_dict_metadata=remaining)
