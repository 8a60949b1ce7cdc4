"""One save of the manager, on whatever thread it runs, and what follows its commit.

    job.run        stage or list, write, seal, project   fails: SaveFailed, raised
    committed      events, on_commit
    followers      retention, copies, in this order       fail: logged, tried again at the next commit

Both the synchronous save, on the caller's thread, and the asynchronous one, on the worker's, are
this; only the seat differs, because its control belongs to one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.entries import Kind
from ckptfs.commit.publishing import (
    Listed,
    Publication,
    list_files,
    refuse_own,
    remove_source,
    share_files,
)
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import Committed, SaveSpec, WrittenPart
from ckptfs.dcp.pending import Phase, Watch
from ckptfs.dcp.saving import Tell, WriteOptions, followed, save_at
from ckptfs.dcp.share import Share
from ckptfs.errors import CkptfsError
from ckptfs.events import Event, SaveCommitted, SaveFailed, SaveResult, Written
from ckptfs.uri import Uri

__all__ = ["FilesJob", "Follower", "Job", "Saver", "StateJob"]

logger = logging.getLogger(__name__)

# Called on every rank after each commit, on the thread and control that saved. Collective.
Follower = Callable[[Seat, SaveResult], None]


class Job(Protocol):
    """One save: where to, how it is recorded, and how it is made. started: by perf_counter."""

    @property
    def target(self) -> Uri:
        """What it will be called."""

    @property
    def spec(self) -> SaveSpec:
        """As the attempt takes it."""

    @property
    def started(self) -> float:
        """When the user called, by ``perf_counter``."""

    def run(self, seat: Seat, tell: Tell, watch: Watch | None) -> SaveResult:
        """Collective. Committed when it returns."""


@dataclass(frozen=True, slots=True)
class StateJob:
    """A state, live or staged."""

    state: Mapping[str, Any] | Share
    target: Uri
    spec: SaveSpec
    options: WriteOptions
    started: float

    def run(self, seat: Seat, tell: Tell, watch: Watch | None) -> SaveResult:
        """As ``Job.run``."""
        return save_at(
            self.state,
            seat,
            self.target,
            self.spec,
            self.options,
            started=self.started,
            tell=tell,
            watch=watch,
        )


@dataclass(frozen=True, slots=True)
class FilesJob:
    """A local directory, as each node sees it. consume: it goes when it is committed."""

    path: str
    target: Uri
    spec: SaveSpec
    started: float
    consume: bool = False

    def run(self, seat: Seat, tell: Tell, watch: Watch | None) -> SaveResult:
        """As ``Job.run``."""
        control, watch = seat.control, watch or Watch()
        watch.enter(Phase.PLAN)
        nodes = [world.node for world in control.worlds]
        domains = [domain.ranks for domain in seat.placement.domains]
        is_lead = nodes.index(control.world.node) == control.rank
        # A node's lead may come first: it must not list what the other ranks are still writing.
        control.step("all have written", lambda: None)
        shares = control.step(
            "list files",
            lambda: self._list(seat) if is_lead else None,
            lambda listings: share_files(listings, nodes, domains),
        )
        mine = shares[control.rank]
        watch.planned(sum(file.size_bytes for file in mine.send), len(mine.send))
        attempt = Attempt(seat, self.spec)
        try:
            with followed(attempt, watch, self._result_of(control.rank)):
                attempt.begin()
                part = Publication(attempt, seat, self.path, mine)

                def write() -> WrittenPart:
                    watch.enter(Phase.WRITE)
                    written = part.write()
                    tell(Written(str(self.target), self.spec.step, written.counters))
                    watch.durable(written.counters)
                    watch.enter(Phase.COMMIT)
                    return written

                committed = attempt.commit(write, part.finish)
        except BaseException:
            attempt.abandon()
            raise
        if self.consume and is_lead:
            remove_source(self.path)
        return self._result_of(control.rank)(committed)

    def _result_of(self, rank: int) -> Callable[[Committed], SaveResult]:
        def result_of(committed: Committed) -> SaveResult:
            wall_s = time.perf_counter() - self.started
            return committed.result(str(self.target), self.spec.step, rank, wall_s)

        return result_of

    def _list(self, seat: Seat) -> tuple[Listed, ...]:
        run = seat.storage.local_path("")
        if self.consume and run is not None:
            refuse_own(self.path, run, self.spec.name)
        return list_files(self.path)


class Saver:
    """Runs jobs, one at a time. tell: the listeners' bell. before: local, ahead of every save."""

    def __init__(
        self,
        tell: Callable[[Event], None],
        before: Callable[[], None],
        followers: Sequence[Follower],
    ) -> None:
        self._tell = tell
        self._before = before
        self._followers = tuple(followers)

    def run(self, job: Job, seat: Seat, watch: Watch | None = None) -> SaveResult:
        """Collective. Committed when it returns. Errors are those of ``ckptfs.save``."""
        try:
            self._before()
            return job.run(seat, self._tell, watch)
        except BaseException as error:
            self.failed(job.target, job.spec, error)
            raise

    def failed(self, target: Uri, spec: SaveSpec, error: BaseException) -> None:
        """Local. Tell the listeners."""
        outcome = error.outcome if isinstance(error, CkptfsError) else "failed"
        told = f"{type(error).__name__}: {error}"
        self._tell(SaveFailed(str(target), spec.step or 0, told, outcome))

    def follow(self, kind: Kind, seat: Seat, result: SaveResult, stall_s: float) -> None:
        """Collective. What follows a commit; a failure is logged, the checkpoint is there.

        stall_s: how long training stood still for the save.
        """
        self._tell(SaveCommitted(result, kind.value, stall_s))
        for follower in self._followers:
            try:
                follower(seat, result)
            except CkptfsError as error:
                # What could not be done now is done after the next commit.
                logger.warning("after the commit of %s: %s", result.uri, error)
            except Exception:
                # It is committed: a fault in what comes after must not make it look failed.
                logger.exception("after the commit of %s", result.uri)
