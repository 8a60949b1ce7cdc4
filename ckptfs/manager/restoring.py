"""Restore: from the newest checkpoint that is whole on all domains, decided once for all ranks.

    survey    one process per node folds its domain's log      -> candidates, newest commit first
    check     every rank finds the save, reads `.metadata`, looks at its share of the files
                                                               -> whole, or damaged: what, where
    load      plan, read, verify, hand over                    -> outcome
    again     damaged: a copy of the same save; an older one if the caller allows that; else an error

Collective and read-only. None means that the run is truly empty: nothing was ever committed and
nothing there looks like a checkpoint. Everything else is an error that says what it is.
"""

from __future__ import annotations

import fnmatch
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.catalog import part_of
from ckptfs.commit.entries import Seal
from ckptfs.commit.seat import Seat
from ckptfs.dcp.loading import Loadable, load_into
from ckptfs.dcp.per_rank import unmarked_key, view_for
from ckptfs.errors import CollectiveError, IncompleteCheckpointError, StateError
from ckptfs.events import LoadResult, Restored
from ckptfs.manager.blanks import Blank, Marks, Moving, Reshard, blank_of, moved_keys
from ckptfs.manager.candidates import Candidate, Fallback, PerRankPolicy, RestoreRequest
from ckptfs.manager.checking import Opened, check
from ckptfs.manager.damage import Damage, Flaw, damage_of, doubt_of, listed
from ckptfs.manager.places import Places
from ckptfs.manager.saved import Saved

__all__ = ["RestoreOutcome", "restore"]

logger = logging.getLogger(__name__)

TRIES = 5  # a run whose saves move under a reader settles at the second look


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """A restore that is done. source: which of the places it was read from, 0 is the primary.

    save_id: retention must not delete this save before the next commit.
    """

    restored: Restored
    save_id: str
    source: int
    loaded: LoadResult


class _MovedError(Exception):
    """The run changed while it was read: look again, all ranks together."""


def restore(sources: Sequence[Seat], state: Any, request: RestoreRequest) -> RestoreOutcome | None:
    """Collective, read-only. Restore ``state`` in place from the newest whole checkpoint.

    sources: the run, then its copies; their controls are one. The run decides what is newest; a copy
    serves a save that the run has lost, and all of them when the run is truly empty. None: nothing
    was ever committed anywhere. NotFoundError: no such step. IncompleteCheckpointError,
    IntegrityError, ManifestError: the newest is damaged, lost in part, or in doubt, and what is
    missing where. StateError: the state does not fit, or the place holds checkpoints that are not
    this run's, or that another program saved after its newest commit. After an error while reading, tensors are undefined.
    """
    if request.part is not None and request.fallback is Fallback.OLDER:
        raise StateError(
            f'part {request.part!r} with fallback="older": each group might take another step',
            hint="choose the step once, for all groups, and restore it by number",
        )
    work = _Restore(sources, state, request)
    for _ in range(TRIES):
        try:
            return work.run()
        except _MovedError:
            continue
    raise IncompleteCheckpointError(
        f"the run changed at each of {TRIES} looks",
        uri=sources[0].storage.root,
        hint="its owner deletes faster than this process reads: keep more, or set delete_grace_s",
    )


