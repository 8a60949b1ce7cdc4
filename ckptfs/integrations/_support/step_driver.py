"""Checkpoints made of parts: groups of ranks that save for themselves, and one driver.

``PartSaver`` saves one group's part, as a directory of files:

    saver = PartSaver(is_async=True)
    saver.save(part, framework.save)          part: from the ticket of a driver, which decides over all parts
    saver.wait()                              raises the error of the last save, on all ranks
    with reading_part(uri, place, only) as path: framework.load(path)

``StepDriver`` is one process outside of every group. It decides over a step and all its parts:

    driver = StepDriver("s3://bucket/run", name="global_step_{N}", keep_latest=3)
    with driver.saving(40, ["actor", "critic"]) as step:
        every rank of a group saves step.part("actor")     PartSaver, or commit.part_dir
        the driver's own files go to step.path             data.pt
    driver.close()

Leaving the block commits the step; in async mode a thread does, once the log says that all is sealed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from ckptfs.commit.catalog.locate import locate_directory, reading_session
from ckptfs.commit.directory_checkpoints.read import NodeScratch, Wanted, fetched
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.parts.directory_parts import publish_part, wait_sealed, writing_part
from ckptfs.commit.parts.tickets import SealedPart, Ticket, TicketPart
from ckptfs.commit.paths import MANIFEST, is_save_id
from ckptfs.commit.session import Place, control_for, open_session
from ckptfs.control.control import Control, SoloControl
from ckptfs.control.framework_collectives import meeting_at_barriers
from ckptfs.dcp.worker import SaveWorker
from ckptfs.errors import CollectiveError, NotFoundError
from ckptfs.manager.directory_manager import DirectoryManager, OpenedDirectory
from ckptfs.manager.restore_candidates import RestoreRequest
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.uri import Uri

__all__ = ["PartSaver", "Saving", "StepDriver", "reading_part"]


class PartSaver:
    """Saves a group's part; every rank makes one, and calls are collective.

    ``scratch`` holds an asynchronous save until it is uploaded; by default it is the temporary directory.
    """

    def __init__(
        self, *, is_async: bool, scratch: str | None = None, process_group: Any = None
    ) -> None:
        self._is_async = is_async
        self._scratch = scratch
        self._group = process_group
        self._worker: SaveWorker | None = None
        self._pending: Future[SealedPart] | None = None

    def save(
        self,
        part: TicketPart,
        write: Callable[[str], None],
        then: Callable[[SealedPart], object] = lambda _: None,
        failed: Callable[[], None] = lambda: None,
    ) -> SealedPart | None:
        """Seal what ``write(path)`` writes; returns the sealed part.

        If the previous save failed, this first raises its error. In async mode it returns None, as soon as
        the part is in scratch. ``write`` is a framework's code, with barriers of its own. ``then`` is called
        when the part is sealed, ``failed`` when it is not: on every rank, in async mode by a thread. Any
        rank's failure fails all.
        """
        self.wait()
        try:
            with contextlib.ExitStack() as stack:
                control = stack.enter_context(control_for(self._group, None))
                place = Place(part.storage_options)
                session = stack.enter_context(open_session(part.run, control, place, write=True))
                if not self._is_async:
                    done: list[SealedPart] = []
                    with writing_part(session, part, done) as path, meeting_at_barriers(control):
                        write(path)
                    then(done[0])
                    return done[0]
                scratch = NodeScratch(control, "ckptfs-part-", self._scratch)
                scratch.mates = [control.rank]  # of this rank alone
                # Inside the block: if the disk is full on one rank, all ranks fail.
                with meeting_at_barriers(control):
                    path = scratch.make()
                    stack.callback(scratch.leave)
                    write(path)
                after = stack.pop_all()
        except BaseException:
            failed()
            raise

        def publish() -> SealedPart:
            with after:
                try:
                    sealed = publish_part(session, part, scratch.path)
                    then(sealed)
                except BaseException:
                    failed()
                    raise
                return sealed

        if self._worker is None:
            self._worker = SaveWorker("ckptfs-part")
        self._pending = self._worker.submit(f"saving {part.uri}", publish)
        return None

    def wait(self) -> None:
        """Wait for the save under way and raise its error, on all ranks at the same call."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait as ``wait`` does, and end the thread. Harmless twice."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.close()


