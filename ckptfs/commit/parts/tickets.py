"""Tickets: one checkpoint that several groups of processes write and one process commits.

    driver                           ticket = begin_parts(run, "step_100", 100, ["actor", "driver"])
    each group, with its own ranks   sealed = ckptfs.save(state, ticket.part("actor"))
    driver                           sealed = ckptfs.save(loader, ticket.part("driver"))
    driver                           decision = ticket.commit([...])      one seal, in home
    groups that home does not reach  decision.publish()                   it becomes visible there

The driver holds the run: it is usually one process outside of every group. The home is the domain that it
reaches. Tickets, sealed parts and decisions can be pickled: send them by the channel that you have to the groups.
A ticket carries the run's ``storage_options`` and the credentials among them, but its repr does not show them.

The ranks that hold the run call these steps together. Only the coordinator reads and writes the storage with the
home's log, and its error is raised with its type on all ranks:

    begin    fold; check the name; make the attempt, its record first   -> the word for the groups
             (if the old save was removed by hand, every reached log records that first)
    commit   one sealed part for each name; manifest; the one seal      -> committed
             project the files in home
    abandon  append the abort, remove what home reaches
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptfs._version import __version__
from ckptfs.commit.decisions import Refusal, to_clear
from ckptfs.commit.delete.deletion_steps import discard_own_attempt, record_removed
from ckptfs.commit.directory_checkpoints.write import Sender, list_files
from ckptfs.commit.log.append import Means, RefusedAppend, catch_up, catch_up_again
from ckptfs.commit.log.entries import Fence, Generation, Kind, PartRef, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import DomainRecord, FileRecord, Manifest, digest_of, encode_manifest
from ckptfs.commit.operations import drive, take_turns
from ckptfs.commit.ownership.run import Run, is_for_call
from ckptfs.commit.parts.parts import HomeWord, PartPlan, apply_everywhere, read_home
from ckptfs.commit.paths import CONTROL, MANIFEST, AttemptKeys
from ckptfs.commit.save.owner_steps import begin, clear, finish, prepare, seal_save, undo
from ckptfs.commit.save.spec import IfExists, fresh_ids, fresh_save_id, now_text
from ckptfs.commit.session import Place, RunSession, control_for, open_session
from ckptfs.commit.state import next_seq, part_name, promised_here, save_named
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
    UriError,
)
from ckptfs.events import SaveResult
from ckptfs.storage.base import Shape, Storage
from ckptfs.uri import Uri

__all__ = [
    "Decision",
    "HomeSide",
    "SealedPart",
    "Ticket",
    "TicketPart",
    "begin_parts",
]

logger = logging.getLogger("ckptfs.commit")

Sealed = Sequence[tuple[str, PartRef]]  # the id of the whole, and the reference to the part


@dataclass(frozen=True, slots=True)
class _HomeFiles:
    """The destination of the home's own files of a whole, in the form that ``Sender`` expects."""

    session: RunSession
    storage: Storage
    keys: AttemptKeys
    base: Generation

    @property
    def directory(self) -> str:
        return self.keys.directory


