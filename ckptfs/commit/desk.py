"""Home's side of one ticket: what the run's coordinator does with the home's log.

    begin    fold; is the name free? the attempt, its record first      -> the word for the groups
             (where it was removed by hand, every reached log records that first)
    commit   one sealed part for each name; manifest; the one seal      -> committed
             project what lies in home
    abandon  append the abort, remove what home reaches

The ranks that hold the run call these together; the coordinator alone touches storage, and what it
meets is raised as its type on all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckptfs._version import __version__
from ckptfs.commit.decisions import Refusal
from ckptfs.commit.entries import Fence, Generation, Kind, PartRef, Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import MANIFEST, AttemptKeys
from ckptfs.commit.log import Refused, catch_up, catch_up_again
from ckptfs.commit.manifest import DomainRecord, FileRecord, Manifest, digest_of, encode_manifest
from ckptfs.commit.ops import drive
from ckptfs.commit.parts import HomeWord, spread, word_of
from ckptfs.commit.pieces import part_name, promised_here
from ckptfs.commit.protocol import name_taken, next_seq
from ckptfs.commit.publishing import list_files
from ckptfs.commit.reclaim import discard_own_attempt
from ckptfs.commit.removal import record_removed
from ckptfs.commit.run import Run, is_for_call
from ckptfs.commit.saving import (
    Means,
    begin,
    clear,
    finish,
    prepare,
    seal_save,
    to_clear,
    undo,
)
from ckptfs.commit.seat import Seat
from ckptfs.commit.sending import Sender
from ckptfs.commit.spec import IfExists, fresh_ids, fresh_save_id, now_text
from ckptfs.commit.turns import take_turns
from ckptfs.errors import (
    CkptfsError,
    CommitConflictError,
    CommitInDoubtError,
    FencedError,
    IncompleteCheckpointError,
    NotFoundError,
    StaleError,
    StateError,
    StorageError,
)
from ckptfs.storage.base import Shape, Storage

__all__ = ["Desk"]

logger = logging.getLogger(__name__)

Sealed = Sequence[tuple[str, PartRef]]  # the id of the whole, and what is said of the part


@dataclass(frozen=True, slots=True)
class _Beside:
    """Where home's own files of a whole go: as an attempt tells it to ``Sender``."""

    seat: Seat
    storage: Storage
    keys: AttemptKeys
    base: Generation

    @property
    def directory(self) -> str:
        return self.keys.directory


