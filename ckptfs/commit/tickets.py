"""Tickets: one checkpoint that several groups of processes write and one process commits.

    driver                           ticket = begin_parts(run, "step_100", 100, ["actor", "driver"])
    each group, with its own ranks   sealed = ckptfs.save(state, ticket.part("actor"))
    driver                           sealed = ckptfs.save(loader, ticket.part("driver"))
    driver                           decision = ticket.commit([...])      one seal, in home
    groups that home does not reach  decision.publish()                   it becomes visible there

The driver is whoever holds the run: usually one process outside of every group. The home is the
domain that it reaches. Tickets, sealed parts and decisions are values that pickle: send them by
whatever the groups are told by. A ticket carries the run's ``storage_options`` as they were given to
it: credentials among them travel with it, but show in no repr.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.desk import Desk
from ckptfs.commit.entries import Kind, PartRef, Seal
from ckptfs.commit.layout import CONTROL, MANIFEST
from ckptfs.commit.opening import Place, control_for, open_seat
from ckptfs.commit.parts import HomeWord, PartPlan, spread
from ckptfs.commit.pieces import part_name
from ckptfs.commit.run import Run
from ckptfs.commit.spec import IfExists
from ckptfs.errors import StateError, UriError
from ckptfs.events import SaveResult
from ckptfs.uri import Uri

__all__ = ["Decision", "SealedPart", "Ticket", "TicketPart", "begin_parts"]


@dataclass(frozen=True, slots=True)
class TicketPart:
    """One part of a ticket: what a group passes to ``ckptfs.save`` in place of a URI."""

    run: Uri
    plan: PartPlan
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def uri(self) -> Uri:
        """Where the part will be: below the checkpoint, which is below the run."""
        return self.run / part_name(self.plan.name, self.plan.part)


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A part that is whole and durable where it was written; it is committed with the others.

    part: its name. of: the id of the save that it belongs to. ref: what the commit says of it.
    result: what was saved, on this rank and on all.
    """

    part: str
    of: str
    ref: PartRef
    result: SaveResult = field(repr=False)

    @property
    def nodes(self) -> Mapping[str, str]:
        """The hosts that hold it, by the id of their domain."""
        return dict(zip(self.ref.domains, self.ref.hosts, strict=True))


@dataclass(frozen=True, slots=True)
class Decision:
    """A committed checkpoint of parts. uri, step: where it is. seal: what was decided."""

    uri: Uri
    step: int | None
    seal: Seal = field(repr=False)
    word: HomeWord = field(repr=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def parts(self) -> Mapping[str, Uri]:
        """Where each part lies: ``ckptfs.load`` it from there."""
        return {ref.name: self.uri / ref.name for ref in self.seal.parts}

    def publish(
        self,
        *,
        process_group: Any = None,
        timeout_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Collective over one group. Make the decision known on the disks that this group reaches.

        Needed where parts lie on disks that the driver does not reach: until then readers there find
        the checkpoint in doubt, and its files in ``.ckptfs``. The group's next ``save`` of a part
        does the same. Repeating it does nothing. FencedError: the run has a newer owner.
        """
        place = Place({**self.storage_options, **(storage_options or {})})
        with (
            control_for(process_group, timeout_s) as control,
            open_seat(self.uri.parent, control, place, write=True) as seat,
        ):
            spread(seat, self.word)


Then = Callable[[Decision, Sequence[SealedPart]], None]


@dataclass
class Ticket:
    """One checkpoint on its way. Pickles; a copy that travelled gives parts and commits nothing.

    uri: where the checkpoint will be. parts: their names, all of which a commit needs.
    """

    uri: Uri
    step: int | None
    save_id: str
    parts: tuple[str, ...]
    word: HomeWord = field(repr=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _desk: Desk | None = field(default=None, repr=False, compare=False)
    _then: Then | None = field(default=None, repr=False, compare=False)

    def part(self, name: str) -> TicketPart:
        """The part of that name, to be passed to ``ckptfs.save``. StateError: there is none."""
        if name not in self.parts:
            raise StateError(
                f"the ticket has no part {name!r}",
                uri=self.uri,
                hint=f"its parts are {', '.join(self.parts)}",
            )
        plan = PartPlan(self.save_id, self.uri.name, name, self.step, self.word)
        return TicketPart(self.uri.parent, plan, self.storage_options)

    def commit(
        self,
        sealed: Sequence[SealedPart],
        *,
        metrics: Mapping[str, float] | None = None,
        beside: str | None = None,
    ) -> Decision:
        """Commit the checkpoint: one seal in home, over all parts. In the process that began it.

        sealed: what ``save`` returned, of each part at least once. Committed and durable when this
        returns, and visible on home's own disk. IncompleteCheckpointError names the part that is
        missing; nothing is decided then, and commit may be called again. CommitInDoubtError: calling
        it again, or the next owner of the run, settles it. FencedError, CommitConflictError: nothing
        was committed, and never will be.

        beside: a local directory of this process, whose files become part of it too, beside the parts;
        for checkpoints of directories.
        """
        pairs = tuple((part.of, part.ref) for part in sealed)
        seal, word = self._at_home.commit(pairs, metrics or {}, beside)
        decision = Decision(self.uri, self.step, seal, word, self.storage_options)
        if self._then is not None:
            self._then(decision, sealed)
        return decision

    def abandon(self) -> None:
        """Give the checkpoint up, in the process that began it; harmless after a commit.

        What home reaches is removed now. Parts elsewhere are let go by the next ``save`` there.
        """
        self._at_home.abandon()

    @property
    def _at_home(self) -> Desk:
        if self._desk is None:
            raise StateError(
                "this ticket travelled: only the process that began it commits or abandons it",
                uri=self.uri,
                hint="send the sealed parts to the process that called begin()",
            )
        return self._desk

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_desk": None, "_then": None}


def begin_parts(
    run: Run,
    name: str,
    step: int | None,
    parts: Sequence[str],
    *,
    if_exists: IfExists = IfExists.ERROR,
    artifact: Kind = Kind.CHECKPOINT,
    save_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    then: Then | None = None,
) -> Ticket:
    """Collective over the run's ranks. Begin a checkpoint of parts; nothing is visible yet.

    artifact: what all its parts are: state dicts (``ckptfs.save``), or directories (``part_dir``).
    save_id: of a copy, one that was never tried here.
    storage_options: how the groups open the run, where they need other options than their own.
    then: called after the commit, on every rank of the run that made it.
    CommitConflictError: the name is taken. FencedError: the run has a newer owner. StateError: the
    parts' names. After a crash the next owner of the run gives up what was not committed.
    """
    _check_names(name, parts, run.seat.storage.uri(name))
    run.check(run.uri / name)
    desk = Desk(
        run, name, step, tuple(parts), if_exists=if_exists, artifact=artifact, save_id=save_id
    )
    word = desk.begin()
    return Ticket(
        run.uri / name,
        step,
        desk.save_id,
        tuple(parts),
        word,
        dict(storage_options or {}),
        desk,
        then,
    )


def _check_names(name: str, parts: Sequence[str], where: Uri) -> None:
    if name == CONTROL or "/" in name:
        raise UriError(f"{name!r} cannot name a checkpoint", uri=where)
    if not parts or len(set(parts)) != len(parts):
        raise StateError("a ticket needs parts with names of their own", uri=where)
    for part in parts:
        if not part or "/" in part or part.startswith(".") or part == MANIFEST or "\0" in part:
            raise StateError(
                f"{part!r} cannot name a part",
                uri=where,
                hint="it becomes a directory in the checkpoint: one name without slash or dot",
            )
