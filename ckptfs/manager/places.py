"""The places that a restore may read from, as all ranks know them together: the run and its copies.

    survey(n)         one process per node folds its domain's log    -> candidates of one place
    refuse_unfit(n)   checkpoints are there, and none may be taken     -> StateError
    check_nothing()   nowhere is anything that looks like a checkpoint, or an error says what it is

Each is collective; verdicts are the same on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptfs.commit.entries import Kind
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import number_order
from ckptfs.commit.misplaced import refuse_no_run
from ckptfs.commit.ops import drive
from ckptfs.commit.seat import Seat
from ckptfs.commit.unlogged import Unlogged, newer_unlogged, unlogged_at, unlogged_error
from ckptfs.errors import IncompleteCheckpointError, NotFoundError, StateError, StorageError
from ckptfs.manager.candidates import (
    FAILURES,
    ODD_NAMES,
    Choice,
    Fallback,
    RestoreRequest,
    ahead,
    choose,
    is_forked,
    is_passed,
)
from ckptfs.manager.damage import listed
from ckptfs.manager.survey import Sight, leftovers, look
from ckptfs.storage.base import Shape
from ckptfs.uri import Uri

__all__ = ["Places", "Surveyed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What all ranks know of one source. unreached: why nothing could be read, None if it could.
    unlogged: what another program saved there after the newest commit.
    """

    choice: Choice
    has_log: bool
    unreached: str | None = None
    unlogged: tuple[str, ...] = ()


