"""A held run: what a claim gives to every rank, and how the run is released.

    held = claim(session)          the fence is in the log, the lease is kept
    save(..., run=held)         checks that the target is in the run
    held.release()              chores end, the lease stops, the owners append "released"

After a crash without the release, the next owner waits until the lease has not changed for some time. A Run without
any reference is released by a thread of its process, as soon as Python has collected it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ckptfs.commit.decisions import Refusal
from ckptfs.commit.log.append import Appended, RefusedAppend, append
from ckptfs.commit.log.entries import Generation, Release, Stamp
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import Program, drive
from ckptfs.commit.ownership.lease import Keeper
from ckptfs.commit.save.spec import fresh_ids, now_text
from ckptfs.commit.session import RunSession, agree_uri, is_relative, uri_stage
from ckptfs.control.control import Control, step_of_stages
from ckptfs.control.messages import Stage
from ckptfs.errors import (
    CkptfsError,
    StateError,
    StorageError,
    UriError,
)
from ckptfs.uri import Uri

__all__ = [
    "Caller",
    "Ownership",
    "Run",
    "agree_target",
    "agreeing_target",
    "is_for_call",
    "ownership_of",
    "release_fence",
    "wait_until_left",
]

logger = logging.getLogger("ckptfs.commit")

CHORES_S = 30.0  # how long a release waits for deletes under way
_NOT_CALLERS = ("ckptfs", "contextlib", "threading", "concurrent", "torch")


def _where() -> str:
    """Return where the call was made, for a message.

    It is the innermost frame that belongs neither to ckptfs nor to Python.
    """
    for frame, line in traceback.walk_stack(None):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_CALLERS:
            return f" in {os.path.basename(frame.f_code.co_filename)}, line {line}"
    return ""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Caller:
    """The call that claims a run.

    Attributes:
        call: Its name, for messages.
        given_up: Called by the next claim of this process. True if the call was given up and its
            run is being released.
        behind: Closed after the release of a run that was garbage-collected.
        for_call: Whether the run is released when this call ends. Otherwise its holder commits
            again later.
        wait_s: How long it waits for others that hold the run for a call.
    """

    call: str = "claim()"
    given_up: Callable[[], bool] = _never
    behind: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    for_call: bool = False
    wait_s: float = 0.0


@dataclass
class Run:
    """A held run. Pass it to ``save(..., run=run)``; leaving the ``with`` block releases it.

    Every rank holds one. ``release()`` is local, and only owners write. If it is never called, the run is
    released when Python collects the object.

    Attributes:
        uri: The run.
        generation: Number and nonce of the fence.
        session: What the ranks share: storage, control plane, domains. For ckptfs itself.
        in_doubt: Names of saves with domains that are out of reach.
        closing: Closed after the release. Add callbacks to this stack, and do not replace it.
        aside: The worker of its asynchronous saves; they end before it is released. For ckptfs itself.
        plans: The plan of the last save, so that the next one need not send it again. For ckptfs itself.
    """

    uri: Uri
    generation: Generation
    session: RunSession
    in_doubt: tuple[str, ...] = ()
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    aside: Any = field(default=None, repr=False)
    plans: Any = field(default=None, repr=False)
    _keeper: Keeper | None = field(default=None, repr=False)
    _caller: Caller = field(default_factory=Caller, repr=False)
    _released: bool = field(default=False, repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    def __post_init__(self) -> None:
        self._ownership = Ownership(
            weakref.ref(self),
            self.generation,
            self.session,
            self.closing,
            self._keeper,
            self._caller,
        )
        _OWNED.add(self, self._ownership)

    def check(self, target: Uri) -> None:
        """Check that ``target`` may be saved in this run.

        Raises:
            StateError: ``target`` is not directly in this run, or the run was released.
        """
        if target.parent != self.uri:
            raise StateError(
                "the checkpoint is not directly in the run that was passed",
                uri=target,
                hint=f"the run is {self.uri}",
            )
        self.check_held()

    def check_held(self) -> None:
        """Check that the run is still held.

        Raises:
            StateError: The run was released: its control plane is closed.
        """
        if self._released:
            raise StateError("the run was released", uri=self.uri, hint="prepare it again")

    def release(self) -> None:
        """Release the run, so that the next owner need not wait. Local.

        Calling it twice is harmless. After a crash without it, the next owner waits until the lease
        has not changed for some time.
        """
        if self._released or os.getpid() != self._pid:
            return  # in the child of a fork: the run belongs to the parent, which continues
        if self.aside is not None:
            self.aside.close()
        self._released, self.plans = True, None
        self._ownership.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc_type is not None and self.aside is not None and os.getpid() == self._pid:
            # A hanging storage must not hide the exception that is being raised.
            worker, self.aside = self.aside, None
            worker.leave()
        self.release()


def agree_target(run: Run, control: Control, given: object) -> Uri:
    """Return the URI that all ranks were given for a checkpoint in this run. Collective.

    ``control`` is the run's, or a clone of it for another thread.

    Raises:
        UriError: They were given different ones, or one that cannot be read; the same on every rank.
        StateError: It is not directly in this run, or some rank has released the run; the same on every rank.
    """
    if is_relative(given):
        target = agree_uri(control, given)
        step_of_stages(control, "the run", [_in_run(run, target)])
        return target
    step_of_stages(control, "the run", _agreeing(run, given))
    return Uri.parse(given)  # type: ignore[arg-type]  # all ranks could read it


def agreeing_target(run: Run, given: object, label: str) -> tuple[Uri, Sequence[Stage]]:
    """Return the URI, and the stages in which the ranks agree on it: the caller makes them the first of a step.

    Args:
        run: The held run.
        given: The URI of the checkpoint, as this rank was given it.
        label: The label of that step.

    Returns:
        This rank's URI, and the stages; none if the ranks have agreed already.

    Raises:
        UriError: As ``agree_target``.
        StateError: As ``agree_target``. If this rank has released the run it has no control plane any more, and
            raises alone; the others hear that it has left.
    """
    run.check_held()
    if is_relative(given):
        return agree_target(run, run.session.control, given), ()
    stages = _agreeing(run, given)
    try:
        target = Uri.parse(given)  # type: ignore[arg-type]  # the parser names what it cannot read
        run.check(target)
    except (UriError, StateError):
        # The other ranks may have been given a good one, and are on their way to that step: it ends here, on all.
        step_of_stages(run.session.control, label, stages)
        raise
    return target, stages


def _agreeing(run: Run, given: object) -> list[Stage]:
    return [uri_stage(given), _in_run(run, given)]


def _in_run(run: Run, given: object) -> Stage:
    """Return the stage that checks the URI on every rank."""

    def check() -> StateError | None:
        try:
            run.check(Uri.parse(given))  # type: ignore[arg-type]  # as above
        except StateError as error:
            return error
        return None

    def agree(found: Sequence[StateError | None]) -> None:
        # A run that one rank has released fails the save on all of them.
        for wrong in found:
            if wrong is not None:
                raise wrong

    return Stage("the run", check, agree)


@dataclass(eq=False)
class Ownership:
    """What this process needs to release a run, and the call that claimed it.

    It does not keep the ``Run`` alive: a Run without any reference is released through this object.
    """

    run: weakref.ref[Run]
    generation: Generation
    session: RunSession
    closing: contextlib.ExitStack
    keeper: Keeper | None
    caller: Caller
    since: str = field(default_factory=now_text)
    where: str = field(default_factory=_where)
    left: threading.Event = field(default_factory=threading.Event)
    _leaving: bool = False

    @property
    def is_leaving(self) -> bool:
        """Whether the run is being released, or is about to be because its Run has no reference."""
        return self._leaving or self.run() is None

    def leave(self) -> None:
        """End chores and lease, append the release, close what was opened for the run."""
        self._leaving = True
        try:
            with self.closing:
                if self.session.background is not None:
                    self.session.background.close(CHORES_S)
                if self.keeper is not None:
                    self.keeper.stop()
                if self.session.placement.is_owner:
                    self._append_release()
        finally:
            self.left.set()
            _OWNED.remove(self)

    def leave_behind(self) -> None:
        """Do as ``leave``, and close what the caller would have closed after it."""
        with self.caller.behind:
            self.leave()

    @property
    def stays(self) -> bool:
        """Whether the run is held for longer than one call, and will not be released by itself."""
        return not self.is_leaving and not self.caller.for_call

    @property
    def call(self) -> str:
        """The call that claimed the run, and its place in the program."""
        return f"{self.caller.call}{self.where}"

    def _append_release(self) -> None:
        try:
            program = release_fence(
                self.generation, fresh_ids(), self.session.fold_from, self.session.stamp()
            )
            drive(program, self.session.storage, deadline_s=10.0)
        except (StorageError, CkptfsError) as error:
            logger.warning("the run was not released, so the next owner has to wait: %s", error)
        else:
            self.session.touch_log_later(last=True)


class _Owned:
    """The runs that this process holds, and the thread that releases those without a Run.

    A finalizer may run between any two instructions of any thread, also of one that holds a lock.
    So it only puts the run into a queue.
    """

    def __init__(self) -> None:
        self.begin_anew()
        os.register_at_fork(after_in_child=self.begin_anew)  # the runs are the parent's

    def begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._all: set[Ownership] = set()
        self._collected: queue.SimpleQueue[Ownership] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, run: Run, ownership: Ownership) -> None:
        with self._lock:
            self._all.add(ownership)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_leave_collected,
                    args=(self._collected,),
                    name="ckptfs-collected",
                    daemon=True,
                )
                self._thread.start()
        weakref.finalize(run, self._collected.put, ownership).atexit = False

    def remove(self, ownership: Ownership) -> None:
        with self._lock:
            self._all.discard(ownership)

    def all(self) -> list[Ownership]:
        with self._lock:
            return list(self._all)


_OWNED = _Owned()
# How long to wait for the garbage collector before each look for runs without a reference. The refusal of a
# claim because this process really holds the run comes that much later.
_COLLECT_AGAIN_S = (0.0, 0.05, 0.3)


def _leave_collected(collected: queue.SimpleQueue[Ownership]) -> None:
    while True:
        ownership = collected.get()
        if ownership.left.is_set():
            continue
        logger.warning(
            "%s, claimed by %s, was never released, and its last reference is gone: released now",
            ownership.session.storage.root,
            ownership.call,
        )
        # A thread each: a hanging storage must not stop the others.
        with contextlib.suppress(RuntimeError):  # the interpreter ends: no thread starts
            threading.Thread(
                target=ownership.leave_behind, name="ckptfs-release", daemon=True
            ).start()
        del ownership


def ownership_of(generation: Generation) -> Ownership | None:
    """Return this process's own claim with that fence, or None."""
    return next((one for one in _OWNED.all() if one.generation == generation), None)