@contextlib.contextmanager
def reading_part(
    uri: Any,
    place: Place,
    only: Wanted | None = None,
    *,
    otherwise: Callable[[], bool] = lambda: False,
    process_group: Any = None,
) -> Iterator[tuple[str | None, Control]]:
    """Yield a path with what this node needs of a directory or part. Collective, read-only.

    Also yields the control, for ``meeting_at_barriers``; the block runs in that. If there is no such
    directory, ``otherwise`` is called on every rank: if it is True on all of them, the path is None. Raises
    NotFoundError if there is no such directory, IncompleteCheckpointError if it is not whole.
    """
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(control_for(process_group, None))
        path = None
        try:
            session, _, name = stack.enter_context(reading_session(uri, control, place))
            found = locate_directory(session, name)
        except CollectiveError:
            raise  # single ranks failed: that does not mean that nothing is there
        except NotFoundError:
            if not control.step("otherwise", otherwise, all):
                raise
        else:
            path = stack.enter_context(fetched(session, found, only=only))
        with meeting_at_barriers(control):
            yield path, control


_SEEN_S = 5.0  # on NFS an entry of another client becomes visible a little late


@dataclass(frozen=True, slots=True)
class Saving:
    """A step under way. ``path``: a local directory for the driver's own files."""

    path: str
    ticket: Ticket = field(repr=False)

    def part(self, group: str) -> TicketPart:
        """Return what the ranks of ``group`` save."""
        return self.ticket.part(group)


class _StepDirectories(DirectoryManager):
    """A manager of checkpoints of parts that reads only the driver's own files."""

    @contextlib.contextmanager
    def reading_own_files(self, step: int | None = None) -> Iterator[OpenedDirectory | None]:
        """Yield what a checkpoint of parts holds outside of its parts, as ``reading`` does.

        Nothing else is downloaded; on a mounted filesystem the path contains the parts too. Collective to
        enter.
        """
        self._settle(1)
        names, unlogged = self._settings.names, self._settings.unlogged
        step_of = names.of(Kind.DIRECTORY).step_of
        request = RestoreRequest(step_of, step, Kind.DIRECTORY, unlogged=unlogged)

        def outside_parts(seal: Seal) -> Wanted:
            parts = {ref.name for ref in seal.parts}
            return lambda path, _: path.split("/", 1)[0] not in parts

        with self._opened(request, None, outside_parts) as opened:
            yield opened


