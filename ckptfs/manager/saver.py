"""One save of the manager, on whatever thread it runs, and what follows its commit.

    save_at        stage, write, seal, project           fails: SaveFailed, raised
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
from typing import Any

from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import SaveSpec
from ckptfs.dcp.saving import WriteOptions, save_at
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

    state: Any
    target: Uri
    spec: SaveSpec
    options: WriteOptions
    started: float
    extra: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.spec.step or 0


class Saver:
    """Runs jobs, one at a time. tell: the listeners' bell."""

    def __init__(self, tell: Callable[[Event], None], followers: Sequence[Follower]) -> None:
        self._tell = tell
        self._followers = tuple(followers)

    def run(self, job: Job, seat: Seat, *, stall_s: float | None = None) -> SaveResult:
        """Collective. Committed when it returns. stall_s: None counts until now (synchronous).

        Errors are those of ``ckptfs.save``. What follows the commit never raises.
        """
        try:
            result = save_at(
                job.state,
                seat,
                job.target,
                job.spec,
                job.options,
                started=job.started,
                tell=self._tell,
                **job.extra,
            )
        except CkptfsError as error:
            self._tell(SaveFailed(str(job.target), job.step, str(error), error.outcome))
            raise
        except BaseException as error:
            self._tell(SaveFailed(str(job.target), job.step, repr(error), "failed"))
            raise
        waited = time.perf_counter() - job.started if stall_s is None else stall_s
        self._tell(SaveCommitted(result, job.spec.artifact.value, waited))
        self._follow(seat, result)
        return result

    def _follow(self, seat: Seat, result: SaveResult) -> None:
        for follower in self._followers:
            try:
                follower(seat, result)
            except CkptfsError as error:
                # The checkpoint is there; what could not be done now is done after the next one.
                logger.warning("after the commit of %s: %s", result.uri, error)