def is_for_call(generation: Generation | None) -> bool:
    """Whether this process holds the run with that fence for one call only.

    Then it commits nothing to the run later.
    """
    own = None if generation is None else ownership_of(generation)
    return own is not None and own.caller.for_call


def wait_until_left(root: Uri, timeout_s: float, *, patient: bool) -> None:
    """Wait for the runs at ``root`` that this process is about to release. Local.

    These are runs without any reference, and runs that were claimed by a save that was given up.
    patient: Look for such runs more than once.
    """
    owned = [one for one in _OWNED.all() if one.session.storage.root == root]
    leaving = {one for one in owned if one.is_leaving or one.caller.given_up()}
    for pause_s in _COLLECT_AGAIN_S if patient else (0.0,):
        staying = [one for one in owned if one not in leaving]
        if not staying:
            break
        staying[0].left.wait(pause_s)
        # A manager is a cycle of objects, so it is only freed by the garbage collector. One of its
        # threads that has just ended a save or a copy may refer to it for a moment longer: so this
        # looks more than once.
        gc.collect()
        leaving |= {one for one in owned if one.is_leaving}
    until = time.monotonic() + timeout_s
    for one in leaving:
        if not one.left.wait(max(0.0, until - time.monotonic())):
            logger.warning("%s was not released within %g s by %s", root, timeout_s, one.call)


def release_fence(
    generation: Generation, ids: Iterator[str], known: LogState | None, stamp: Stamp
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Append that the owner of ``generation`` left. Refused if that is not the newest any more."""

    def decide(state: LogState) -> Release | RefusedAppend[Refusal]:
        if state.generation != generation or state.released:
            return RefusedAppend(Refusal.NOTHING, state)
        return Release(generation)

    return (yield from append(decide, write_id=next(ids), stamp=stamp, state=known))
