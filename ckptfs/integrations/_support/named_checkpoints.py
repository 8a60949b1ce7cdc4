"""Checkpoints whose names and whose end a framework decides.

Sharded checkpoints of one run whose names, and whose end, a framework decides.

    shelf = NamedCheckpoints("s3://bucket/run", mode="async", beside=["meta.pt"])    on every rank
    shelf.save("epoch=1.ckpt", state, step=20, beside={"meta.pt": data})
    shelf.remove("epoch=0.ckpt")     when the save before this call is committed, not before
    shelf.close()                    all done; raises what failed; the run is released

The first save claims the run. ``beside``: small files for readers that are not ours, laid into the
step directory by each domain's owner once the checkpoint is committed, and removed with it. They are
no part of it: what a loader of ours needs has to be in the state.

Only what the run's log knows is removed, and never the newest commit of its kind or what ``hold`` named.

Modules, optimizers and whatever else a trainer holds, as named checkpoints of any number of runs.

    shelves = Shelves(mode="async", meta_file="meta.pt")
    shelves.save("s3://bucket/run/epoch=1.ckpt", {"model": ...}, meta_bytes, step=20)
    meta = shelves.load("s3://bucket/run/epoch=1.ckpt", "model", module, {"optimizer": optimizer})

A trainer's meta data is part of the state, so that one commit holds tensors and progress; the same
bytes lie beside as ``meta_file``, which is where stock readers look for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from ckptfs.commit.decisions import Cause, why_kept
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.ownership.claim import Takeover
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.save.spec import IfExists, SaveSpec
from ckptfs.commit.session import Place, Seat
from ckptfs.commit.state import catalog
from ckptfs.dcp.api import load, save
from ckptfs.dcp.async_api import async_save
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.errors import AlreadyExistsError, CkptfsError, DeadlineError, NotFoundError, StateError
from ckptfs.events import SaveResult
from ckptfs.manager.claimed_run import Ground, Where
from ckptfs.manager.run_manager import Flight
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["META", "NamedCheckpoints", "Shelves"]

logger = logging.getLogger("ckptfs.integrations")


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
                logger.warning(
                    "%s is not removed: no later save was committed", self._ground.root / name
                )
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
            logger.warning("%s is not removed: this run resumed from it", self._ground.root / name)
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
            removed = seat.control.step("a link?", partial(_unlink, seat, name), any)
            if not removed:
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
    views = {seat.placement.mine.id: state}
    found = [live.seal.save_id for live in catalog(views) if live.seal.name == name]
    if not found:
        return None
    return found[0], why_kept(found[0], views, (Cause.NEWEST,)) is not None


def _unlink(owner: Seat, name: str) -> bool:
    """Owners. Remove a symbolic link to a checkpoint of the run, which a framework made by itself (Lightning's
    save_last="link"); the checkpoint stays. Returns whether there was one.
    """
    path = owner.storage.local_path(name) if owner.placement.is_owner else None
    if path is None or not os.path.islink(path):
        return False
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(os.path.dirname(path)):
        return False  # it leads elsewhere: somebody's own
    try:
        owner.storage.remove(name)
        owner.storage.sync("")
    except CkptfsError as error:
        logger.warning("the link %s was not removed: %s", owner.storage.uri(name), error)
    return True


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
            logger.exception("the additional files of %s", self.uri)
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
                f"the additional files were not written within {timeout_s:g} s",
                uri=self.uri,
                hint="the checkpoint itself is committed; wait again",
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
            logger.warning("%s is committed, but other readers miss %s: %s", name, where, error)


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
        logger.warning(
            "the additional files of %s were not removed: %s", seat.storage.uri(name), error
        )


META = "ckptfs.meta"


class Shelves:
    """Every rank makes one; all calls but ``is_file`` are collective. Arguments and errors are those of
    ``NamedCheckpoints``, of which it makes one for each run that it saves into.
    """

    def __init__(
        self, *, mode: str, meta_file: str, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._mode, self._meta_file = mode, meta_file
        self.storage_options = dict(storage_options or {})
        self._shelves: dict[Uri, NamedCheckpoints] = {}
        self._held: set[Uri] = set()

    def _shelf(self, run: Uri) -> NamedCheckpoints:
        if run not in self._shelves:
            shelf = NamedCheckpoints(
                run,
                mode=self._mode,
                beside=(self._meta_file,),
                storage_options=self.storage_options,
            )
            self._shelves[run] = shelf
            for held in self._held:
                if held.parent == run:
                    shelf.hold(held.name)
        return self._shelves[run]

    def save(
        self,
        target: Uri,
        state: Mapping[str, Any],
        meta: bytes,
        *,
        step: int | None,
        kind: Kind = Kind.CHECKPOINT,
    ) -> None:
        """Collective. meta: equal on all ranks. kind: as for ``NamedCheckpoints.save``."""
        whole = {**state, META: meta}
        beside = {self._meta_file: meta}
        shelf = self._shelf(target.parent)
        shelf.save(target.name, whole, step=step, beside=beside, kind=kind)

    def load(
        self,
        target: Uri,
        key: str,
        module: Module,
        optimizers: Mapping[str, Optimizer],
        *,
        strict: bool = True,
    ) -> bytes | None:
        """Collective. Fill the module, saved under ``key``, and optimizers under theirs. The meta data;
        None where a stock writer left it in a file. It is not removed before ``close``.

        StateError: strict, and keys are missing. NotFoundError, IntegrityError, ...: as ``ckptfs.load``.
        """
        self.wait()
        state: dict[str, Any] = {key: get_model_state_dict(module), META: b""}
        for name, optimizer in optimizers.items():
            state[name] = get_optimizer_state_dict(module, optimizer)
        loaded = load(state, target, strict=False, storage_options=self.storage_options)
        missing = [name for name in loaded.missing_keys if name != META]
        if missing and strict:
            raise StateError(
                f"the checkpoint lacks {len(missing)} keys; the first is {missing[0]}",
                uri=target,
                hint=self._hint(missing, optimizers),
            )
        set_model_state_dict(module, state[key], options=StateDictOptions(strict=strict))
        for name, optimizer in optimizers.items():
            set_optimizer_state_dict(module, optimizer, optim_state_dict=state[name])
        self._held.add(target)
        if target.parent in self._shelves:
            self._shelves[target.parent].hold(target.name)
        return None if META in loaded.missing_keys else state[META]

    def _hint(self, missing: list[str], optimizers: Mapping[str, Optimizer]) -> str:
        if not any(key.split(".")[0] in optimizers for key in missing):
            return "pass strict=False to leave them as they are"
        # Going on with a fresh optimizer is not resuming, and looks like it.
        return (
            "it has weights only, like an export, and no optimizer. Resume from a full "
            "checkpoint (see ckptfs.latest() of its run), or load these weights into the "
            "model and start a new run; strict=False leaves the optimizer as it is"
        )

    def is_file(self, target: Uri) -> bool:
        """Local. Whether it is a single file; False also where nothing is: loading tells."""
        storage = open_storage(target.parent, self.storage_options)
        try:
            return not storage.stat(target.name).is_dir
        except NotFoundError:
            return False
        finally:
            storage.close()

    def knows(self, run: Uri) -> bool:
        """Local. Whether something was saved into that run: only there anything is removed."""
        return run in self._shelves

    def remove(self, target: Uri) -> None:
        """Collective. As ``NamedCheckpoints.remove``, in a run that something was saved into."""
        self._shelf(target.parent).remove(target.name)

    def wait(self) -> None:
        """Collective."""
        self._each(NamedCheckpoints.wait)

    def close(self) -> None:
        """Collective. It may be used again."""
        try:
            self._each(NamedCheckpoints.close)
        finally:
            self._shelves.clear()
            self._held.clear()

    def leave(self) -> None:
        """Local, after an exception."""
        try:
            self._each(NamedCheckpoints.leave)
        finally:
            self._shelves.clear()

    def _each(self, act: Callable[[NamedCheckpoints], None]) -> None:
        """All of them, on all ranks in one order; the first failure is raised after the last."""
        with contextlib.ExitStack() as stack:
            for shelf in self._in_order():
                stack.callback(act, shelf)

    def _in_order(self) -> Iterator[NamedCheckpoints]:
        yield from reversed(self._shelves.values())
