"""One save of the manager, on whatever thread it runs, and what follows its commit.

    save_at        stage, write, seal, project           fails: SaveFailed, raised
    committed      events, on_commit
    followers      retention, copies, in this order       fail: logged, tried again at the next commit

Both the synchronous save, on the caller's thread, and the asynchronous one, on the worker's, are
this; only the seat differs, because its control belongs to one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs.commit.entries import Kind
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import SaveSpec
from ckptfs.dcp.pending import Watch
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.dcp.share import Share
from ckptfs.errors import CkptfsError
from ckptfs.events import Event, SaveCommitted, SaveFailed, SaveResult
from ckptfs.uri import Uri

__all__ = ["Follower", "Job", "Saver"]

logger = logging.getLogger(__name__)

# Called on every rank after each commit, on the thread and control that saved. Collective.
Follower = Callable[[Seat, SaveResult], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One save: the state (live, or staged), where to, and how. started: by perf_counter."""

    state: Mapping[str, Any] | Share
    target: Uri
    spec: SaveSpec
    options: WriteOptions
    started: float

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.spec.step or 0


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
            return save_at(
                job.state,
                seat,
                job.target,
                job.spec,
                job.options,
                started=job.started,
                tell=self._tell,
                watch=watch,
            )
        except BaseException as error:
            outcome = error.outcome if isinstance(error, CkptfsError) else "failed"
            told = f"{type(error).__name__}: {error}"
            self._tell(SaveFailed(str(job.target), job.step, told, outcome))
            raise

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
