"""Checkpoints that a framework writes as files: a manager for them, and checkpoints of parts.

``DirectoryManager`` keeps directories of files like any other checkpoint:

    manager = ckptfs.DirectoryManager("s3://bucket/run", keep_latest=3, mode="async")
    trainer.save_checkpoint("/scratch/step_100")                   the framework's own way to save
    manager.save(100, "/scratch/step_100", consume=True)           committed whole, then removed here

    with manager.writing(100) as path: ...       or: write straight into what will be committed
    with manager.reading() as opened: ...        a local path to the newest committed one

Frameworks that save state dicts are better served by CheckpointManager: sharded, resharded, read in place.
DirectoryManager is for frameworks that insist on ``open``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.catalog.catalog import LocatedCheckpoint
from ckptfs.commit.catalog.unlogged import Unlogged
from ckptfs.commit.directory_checkpoints.read import NodeScratch, Wanted, fetched
from ckptfs.commit.directory_checkpoints.write import leaving_together, writing_directory
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.ownership.claim import Takeover
from ckptfs.commit.parts.tickets import Ticket
from ckptfs.commit.save.spec import Committed, SaveSpec
from ckptfs.commit.session import Place, RunSession
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import IncompleteCheckpointError
from ckptfs.events import Restored, SaveBegan, SaveResult, SaveSkipped
from ckptfs.manager.listeners import Listener
from ckptfs.manager.preemption import SignalName
from ckptfs.manager.restore import Opened as Checked
from ckptfs.manager.restore import Places, check
from ckptfs.manager.restore_candidates import Candidate, Damage, Fallback, RestoreRequest, doubt_of
from ckptfs.manager.run_manager import RunManager
from ckptfs.manager.run_setup import (
    IfSlow,
    Names,
    Pointer,
    RunHandle,
    SaveMode,
    Settings,
    Template,
    Where,
    metrics_of,
)
from ckptfs.manager.run_workers import FilesJob, RunWorkers, StartingPoint
from ckptfs.manager.schedule import Rules
from ckptfs.replication.tiers import copies_of, open_copies
from ckptfs.retention.policy import Best, Keep
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri, options_of

__all__ = ["DirectoryManager", "OpenedDirectory"]

_PREFIX = "ckptfs-write-"


@dataclass(frozen=True, slots=True)
class OpenedDirectory:
    """A committed directory as a local path.

    Attributes:
        path: The path; no process may write into it.
        step: Completed optimizer steps.
        uri: Where it was read, in the run or in a copy.
        skipped: Newer checkpoints that are damaged, and why.
        parts: The parts of a checkpoint that several groups wrote.
    """

    path: str
    step: int
    uri: Uri
    skipped: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


class DirectoryManager(RunManager):
    """Saves, retains and opens the directories of one run. Every rank makes one.

    Files with fixed names cannot be replaced. If a step comes again, what an earlier job committed under it
    is deleted first, provided that something was committed after it; a copy deletes it before the new one is
    copied. What is true after a crash, and the other arguments are as for ``ckptfs.CheckpointManager``.

    Args:
        mode: "sync" commits before ``save`` returns; "async" commits in the background.
        name: Template of the names, matched exactly: a directory that it does not match is never deleted.
        scratch: Where files are kept if the storage has no local path; it has to hold one checkpoint of a
            node. None: the temporary directory.
        pointer: A small file in the run that names the newest checkpoint, for readers that do not know
            ckptfs; None: no such file.
    """

    def __init__(
        self,
        uri: Any,
        *,
        keep_latest: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | None = None,
        mode: Literal["sync", "async"] = "sync",
        name: str = "step_{N}",
        every_steps: int | None = None,
        every_s: float | None = None,
        preempt_signals: Iterable[SignalName] = (),
        grace_s: float = 30.0,
        max_in_flight: int = 1,
        if_slow: Literal["delay", "skip"] = "delay",
        delete_grace_s: float = 0.0,
        scratch: str | os.PathLike[str] | None = None,
        pointer: str | Pointer | None = None,
        copies: Sequence[Any] = (),
        listeners: Sequence[Listener] = (),
        on_commit: Callable[[str], None] | None = None,
        takeover: Literal["auto", "never", "force"] = "auto",
        begin_again: bool = False,
        unlogged: Literal["error", "ignore"] = "error",
        process_group: Any = None,
        timeout_s: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
        scope: Literal["auto", "shared", "node"] = "auto",
        domain: str | None = None,
        ground: RunHandle | None = None,
    ) -> None:
        place = Place({**options_of(uri), **(storage_options or {})}, scope, domain)
        where = Where(uri, place, process_group, timeout_s, Takeover(takeover))
        settings = Settings(
            names=Names.of_directories(Template(name)),
            keep=Keep(keep_latest, keep_every, keep_best),
            mode=SaveMode(mode),
            if_slow=IfSlow(if_slow),
            max_in_flight=max_in_flight,
            delete_grace_s=delete_grace_s,
            listeners=tuple(listeners),
            on_commit=on_commit,
            copies=copies_of(copies, uri),
            takeover=where.takeover,
            begin_again=begin_again,
            unlogged=Unlogged(unlogged),
            pointer=Pointer(pointer) if isinstance(pointer, str) else pointer,
        )
        rules = Rules(every_steps, every_s, grace_s)
        super().__init__(ground or RunHandle(where), settings, rules, preempt_signals)
        self._scratch = None if scratch is None else os.fspath(scratch)

    # -- saving -------------------------------------------------------------------------

    def save(
        self,
        step: int,
        path: str | os.PathLike[str],
        metrics: Mapping[str, float] | None = None,
        *,
        consume: bool = False,
    ) -> SaveResult | PendingSave | SaveSkipped:
        """Commit what a framework wrote below ``path`` as the checkpoint of ``step``. Collective.

        Every node lists the files that it sees. Each file is sent once, by a rank that sees it; several nodes
        may hold the same file. All ranks must have finished writing when the last one calls. The files must
        stay as they are until the commit, with ``mode="async"`` too: until ``PendingSave.result()`` returns.
        A failure, also one to read the files, is raised on all ranks, and ``path`` stays. After a crash the
        checkpoint is there whole or not at all.

        Args:
            step: Completed optimizer steps.
            path: The directory, on this rank's node.
            metrics: Numbers for ``keep_best`` and the log; None: none.
            consume: Remove ``path`` when it is committed.

        Returns:
            A SaveResult; in async mode a PendingSave; or a SaveSkipped (``if_slow="skip"``) when the save
            before it is still under way on some rank.

        Raises:
            CommitConflictError: This manager has committed the step already; or the step is the newest
                commit, or the one that the job was restored from; or this manager read nothing and the run
                has reached this step.
            StateError: An earlier job's checkpoint of the step is pinned.
            CkptfsError: As for ``CheckpointManager.save``.
        """
        started = time.perf_counter()
        checked_metrics = metrics_of(metrics)
        prepared = self._prepare(step, checked_metrics)
        if isinstance(prepared, SaveSkipped):
            return prepared
        target, spec = prepared
        return self._run_job(FilesJob(os.fspath(path), target, spec, started, consume))

    @contextlib.contextmanager
    def writing(self, step: int, metrics: Mapping[str, float] | None = None) -> Iterator[str]:
        """A path to write the checkpoint of ``step`` into, committed when all ranks leave.

        Collective. All ranks of a node get the same path. On a mounted filesystem it is the path of the
        attempt itself, shared by all ranks that see it; elsewhere it is a path in ``scratch``, uploaded on
        leaving. The save is synchronous in any mode. An exception inside the block, on any rank, commits
        nothing and is raised on all. Errors and the arguments are as for ``ckptfs.DirectoryManager.save``.

        Yields:
            The path.
        """
        started = time.perf_counter()
        checked_metrics = metrics_of(metrics)
        self._settle(1)
        prepared = self._prepare(step, checked_metrics)
        assert not isinstance(prepared, SaveSkipped)  # noqa: S101 - nothing is on its way
        target, spec = prepared
        workers = self._workers()
        workers.retirer.make_room()
        session = workers.run.session
        self._tell(SaveBegan(str(target), step, Kind.DIRECTORY.value, SaveMode.SYNC.value))
        try:
            if session.storage.local_path("") is None:
                with self._scratch_on(session) as path:
                    with leaving_together(session.control):
                        yield path
                    result = FilesJob(path, target, spec, started).run(session, self._tell, None)
            else:
                done: list[Committed] = []
                with writing_directory(session, spec, done) as path:
                    yield path
                wall_s = time.perf_counter() - started
                result = done[0].result(str(target), step, session.control.rank, wall_s)
        except BaseException as error:
            workers.saver.failed(target, spec, error)
            raise
        workers.saver.follow(Kind.DIRECTORY, session, result, time.perf_counter() - started)
        self._schedule.took(result.wall_s)
        self._saved(Kind.DIRECTORY, step)

    def begin(
        self,
        step: int,
        parts: Sequence[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Ticket:
        """Begin a checkpoint of directories that several groups of processes write.

        Collective over this manager's ranks. See ``ckptfs.commit.parts.directory_parts``. The arguments are
        as for ``ckptfs.CheckpointManager.begin``.

        Returns:
            The ticket.

        Raises:
            CommitConflictError: The step is committed.
            CkptfsError: As for ``CheckpointManager.begin``.
        """
        name = self._settings.names.of(Kind.DIRECTORY).name(step)
        self._run_handle.check_open()
        self._settle(1)
        workers = self._begun(name, step)
        given = self._run_handle.where.place.storage_options
        ticket = workers.begin(
            name, step, parts, given if storage_options is None else storage_options, Kind.DIRECTORY
        )
        self._saved(Kind.DIRECTORY, step)
        return ticket

    def _prepare(
        self, step: int, metrics: tuple[tuple[str, float], ...]
    ) -> tuple[Uri, SaveSpec] | SaveSkipped:
        name = self._settings.names.of(Kind.DIRECTORY).name(step)
        self._run_handle.check_open()
        skipped = self._make_way(step, name)
        if skipped is not None:
            return skipped
        workers = self._begun(name, step)
        spec = SaveSpec(
            name, step, artifact=Kind.DIRECTORY, run=workers.run.generation, metrics=metrics
        )
        return self._run_handle.root / name, spec

    def _begun(self, name: str, step: int) -> RunWorkers:
        """Return the run's workers when ``step`` may be saved and its name is free. Collective."""
        workers = self._workers()
        workers.check_beginning(Kind.DIRECTORY, name, step)
        if workers.comes_again(name, step):
            self._settle(1)
            workers.free_name(name)
        return workers

    @contextlib.contextmanager
    def _scratch_on(self, session: RunSession) -> Iterator[str]:
        """Yield one directory per node; an exception inside reaches all ranks. Collective."""
        control = session.control
        place = NodeScratch(control, _PREFIX, self._scratch)
        try:
            answers = control.step(
                "make scratch", lambda: (place.node, place.make()) if place.is_lead else None
            )
        except BaseException:
            place.discard()
            raise
        place.target = next(one[1] for one in answers if one is not None and one[0] == place.node)
        try:
            yield place.path
        finally:
            place.leave()

    # -- reading ------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(
        self,
        step: int | None = None,
        *,
        into: str | os.PathLike[str] | None = None,
        fallback: Literal["error", "older"] = "error",
        only: Wanted | None = None,
        unlogged: Literal["error", "ignore"] | None = None,
    ) -> Iterator[OpenedDirectory | None]:
        """The newest committed directory, or that of ``step``, as a local path.

        Collective to enter, read-only; decided once for all ranks. No process may write into the path, which
        is valid inside the block: on a mounted filesystem it is the checkpoint. Elsewhere, and with ``into``,
        it is downloaded, see ``ckptfs.checkpoint_dir``.

        Args:
            step: Exactly this one; None: the newest.
            into: A directory to download to and to keep; None: the checkpoint itself, or a directory that is
                removed.
            fallback: What happens if the newest is damaged: "error" never uses an older one, "older" uses the
                newest whole one and lists the damaged ones in ``skipped``.
            only: Which files this node needs where they are downloaded, given a file's path and the node's
                ranks; None: all.
            unlogged: "error" or "ignore": what happens if stock torch saved into the run after the newest
                commit; None: as the manager was made.

        Yields:
            The directory. None only if nothing was ever saved.

        Raises:
            AlreadyExistsError: ``into`` has files.
            CkptfsError: As for ``CheckpointManager.restore``.
        """
        self._settle(1)
        request = RestoreRequest(
            self._settings.names.of(Kind.DIRECTORY).step_of,
            step,
            Kind.DIRECTORY,
            fallback=Fallback(fallback),
            unlogged=self._settings.unlogged_of(unlogged),
        )
        directory = None if into is None else os.fspath(into)
        with self._opened(request, directory, lambda _: only) as opened:
            yield opened

    @contextlib.contextmanager
    def _opened(
        self, request: RestoreRequest, into: str | None, only_of: Callable[[Seal], Wanted | None]
    ) -> Iterator[OpenedDirectory | None]:
        """Yield the checkpoint, downloaded to ``into`` if given; only the files of ``only_of``."""
        with (
            self._run_handle.reading() as session,
            open_copies(self._settings.copies, self._run_handle.control) as copies,
        ):
            chosen = _choose([session, *copies], request)
            if chosen is None:
                self._found_nothing(Kind.DIRECTORY)
                yield None
                return
            seal, began = chosen.candidate.seal, time.perf_counter()
            step, place = chosen.candidate.step, chosen.session
            only = only_of(seal)
            with fetched(place, chosen.found, into=into, scratch=self._scratch, only=only) as path:
                self._needed = frozenset({seal.save_id})
                self._set_start(StartingPoint(step))
                uri = place.storage.uri(seal.name)
                wall_s = time.perf_counter() - began
                copy_of = None if place is session else str(session.storage.root)
                self._tell(Restored(str(uri), step, chosen.skipped, wall_s, copy_of=copy_of))
                # Inside the block the run may be claimed, and retention run: this save stays until a commit.
                parts = tuple(ref.name for ref in seal.parts)
                yield OpenedDirectory(path, step, uri, chosen.skipped, parts)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The checkpoint to open, the ``session`` of the place that has it whole, and what was skipped."""

    session: RunSession
    candidate: Candidate
    found: LocatedCheckpoint
    skipped: tuple[str, ...]


def _choose(sessions: Sequence[RunSession], request: RestoreRequest) -> _Chosen | None:
    """Return the newest whole checkpoint; None: the run is truly empty. Collective.

    ``sessions`` are those of the run, then of its copies; a copy serves a save that the run has lost.
    """
    places = Places(sessions, request)
    home = places.home()
    if home is None:
        return None
    skipped: list[str] = []
    for candidate in places.survey(home).choice.candidates:
        damage: Damage | None = None
        for source in (home, *(n for n in range(len(places)) if n != home)):
            found = places.survey(source).choice.of(candidate.seal.save_id)
            if found is None:
                continue
            held: list[Checked] = []
            session = sessions[source]
            why = _doubt(found) or check(session, found.seal, held, _no_metadata)
            if why is None:
                return _Chosen(session, found, held[0][0], tuple(skipped))
            damage = damage or why
        if damage is None:
            raise AssertionError("a candidate is one of its own place")
        if request.fallback is Fallback.ERROR or request.step is not None:
            raise damage.error(candidate.seal.name, places.uri(home) / candidate.seal.name)
        skipped.append(f"{candidate.seal.name}: {damage.why}")
    raise IncompleteCheckpointError(
        f"none of {len(skipped)} checkpoints is complete: {'; '.join(skipped)}",
        uri=places.uri(home),
        hint="bring one of them back; ckptfs never restarts a run from the beginning on its own",
    )


def _doubt(candidate: Candidate) -> Damage | None:
    return doubt_of(candidate.doubt, None) if candidate.doubt else None


def _no_metadata(_storage: Storage, _found: LocatedCheckpoint) -> Metadata:
    """Return no metadata: the framework that wrote the files reads them itself."""
    return Metadata(state_dict_metadata={})