class _Restore:
    """One restore. Every branch depends on verdicts only, so all ranks take the same one."""

    def __init__(self, sources: Sequence[Seat], state: Any, request: RestoreRequest) -> None:
        self._places = Places(sources, request)
        self._control = sources[0].control
        self._state = state
        self._request = request
        self._skipped: list[tuple[Candidate, str]] = []
        self._started = time.perf_counter()

    def run(self) -> RestoreOutcome | None:
        """Take the newest whole one; None: truly empty."""
        places = self._places
        places.forget()
        self._skipped.clear()
        primary = places.survey(0)
        if primary.unreached is not None:
            places.allow_unreached(primary.unreached)
        home: int | None = 0
        if not primary.choice.candidates:
            places.refuse_unfit(0)
            home = places.furthest_copy()
        elif places.is_passed():
            home = places.furthest_copy()
            logger.warning("%s is what the run left here: it went on elsewhere", places.uri(0))
        else:
            places.refuse_fork()
            places.refuse_unlogged()
        if home is None:
            places.check_nothing()
            return None
        if home:
            logger.warning(
                "restoring from a copy of %s, which is ahead of it: %s",
                places.uri(0),
                places.uri(home),
            )
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
            f"none of {len(candidates)} checkpoints is whole: {why}",
            uri=self._places.uri(home),
            hint="bring one of them back; the run is not begun anew by itself",
        )

    def _take_one(self, home: int, candidate: Candidate) -> RestoreOutcome | Damage:
        """The save where it was found, else wherever a copy of the same save is whole."""
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
            # It may have been projected between the look and the read: what is missing is missed twice.
            return self._try_now(source, candidate)
        return first

    def _try_now(self, source: int, candidate: Candidate) -> RestoreOutcome | Damage:
        seat = self._places.seats[source]
        seal = self._piece(source, candidate)
        held: list[Opened] = []
        damage = check(seat, seal, held)
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
        """The save to look for: the candidate, or the part of it that was asked for."""
        if candidate.doubt:
            return candidate.seal
        where = self._places.uri(source) / candidate.seal.name
        return part_of(candidate.seal, self._request.part, where)[0]

    # -- loading -------------------------------------------------------------------------------

    def _load(
        self, source: int, candidate: Candidate, seal: Seal, opened: Opened
    ) -> RestoreOutcome:
        seat, control = self._places.seats[source], self._control
        found, metadata = opened
        manifest = found.manifest
        world = control.size if manifest is None else manifest.world_size
        view = view_for(metadata, control.rank, control.size, world, ())
        saved = Saved(view)
        marks = Marks(saved, moves=world != control.size)
        hooks, dropped = self._decide_moves(marks, world)
        moving = Moving(marks, hooks, control.rank, control.size)
        blanks: list[Blank] = []
        # A step, because an object that does not fit may do so on one rank only.
        control.step(
            "look at the state", lambda: blanks.append(blank_of(self._state, saved, moving))
        )
        uri = self._places.uri(source) / seal.name
        loaded = load_into(
            Loadable(blanks[0].state_dict, blanks[0].give_back),
            _without(metadata, hooks) if dropped else metadata,
            seat,
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
        return RestoreOutcome(restored, candidate.seal.save_id, source, loaded)

    def _decide_moves(
        self, marks: Marks, world: int
    ) -> tuple[Mapping[str, Reshard], tuple[str, ...]]:
        """Collective where ranks of another world size kept state: hooks by key, and what is dropped."""
        if not marks.keys:
            return {}, ()

        def decide(told: Sequence[tuple[str, ...]]) -> tuple[dict[str, str], tuple[str, ...]]:
            keys = sorted({key for one in told for key in one})
            hooked = {k: p for k in keys if (p := self._pattern(k)) is not None}
            unused = [k for k in keys if k not in hooked]
            if self._request.per_rank is PerRankPolicy.ERROR:
                if unused:
                    raise StateError(
                        f"{world} ranks kept state of their own, {self._control.size} restore: "
                        f"{listed(unused)} of ranks 0 to {world - 1} would be unused",
                        hint='reshard={"key": function} makes the new state, per_rank="drop" goes '
                        "on without it",
                    )
                return hooked, ()
            return hooked, tuple(unused)

        patterns, unused = self._control.step(
            "per-rank state", lambda: moved_keys(self._state, marks), decide
        )
        hooks = {key: self._request.reshard[p] for key, p in patterns.items()}
        if self._request.per_rank is PerRankPolicy.ERROR:
            return hooks, ()
        asked = (*unused, *hooks)
        unasked = (k for k in marks.keys if not any(a == k or a.startswith(f"{k}.") for a in asked))
        return hooks, (*unused, *unasked)

    def _pattern(self, key: str) -> str | None:
        return next((p for p in self._request.reshard if fnmatch.fnmatchcase(key, p)), None)

    def _tell_skipped(self, taken: Candidate) -> tuple[str, ...]:
        told = tuple(
            f"{one.seal.name}, {one.step - taken.step} steps later: {why}"
            for one, why in self._skipped
        )
        if told:
            lost = self._skipped[0][0].step - taken.step
            logger.warning(
                "restored step %d, and %d steps are lost: %s", taken.step, lost, "; ".join(told)
            )
        return told


def _without(metadata: Metadata, hooks: Collection[str]) -> Metadata:
    """The metadata without what old ranks kept for themselves, but for what hooks make new."""

    def is_wanted(key: str) -> bool:
        own = unmarked_key(key)
        return own is None or any(own[0] == k or own[0].startswith(f"{k}.") for k in hooks)

    kept = {k: v for k, v in metadata.state_dict_metadata.items() if is_wanted(k)}
    return replace(metadata, state_dict_metadata=kept)
