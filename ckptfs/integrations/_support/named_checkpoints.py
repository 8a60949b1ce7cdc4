"""Sharded checkpoints with names and removals that a framework decides.

``NamedCheckpoints`` are those of one run:

    checkpoints = NamedCheckpoints("s3://bucket/run", mode="async", ...)    on every rank
    checkpoints.save("epoch=1.ckpt", state, step=20, ...)
    checkpoints.remove("epoch=0.ckpt")     when the save before this call is committed, not before
    checkpoints.close()                    all done; raises what failed; the run is released

The first save claims the run. ``extra_files=`` passes small files for readers that do not know ckptfs,
such as meta.pt. Each domain's owner writes them into the step directory once the checkpoint is
committed, and they are removed with it. They are no part of the checkpoint: what a loader of ours
needs has to be in the state.

A checkpoint is removed only if the run's log lists it, and never if it is the newest commit of its
kind or was named by ``hold``.

``NamedCheckpointRuns`` are modules, optimizers and other objects of a trainer, as named checkpoints of any
number of runs:

    named_runs = NamedCheckpointRuns(mode="async", meta_file="meta.pt")
    named_runs.save("s3://bucket/run/epoch=1.ckpt", {"model": ...}, meta_bytes, step=20)
    meta = named_runs.load("s3://bucket/run/epoch=1.ckpt", "model", module, {"optimizer": optimizer})

A trainer's metadata is part of the state, so that one commit holds tensors and progress. The same
bytes are also written to ``meta_file`` in the step directory, where stock readers look for them.
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

from ckptfs.commit.decisions import Cause, reason_to_keep
from ckptfs.commit.log.entries import Kind
from ckptfs.commit.ownership.claim import Takeover
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.save.spec import IfExists, SaveSpec
from ckptfs.commit.session import Place, RunSession
from ckptfs.commit.state import catalog
from ckptfs.dcp.api import load, save
from ckptfs.dcp.async_api import async_save
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.errors import AlreadyExistsError, CkptfsError, DeadlineError, NotFoundError, StateError
from ckptfs.events import SaveResult
from ckptfs.manager.run_manager import PendingSaves
from ckptfs.manager.run_setup import RunHandle, Where
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri

__all__ = ["META", "NamedCheckpointRuns", "NamedCheckpoints"]

logger = logging.getLogger("ckptfs.integrations")


class NamedCheckpoints:
    """Every rank makes one. ``save``, ``remove``, ``wait`` and ``close`` are collective.

    ``uri`` is the run. With ``mode="async"``, ``save`` returns when the state is staged; one save
    is under way at a time. ``extra_files`` has the names of the additional files that saves of this
    run may have. Making one appends nothing. Errors are those of ``CheckpointManager``. The error
    of an earlier save is raised by the next call, the same one on all ranks.
    """

    def __init__(
        self,
        uri: Any,
        *,
        mode: str = "sync",
        extra_files: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if mode not in ("sync", "async"):
            raise StateError(f'mode is {mode!r}; it is "sync" or "async"')
        self._is_async = mode == "async"
        place = Place(dict(storage_options or {}))
        self._run_handle = RunHandle(Where(uri, place, None, timeout_s, Takeover.AUTO))
        self._pending_saves = PendingSaves()
        self._run: Run | None = None
        self._retirer: Retirer | None = None
        self._extra_files = tuple(extra_files)
        self._to_remove: dict[str, None] = {}
        self._held: set[str] = set()
        self._committed = True  # whether the last full checkpoint was committed

    # -- saving -------------------------------------------------------------------------

    def save(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        kind: Kind = Kind.CHECKPOINT,
    ) -> None:
        """Save ``state`` as ``name``, replacing what has that name. Collective.

        The old checkpoint stays until the new one is committed. If an earlier save failed, this
        raises its error and saves nothing. ``kind``: no job can resume from weights; they are
        committed when this returns, in async mode too.
        """
        self.wait()
        run, retirer = self._claimed()
        retirer.make_room()
        self._to_remove.pop(name, None)  # it is wanted again
        target = self._run_handle.root / name
        write_files = partial(_write_extra_files, run.session, name, dict(extra_files or {}))
        if kind is not Kind.CHECKPOINT:
            spec = SaveSpec(name, step, IfExists.REPLACE, artifact=kind, run=run.generation)
            save_at(state, run.session, target, spec, WriteOptions(), started=time.perf_counter())
            write_files()
            return  # if a full checkpoint failed, what it was to replace still stays
        self._committed = False
        if self._is_async:
            pending = async_save(state, target, step=step, if_exists="replace", run=run)
            self._pending_saves.add(_Followed(pending, write_files))
            return
        save(state, target, step=step, if_exists="replace", run=run)
        write_files()
        self._committed = True

    def wait(self) -> None:
        """Wait until the save under way is committed and what waited for that is removed.

        Collective.
        """
        if self._pending_saves.settle(1) is not None:
            self._committed = True
        if self._committed and self._to_remove:
            pending_deletes, self._to_remove = self._to_remove, {}
            for name in pending_deletes:
                self._remove(name)

    def close(self) -> None:
        """Wait as ``wait`` does; then leave the run. Collective."""
        try:
            self.wait()
            for name in self._to_remove:
                logger.warning(
                    "%s is not removed: no later save was committed", self._run_handle.root / name
                )
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave after an exception, without waiting for other ranks. Local.

        Saves under way are finished.
        """
        run = self._run
        if run is not None and run.aside is not None and len(self._pending_saves):
            worker, run.aside = run.aside, None  # otherwise the release waits again, without end
            worker.leave()
        self._run_handle.close()

    def _claimed(self) -> tuple[Run, Retirer]:
        if self._run is None or self._retirer is None:
            self._run = self._run_handle.claim()
            self._retirer = Retirer(self._run, Keep(), lambda _: False)
            self._run_handle.before_release(self._retirer.close)
        return self._run, self._retirer

    # -- removing -----------------------------------------------------------------------

    def hold(self, name: str) -> None:
        """Never remove this checkpoint: a job resumes from it. Local, the same on all ranks."""
        self._held.add(name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint once the last save is committed; at once if it is. Collective.

        What cannot be removed stays, with a line in the log.
        """
        if name in self._held:
            logger.warning(
                "%s is not removed: this run resumed from it", self._run_handle.root / name
            )
            return
        self._to_remove[name] = None
        if not len(self._pending_saves):
            self.wait()

    def _remove(self, name: str) -> None:
        run, retirer = self._claimed()
        session = run.session
        where = self._run_handle.root / name
        found = session.control.step("which save", partial(_live, session, name), _first)
        if found is None:
            removed = session.control.step("a link?", partial(_unlink, session, name), any)
            if not removed:
                logger.warning("%s is not removed: the run's log does not know it", where)
            return
        save_id, is_newest = found
        if is_newest:
            logger.warning("%s is not removed: nothing of its kind was committed after it", where)
            return
        try:
            retirer.delete(session, save_id)
        except CkptfsError as error:
            # No reason to stop training: the checkpoint is there, and may be deleted by hand.
            logger.warning("%s is not removed: %s", where, error)
            return
        _remove_extra_files(session, name, self._extra_files)


def _live(session: RunSession, name: str) -> tuple[str, bool] | None:
    """Return the live save of a name, and whether it is the newest commit of its kind.

    Owners only.
    """
    state = session.known.state
    if not session.placement.is_owner or state is None:
        return None
    views = {session.placement.mine.id: state}
    found = [live.seal.save_id for live in catalog(views) if live.seal.name == name]
    if not found:
        return None
    return found[0], reason_to_keep(found[0], views, (Cause.NEWEST,)) is not None


def _unlink(owner: RunSession, name: str) -> bool:
    """Remove a symbolic link to a checkpoint of the run; return whether there was one. Owners only.

    A framework makes such links by itself (Lightning's save_last="link"). The checkpoint stays.
    """
    path = owner.storage.local_path(name) if owner.placement.is_owner else None
    if path is None or not os.path.islink(path):
        return False
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(os.path.dirname(path)):
        return False  # it leads out of the run: it is the user's own
    try:
        owner.storage.remove(name)
        owner.storage.sync("")
    except CkptfsError as error:
        logger.warning("the link %s was not removed: %s", owner.storage.uri(name), error)
    return True


def _first(answers: list[tuple[str, bool] | None]) -> tuple[str, bool] | None:
    return next((answer for answer in answers if answer is not None), None)


class _Followed:
    """A save under way, and the files that are written next to it when it is committed."""

    def __init__(self, pending: PendingSave, write_files: Any) -> None:
        self._pending, self._write_files = pending, write_files
        self.uri = pending.uri
        self._files_written: Future[None] = Future()
        pending.committed.add_done_callback(self._follow)

    def _follow(self, committed: Future[SaveResult]) -> None:
        try:
            if committed.exception() is None:
                self._write_files()
        except Exception:
            # The checkpoint is committed; a caller that waits must not wait without end.
            logger.exception("the additional files of %s", self.uri)
        finally:
            self._files_written.set_result(None)

    def result(self, timeout_s: float | None = None) -> SaveResult:
        began = time.monotonic()
        result = self._pending.result(timeout_s)
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
        try:
            self._files_written.result(left)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"the additional files were not written within {timeout_s:g} s",
                uri=self.uri,
                hint="the checkpoint itself is committed; wait again",
            ) from error
        return result

    def done(self) -> bool:
        return self._pending.done() and self._files_written.done()


def _write_extra_files(session: RunSession, name: str, files: Mapping[str, bytes]) -> None:
    """Write the additional files of a committed checkpoint. Owners only.

    A failure is logged and fails nothing.
    """
    if not session.placement.is_owner:
        return
    for key, data in files.items():
        try:
            session.storage.replace(f"{name}/{key}", data)
        except CkptfsError as error:
            where = session.storage.uri(f"{name}/{key}")
            logger.warning("%s is committed, but other readers miss %s: %s", name, where, error)


def _remove_extra_files(session: RunSession, name: str, files: Sequence[str]) -> None:
    """Remove the additional files of a checkpoint, and its directory if that is empty.

    Owners only.
    """
    if not session.placement.is_owner:
        return
    try:
        for key in files:
            session.storage.remove(f"{name}/{key}")
        session.storage.remove_dir(name)
    except (AlreadyExistsError, NotFoundError):
        return  # other files are there, or all of it is gone
    except CkptfsError as error:
        logger.warning(
            "the additional files of %s were not removed: %s", session.storage.uri(name), error
        )


META = "ckptfs.meta"


class NamedCheckpointRuns:
    """Every rank makes one; all calls but ``is_file`` are collective.

    It makes a ``NamedCheckpoints`` for each run that it saves into; arguments and errors are the
    same.
    """

    def __init__(
        self, *, mode: str, meta_file: str, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._mode, self._meta_file = mode, meta_file
        self.storage_options = dict(storage_options or {})
        self._named_runs: dict[Uri, NamedCheckpoints] = {}
        self._held: set[Uri] = set()

    def _checkpoints_of(self, run: Uri) -> NamedCheckpoints:
        if run not in self._named_runs:
            checkpoints = NamedCheckpoints(
                run,
                mode=self._mode,
                extra_files=(self._meta_file,),
                storage_options=self.storage_options,
            )
            self._named_runs[run] = checkpoints
            for held in self._held:
                if held.parent == run:
                    checkpoints.hold(held.name)
        return self._named_runs[run]

    def save(
        self,
        target: Uri,
        state: Mapping[str, Any],
        meta: bytes,
        *,
        step: int | None,
        kind: Kind = Kind.CHECKPOINT,
    ) -> None:
        """Save a state with its metadata. Collective.

        ``meta`` is equal on all ranks. ``kind``: as for ``NamedCheckpoints.save``.
        """
        full_state = {**state, META: meta}
        extra_files = {self._meta_file: meta}
        checkpoints = self._checkpoints_of(target.parent)
        checkpoints.save(target.name, full_state, step=step, extra_files=extra_files, kind=kind)

    def load(
        self,
        target: Uri,
        key: str,
        module: Module,
        optimizers: Mapping[str, Optimizer],
        *,
        strict: bool = True,
    ) -> bytes | None:
        """Fill the module, saved under ``key``, and optimizers under their names. Collective.

        Returns the metadata; None if a stock writer left it in a file. The checkpoint is not
        removed before ``close``. Raises StateError if keys are missing and ``strict`` is True, and
        otherwise NotFoundError, IntegrityError and so on, as ``ckptfs.load`` does.
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
        if target.parent in self._named_runs:
            self._named_runs[target.parent].hold(target.name)
        return None if META in loaded.missing_keys else state[META]

    def _hint(self, missing: list[str], optimizers: Mapping[str, Optimizer]) -> str:
        if not any(key.split(".")[0] in optimizers for key in missing):
            return "pass strict=False to leave them as they are"
        # Continuing with a fresh optimizer is not resuming, but looks like it.
        return (
            "it has weights only, like an export, and no optimizer. Resume from a full "
            "checkpoint (see ckptfs.latest() of its run), or load these weights into the "
            "model and start a new run; strict=False leaves the optimizer as it is"
        )

    def is_file(self, target: Uri) -> bool:
        """Whether it is a single file.

        Local. False also if nothing is there: the load raises that.
        """
        storage = open_storage(target.parent, self.storage_options)
        try:
            return not storage.stat(target.name).is_dir
        except NotFoundError:
            return False
        finally:
            storage.close()

    def knows(self, run: Uri) -> bool:
        """Whether something was saved into that run. Local. Only then anything in it is removed."""
        return run in self._named_runs

    def remove(self, target: Uri) -> None:
        """Remove as ``NamedCheckpoints.remove`` does, in a run that was saved into. Collective."""
        self._checkpoints_of(target.parent).remove(target.name)

    def wait(self) -> None:
        """Wait for the saves of all runs. Collective."""
        self._each(NamedCheckpoints.wait)

    def close(self) -> None:
        """Close all runs. Collective. It may be used again."""
        try:
            self._each(NamedCheckpoints.close)
        finally:
            self._named_runs.clear()
            self._held.clear()

    def leave(self) -> None:
        """Leave all runs after an exception. Local."""
        try:
            self._each(NamedCheckpoints.leave)
        finally:
            self._named_runs.clear()

    def _each(self, act: Callable[[NamedCheckpoints], None]) -> None:
        """Act on all runs, in one order on all ranks; then raise the first failure."""
        with contextlib.ExitStack() as stack:
            for checkpoints in self._in_order():
                stack.callback(act, checkpoints)

    def _in_order(self) -> Iterator[NamedCheckpoints]:
        yield from reversed(self._named_runs.values())