class Places:
    """Where a restore may read from, the run first."""

    def __init__(self, seats: Sequence[Seat], request: RestoreRequest) -> None:
        self.seats = tuple(seats)
        self._request = request
        self._surveyed: dict[int, Surveyed] = {}

    def __len__(self) -> int:
        return len(self.seats)

    def forget(self) -> None:
        """Look at everything anew."""
        self._surveyed.clear()

    def uri(self, source: int) -> Uri:
        """The run there."""
        return self.seats[source].storage.root

    def survey(self, source: int) -> Surveyed:
        """Collective, once per source. Candidates, from the logs of the reached domains."""
        if source not in self._surveyed:
            self._surveyed[source] = self.look_again(source)
        return self._surveyed[source]

    def look_again(self, source: int) -> Surveyed:
        """Collective. The same, as it is now."""
        seat = self.seats[source]

        def local() -> Sight | StorageError | None:
            if not _looks(seat):
                return None
            try:
                sight = drive(look(), seat.storage)
                return self._with_unlogged(source, sight)
            except StorageError as error:
                if len(self.seats) == 1:
                    raise
                return error  # a copy may stand in for a place that is down

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
                    hint="entries are never removed: bring the directory back as it was",
                )
            views: dict[str, LogState] = {}
            for sight in sights:
                if sight.domain is None or sight.state is None:
                    continue
                known = views.get(sight.domain)
                # Two nodes of one domain: one of them may see less of its log yet.
                if known is None or known.next < sight.state.next:
                    views[sight.domain] = sight.state
            foreign = {name for sight in sights for name in sight.unlogged}
            unlogged = tuple(sorted(foreign, key=number_order))
            found = choose(views, self._request)
            return Surveyed(found, has_log=bool(views), unlogged=unlogged)

        return seat.control.step("survey the run", local, decide)

    def _with_unlogged(self, source: int, sight: Sight) -> Sight:
        """With what another program saved after the newest commit; asked of the run, by one process of
        each domain.
        """
        seat, request = self.seats[source], self._request
        is_asked = source == 0 and request.kind is not Kind.WEIGHTS
        if not is_asked or request.unlogged is Unlogged.IGNORE or not seat.placement.is_owner:
            return sight
        if sight.domain is None or sight.state is None:
            return sight
        views, shape = {sight.domain: sight.state}, seat.caps.shape
        if request.step is None:
            names = newer_unlogged(views, shape)
        else:
            seals = [candidate.seal for candidate in choose(views, request).candidates]
            names = unlogged_at(
                views, seals, lambda name: request.step_of(name) == request.step, shape
            )
        return replace(sight, unlogged=drive(names, seat.storage))

    def refuse_unlogged(self) -> None:
        """AmbiguousCheckpointError where stock torch, say, saved into the run after its newest commit, or
        over the step that was asked for: to go back to ours would lose what came later.
        """
        mine = self.survey(0)
        if mine.unlogged:
            ours = mine.choice.candidates[0].seal if mine.choice.candidates else None
            raise unlogged_error(mine.unlogged, ours, self.uri(0))

    def allow_unreached(self, why: str) -> None:
        """IncompleteCheckpointError where the run cannot be read and nobody allowed older copies."""
        if len(self.seats) > 1 and self._request.fallback is Fallback.OLDER:
            logger.warning("%s cannot be read, looking at its copies: %s", self.uri(0), why)
            return
        raise IncompleteCheckpointError(
            f"the run cannot be read: {why}",
            uri=self.uri(0),
            hint='copies may be behind it: fallback="older" takes the newest of them'
            if len(self.seats) > 1
            else "whether there is a checkpoint is not known: make the storage reachable",
        )

    def is_passed(self) -> bool:
        """Collective. Whether a copy knows the primary's newest and went on from there: node-local
        disks of an earlier allocation look like that.
        """
        mine = self.survey(0).choice
        return any(is_passed(mine, self.survey(n).choice) for n in range(1, len(self.seats)))

    def refuse_fork(self) -> None:
        """Collective. StateError where a copy has a later step that this run never heard of, and this
        run's newest was never copied: which of the two is the run is somebody's decision.
        """
        mine = self.survey(0).choice
        for n in range(1, len(self.seats)):
            other = self.survey(n).choice
            if self._request.step is None and is_forked(mine, other):
                here, there = mine.candidates[0].seal.name, other.candidates[0].seal.name
                raise StateError(
                    f"the run and its copy {self.uri(n)} went on apart: {here} is not in the copy, "
                    f"and the run does not know {there}",
                    uri=self.uri(0),
                    hint="this is what an earlier allocation left, or the copy is another job's: "
                    "restore one by its step=, or move the one aside that is not to be gone on with",
                )

    def furthest_copy(self) -> int | None:
        """The copy to go on from where the primary has nothing."""
        choices = [self.survey(n).choice for n in range(1, len(self.seats))]
        found = ahead(choices)
        return None if found is None else found + 1

    def refuse_unfit(self, source: int) -> None:
        """StateError where there are checkpoints and none that may be taken."""
        unfit = self.survey(source).choice.unfit
        where = self.uri(source)
        if FAILURES in unfit and self._request.step is None:
            raise StateError(
                f"the run holds only what failing runs saved: {listed(unfit[FAILURES])}",
                uri=where,
                hint="restore one by its step, or allow them: include_failures=True",
            )
        if ODD_NAMES in unfit and self._request.step is None:
            raise StateError(
                f"the run holds checkpoints that are not named by the template: "
                f"{listed(unfit[ODD_NAMES])}",
                uri=where,
                hint="give the manager the name= that they were saved with",
            )

    def check_nothing(self) -> None:
        """StateError, NotFoundError or IncompleteCheckpointError unless nothing was ever committed."""
        if self._request.step is not None:
            self.refuse_unlogged()
        for source, seat in enumerate(self.seats):
            self.refuse_unfit(source)
            self._refuse_leftovers(source, seat)
        if self._request.step is not None:
            steps = sorted({s for x in self._surveyed.values() for s in x.choice.steps})
            there = f"there are {listed([str(s) for s in steps])}" if steps else "there is none"
            raise NotFoundError(
                f"no checkpoint of step {self._request.step}: {there}", uri=self.uri(0)
            )
        unreached = next((x.unreached for x in self._surveyed.values() if x.unreached), None)
        if unreached is not None:
            raise IncompleteCheckpointError(
                f"a place that may hold checkpoints cannot be read: {unreached}", uri=self.uri(0)
            )
        logger.info("%s is empty: nothing to restore", self.uri(0))

    def _refuse_leftovers(self, source: int, seat: Seat) -> None:
        surveyed = self.survey(source)
        if surveyed.unreached is not None:
            return

        def local() -> tuple[str, ...] | StateError:
            if not _looks(seat):
                return ()
            step_of, known = self._request.step_of, surveyed.choice.names
            if not surveyed.has_log:
                try:
                    drive(refuse_no_run(self.uri(source), seat.caps.shape), seat.storage)
                except StateError as error:
                    return error  # a value, so that it is raised as its type
            return drive(leftovers(step_of, known, has_log=surveyed.has_log), seat.storage)

        def decide(answers: Sequence[tuple[str, ...] | StateError]) -> None:
            for answer in answers:
                if isinstance(answer, StateError):
                    raise answer
            found = {name for one in answers if isinstance(one, tuple) for name in one}
            names = sorted(found, key=number_order)
            if names:
                raise StateError(
                    f"no log knows what lies in this run: {listed(names)}",
                    uri=self.uri(source),
                    hint="load one with ckptfs.load() and begin a run elsewhere, or remove them: "
                    "beginning at step 0 beside them is not what a restart means",
                )

        seat.control.step("look for leftovers", local, decide)


def _looks(seat: Seat) -> bool:
    """One process per node where nodes may see different things; one of all on an object store."""
    if seat.caps.shape is Shape.OBJECT:
        return seat.placement.is_owner
    return seat.placement.is_node_lead