class StepDriver:
    """Begins and commits the steps of all groups, from one process alone.

    ``mode``: "async" leaves ``saving`` before the commit. ``seal_timeout_s``: how many seconds the groups may
    take to seal their parts after that. ``seen_s``: in sync mode, after how many seconds a part that is still
    missing is an error: an entry may become visible late. ``flush`` lets all groups finish their uploads and
    raises their errors; it is called before a commit is waited for, because a dead group would delay that for
    seal_timeout_s. ``options`` are those of ``ckptfs.DirectoryManager``.
    """

    def __init__(
        self,
        uri: Any,
        *,
        mode: Literal["sync", "async"] = "sync",
        seal_timeout_s: float = 3600.0,
        seen_s: float = _SEEN_S,
        flush: Callable[[], object] = lambda: None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._flush = flush
        self.is_async = mode == "async"
        self._seal_timeout_s = seal_timeout_s
        self._seen_s = seen_s
        self._options = dict(storage_options or {})
        # Alone, even if a launcher's variables say that there are other ranks.
        run_handle = RunHandle(Where(uri, Place(self._options)), control=SoloControl())
        self._manager = _StepDirectories(uri, ground=run_handle, **options)
        self._worker: SaveWorker | None = None
        self._stopped = threading.Event()
        self._pending: Future[None] | None = None
        self._fetched: dict[int, Uri] = {}

    @property
    def steps(self) -> list[int]:
        """The committed steps, oldest commit first."""
        return self._manager.steps

    @contextlib.contextmanager
    def saving(self, step: int, groups: Sequence[str]) -> Iterator[Saving]:
        """Begin a step; commit it when the block is left, or in async mode when all is sealed.

        An exception inside gives the step up.

        Args:
            step: Completed optimizer steps.
            groups: The name of each group's part.

        Yields:
            The parts for the groups, and a directory for the driver's own files.

        Raises:
            CommitConflictError: The step is committed already.
            IncompleteCheckpointError: A part is missing.
            CkptfsError: The error of the previous step, which is raised first; or as for
                ``CheckpointManager.begin``.
        """
        self.wait()
        ticket = self._manager.begin(step, groups, storage_options=self._options)
        path: str | None = None
        try:
            path = os.path.join(tempfile.mkdtemp(prefix="ckptfs-step-"), ticket.uri.name)
            os.mkdir(path)
            yield Saving(path, ticket)
            if not self.is_async:
                self._commit(ticket, path, self._seen_s)
                return
            if self._worker is None:
                self._worker = SaveWorker("ckptfs-driver")
            self._pending = self._worker.submit(
                f"committing {ticket.uri}",
                lambda: self._commit_later(ticket, path),
            )
        except BaseException:
            _give_up(ticket, path)
            raise

    def _commit_later(self, ticket: Ticket, path: str) -> None:
        try:
            self._commit(ticket, path, self._seal_timeout_s)
        except BaseException:
            _give_up(ticket, path)
            raise

    def _commit(self, ticket: Ticket, path: str, timeout_s: float) -> None:
        sealed = wait_sealed(ticket, timeout_s, self._stopped)
        ticket.commit(sealed, beside=path if os.listdir(path) else None)
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)

    def wait(self) -> None:
        """Wait for the commit under way, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._flush()
        except BaseException:
            self._stopped.set()  # the part of the failed group will never be sealed
            futures.wait([pending])
            self._stopped.clear()
            raise
        pending.result()

    def give_up(self) -> None:
        """Stop waiting for parts: a group failed. The log says that the step is not committed."""
        self._stopped.set()
        with contextlib.suppress(Exception):
            self.wait()
        self._stopped.clear()

    def fetch(self, folder: Callable[[int], str], step: int | None = None) -> int | None:
        """Copy the driver's own files of a step to a folder. Each file appears atomically.

        Args:
            folder: Returns the folder for a step.
            step: Which step; None: the newest.

        Returns:
            The step; None if nothing was ever saved.
        """
        self.wait()
        with self._manager.reading_own_files(step) as opened:
            if opened is None:
                return None
            parts = opened.parts

            def is_drivers(path: str) -> bool:
                top = path.split("/", 1)[0]
                return top not in parts and top != MANIFEST and not is_save_id(top)

            _copy(opened.path, folder(opened.step), is_drivers)
            self._fetched = {opened.step: opened.uri}
            return opened.step

    def fetched_from(self, step: int) -> Uri | None:
        """Return where, maybe in a copy, the last ``fetch`` read ``step``; None: another step."""
        return self._fetched.get(step)

    def close(self) -> None:
        """Finish the commit under way and leave the run; raises its error. Harmless twice."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.close()
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """As ``close``. After an exception in the block, give up a step with unsealed parts."""
        if exc is not None:
            self.give_up()
        self.close()


def _give_up(ticket: Ticket, path: str | None) -> None:
    ticket.abandon()
    if path is not None:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def _copy(source: str, folder: str, is_wanted: Callable[[str], bool]) -> None:
    if os.path.realpath(source) == os.path.realpath(folder):
        return
    os.makedirs(folder, exist_ok=True)
    for top, _, names in os.walk(source):
        for name in names:
            path = os.path.relpath(os.path.join(top, name), source)
            if is_wanted(path):
                target = os.path.join(folder, path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copyfile(os.path.join(top, name), f"{target}.partial")
                os.replace(f"{target}.partial", target)