class HomeSide:
    """One ticket in the home, on every rank that holds the run.

    save_id: Equal on all ranks after begin().
    """

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
        session = run.session
        self._run, self._name, self._step, self._parts = run, name, step, parts
        self._artifact = artifact
        self._replace = if_exists is IfExists.REPLACE
        self._where = session.storage.uri(name)
        self._home = next(d for d in session.placement.domains if 0 in d.ranks)
        self._host = session.control.worlds[0].site
        self._means = Means(self._home.id, session.caps, fresh_ids(), session.stamp())
        self.save_id = save_id or ""
        self._seq = 0  # its place in commit order; only on the coordinator
        # Once a seal was tried it may be in the log: another seal would contradict its manifest.
        self._tried: Seal | None = None

    # -- on every rank that holds the run --------------------------------------------------

    def begin(self) -> HomeWord:
        """Make the attempt and return the word for the groups. Collective.

        If the save that has the name was removed by hand, the log records that first. Errors as for
        begin_parts.
        """
        run = self._run
        try:
            return self._begin_together()
        except CommitConflictError:
            if not record_removed(run.session, self._name, self._artifact, run.generation):
                raise
        return self._begin_together()

    def _begin_together(self) -> HomeWord:
        control = self._run.session.control
        self.save_id, word = control.step("begin parts", lambda: None, lambda _: self._begin())
        return word

    def commit(
        self, sealed: Sealed, metrics: Mapping[str, float], extra_dir: str | None = None
    ) -> tuple[Seal, HomeWord]:
        """Commit the parts that the ranks received. Collective. Errors as for Ticket.commit.

        sealed: The parts that were sent to this rank.
        """

        def decide(answers: Sequence[Sealed]) -> tuple[Seal, HomeWord]:
            refs = self._one_of_each([part for parts in answers for part in parts])
            return self._decide(refs, metrics, extra_dir)

        session = self._run.session
        seal, word = session.control.step("commit parts", lambda: tuple(sealed), decide)
        if len(session.placement.domains) > 1:
            try:
                apply_everywhere(session, word)
            except CkptfsError as error:
                logger.warning(
                    "%s is committed; not every disk has recorded it: %s", seal.name, error
                )
        return seal, word

    def abandon(self) -> None:
        """Give the checkpoint up. Collective, best effort.

        What cannot be done now is left to the next owner of the run.
        """
        try:
            self._run.session.control.step("abandon parts", lambda: None, lambda _: self._give_up())
        except CkptfsError as error:
            logger.warning("%s is left to the next owner of the run: %s", self._name, error)

    # -- on the coordinator ------------------------------------------------------------------

    def _begin(self) -> tuple[str, HomeWord]:
        session, generation = self._run.session, self._run.generation
        state = drive(catch_up_again(self._known), session.storage)
        session.known.learn(state)
        if state.generation != generation:
            raise self._fenced(state.fence)
        existing = save_named(self._name, {self._home.id: state})
        if existing is not None and not self._replace:
            raise CommitConflictError(
                f"{self._name} is committed already (save {existing.save_id})",
                uri=self._where,
                hint='choose another name, or if_exists="replace"',
            )
        # Taken now: a ticket that is committed late must not take the run back behind later saves.
        seq = next_seq(generation, {self._home.id: state}, fenced=True)
        self._seq = session.known.seq = max(seq, session.known.seq + 1)
        self.save_id = self.save_id or fresh_save_id()
        with self._fenced_rather_than_missing():
            drive(begin(self._keys, generation), session.storage)
        return self.save_id, read_home(self._home.id, self._host, state)

    @property
    def _known(self) -> LogState | None:
        return self._run.session.known.state if self._means.caps.exclusive_create else None

    @property
    def _keys(self) -> AttemptKeys:
        return AttemptKeys(self._means.caps.shape, self._name, self.save_id)

    def _one_of_each(self, sealed: Sealed) -> dict[str, PartRef]:
        """Return one sealed part for each name. Every rank of a group returns the same one."""
        refs: dict[str, PartRef] = {}
        for of, ref in sealed:
            if of != self.save_id or ref.name not in self._parts:
                raise StateError(
                    f"part {ref.name} was not saved for this ticket",
                    uri=self._where,
                    hint="pass what save() returned for ticket.part(...)",
                )
            refs[ref.name] = ref  # if a part was saved again, the last one counts
        missing = [name for name in self._parts if name not in refs]
        if missing:
            raise IncompleteCheckpointError(
                f"part {', '.join(missing)} of {self._name} is missing",
                uri=self._where,
                hint="it was not saved, or its save() failed; save it, then commit again",
            )
        return refs

    def _decide(
        self, refs: Mapping[str, PartRef], metrics: Mapping[str, float], extra_dir: str | None
    ) -> tuple[Seal, HomeWord]:
        state = drive(catch_up(self._known), self._run.session.storage)
        seal = state.save(self.save_id).seal
        if seal is None and state.generation > self._run.generation:
            raise self._fenced(state.fence)
        if seal is None:
            seal = self._tried or self._seal_of(refs, metrics, extra_dir)
            self._tried = seal
            state = self._append(seal, state)
            seal = state.save(self.save_id).seal or seal  # the effective one
        state = self._finish(seal, state)
        return seal, read_home(self._home.id, self._host, state)

    def _seal_of(
        self, refs: Mapping[str, PartRef], metrics: Mapping[str, float], extra_dir: str | None
    ) -> Seal:
        """Store the manifest of the whole and the files next to the parts; return the seal.

        The files are durable when this returns.
        """
        parts = tuple(refs[name] for name in self._parts)
        base = self._run.generation
        files = () if extra_dir is None else self._send(extra_dir)
        manifest = Manifest(
            save_id=self.save_id,
            name=self._name,
            step=self._step,
            artifact=self._artifact,
            files=files,
            domains=(DomainRecord(self._home.id, self._home.ranks, (self._host,)),),
            base=base,
            world_size=self._run.session.control.size,
            created_at=now_text(),
            writer=f"ckptfs {__version__}",
            parts=parts,
        )
        encoded = encode_manifest(manifest)
        with self._fenced_rather_than_missing():
            drive(prepare(self._keys, {MANIFEST: encoded}), self._run.session.storage)
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
        session, keys, base = self._run.session, self._keys, self._run.generation
        target = _HomeFiles(session, session.storage, keys, base)
        domain = self._home.id if session.caps.shape is Shape.FILESYSTEM else None
        return Sender(target, path, domain).send([f.path for f in list_files(path)]).files

    def _append(self, seal: Seal, state: LogState) -> LogState:
        """Append the seal. This is the commit."""
        program = seal_save(seal, self._means, state, replace=self._replace)
        outcome = drive(program, self._run.session.storage)
        if not isinstance(outcome, RefusedAppend):
            return outcome.state
        match outcome.reason:
            case Refusal.NOTHING:  # an earlier call of ours did it, and its answer was lost
                return outcome.state
            case Refusal.FENCED:
                raise self._fenced(outcome.state.fence)
            case Refusal.ABORTED:
                raise CommitConflictError(
                    f"{self._name} was abandoned, or a part differs from what this storage has",
                    uri=self._where,
                    hint="begin another ticket",
                )
            case Refusal.CONFLICT:
                raise CommitConflictError(
                    f"{self._name} was committed after the ticket began",
                    uri=self._where,
                    hint="a save that began after this ticket committed it: begin another ticket"
                    if self._replace
                    else 'choose another name, or if_exists="replace"',
                )

    @contextlib.contextmanager
    def _fenced_rather_than_missing(self) -> Iterator[None]:
        """Raise FencedError if files of the attempt are missing because a newer owner removed them."""
        try:
            yield
        except (NotFoundError, StaleError):
            now = drive(catch_up(self._known), self._run.session.storage)
            if now.generation > self._run.generation:
                raise self._fenced(now.fence) from None
            raise

    def _fenced(self, fence: Fence) -> FencedError:
        return FencedError(
            f"the run was taken over by generation {fence.generation.number} "
            f"({fence.host} pid {fence.pid})",
            uri=self._where,
            hint="this process must stop; nothing of this checkpoint was committed",
        )

    def _finish(self, seal: Seal, state: LogState) -> LogState:
        """Project the files in the home.

        The checkpoint is committed: if this fails, the next writer does it.
        """
        session, holder, background = (
            self._run.session,
            self._run.generation,
            self._run.session.background,
        )
        pending_deletes = to_clear({self._home.id: state}, self._home.id, session.deferred_deletes)
        # Plain names may belong to a later owner by the time that a chore removes them.
        in_background = background is not None and not any(
            one.seal.artifact is Kind.DIRECTORY for one in pending_deletes
        )
        at_once = is_for_call(holder)
        try:
            program = finish(
                seal,
                self._means if in_background else self._means.held_by(holder),
                state,
                spare=session.deferred_deletes,
                at_once=at_once,
            )
            state = drive(take_turns(program, session.turn), session.storage)
            session.known.learn(state)
        except (StorageError, CommitInDoubtError) as error:
            logger.warning("%s is committed; its projection is incomplete: %s", seal.name, error)
            return state
        finally:
            session.touch_log_later()  # sealed, even if the projection failed
        if background is not None and in_background:
            # Deletes take requests on an object store, and the caller does not need to wait for
            # them.
            own = frozenset({seal.save_id} if at_once else ())
            clearing = clear(
                self._means.held_by(holder), self._known, session.deferred_deletes, own
            )
            turns = take_turns(clearing, session.turn)
            chore = partial(session.drive_in_background, turns, background)
            background.submit(f"clearing what {seal.name} replaced", chore)
        return state

    def _give_up(self) -> None:
        storage, caps = self._run.session.storage, self._means.caps
        try:
            if not drive(undo(self._keys, self._run.generation, self._means), storage):
                return
        finally:
            self._run.session.touch_log_later()
        state = drive(catch_up(self._known), storage)
        for part in promised_here(state).get(self.save_id, []):
            name = part_name(part.name, part.part)
            drive(discard_own_attempt(part.save_id, name, caps), storage)


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
    """A part that is complete and durable, and will be committed with the others. Picklable.

    Attributes:
        part: Its name.
        of: The id of the save that it belongs to.
        ref: The reference to it that the commit records.
        result: What was saved, on this rank and on all.
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
    """A committed checkpoint of parts. Picklable.

    Attributes:
        uri: Where it is.
        step: Completed optimizer steps; None where there is no number.
        seal: The seal that committed it.
        word: The state of the home for groups that do not reach it. For ckptfs itself.
        storage_options: How the run is opened: the ticket's.
    """

    uri: Uri
    step: int | None
    seal: Seal = field(repr=False)
    word: HomeWord = field(repr=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def parts(self) -> Mapping[str, Uri]:
        """Where each part is: load it from there with ``ckptfs.load``."""
        return {ref.name: self.uri / ref.name for ref in self.seal.parts}

    def publish(
        self,
        *,
        process_group: Any = None,
        timeout_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the decision known on the disks that this group reaches. Collective over one group.

        This is needed if parts are on disks that the driver does not reach: until then readers
        there find the checkpoint in doubt, and its files in ``.ckptfs``. The group's next ``save``
        of a part does the same. Repeating it does nothing.

        Args:
            process_group: The ranks of the group; None: the default group.
            timeout_s: The longest silence of a rank that is waited out, in seconds; None: 600, or
                CKPTFS_TIMEOUT_S.
            storage_options: Options that replace some of ``self.storage_options`` here; None:
                nothing.

        Raises:
            FencedError: The run has a newer owner.
            CollectiveError: Some ranks failed; every rank raises this same error.
        """
        place = Place({**self.storage_options, **(storage_options or {})})
        with (
            control_for(process_group, timeout_s) as control,
            open_session(self.uri.parent, control, place, write=True) as session,
        ):
            apply_everywhere(session, self.word)


