"""One save, over all ranks: the collective that turns written files into a commit.

    rank 0 .. n-1   begin()                       owners          coordinator
      |               survey  ------------------> fold logs ----> check the name; base, seq, save_id
      |                       (of a held run: a stage of the step before, see survey_ahead)
      |               begin   ------------------> make attempts/<id>/<id>/, attempt.json
      |               confirm   one process per node reads the record through its own path
      |             (the caller writes any files below .prefix)
      |             commit(write, finish)
      |               write   ------------------------------------> planned == written? manifest
      |               prepare ------------------> manifest, .metadata, every name durable
      |               seal    ------------------> append the seal  -> committed | failed | in doubt
      |               finish  ------------------> record, project, reclaim

Every line is one ``control.step``: it ends on every rank with the same value or the same error. Up
to ``prepare`` a failure leaves the old state, and ``abandon`` removes what was written. After a seal
was tried, only recovery removes anything. ``finish`` cannot fail the save any more: the next writer
does what it did not complete.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckptfs.commit.decisions import to_clear
from ckptfs.commit.delete.deletion_steps import find_removed, record_removed
from ckptfs.commit.log.advisory_log import ADVICE
from ckptfs.commit.log.append import catch_up_again
from ckptfs.commit.log.entries import Generation, Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import Manifest, digest_of, encode_manifest
from ckptfs.commit.operations import drive, read_limited, side_by_side, take_turns
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run, is_for_call
from ckptfs.commit.paths import CONTROL, MANIFEST, SHARED, AttemptKeys
from ckptfs.commit.save.foreign_metadata import foreign_at, metadata_at
from ckptfs.commit.save.owner_steps import (
    BegunHere,
    Here,
    Strategy,
    finish,
    prepare,
    replaced_bytes,
    survey,
    tidy,
)
from ckptfs.commit.save.planning import SavePlan, manifest_of, origins_of, seal_of_plan
from ckptfs.commit.save.projection import InHand
from ckptfs.commit.save.sealing import (
    NameConflict,
    fenced_rather_than_missing,
    lost_while_sealing,
    seal_everywhere,
    undo_here,
)
from ckptfs.commit.save.spec import Committed, IfExists, SaveSpec, SmallFile, WrittenPart
from ckptfs.commit.session import (
    RunSession,
    View,
    finish_with_views,
    naming,
    stage_with_views,
    step_with_views,
)
from ckptfs.control.messages import Stage, apart
from ckptfs.errors import (
    CkptfsError,
    CommitConflictError,
    CommitInDoubtError,
    StateError,
    StorageError,
    SymlinkError,
    UriError,
)
from ckptfs.events import Counters
from ckptfs.storage.base import Shape
from ckptfs.storage.inflight import add_fields, log_fields

__all__ = ["SaveAttempt", "SealContent"]

logger = logging.getLogger("ckptfs.commit")

DRAIN_S = 60.0  # how long a directory waits for running deletes before it is refused


@dataclass(frozen=True, slots=True)
class SealContent:
    """The content that the owners seal.

    ``files`` is sent to each of them separately, and not at all if only the coordinator needs it.
    """

    digest: str
    files: Mapping[str, SmallFile]
    counters: tuple[Counters, ...]
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Finished:
    """The result of the projection in one domain.

    Attributes:
        note: Why it is incomplete; empty if it is complete.
        replaced_bytes: How many bytes of older saves of the name stay there.
    """

    note: str = ""
    replaced_bytes: int = 0


P = ParamSpec("P")
R = TypeVar("R")

# What a rank sends in the survey: name, step and kind of its save, and the log of its domain.
_Look = tuple[tuple[str, int | None, str], View | None]


def _view_in(look: _Look) -> View | None:
    return look[1]


def _logged(
    method: Callable[Concatenate[SaveAttempt, P], R],
) -> Callable[Concatenate[SaveAttempt, P], R]:
    """Name the save in all log records that are made during the call.

    This includes records of other threads that work for it.
    """

    @functools.wraps(method)
    def run(self: SaveAttempt, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with log_fields(**self.log_fields):
            return method(self, *args, **kwargs)

    return run


class SaveAttempt:
    """One save, on one rank. Every rank makes one and makes the same calls in order.

    Args:
        session: The session at the run.
        spec: What is saved.
        caller: Who claims the run if it has to be claimed. None: this save.
        strategy: What differs between kinds of save. None: an ordinary one.
    """

    def __init__(
        self,
        session: RunSession,
        spec: SaveSpec,
        caller: Caller | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        if spec.name in (CONTROL, SHARED):
            raise UriError(
                f"{spec.name} belongs to the run itself",
                uri=session.storage.uri(spec.name),
                hint="choose another name",
            )
        self.session = session
        self.spec = spec
        self.storage = session.storage
        self._strategy = strategy or Strategy()
        self._means = session.means()
        self._owner = session.placement.is_owner
        self._state: LogState | None = None
        self._plan: SavePlan | None = None
        self._surveyed: object = None  # the answer of survey_ahead()
        self._keys: AttemptKeys | None = None
        self._foreign: str | None = None
        self._stood: bytes | None = None  # what the name holds, if read with the log
        self._small: dict[str, bytes] = {}  # an owner's small files, as it wrote them
        self._seal: Seal | None = None
        self._seal_tried = False
        self._committed: Committed | None = None
        self._began = False
        self._claimed: Run | None = None  # for this save alone
        call = 'save(if_exists="replace")' if spec.if_exists is IfExists.REPLACE else "a save"
        self._caller = caller or Caller(call, for_call=True, wait_s=spec.wait_s)
        self._manifest: Manifest | None = None  # the coordinator's
        self._files: dict[str, SmallFile] = {}  # the coordinator's, if it is the only owner

    # -- what the writer of files needs -------------------------------------------------

    @property
    def save_id(self) -> str:
        """The unique id of this save, equal on all ranks after begin()."""
        return self._planned.save_id

    @property
    def base(self) -> Generation:
        """The generation that this save carries, equal on all ranks after begin()."""
        return self._planned.base

    @property
    def keys(self) -> AttemptKeys:
        """The keys of its files."""
        return self._named

    @property
    def log_fields(self) -> dict[str, Any]:
        """The fields that log records of this save get."""
        run, control = self.session.storage.root, self.session.control
        save_id = self.spec.save_id if self._keys is None else self._keys.save_id
        return {
            "run": str(run),
            "step": self.spec.step,
            "rank": control.rank,
            "save_id": save_id,
        }

    @property
    def seal(self) -> Seal:
        """The seal that was appended, or tried last. After commit()."""
        if self._seal is None:
            raise RuntimeError("commit() was not called")
        return self._seal

    @property
    def previous(self) -> Seal | None:
        """The last committed save of the same kind, if this save holds the run; else None.

        Equal on all ranks after begin().
        """
        return self._planned.previous

    @property
    def prefix(self) -> str:
        """The key prefix of this save's data files, ending with a slash."""
        return f"{self._named.data}/"

    @property
    def directory(self) -> str:
        """The key of the future step directory. For kind DIRECTORY, plain names go there."""
        return self._named.directory

    @property
    def _here(self) -> Here:
        base, state, foreign = self._planned.base, self._state, self._foreign
        return Here(self.session, self.spec, self._named, base, state, foreign)

    @property
    def _planned(self) -> SavePlan:
        if self._plan is None:
            raise RuntimeError("begin() was not called")
        return self._plan

    @property
    def _known(self) -> LogState | None:
        # Without exclusive creates entries may slip in below what was folded.
        return self.session.known.state if self._means.caps.exclusive_create else None

    @property
    def _named(self) -> AttemptKeys:
        if self._keys is None:
            raise RuntimeError("begin() was not called")
        return self._keys

    # -- begin --------------------------------------------------------------------------

    @_logged
    def begin(self) -> None:
        """Decide the save's id and base, make its directories, and confirm them. Collective.

        After an error nothing is visible; a record of the attempt may remain in
        ``.ckptfs/attempts``.

        If the committed save of this name was removed by hand, the log records that first, and the
        save continues. Without ``spec.run`` it claims the run for that, until it ends.

        Raises:
            CommitConflictError: The name is committed.
            FencedError: The run has a newer owner.
            RunBusyError: The run must be claimed, and a living owner holds it.
        """
        try:
            if not self._strategy.reads_log:
                self._state = self._strategy.before_begin(self.session)
            self._begin_save()
        except BaseException:
            self._let_go()
            raise

    def _begin_save(self) -> None:
        try:
            self._plan = self._planned_together()
        except CommitConflictError:
            if not self._free_name():
                raise
            self._plan = self._planned_together()
        if self._plan.replaces and self._claims_if_name_exists:
            if not self._free_name() and self._claimed is None:
                self._claim()
            self._plan = self._planned_together()
        self._set_keys()
        if self._make_together():
            self._claim()
            self._plan = self._planned_together()
            self._set_keys()
            self._make_together()

    def _make_together(self) -> bool:
        """Make the attempt, unless the run must be claimed first: then return True. Collective."""
        control = self.session.control
        with naming(self.storage.uri(self.spec.name)), self._fenced_rather_than_missing():
            begun = control.step("begin", self._begin_plainly, self._refuse_others)
            if begun.is_occupied:
                return True
            if begun.base is not None and self.spec.run is None:
                self._plan = replace(self._planned, base=begun.base)
            if self.session.spans_nodes:
                control.step("confirm", self._confirm)
        return False

    def _fenced_rather_than_missing(self) -> contextlib.AbstractContextManager[None]:
        return fenced_rather_than_missing(self.session, self._planned.base, self.spec.name)

    def _set_keys(self) -> None:
        shape, save_id = self._means.caps.shape, self._planned.save_id
        self._keys = AttemptKeys(shape, self.spec.name, save_id)
        add_fields(save_id=save_id)
        self._began = True

    def survey_ahead(self, *, is_due: Callable[[], bool]) -> Stage | None:
        """Return the survey as a stage of a step before ``begin``, which then makes none.

        None if the save holds no run: its survey makes directories, and must come after all that
        may refuse the save.

        is_due: Whether the stages before it decided, on the coordinator. If not, nothing is decided
            here either, and the step is made again.
        """
        if self.spec.run is None or not self._strategy.surveys_ahead:
            return None
        stage = stage_with_views("survey", self._look, _view_in, self._agree)

        def decide(answers: list[_Look]) -> object:
            if not is_due():
                return None
            try:
                return stage.decide(answers)
            except CommitConflictError as error:
                return error  # a value: begin() raises it, or frees the name

        return Stage(stage.label, stage.local, decide)

    def surveyed(self, answer: object) -> None:
        """Take the answer of ``survey_ahead``. The next ``begin`` uses it."""
        self._surveyed = answer

    def _look(self, ids: Collection[str]) -> _Look:
        return self._own_plan, self._survey(ids)

    def _planned_together(self) -> SavePlan:
        control, (answer, self._surveyed) = self.session.control, (self._surveyed, None)
        if isinstance(answer, CommitConflictError):
            raise answer
        if answer is not None:
            return finish_with_views(control, "survey", self._look, self._agree, answer)
        return step_with_views(control, "survey", self._look, _view_in, self._agree)

    def _free_name(self) -> bool:
        """Whether a taken name is free because its save was removed by hand. Collective.

        If so, the log records that when this returns.
        """
        name, artifact = self.spec.name, self.spec.artifact
        if not find_removed(self.session, name, artifact):
            return False
        if self.spec.run is None:
            keep = () if self.spec.save_id is None else (self.spec.save_id,)
            self._claim(keep)
        assert self.spec.run is not None  # noqa: S101 - claimed above
        # Look again, now that no other process moves anything: a file that was being moved may be there now.
        return record_removed(self.session, name, artifact, self.spec.run)

    def _claim(self, keep: tuple[str, ...] = ()) -> None:
        """Claim the run for this save, until it ends. Collective.

        RunBusyError: a living owner holds the run.
        """
        # A save that runs in a job next to the job's manager must not take the run from that manager.
        self._claimed = claim(self.session, takeover=Takeover.DEAD, keep=keep, caller=self._caller)
        self.session = self._claimed.session
        self.spec = replace(self.spec, run=self._claimed.generation)

    @property
    def _claims_if_name_exists(self) -> bool:
        """Whether the save claims the run if the name is taken.

        It does so if it may replace and holds no run yet. An unused name is saved without a claim.
        """
        return self.spec.if_exists is IfExists.REPLACE and self.spec.run is None

    def _let_go(self) -> None:
        """Release the run that was claimed for this save alone. Calling it twice is harmless."""
        run, self._claimed = self._claimed, None
        if run is not None:
            run.release()

    def _survey(self, ids: Collection[str] = ()) -> View | None:
        if not self._owner:
            return None
        if not self._strategy.reads_log:
            known = self._state or LogState()
            return self._means.domain, known.to_send((*ids, *self._strategy.asks_for))
        background = self.session.background
        if background is not None and self.spec.artifact is Kind.DIRECTORY:
            # Plain names never overwrite: the saves that the last commit replaced must be gone first.
            background.drain(DRAIN_S)
        # The holder of the run made the log's directories when it claimed the run.
        look = survey() if self.spec.run is None else catch_up_again(self._known)
        if self._looks_at_once:
            stands = metadata_at(self.spec.name)
            self._state, self._stood = drive(side_by_side(look, stands), self.storage)
        else:
            self._state = drive(look, self.storage)
        return self._means.domain, self._state.to_send(ids)

    @property
    def _own_plan(self) -> tuple[str, int | None, str]:
        return self.spec.name, self.spec.step, self.spec.artifact.value

    def _agree(self, answers: Sequence[_Look]) -> SavePlan:
        """Return the plan if all ranks mean one save.

        Half of step 10 together with half of step 11 would be neither.
        """
        odd = next((rank for rank, (what, _) in enumerate(answers) if what != answers[0][0]), None)
        if odd is not None:
            raise StateError(
                f"ranks save different checkpoints: {answers[0][0][0]} (step {answers[0][0][1]}) on rank 0, "
                f"{answers[odd][0][0]} (step {answers[odd][0][1]}) on rank {odd}",
                uri=self.storage.root,
                hint="make the same calls in the same order on every rank",
            )
        # A metric is a number of each rank's own: the seal, which is the same everywhere, has that
        # of the coordinator.
        views = [view for _, view in answers]
        plan = self._strategy.plan(self.spec, views, self.session)
        return replace(plan, metrics=self.spec.metrics)

    @property
    def _looks_at_once(self) -> bool:
        """Whether what exists under the name is read together with the log. Requests take long."""
        is_object = self._means.caps.shape is Shape.OBJECT
        return is_object and self.spec.artifact is not Kind.DIRECTORY

    def _begin_plainly(self) -> BegunHere | SymlinkError | CommitConflictError:
        try:
            if self._look_for_foreign() and self._claims_if_name_exists:
                self._began = False  # nothing was made, because the run must be claimed first
                return BegunHere(is_occupied=True)
            return self._strategy.begin(self._here) if self._owner else BegunHere()
        except (SymlinkError, CommitConflictError) as error:
            self._began = False  # nothing was made, so there is nothing to abort
            return error  # a value, so that it is raised as its type

    def _look_for_foreign(self) -> bool:
        """Whether another program's checkpoint, or a copy of one of ours, has the name.

        Another program's checkpoint is replaced if the caller wanted that, else refused. Only the
        one that is there now is replaced: one that appears while this save is written is left
        alone.
        """
        if not self._owner or self._state is None or self.spec.artifact is Kind.DIRECTORY:
            return False
        name = self.spec.name
        stood = self._stood if self._looks_at_once else drive(metadata_at(name), self.storage)
        found = drive(foreign_at(name, stood, self._state), self.storage)
        self._foreign = None if found is None else found.digest
        # A complete or interrupted copy of a checkpoint of ours is not another program's checkpoint.
        if found is None or found.is_copy:
            return found is not None
        if self.spec.if_exists is IfExists.ERROR or self.spec.spares_foreign:
            ways = 'move it away, or save over it with ckptfs.save(..., if_exists="replace")'
            raise CommitConflictError(
                f"{self.spec.name} holds a checkpoint that ckptfs did not write",
                uri=self.storage.uri(self.spec.name),
                hint=f"choose another name, {ways}",
            )
        return True

    def _refuse_others(
        self, answers: Sequence[BegunHere | SymlinkError | CommitConflictError]
    ) -> BegunHere:
        """Return how the save began. It is occupied if the run must be claimed for what has the name."""
        for answer in answers:
            if isinstance(answer, SymlinkError | CommitConflictError):
                raise answer
        begun = [answer for answer in answers if isinstance(answer, BegunHere)]
        others = [save_id for one in begun for save_id in one.others]
        if others:
            raise CommitConflictError(
                f"another save of {self.spec.name} is in progress, or it died: {others[0]}",
                uri=self.storage.uri(self.spec.name),
                hint="files with plain names never overwrite; call prepare_run() to clean up "
                "after a save that died",
            )
        base = next((one.base for one in begun if one.base is not None), None)
        return BegunHere(is_occupied=any(one.is_occupied for one in begun), base=base)

    def _confirm(self) -> None:
        """Read the attempt's record through this node's own path, in one process per node.

        A client may have cached that the directory does not exist, and an existing directory may
        belong to another process.
        """
        if self.session.placement.is_node_lead and not self._owner:
            record = self._named.record
            self.storage.refresh(record.rsplit("/", 2)[0])
            self.storage.refresh(record.rsplit("/", 1)[0])
            read_limited(self.storage, record)

    def given_up(self, error: CkptfsError) -> Committed:
        """Return the result of the save while this rank's part of it hangs. Local, from any thread.

        It is for a caller that waits for the save. ``error`` is the error that its step ended with
        on all other ranks. If the save is committed, it stays so; the error is then among the
        warnings, as on the other ranks, because the projection is not complete.

        Raises:
            CommitInDoubtError: This rank hangs in the seal.
            CkptfsError: ``error``, if it hangs before the seal.
        """
        if self._committed is not None:
            return replace(self._committed, warnings=(str(error),))
        if self._seal_tried:
            where = self.storage.uri(self.spec.name)
            raise lost_while_sealing(self.spec.name, where, error) from error
        with naming(self.storage.uri(self.spec.name)):
            raise error

    # -- commit -------------------------------------------------------------------------

    @_logged
    def commit(
        self,
        write: Callable[[], WrittenPart],
        finish: Callable[[list[WrittenPart]], Mapping[str, SmallFile]],
    ) -> Committed:
        """Write, then seal what all ranks wrote. Committed when this returns. Collective.

        After an error before the seal the old state stays; call abandon().

        Args:
            write: Makes this rank's files, each durable when it returns. Its error reaches all
                ranks.
            finish: Runs on the coordinator with every rank's part. It checks that what was planned
                was written, and returns the further small files (such as ``.metadata``) that are
                stored next to the manifest.

        Returns:
            The committed save.

        Raises:
            CommitInDoubtError: It is not known whether the save is committed. The next begin or
                prepare_run settles it.
        """
        control = self.session.control
        here = self.storage.uri(self.spec.name)
        with naming(here), self._fenced_rather_than_missing():
            gathered, received = control.step(
                "write", write, lambda parts: self._apart(self._gather(parts, finish))
            )
            started = time.perf_counter()
            files = self._files or received or {}
            control.step("prepare", lambda: self._prepare(files))
        seal = seal_of_plan(self._planned, self.spec, gathered.digest, gathered.origins)
        self._seal_tried = True
        try:
            self._state = self._append_seal(seal)
        except NameConflict:
            # Certainly not sealed. The data stays as it is; only the files that name the generation are new.
            self._seal_tried = False
            seal = self._described_anew(gathered.origins)
            self._seal_tried = True
            self._state = self._append_seal(seal)
        commit_s = time.perf_counter() - started
        self._committed = Committed(seal.save_id, gathered.counters, commit_s)
        warnings, replaced_bytes = self._finish(seal)
        if not self._means.caps.exclusive_create:
            warnings = (ADVICE, *warnings)
            if self.session.control.rank == 0:
                logger.warning("%s is committed; %s", seal.name, ADVICE)
        self._let_go()
        commit_s = time.perf_counter() - started
        return Committed(seal.save_id, gathered.counters, commit_s, warnings, replaced_bytes)

    def _described_anew(self, origins: tuple[str, ...]) -> Seal:
        """Claim the run, and write a manifest of its generation for the files. Collective."""
        self.spec = replace(self.spec, save_id=self.save_id)
        self._claim((self.save_id,))
        self._plan = self._planned_together()
        base = self._planned.base

        def describe(_: Sequence[None]) -> bytes:
            assert self._manifest is not None  # noqa: S101 - the coordinator made it
            return encode_manifest(replace(self._manifest, base=base))

        control = self.session.control
        with self._fenced_rather_than_missing():
            encoded = control.step("describe", lambda: None, describe)
            control.step("prepare", lambda: self._prepare({MANIFEST: encoded}))
        return seal_of_plan(self._planned, self.spec, digest_of(encoded), origins)

    def _append_seal(self, seal: Seal) -> LogState | None:
        self._seal = seal
        return seal_everywhere(
            self.session,
            self._named,
            seal,
            self._means,
            self._state,
            decide=self._strategy.decision(seal, self.spec),
            may_try_again=self._claims_if_name_exists,
        )

    def _gather(
        self,
        parts: list[WrittenPart],
        finish: Callable[[list[WrittenPart]], Mapping[str, SmallFile]],
    ) -> SealContent:
        files = dict(finish(parts))
        manifest = manifest_of(
            self._planned, self.spec, self.session, [f for part in parts for f in part.files], files
        )
        self._manifest = manifest
        encoded = self._strategy.described(manifest, self._here)
        files[MANIFEST] = encoded
        counters = tuple(part.counters for part in parts)
        digest, origins = digest_of(encoded), origins_of(manifest)
        if len(self._planned.domains) == 1 and self._owner:
            self._files = files  # the coordinator is the only owner: nothing large has to be sent
            return SealContent(digest, {}, counters, origins)
        return SealContent(digest, files, counters, origins)

    def _apart(self, gathered: SealContent) -> tuple[SealContent, Mapping[str, SmallFile] | None]:
        """Send each owner only its own files: they are as large as the checkpoint has items."""
        if not gathered.files:
            return apart(gathered)
        here = {domain.owner: domain.id for domain in self.session.placement.domains}
        pieces: list[Mapping[str, SmallFile] | None] = [
            {n: f if isinstance(f, bytes) else f[here[rank]] for n, f in gathered.files.items()}
            if rank in here
            else None
            for rank in range(self.session.control.size)
        ]
        return apart(replace(gathered, files={}), pieces)

    def _prepare(self, files: Mapping[str, SmallFile]) -> None:
        if self._owner:
            here = self._means.domain
            own_files = {n: f if isinstance(f, bytes) else f[here] for n, f in files.items()}
            self._strategy.before_prepare(files, self._here)
            drive(prepare(self._named, own_files), self.storage)
            self._small |= own_files

    # -- after the commit ---------------------------------------------------------------

    def _finish(self, seal: Seal) -> tuple[tuple[str, ...], int]:
        """Record the decision and project the save.

        The save is committed: a failure here is a warning, not an error.

        Returns:
            The warnings, and how many bytes of older saves of the name stay.
        """
        if not self._strategy.projects:
            if self._owner:
                self.session.touch_log_later()
            return (), 0

        def together(ends: Sequence[_Finished]) -> tuple[tuple[str, ...], int]:
            # One value for all: else every rank reads as many values as there are ranks.
            warnings = tuple(dict.fromkeys(end.note for end in ends if end.note))
            return warnings, sum(end.replaced_bytes for end in ends)

        try:
            found = self.session.control.step("finish", lambda: self._finish_here(seal), together)
        except CkptfsError as error:
            found = (str(error),), 0
        for note in found[0]:
            logger.warning("%s is committed; its projection is incomplete: %s", seal.name, note)
        return found

    def _finish_here(self, seal: Seal) -> _Finished:
        if not self._owner or self._state is None:
            return _Finished()
        holder, background = self.spec.run, self.session.background
        at_once = is_for_call(holder)
        try:
            # This domain knows only what its own log records about other saves: an earlier save
            # that is sealed here but not elsewhere must not be projected.
            in_background = background is not None and not self._clears_plain_names()
            clears = None if in_background else holder
            behind = holder is not None and in_background
            in_hand = InHand(
                self._small, self._looks_at_once and self._stood is None, leaves_record=behind
            )
            program = finish(
                seal,
                self._means if clears is None else self._means.held_by(clears),
                self._state,
                spare=self.session.deferred_deletes,
                replaces=self._foreign,
                in_hand=in_hand if self._small else None,
                at_once=at_once,
            )
            self._state = drive(take_turns(program, self.session.turn), self.storage)
            self.session.known.learn(self._state)
        except (StorageError, CommitInDoubtError) as error:
            return _Finished(str(error), self._replaced_bytes(seal, at_once=at_once))
        finally:
            self.session.touch_log_later()  # sealed, even if the projection failed
        if holder is not None and background is not None and in_background:
            # Deletes take requests on an object store, and the caller does not need to wait for
            # them.
            own = frozenset({seal.save_id} if at_once else ())
            tidying = tidy(
                self._named,
                self._means.held_by(holder),
                self._known,
                spare=self.session.deferred_deletes,
                at_once=own,
            )
            turns = take_turns(tidying, self.session.turn)
            chore = partial(self.session.drive_in_background, turns, background)
            background.submit(f"clearing what {seal.name} replaced", chore)
        return _Finished(replaced_bytes=self._replaced_bytes(seal, at_once=at_once))

    def _replaced_bytes(self, seal: Seal, *, at_once: bool) -> int:
        """Return the bytes of older saves of the name here that will not be removed soon."""
        if not self._planned.replaces or self._state is None:
            return 0
        here, own = self._means.domain, frozenset({seal.save_id} if at_once else ())
        shape, root = self._means.caps.shape, self.storage.root
        program = replaced_bytes(seal, here, self._state, shape, root, at_once=own)
        return drive(program, self.storage)

    def _clears_plain_names(self) -> bool:
        """Whether a directory checkpoint is to be removed.

        Its plain names may belong to a later owner by the time that a chore removes them, so they
        are removed before this save returns.
        """
        here = self._means.domain
        deferred = self.session.deferred_deletes
        pending_deletes = (
            () if self._state is None else to_clear({here: self._state}, here, deferred)
        )
        return any(one.seal.artifact is Kind.DIRECTORY for one in pending_deletes)

    @_logged
    def abandon(self) -> None:
        """End this rank's part after a failed begin, write or commit. Local, best effort.

        What it wrote is aborted and removed, unless the strategy keeps it for the next process. Nothing is
        removed once a seal was tried: recovery decides about that.
        """
        if not self._strategy.keeps_files:
            self.give_up()
            return
        self._let_go()
        if self._keys is None or not self._owner:
            return
        try:
            self._strategy.leave(self._here)
        except (CkptfsError, OSError) as error:
            logger.debug("what is left of %s: %s", self.save_id, error)

    def give_up(self) -> None:
        """Abandon it although the strategy keeps its files: no process will continue it. Local, best effort."""
        try:
            self._abandon()
        finally:
            self._let_go()

    def _abandon(self) -> None:
        if not (self._began and self._owner) or self._seal_tried:
            return
        try:
            undo_here(self.session, self._named, self._planned.base, self._means)
        except (CkptfsError, OSError) as error:
            logger.warning(
                "the abandoned attempt %s was not removed; the next prepare_run removes it: %s",
                self.save_id,
                error,
            )