class Desk:
    """One ticket at home, on every rank that holds the run. save_id: equal on all after begin()."""

    def __init__(
        self,
        run: Run,
        name: str,
        step: int | None,
        parts: tuple[str, ...],
        *,
        if_exists: IfExists,
        artifact: Kind,
        save_id: str | None = None,
    ) -> None:
        seat = run.seat
        self._run, self._name, self._step, self._parts = run, name, step, parts
        self._artifact = artifact
        self._replace = if_exists is IfExists.REPLACE
        self._where = seat.storage.uri(name)
        self._home = next(d for d in seat.placement.domains if 0 in d.ranks)
        self._host = seat.control.worlds[0].site
        world = seat.control.world
        stamp = Stamp(now_text(), world.hostname, os.getpid(), seat.control.rank)
        self._means = Means(self._home.id, seat.caps, fresh_ids(), stamp)
        self.save_id = save_id or ""
        self._seq = 0  # its place in commit order; the coordinator's
        # Once a seal was tried it may lie in the log: another one would belie its manifest.
        self._tried: Seal | None = None

    # -- on every rank that holds the run --------------------------------------------------

    def begin(self) -> HomeWord:
        """Collective. Make the attempt; what the groups are told. Errors as for begin_parts.

        Where what has the name was removed by hand, the log records that first.
        """
        run = self._run
        try:
            return self._begin_together()
        except CommitConflictError:
            if not record_removed(run.seat, self._name, self._artifact, run.generation):
                raise
        return self._begin_together()

    def _begin_together(self) -> HomeWord:
        control = self._run.seat.control
        self.save_id, word = control.step("begin parts", lambda: None, lambda _: self._begin())
        return word

    def commit(
        self, sealed: Sealed, metrics: Mapping[str, float], beside: str | None = None
    ) -> tuple[Seal, HomeWord]:
        """Collective. Each rank gives the parts that it was sent. Errors as for Ticket.commit."""

        def decide(told: Sequence[Sealed]) -> tuple[Seal, HomeWord]:
            refs = self._one_of_each([part for parts in told for part in parts])
            return self._decide(refs, metrics, beside)

        seat = self._run.seat
        seal, word = seat.control.step("commit parts", lambda: tuple(sealed), decide)
        if len(seat.placement.domains) > 1:
            try:
                spread(seat, word)
            except CkptfsError as error:
                logger.warning("%s is committed; not every disk was told: %s", seal.name, error)
        return seal, word

    def abandon(self) -> None:
        """Collective, best effort: what cannot be done now is left to the next owner of the run."""
        try:
            self._run.seat.control.step("abandon parts", lambda: None, lambda _: self._give_up())
        except CkptfsError as error:
            logger.warning("%s is left to the next owner of the run: %s", self._name, error)

    # -- on the coordinator ------------------------------------------------------------------

    def _begin(self) -> tuple[str, HomeWord]:
        seat, generation = self._run.seat, self._run.generation
        state = drive(catch_up_again(self._known), seat.storage)
        seat.known.learn(state)
        if state.generation != generation:
            raise self._fenced(state.fence)
        taken = name_taken(self._name, {self._home.id: state})
        if taken is not None and not self._replace:
            raise CommitConflictError(
                f"{self._name} is committed already (save {taken.save_id})",
                uri=self._where,
                hint='choose another name, or if_exists="replace"',
            )
        # Taken now: a ticket that is committed late must not take the run back behind later saves.
        seq = next_seq(generation, {self._home.id: state}, fenced=True)
        self._seq = seat.known.seq = max(seq, seat.known.seq + 1)
        self.save_id = self.save_id or fresh_save_id()
        drive(begin(self._keys, generation), seat.storage)
        return self.save_id, word_of(self._home.id, self._host, state)

    @property
    def _known(self) -> LogState | None:
        return self._run.seat.known.state if self._means.caps.exclusive_create else None

    @property
    def _keys(self) -> AttemptKeys:
        return AttemptKeys(self._means.caps.shape, self._name, self.save_id)

    def _one_of_each(self, sealed: Sealed) -> dict[str, PartRef]:
        """One sealed part for each name; every rank of a group returns the same one."""
        refs: dict[str, PartRef] = {}
        for of, ref in sealed:
            if of != self.save_id or ref.name not in self._parts:
                raise StateError(
                    f"part {ref.name} was not saved for this ticket",
                    uri=self._where,
                    hint="pass what save() returned for ticket.part(...)",
                )
            refs[ref.name] = ref  # of a part that was saved again, the last
        missing = [name for name in self._parts if name not in refs]
        if missing:
            raise IncompleteCheckpointError(
                f"part {', '.join(missing)} of {self._name} is missing",
                uri=self._where,
                hint="it was not saved, or its save() failed; commit again when it is there",
            )
        return refs

    def _decide(
        self, refs: Mapping[str, PartRef], metrics: Mapping[str, float], beside: str | None
    ) -> tuple[Seal, HomeWord]:
        state = drive(catch_up(self._known), self._run.seat.storage)
        seal = state.save(self.save_id).seal
        if seal is None and state.generation > self._run.generation:
            raise self._fenced(state.fence)
        if seal is None:
            seal = self._tried or self._seal_of(refs, metrics, beside)
            self._tried = seal
            state = self._append(seal, state)
            seal = state.save(self.save_id).seal or seal  # the one that stands
        state = self._finish(seal, state)
        return seal, word_of(self._home.id, self._host, state)

    def _seal_of(
        self, refs: Mapping[str, PartRef], metrics: Mapping[str, float], beside: str | None
    ) -> Seal:
        """Store the manifest of the whole, and what lies beside the parts, durably; the seal over it."""
        parts = tuple(refs[name] for name in self._parts)
        base = self._run.generation
        files = () if beside is None else self._send(beside)
        manifest = Manifest(
            save_id=self.save_id,
            name=self._name,
            step=self._step,
            artifact=self._artifact,
            files=files,
            domains=(DomainRecord(self._home.id, self._home.ranks, (self._host,)),),
            base=base,
            world_size=self._run.seat.control.size,
            created_at=now_text(),
            writer=f"ckptfs {__version__}",
            parts=parts,
        )
        encoded = encode_manifest(manifest)
        try:
            drive(prepare(self._keys, {MANIFEST: encoded}), self._run.seat.storage)
        except (NotFoundError, StaleError):
            now = drive(catch_up(self._known), self._run.seat.storage)
            if now.generation > base:
                raise self._fenced(now.fence) from None  # a newer owner took the attempt away
            raise
        return Seal(
            save_id=self.save_id,
            base=base,
            seq=self._seq,
            fenced=True,
            name=self._name,
            step=self._step,
            artifact=self._artifact,
            domains=(self._home.id,),
            digest=digest_of(encoded),
            parts=parts,
            metrics=tuple(sorted((name, float(value)) for name, value in metrics.items())),
        )

    def _send(self, path: str) -> tuple[FileRecord, ...]:
        seat, keys, base = self._run.seat, self._keys, self._run.generation
        target = _Beside(seat, seat.storage, keys, base)
        domain = self._home.id if seat.caps.shape is Shape.FILESYSTEM else None
        return Sender(target, path, domain).send([f.path for f in list_files(path)]).files

    def _append(self, seal: Seal, state: LogState) -> LogState:
        """The commit."""
        program = seal_save(seal, self._means, state, replace=self._replace)
        outcome = drive(program, self._run.seat.storage)
        if not isinstance(outcome, Refused):
            return outcome.state
        match outcome.reason:
            case Refusal.NOTHING:  # an earlier call of ours, whose answer was lost
                return outcome.state
            case Refusal.FENCED:
                raise self._fenced(outcome.state.fence)
            case Refusal.ABORTED:
                raise CommitConflictError(
                    f"{self._name} was given up, or a part is not what this storage holds",
                    uri=self._where,
                    hint="begin another ticket",
                )
            case Refusal.CONFLICT:
                raise CommitConflictError(
                    f"{self._name} was committed meanwhile",
                    uri=self._where,
                    hint="by a save that began after this ticket: begin another one"
                    if self._replace
                    else 'choose another name, or if_exists="replace"',
                )

    def _fenced(self, fence: Fence) -> FencedError:
        return FencedError(
            f"the run was taken over by generation {fence.generation.number} "
            f"({fence.host} pid {fence.pid})",
            uri=self._where,
            hint="this process must stop; nothing of this checkpoint was committed",
        )

    def _finish(self, seal: Seal, state: LogState) -> LogState:
        """Project what lies in home. It is committed: what fails here, the next writer does."""
        seat, holder, background = self._run.seat, self._run.generation, self._run.seat.background
        doomed = to_clear({self._home.id: state}, self._home.id, seat.spared)
        # Plain names may be a later owner's by the time that a chore comes to them.
        aside = background is not None and not any(s.artifact is Kind.DIRECTORY for s, _ in doomed)
        at_once = is_for_call(holder)
        try:
            program = finish(
                seal,
                self._means,
                state,
                holder=None if aside else holder,
                spare=seat.spared,
                at_once=at_once,
            )
            state = drive(take_turns(program, seat.turn), seat.storage)
            seat.known.learn(state)
        except (StorageError, CommitInDoubtError) as error:
            logger.warning("%s is committed; its projection is not complete: %s", seal.name, error)
            return state
        finally:
            seat.touch_log_later()  # the seal stands, whatever became of its projection
        if background is not None and aside:
            # Deleting takes requests there, and what the caller waits for is done.
            own = frozenset({seal.save_id} if at_once else ())
            clearing = clear(self._means, self._known, holder, seat.spared, own)
            turns = take_turns(clearing, seat.turn)
            chore = partial(seat.drive_aside, turns, background)
            background.submit(f"clearing what {seal.name} replaced", chore)
        return state

    def _give_up(self) -> None:
        storage, caps = self._run.seat.storage, self._means.caps
        try:
            if not drive(undo(self._keys, self._run.generation, self._means), storage):
                return
        finally:
            self._run.seat.touch_log_later()
        state = drive(catch_up(self._known), storage)
        for part in promised_here(state).get(self.save_id, []):
            name = part_name(part.name, part.part)
            drive(discard_own_attempt(part.save_id, name, caps), storage)
