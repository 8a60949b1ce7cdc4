"""StepDriver: one process outside of every group, which decides over a step and all its parts.

    driver = StepDriver("s3://bucket/run", name="global_step_{N}", keep_latest=3)
    with driver.saving(40, ["actor", "critic"]) as step:
        every rank of a group saves step.part("actor")     PartSaver, or commit.part_dir
        files of the driver's own go to step.path          data.pt
    driver.close()

Leaving the block is the commit. In async mode it follows as soon as the groups have sealed their
parts, from a thread: what the run's log says of parts needs no messenger.
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

from ckptfs.commit.layout import MANIFEST, is_save_id
from ckptfs.commit.opening import Place
from ckptfs.commit.part_dir import wait_sealed
from ckptfs.commit.tickets import Ticket, TicketPart
from ckptfs.dcp.worker import SaveWorker
from ckptfs.manager.directories import DirectoryManager
from ckptfs.manager.ground import Ground, Where
from ckptfs.topology.control import SoloControl

__all__ = ["Saving", "StepDriver"]

_SEEN_S = 5.0  # a reader on NFS sees another client's entry a little late


@dataclass(frozen=True, slots=True)
class Saving:
    """A step on its way. path: a local directory with the step's name, for the driver's own files."""

    path: str
    ticket: Ticket = field(repr=False)

    def part(self, group: str) -> TicketPart:
        """What that group saves."""
        return self.ticket.part(group)


class StepDriver:
    """One process alone. mode: "async" leaves ``saving`` before the commit. seal_timeout_s: how long
    the groups may take after that. seen_s: how late an entry that a group has written may be seen, in
    sync mode: a part that is missing longer is an error. flush: lets all groups finish what they upload and raises what
    failed there; called before a commit is waited for, which without it a dead group holds up for
    seal_timeout_s. options: of ``ckptfs.DirectoryManager``.
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
        # Alone, also where a launcher's variables say that there are others.
        ground = Ground(Where(uri, Place(self._options)), control=SoloControl())
        self._manager = DirectoryManager(uri, ground=ground, **options)
        self._worker: SaveWorker | None = None
        self._stopped = threading.Event()
        self._going: Future[None] | None = None

    @property
    def steps(self) -> list[int]:
        """The committed steps, oldest commit first."""
        return self._manager.steps

    @contextlib.contextmanager
    def saving(self, step: int, groups: Sequence[str]) -> Iterator[Saving]:
        """Begin a step; commit it when the block is left, or in async mode when all is sealed.

        First raises what the step before failed of. An exception inside gives the step up.
        CommitConflictError: it is committed already. IncompleteCheckpointError: a part is missing.
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
            self._going = self._worker.submit(
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
        """Wait for the commit on its way; raises what it failed of."""
        going, self._going = self._going, None
        if going is None:
            return
        try:
            self._flush()
        except BaseException:
            self._stopped.set()  # its part will never come
            futures.wait([going])
            self._stopped.clear()
            raise
        going.result()

    def give_up(self) -> None:
        """A group failed: wait for no part any more. That the step is not committed is in the log."""
        self._stopped.set()
        with contextlib.suppress(Exception):
            self.wait()
        self._stopped.clear()

    def fetch(self, folder: Callable[[int], str], step: int | None = None) -> int | None:
        """Copy the driver's own files of the newest step, or of ``step``, to ``folder(step)``; which it
        was, None where nothing was ever saved. Each file appears whole.
        """
        self.wait()
        newest = self._manager.latest
        parts = () if newest is None else newest.parts

        def mine(path: str, _: Sequence[int] = ()) -> bool:
            top = path.split("/", 1)[0]
            return top not in parts and top != MANIFEST and not is_save_id(top)

        with self._manager.reading(step, only=mine) as opened:
            if opened is None:
                return None
            _copy(opened.path, folder(opened.step), mine)
            return opened.step

    def close(self) -> None:
        """Finish what is on its way and leave the run; raises what failed. Harmless twice."""
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
        """As ``close``. After an exception of the block, a step whose parts are not sealed is given up."""
        if exc is not None:
            self.give_up()
        self.close()


def _give_up(ticket: Ticket, path: str | None) -> None:
    ticket.abandon()
    if path is not None:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def _copy(source: str, folder: str, mine: Callable[[str], bool]) -> None:
    if os.path.realpath(source) == os.path.realpath(folder):
        return
    os.makedirs(folder, exist_ok=True)
    for top, _, names in os.walk(source):
        for name in names:
            path = os.path.relpath(os.path.join(top, name), source)
            if mine(path):
                target = os.path.join(folder, path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copyfile(os.path.join(top, name), f"{target}.partial")
                os.replace(f"{target}.partial", target)
