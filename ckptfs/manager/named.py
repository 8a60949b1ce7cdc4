"""Sharded checkpoints of one run whose names, and whose end, a framework decides.

    shelf = NamedCheckpoints("s3://bucket/run", mode="async", beside=["meta.pt"])    on every rank
    shelf.save("epoch=1.ckpt", state, step=20, beside={"meta.pt": data})
    shelf.remove("epoch=0.ckpt")     when the save before this call is committed, not before
    shelf.close()                    all done; raises what failed; the run is released

The first save claims the run. ``beside``: small files for readers that are not ours, laid into the
step directory by each domain's owner once the checkpoint is committed, and removed with it. They are
no part of it: what a loader of ours needs has to be in the state.

Only what the run's log knows is removed, and never the newest commit of its kind or what ``hold`` named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from ckptfs.commit.claim import Takeover
from ckptfs.commit.entries import Kind
from ckptfs.commit.opening import Place
from ckptfs.commit.protocol import catalog
from ckptfs.commit.run import Run
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import IfExists, SaveSpec
from ckptfs.dcp.api import save
from ckptfs.dcp.async_api import async_save
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.errors import AlreadyExistsError, CkptfsError, DeadlineError, NotFoundError, StateError
from ckptfs.events import SaveResult
from ckptfs.manager.flight import Flight
from ckptfs.manager.ground import Ground, Where
from ckptfs.manager.retention import Keep
from ckptfs.manager.retiring import Retirer

__all__ = ["NamedCheckpoints"]

logger = logging.getLogger(__name__)


class NamedCheckpoints:
    """Every rank makes one. ``save``, ``remove``, ``wait`` and ``close`` are collective.

    uri: the run. mode: "async" returns from ``save`` when the state is staged; one save is on its way
    at a time. beside: the names of files that saves of this run may have beside them. Making one appends nothing. Errors are as for ``CheckpointManager``; what an earlier save
    failed of is raised by the next call, on all ranks at the same one.
    """

    def __init__(
        self,
        uri: Any,
        *,
        mode: str = "sync",
        beside: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if mode not in ("sync", "async"):
            raise StateError(f'mode is {mode!r}; it is "sync" or "async"')
        self._is_async = mode == "async"
        place = Place(dict(storage_options or {}))
        self._ground = Ground(Where(uri, place, None, timeout_s, Takeover.AUTO))
        self._flight = Flight()
        self._run: Run | None = None
        self._retirer: Retirer | None = None
        self._beside = tuple(beside)
        self._doomed: dict[str, None] = {}
        self._held: set[str] = set()
        self._committed = True  # whether the last full checkpoint was

    # -- saving -------------------------------------------------------------------------

    def save(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        beside: Mapping[str, bytes] | None = None,
        kind: Kind = Kind.CHECKPOINT,
    ) -> None:
        """Collective. Save ``state`` as ``name``, over what has that name: the old one stays until the
        new one is committed. Raises first what an earlier save failed of, and saves nothing then.

        kind: weights are nothing to go on from; they are committed when this returns, in async mode too.
        """
        self.wait()
        run, retirer = self._claimed()
        retirer.make_room()
        self._doomed.pop(name, None)  # it is wanted again
        target = self._ground.root / name
        lay = partial(_lay_beside, run.seat, name, dict(beside or {}))
        if kind is not Kind.CHECKPOINT:
            spec = SaveSpec(name, step, IfExists.REPLACE, artifact=kind, run=run.generation)
            save_at(state, run.seat, target, spec, WriteOptions(), started=time.perf_counter())
            lay()
            return  # a failed checkpoint is as missing as before: what it was to replace stays
        self._committed = False
        if self._is_async:
            pending = async_save(state, target, step=step, if_exists="replace", run=run)
            self._flight.add(_Followed(pending, lay))
            return
        save(state, target, step=step, if_exists="replace", run=run)
        lay()
        self._committed = True

    def wait(self) -> None:
        """Collective. Return when the save on its way is committed and what waited for that is removed."""
        if self._flight.settle(1) is not None:
            self._committed = True
        if self._committed and self._doomed:
            doomed, self._doomed = self._doomed, {}
            for name in doomed:
                self._remove(name)

    def close(self) -> None:
        """Collective. As ``wait``; then leave the run."""
        try:
            self.wait()
            for name in self._doomed:
                logger.warning("%s stays: no save after it was committed", self._ground.root / name)
        finally:
            self.leave()

    def leave(self) -> None:
        """Local, after an exception: nothing is asked of other ranks. Saves on their way are finished."""
        run = self._run
        if run is not None and run.aside is not None and len(self._flight):
            aside, run.aside = run.aside, None  # or the release waits for it again, and for ever
            aside.leave()
        self._ground.close()

    def _claimed(self) -> tuple[Run, Retirer]:
        if self._run is None or self._retirer is None:
            self._run = self._ground.claim()
            self._retirer = Retirer(self._run, Keep(), lambda _: False)
            self._ground.before_release(self._retirer.close)
        return self._run, self._retirer

    # -- removing -----------------------------------------------------------------------

    def hold(self, name: str) -> None:
        """Local, the same on all ranks. It is not removed by this object: somebody goes on from it."""
        self._held.add(name)

    def remove(self, name: str) -> None:
        """Collective. Remove a checkpoint once the last save is committed; now, if it is. What cannot be
        removed stays, with a line in the log.
        """
        if name in self._held:
            logger.warning("%s is not removed: this run goes on from it", self._ground.root / name)
            return
        self._doomed[name] = None
        if not len(self._flight):
            self.wait()

    def _remove(self, name: str) -> None:
        run, retirer = self._claimed()
        seat = run.seat
        where = self._ground.root / name
        found = seat.control.step("which save", partial(_live, seat, name), _first)
        if found is None:
            logger.warning("%s is not removed: the run's log does not know it", where)
            return
        save_id, is_newest = found
        if is_newest:
            logger.warning("%s is not removed: nothing of its kind was committed after it", where)
            return
        try:
            retirer.delete(seat, save_id)
        except CkptfsError as error:
            # No reason to stop training: the checkpoint is there, and may be deleted by hand.
            logger.warning("%s is not removed: %s", where, error)
            return
        _clear_beside(seat, name, self._beside)


def _live(seat: Seat, name: str) -> tuple[str, bool] | None:
    """Owners: the live save of a name, and whether it is the newest commit of its kind."""
    state = seat.known.state
    if not seat.placement.is_owner or state is None:
        return None
    lives = [live.seal for live in catalog({seat.placement.mine.id: state})]
    found = [seal for seal in lives if seal.name == name]
    if not found:
        return None
    alike = [seal for seal in lives if seal.artifact is found[0].artifact]
    return found[0].save_id, found[0] is alike[-1]


def _first(answers: list[tuple[str, bool] | None]) -> tuple[str, bool] | None:
    return next((answer for answer in answers if answer is not None), None)


class _Followed:
    """A save on its way, and the files that are laid beside it when it is committed."""

    def __init__(self, pending: PendingSave, lay: Any) -> None:
        self._pending, self._lay = pending, lay
        self.uri = pending.uri
        self._laid: Future[None] = Future()
        pending.committed.add_done_callback(self._follow)

    def _follow(self, committed: Future[SaveResult]) -> None:
        try:
            if committed.exception() is None:
                self._lay()
        except Exception:
            # The checkpoint is committed; whoever waits must not wait for ever.
            logger.exception("what lies beside %s", self.uri)
        finally:
            self._laid.set_result(None)

    def result(self, timeout_s: float | None = None) -> SaveResult:
        began = time.monotonic()
        result = self._pending.result(timeout_s)
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
        try:
            self._laid.result(left)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"files beside it were not written within {timeout_s:g} s",
                uri=self.uri,
                hint="the checkpoint is committed; wait again",
            ) from error
        return result

    def done(self) -> bool:
        return self._pending.done() and self._laid.done()


def _lay_beside(seat: Seat, name: str, files: Mapping[str, bytes]) -> None:
    """Owners. The checkpoint is committed: a failure here is told, and fails nothing."""
    if not seat.placement.is_owner:
        return
    for key, data in files.items():
        try:
            seat.storage.replace(f"{name}/{key}", data)
        except CkptfsError as error:
            where = seat.storage.uri(f"{name}/{key}")
            logger.warning("%s is committed; other readers lack %s: %s", name, where, error)


def _clear_beside(seat: Seat, name: str, files: Sequence[str]) -> None:
    """Owners. What was laid beside a checkpoint goes with it, and the directory if nothing is left."""
    if not seat.placement.is_owner:
        return
    try:
        for key in files:
            seat.storage.remove(f"{name}/{key}")
        seat.storage.remove_dir(name)
    except (AlreadyExistsError, NotFoundError):
        return  # somebody else's files lie there, or all of it is gone
    except CkptfsError as error:
        logger.warning("what lay beside %s stays: %s", seat.storage.uri(name), error)
