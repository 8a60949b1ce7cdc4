"""DirectoryManager: checkpoints that a framework writes as files, kept like any other.

    manager = ckptfs.DirectoryManager("s3://bucket/run", keep_latest=3, mode="async")
    trainer.save_checkpoint("/scratch/step_100")                   every framework's own way
    manager.save(100, "/scratch/step_100", consume=True)           committed whole, then removed here

    with manager.writing(100) as path: ...       or: write straight into what will be committed
    with manager.reading() as opened: ...        a local path to the newest committed one

Frameworks that save state dicts are better served by CheckpointManager: sharded, resharded, read in
place. This is for those that insist on ``open``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from ckptfs.commit.artifact import leaving_together, writing_directory
from ckptfs.commit.catalog import Found
from ckptfs.commit.claim import Takeover
from ckptfs.commit.entries import Kind
from ckptfs.commit.fetching import Wanted, fetched
from ckptfs.commit.opening import Place
from ckptfs.commit.scratch import NodeScratch
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import Committed, SaveSpec
from ckptfs.commit.tickets import Ticket
from ckptfs.commit.unlogged import Unlogged
from ckptfs.dcp.pending import PendingSave
from ckptfs.errors import IncompleteCheckpointError
from ckptfs.events import Restored, SaveBegan, SaveResult, SaveSkipped
from ckptfs.manager.base import RunManager
from ckptfs.manager.candidates import Candidate, Fallback, RestoreRequest
from ckptfs.manager.checking import Opened as Checked
from ckptfs.manager.checking import check
from ckptfs.manager.crew import Crew, StartingPoint
from ckptfs.manager.damage import Damage, doubt_of
from ckptfs.manager.ground import Ground, Where
from ckptfs.manager.listeners import Listener
from ckptfs.manager.naming import Template
from ckptfs.manager.options import IfSlow, Names, SaveMode, Settings, metrics_of
from ckptfs.manager.places import Places
from ckptfs.manager.pointer import Pointer
from ckptfs.manager.preemption import SignalName
from ckptfs.manager.retention import Best, Keep
from ckptfs.manager.saver import FilesJob
from ckptfs.manager.schedule import Rules
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri, options_of

__all__ = ["DirectoryManager", "OpenedDirectory"]

_PREFIX = "ckptfs-write-"


@dataclass(frozen=True, slots=True)
class OpenedDirectory:
    """A committed directory as a local path. skipped: newer ones that are damaged, and why."""

    path: str
    step: int
    uri: Uri
    skipped: tuple[str, ...] = ()


class DirectoryManager(RunManager):
    """Saves, retains and opens the directories of one run. Every rank makes one.

    name: template of their names. scratch: where files lie that the storage has no path for, by
    default the temporary directory; it has to hold one checkpoint of a node. pointer: a small file
    in the run that names the newest one, for readers that are not ours. Everything else, and what
    is true after a crash, as for CheckpointManager. Directories are not copied elsewhere, and files with
    fixed names cannot be replaced: what an earlier job committed under a step that comes again is deleted
    first, if something was committed after it.
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
        ground: Ground | None = None,
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
            takeover=where.takeover,
            begin_again=begin_again,
            unlogged=Unlogged(unlogged),
            pointer=Pointer(pointer) if isinstance(pointer, str) else pointer,
        )
        rules = Rules(every_steps, every_s, grace_s)
        super().__init__(ground or Ground(where), settings, rules, preempt_signals)
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
        """Collective. Commit what a framework wrote below ``path`` as the checkpoint of ``step``.

        path: on this rank's node; every node lists what it sees, each file is sent once, by ranks that
        see it, and several nodes may hold the same file. All ranks have to have written when the last
        one calls. It has to stay as it is until the commit, with mode="async" too: that is when
        ``PendingSave.result()`` returns. consume: it is removed then.

        CommitConflictError: this manager committed the step already, it is the newest commit or what the job
        was restored from, or this manager read nothing and the run has come as far. StateError: an earlier
        job's is pinned. Otherwise as ``CheckpointManager.save``;
        what failed, in the source too, failed on all ranks, and ``path`` stays.
        """
        started = time.perf_counter()
        told = metrics_of(metrics)
        prepared = self._prepare(step, told)
        if isinstance(prepared, SaveSkipped):
            return prepared
        target, spec = prepared
        return self._run_job(FilesJob(os.fspath(path), target, spec, started, consume))

    @contextlib.contextmanager
    def writing(self, step: int, metrics: Mapping[str, float] | None = None) -> Iterator[str]:
        """Collective. A path to write the checkpoint of ``step`` into, committed when all ranks leave.

        All ranks of a node get the same path: on a mounted filesystem that of the attempt itself, shared
        by all that see it; elsewhere one in ``scratch``, uploaded on leaving. Synchronous, whatever the
        mode. An exception inside, on any rank, commits nothing and is raised on all. Else as ``save``.
        """
        started = time.perf_counter()
        told = metrics_of(metrics)
        self._settle(1)
        prepared = self._prepare(step, told)
        assert not isinstance(prepared, SaveSkipped)  # noqa: S101 - nothing is on its way
        target, spec = prepared
        crew = self._hired()
        crew.retirer.make_room()
        seat = crew.run.seat
        self._tell(SaveBegan(str(target), step, Kind.DIRECTORY.value, SaveMode.SYNC.value))
        try:
            if seat.storage.local_path("") is None:
                with self._scratch_on(seat) as path:
                    with leaving_together(seat.control):
                        yield path
                    result = FilesJob(path, target, spec, started).run(seat, self._tell, None)
            else:
                done: list[Committed] = []
                with writing_directory(seat, spec, done) as path:
                    yield path
                wall_s = time.perf_counter() - started
                result = done[0].result(str(target), step, seat.control.rank, wall_s)
        except BaseException as error:
            crew.saver.failed(target, spec, error)
            raise
        crew.saver.follow(Kind.DIRECTORY, seat, result, time.perf_counter() - started)
        self._schedule.took(result.wall_s)
        self._saved(Kind.DIRECTORY, step)

    def begin(
        self,
        step: int,
        parts: Sequence[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Ticket:
        """Collective over this manager's ranks: begin a checkpoint of directories that several groups of
        processes write, see ``ckptfs.commit.part_dir``. As ``CheckpointManager.begin``, but for a step
        that is committed: CommitConflictError.
        """
        name = self._settings.names.of(Kind.DIRECTORY).name(step)
        self._ground.check_open()
        self._settle(1)
        crew = self._begun(name, step)
        given = self._ground.where.place.storage_options
        ticket = crew.begin(
            name, step, parts, given if storage_options is None else storage_options, Kind.DIRECTORY
        )
        self._saved(Kind.DIRECTORY, step)
        return ticket

    def _prepare(
        self, step: int, metrics: tuple[tuple[str, float], ...]
    ) -> tuple[Uri, SaveSpec] | SaveSkipped:
        name = self._settings.names.of(Kind.DIRECTORY).name(step)
        self._ground.check_open()
        skipped = self._make_way(step, name)
        if skipped is not None:
            return skipped
        crew = self._begun(name, step)
        spec = SaveSpec(
            name, step, artifact=Kind.DIRECTORY, run=crew.run.generation, metrics=metrics
        )
        return self._ground.root / name, spec

    def _begun(self, name: str, step: int) -> Crew:
        """Collective. The crew, once this step may be saved and its name is free of earlier jobs' saves."""
        crew = self._hired()
        crew.check_beginning(Kind.DIRECTORY, name, step)
        if crew.comes_again(name, step):
            self._settle(1)
            crew.free_name(name)
        return crew

    @contextlib.contextmanager
    def _scratch_on(self, seat: Seat) -> Iterator[str]:
        """Collective. One directory per node, for its ranks; an exception inside reaches all ranks."""
        control = seat.control
        place = NodeScratch(control, _PREFIX, self._scratch)
        try:
            told = control.step(
                "make scratch", lambda: (place.node, place.make()) if place.is_lead else None
            )
        except BaseException:
            place.discard()
            raise
        place.target = next(one[1] for one in told if one is not None and one[0] == place.node)
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
        """Collective to enter, read-only. The newest committed directory as a local path, or that of
        ``step``; decided once for all ranks. None only where nothing was ever saved.

        The path is good inside the block, and nobody may write into it: on a mounted filesystem it is
        the checkpoint. Elsewhere, and with into=, it is downloaded, see ``ckptfs.checkpoint_dir``.
        only: which files this node needs, of their paths and its ranks, where it is downloaded.
        fallback: "older" passes over damaged ones, and says so in ``skipped``; "error" never goes back
        unasked. AmbiguousCheckpointError: stock torch saved a checkpoint into the run after its newest
        commit; unlogged="ignore" goes back to that, None does as the manager was made to. NotFoundError,
        IncompleteCheckpointError, IntegrityError as for ``restore``.
        """
        self._settle(1)
        template = self._settings.names.of(Kind.DIRECTORY)
        request = RestoreRequest(
            template.step_of,
            step,
            Kind.DIRECTORY,
            fallback=Fallback(fallback),
            unlogged=self._settings.unlogged_of(unlogged),
        )
        kept = None if into is None else os.fspath(into)
        with self._ground.reading() as seat:
            chosen = _choose(seat, request)
            if chosen is None:
                self._found_nothing(Kind.DIRECTORY)
                yield None
                return
            candidate, found, skipped = chosen
            began = time.perf_counter()
            with fetched(seat, found, into=kept, scratch=self._scratch, only=only) as path:
                self._needed = frozenset({candidate.seal.save_id})
                self._set_start(StartingPoint(candidate.step))
                uri = seat.storage.uri(candidate.seal.name)
                wall_s = time.perf_counter() - began
                self._tell(Restored(str(uri), candidate.step, skipped, wall_s))
                # The claim, and retention, may come inside the block: this save stays until a commit.
                yield OpenedDirectory(path, candidate.step, uri, skipped)


def _choose(seat: Seat, request: RestoreRequest) -> tuple[Candidate, Found, tuple[str, ...]] | None:
    """Collective. The newest whole one, and which newer ones are not; None: truly empty."""
    places = Places([seat], request)
    surveyed = places.survey(0)
    if surveyed.unreached is not None:
        places.allow_unreached(surveyed.unreached)
    if not surveyed.choice.candidates:
        places.refuse_unfit(0)
        places.check_nothing()
        return None
    places.refuse_unlogged()
    skipped: list[str] = []
    for candidate in surveyed.choice.candidates:
        held: list[Checked] = []
        damage = _doubt(candidate) or check(seat, candidate.seal, held, _no_metadata)
        if damage is None:
            return candidate, held[0][0], tuple(skipped)
        if request.fallback is Fallback.ERROR or request.step is not None:
            raise damage.error(candidate.seal.name, seat.storage.uri(candidate.seal.name))
        skipped.append(f"{candidate.seal.name}: {damage.why}")
    raise IncompleteCheckpointError(
        f"none of {len(skipped)} checkpoints is whole: {'; '.join(skipped)}",
        uri=seat.storage.root,
        hint="bring one of them back; the run is not begun anew by itself",
    )


def _doubt(candidate: Candidate) -> Damage | None:
    return doubt_of(candidate.doubt, None) if candidate.doubt else None


def _no_metadata(_storage: Storage, _found: Found) -> Metadata:
    """Files are read by whoever wrote them."""
    return Metadata(state_dict_metadata={})