Then = Callable[[Decision, Sequence[SealedPart]], None]


@dataclass
class Ticket:
    """One checkpoint in progress. Picklable; a copy in another process gives parts, never commits.

    Attributes:
        uri: Where the checkpoint will be.
        step: Completed optimizer steps; None where there is no number.
        save_id: The id of the save.
        parts: Their names. A commit needs all of them.
        word: The state of the run's home, for the groups. For ckptfs itself.
        storage_options: How the groups open the run; credentials in it travel with the ticket.
    """

    uri: Uri
    step: int | None
    save_id: str
    parts: tuple[str, ...]
    word: HomeWord = field(repr=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _home_side: HomeSide | None = field(default=None, repr=False, compare=False)
    _then: Then | None = field(default=None, repr=False, compare=False)

    def part(self, name: str) -> TicketPart:
        """Return the part of that name, to be passed to ``ckptfs.save``.

        Args:
            name: One of ``parts``.

        Raises:
            StateError: There is no such part.
        """
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
        """Commit the checkpoint with one seal over all parts, in the process that began it.

        The checkpoint is committed and durable when this returns, and visible on the home's own
        disk. After a crash it is committed or not, and the next owner of the run knows which.

        Args:
            sealed: The values that ``save`` returned, at least one for each part.
            metrics: Numbers for ``keep_best`` and the log; None: none.
            beside: A local directory of this process with further files that become part of the
                checkpoint, next to the parts; for checkpoints of directories. None: no such files.

        Returns:
            The decision, for groups that do not reach home.

        Raises:
            IncompleteCheckpointError: A part is missing, and the message names it. Nothing is
                decided, and commit may be called again.
            CommitInDoubtError: It is not known whether it was committed. Another call, or the next
                owner of the run, settles it.
            FencedError: The run has a newer owner. Nothing was committed, and never will be.
            CommitConflictError: The name was committed by another save, or the ticket was given up.
                Nothing was committed, and never will be.
            StateError: A part was saved for another ticket, or this process did not begin the
                ticket.
        """
        pairs = tuple((part.of, part.ref) for part in sealed)
        seal, word = self._at_home.commit(pairs, metrics or {}, beside)
        decision = Decision(self.uri, self.step, seal, word, self.storage_options)
        if self._then is not None:
            self._then(decision, sealed)
        return decision

    def abandon(self) -> None:
        """Give the checkpoint up, in the process that began it. Harmless after a commit.

        The bytes that the home reaches are removed now. Parts elsewhere are removed by the next
        ``save`` there.

        Raises:
            StateError: This process did not begin the ticket.
        """
        self._at_home.abandon()

    @property
    def _at_home(self) -> HomeSide:
        if self._home_side is None:
            raise StateError(
                "this ticket is a copy: only the process that began it can commit or abandon it",
                uri=self.uri,
                hint="send the sealed parts to the process that called begin()",
            )
        return self._home_side

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_home_side": None, "_then": None}


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
    """Begin a checkpoint of parts. Nothing is visible yet. Collective over the run's ranks.

    After a crash the next owner of the run gives up what was not committed.

    Args:
        run: The held run.
        name: The name of the checkpoint.
        step: Completed optimizer steps; None where there is no number.
        parts: The names of the parts.
        if_exists: What to do if the name is committed already.
        artifact: The kind of all its parts: state dicts (``ckptfs.save``), or directories
            (``directory_parts``).
        save_id: For a copy, an id that was never tried here.
        storage_options: How the groups open the run, if they need other options than their own.
        then: Called after the commit, on every rank of the run that made it.

    Returns:
        The ticket.

    Raises:
        CommitConflictError: The name is taken.
        FencedError: The run has a newer owner.
        StateError: The names of the parts are not valid.
    """
    _check_names(name, parts, run.session.storage.uri(name))
    run.check(run.uri / name)
    home_side = HomeSide(
        run, name, step, tuple(parts), if_exists=if_exists, artifact=artifact, save_id=save_id
    )
    word = home_side.begin()
    return Ticket(
        run.uri / name,
        step,
        home_side.save_id,
        tuple(parts),
        word,
        dict(storage_options or {}),
        home_side,
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
