"""StoreControl: the collective step over a c10d store; no collective of the user's group.

One step, over the keys of ``StepKeys`` (fresh for every control: see ``handshake``):

    rank r          local(), send the value; the last to arrive wakes the coordinator
    coordinator     claims the step ("decide"), reads all values, decides, offers the verdict
    every rank      waits for the verdict, obeys it, acknowledges it

    alarm (dead process, silence, stuck storage): a waiting rank claims the step ("alarm") and offers the error
    as the verdict. The claim permits only one of the two: once the coordinator decides, only its own death or
    silence can still end the step with an error.

The verdict is set once, by compare_set: several ranks may offer one, and all obey the one that is stored. The
coordinator deletes the keys of step k when all have arrived at k + 1; the last rank to close deletes the rest.
After an alarm some keys of late values may stay.

A rank leaves so that no other rank waits for it afterwards, and the store is left clean:

    coordinator    waits until all have read the last verdict, because its process may host the store;
                   deletes the pieces of dead ranks
    every rank     answers the next step, which others may still call, with "I have left"
    the last one   deletes what is left of the control

If a rank is killed, a few small keys stay in the store, under a nonce that is never used again.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from ckptfs._version import __version__
from ckptfs.control.handshake import meet
from ckptfs.control.heartbeat import Alarm, Monitor, Tempo, first_beat
from ckptfs.control.messages import (
    Message,
    StepVerdict,
    attempt,
    decode_message,
    decode_verdict,
    encode_message,
    encode_verdict,
    for_rank,
    joined,
    message_by,
    settle,
    split,
)
from ckptfs.control.rank_errors import collective_error, failure_of, log_left_out
from ckptfs.control.tcpstore_client import StepKeys, StoreClient, answer, drop
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, ControlPlaneLostError, Failure, StateError

__all__ = [
    "LEAVE_S",
    "SharedControl",
    "StoreControl",
    "Waits",
    "drop_pieces_of_dead",
    "leave",
    "linger",
]

T = TypeVar("T")

_SLICE_S = 0.2  # how often a waiting caller looks at the monitor
LEAVE_S = 10.0  # closing never takes longer than this over a store that does not answer

log = logging.getLogger("ckptfs.control")


@dataclass(frozen=True)
class SharedControl:
    """What all clones of one control share."""

    source: Any  # keeps the group's store alive: this process may be its host
    pulse: StoreClient  # the heartbeat's client; also raises alarms, and never waits
    monitor: Monitor
    worlds: tuple[World, ...]
    timeout_s: float
    pid: int
    closes_at_exit: bool


class Waits:
    """The waits of one control. Local; ``result`` on the caller's thread, ``hangs`` on its own."""

    def __init__(self, shared: SharedControl, rank: int) -> None:
        self._shared = shared
        self._rank = rank

    def result(self, future: Future[T], keys: StepKeys, label: str) -> T:
        """Return the result of an operation that waits for other ranks while they are alive."""
        monitor = self._shared.monitor
        begun, ended = time.monotonic(), False
        while True:
            try:
                return future.result(_SLICE_S)
            except (RuntimeError, OSError) as error:
                if future.done():
                    return self._finished(future, keys)
                if not isinstance(error, TimeoutError):
                    raise
            if monitor.lost is not None:
                raise monitor.with_gone(monitor.lost)
            alarm = None if ended else monitor.alarm(keys, time.monotonic() - begun)
            if alarm is not None:
                ended = self._raise_alarm(alarm, keys, label)

    def _finished(self, future: Future[T], keys: StepKeys) -> T:
        """Return the result. If this rank's client broke, tell the others, if the store answers."""
        try:
            return answer(future, 0.0)
        except ControlPlaneLostError as error:
            shown = self._shared.monitor.with_gone(error)
            data = encode_verdict(StepVerdict(error=shown))
            try:
                self._shared.pulse.call_short(lambda store: keys.end(store, data), LEAVE_S)
            except CkptfsError:
                log.debug("nobody could be told: %s", error)  # the store is gone for all ranks
            raise shown from error

    def _raise_alarm(self, alarm: Alarm, keys: StepKeys, label: str) -> bool:
        """Offer the alarm as the step's verdict. False: the operation must be checked again."""
        error = alarm.error(label, self._shared.worlds, self._shared.timeout_s)
        data = encode_verdict(StepVerdict(error=error, final=bool(alarm.dead)))

        ours: list[bool] = []

        def end(store: Any) -> bool:
            # All ranks have called and the coordinator is at work: its answer counts, even if a
            # rank that has already sent its value dies.
            if not keys.claim(store, "alarm") and not alarm.names(0):
                return False
            ours.append(keys.end(store, data))
            return True

        try:
            ended = self._shared.pulse.call_short(end, self._shared.timeout_s)
        except ControlPlaneLostError as lost:
            raise self._shared.monitor.with_gone(lost) from lost
        if any(ours):
            # Not each time that the error was made: while the coordinator decides, that is five
            # times a second.
            log_left_out(error, self._shared.worlds)
        return ended

    def hangs(
        self,
        keys: StepKeys,
        label: str,
        hears: Callable[[CkptfsError], None] | None,
        why: str,
        goes_on: Callable[[], bool],
    ) -> None:
        """End the step for all ranks, because this rank's part hangs in its storage.

        Then call ``hears`` with the error that the step ended with. This runs on a thread of its
        own, because the hanging thread cannot be reached. If the part has returned in the meantime,
        the part itself gets that error from the step.
        """
        if not goes_on():
            return
        try:
            self._raise_alarm(Alarm(stuck={self._rank: why}), keys, label)
            with contextlib.closing(StoreClient(self._shared.source, "ckptfs-hangs")) as client:
                data = client.call(keys.read_verdict, self._shared.timeout_s)
            error = decode_verdict(data).error
        except CkptfsError as lost:
            error = lost
        if error is not None and hears is not None and goes_on():
            hears(error)


_LINGER_S = 10.0
_LAST_S = 1.0  # after a rank died: the dead never read, but the living may be about to


def linger(pulse: StoreClient, monitor: Monitor, last: StepKeys) -> None:
    """Wait until every rank has read the verdict of ``last``, 10 s at most. On the coordinator."""
    deadline = time.monotonic() + _LINGER_S
    try:
        while not pulse.call_short(last.is_acknowledged, _LINGER_S):
            if monitor.alarm(last):
                deadline = min(deadline, time.monotonic() + _LAST_S)
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
    except CkptfsError as error:
        log.debug("no reason to linger: %s", error)


def drop_pieces_of_dead(pulse: StoreClient, monitor: Monitor, step: StepKeys) -> None:
    """Delete the pieces of ``step`` that dead ranks have not read. On the coordinator.

    The pieces may be large.
    """
    alarm = monitor.alarm(step)
    dead = () if alarm is None else tuple(alarm.dead)

    def drop_all(store: Any) -> None:
        for rank in dead:
            step.drop_piece(store, rank)

    try:
        if dead:
            pulse.call_short(drop_all, _LAST_S)
    except CkptfsError as error:
        log.debug("what is left of %s stays: %s", step, error)


def leave(
    store: Any, keys: StepKeys, rank: int, worlds: Sequence[World], monitor: Monitor | None
) -> None:
    """Say goodbye in the step that would come next. It is an operation on a store.

    monitor: The control's, stopped; None for a clone of a control that is still open.
    """
    world = worlds[rank]
    why = f"closed its control, or ended: {world.place}"
    failure = Failure(rank, world.node, "ckptfs.errors.CollectiveError", why)
    if rank == 0:
        error = collective_error("the next step", {0: failure}, worlds)
        keys.end(store, encode_verdict(StepVerdict(error=error, final=True)))
    else:
        keys.arrive(store, rank, encode_message(Message("", failure=failure)))
    if monitor is not None:
        monitor.write_last_beat(store)
    keys.acknowledge(store)  # so that the coordinator does not linger for this rank
    if store.add(f"{keys.prefix}/closed", 1) == keys.size:
        _clean(store, keys, monitor)


def _clean(store: Any, keys: StepKeys, monitor: Monitor | None) -> None:
    for number in {max(0, keys.number - 1), keys.number}:
        step = replace(keys, number=number)
        step.drop_values(store)
        step.drop(store)
    store.delete_key(f"{keys.prefix}/closed")
    if monitor is not None:
        drop(store, f"{keys.prefix}/go")
        drop(store, f"{keys.prefix}/table")
        for name in monitor.keys():  # noqa: SIM118 - not a mapping
            store.delete_key(name)


class _UnmadeError(CkptfsError):
    """A rank's piece cannot be pickled. The cause is the error of pickle."""


def _made(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces, so that an error of pickle differs from an error of the store."""
    try:
        yield from pieces
    except Exception as error:
        raise _UnmadeError("a piece cannot be pickled") from error


class StoreControl:
    """One rank's end of a control plane over a c10d store; see ``Control`` for every method.

    Making one is collective: it returns when all ranks are there.

    world: Rank and size in the control. store: Any c10d store that all ranks share; it is cloned,
    never used. ranks: The global ranks, so that groups do not meet by mistake. name: As in
    ``open_control``. closes_at_exit: False if another object closes it at exit, because that object
    must end before it.
    """

    def __init__(
        self,
        world: World,
        store: Any,
        *,
        timeout_s: float,
        ranks: tuple[int, ...] | None = None,
        name: str = "",
        version: str = __version__,
        closes_at_exit: bool = True,
    ) -> None:
        pulse = StoreClient(store, f"ckptfs-pulse-{world.rank}")
        tag = hashlib.sha256(repr((ranks or world.size, name)).encode()).hexdigest()[:16]
        base = f"ckptfs/{tag}"

        def prepare(client: Any, nonce: str) -> None:
            first_beat(client, f"{base}/{nonce}", world.rank)

        try:
            met = meet(pulse, base, world, prepare, timeout_s=timeout_s, version=version)
        except BaseException:
            pulse.close()
            raise
        prefix = f"{base}/{met.nonce}"
        monitor = Monitor(
            pulse,
            prefix,
            met.worlds,
            met.lives,
            world.rank,
            timeout_s=timeout_s,
            tempo=Tempo.within(timeout_s),
        )
        monitor.start()
        shared = SharedControl(
            store, pulse, monitor, met.worlds, timeout_s, os.getpid(), closes_at_exit
        )
        self._setup(shared, met.worlds[world.rank], prefix)

    def _setup(self, shared: SharedControl, world: World, prefix: str) -> None:
        self.world = world
        self._shared = shared
        self._waits = Waits(shared, world.rank)
        self._prefix = prefix
        self._is_root = True
        self._index = 0
        self._given_up: Future[Any] | None = None
        self._apart: StepKeys | None = None  # of the last step that had pieces
        self._clones: list[StoreControl] = []
        self._busy = threading.Lock()
        self._closed = False
        self._ended: CkptfsError | None = None
        self.hears: Callable[[CkptfsError], None] | None = None  # see ``hearing``
        self._io = StoreClient(shared.source, f"ckptfs-control-{world.rank}")
        # A control that was not closed still says goodbye, so that no other rank waits for its rank.
        if shared.closes_at_exit:
            atexit.register(self.close)

    @property
    def worlds(self) -> tuple[World, ...]:
        """Every rank's World, in order of rank."""
        return self._shared.worlds

    @property
    def rank(self) -> int:
        """0 ... size - 1."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.worlds)

    def clone(self) -> StoreControl:
        """As ``Control.clone``."""
        clone = object.__new__(StoreControl)
        clone._setup(self._shared, self.world, f"{self._prefix}/clone{len(self._clones)}")
        clone._is_root = False
        self._clones.append(clone)
        return clone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # -- one step --------------------------------------------------------------------------

    def step(
        self, label: str, local: Callable[[], T], decide: Callable[[list[T]], Any] | None = None
    ) -> Any:
        """As ``Control.step``."""
        if self._closed or os.getpid() != self._shared.pid:
            raise StateError("this control is closed, or belongs to the parent of a fork")
        if not self._busy.acquire(blocking=False):
            raise StateError(
                "two threads use one control at the same time",
                hint="give the other thread control.clone(), on every rank in the same order",
            )
        try:
            if self._ended is not None:
                raise self._ended
            verdict, problem = self._step(label, local, decide)
        finally:
            self._busy.release()
        if verdict.final:
            self._ended = verdict.error
        return verdict.unwrap(problem)

    def _step(
        self, label: str, local: Callable[[], T], decide: Callable[[list[T]], Any] | None
    ) -> tuple[StepVerdict[Any], BaseException | None]:
        keys = self._keys()
        with self._working(keys, label):
            message, problem = attempt(label, local, self.world)
        self._index += 1
        if self._given_up is not None and not self._given_up.done():
            self._io.close()  # a client that still waits cannot be used
            self._io = StoreClient(self._shared.source, f"ckptfs-control-{self.rank}")
        if problem is not None and not isinstance(problem, Exception):
            self._interrupted(keys, message)
            raise problem
        if self.rank:
            data = message_by(self.world, message)
            self._io.submit_short(lambda store: keys.arrive(store, self.rank, data))
            return self._obey(keys, label), problem
        try:
            verdict, raised = self._decide(keys, message, decide)
        except CkptfsError:
            raise
        except BaseException as error:  # Ctrl-C while waiting: no other rank would decide
            self._interrupted(keys, Message(label, failure=failure_of(error, self.world)))
            raise
        return verdict, problem or raised

    def _keys(self) -> StepKeys:
        """Return the keys of the next step."""
        return StepKeys(self._prefix, self._index, self.size)

    def _decide(
        self, keys: StepKeys, own: Message, decide: Callable[[list[T]], Any] | None
    ) -> tuple[StepVerdict[Any], BaseException | None]:
        """Gather, decide and offer the verdict, on the coordinator.

        Also returns the error of ``decide``, if any.
        """
        label = own.label
        gathered = self._await(self._io.submit(keys.gather), keys, label)
        if not gathered:
            return self._obey(keys, label), None
        read = [name for _, names in gathered for name in names]
        messages = [
            own,
            *(self._decoded(label, rank + 1, data) for rank, (data, _) in enumerate(gathered)),
        ]
        with self._working(keys, label):
            verdict, raised = settle(messages, decide, self.worlds)
        common, pieces = split(verdict)
        try:
            data = encode_verdict(common)
        except Exception as error:  # noqa: BLE001 - pickle raises anything
            raised, pieces = raised or error, iter(())
            verdict, data = self._failed(label, error)
        offered = self._io.submit_short(
            lambda store: keys.offer_verdict(store, data, _made(pieces))
        )
        # After the verdict: thousands of ranks wait for the verdict, and none for this.
        self._io.submit_short(lambda store: keys.sweep(store, read))
        try:
            ours = self._await(offered, keys, label)
        except _UnmadeError as unmade:
            raised = raised or unmade.__cause__
            verdict, data = self._failed(label, unmade.__cause__ or unmade)
            again = self._io.submit_short(lambda store: keys.offer_verdict(store, data))
            ours = self._await(again, keys, label)
        if not ours:
            return self._obey(keys, label), raised  # the others ended the step while we were silent
        self._apart = keys if common.apart else self._apart
        self._io.submit_short(keys.acknowledge)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        return for_rank(verdict, 0), raised

    def _failed(self, label: str, error: BaseException) -> tuple[StepVerdict[Any], bytes]:
        """Return the coordinator's failure as the answer: the decided value cannot be sent."""
        failures = {0: failure_of(error, self.world)}
        verdict: StepVerdict[Any] = StepVerdict(
            error=collective_error(label, failures, self.worlds)
        )
        return verdict, encode_verdict(verdict)

    def _decoded(self, label: str, rank: int, data: bytes) -> Message:
        try:
            return decode_message(data)
        except Exception as error:  # noqa: BLE001 - unpickling raises anything
            # Perhaps a class that only that rank can import. Raising here would leave the others
            # waiting.
            return Message(label, failure=replace(failure_of(error, self.worlds[rank]), rank=rank))

    def _obey(self, keys: StepKeys, label: str) -> StepVerdict[Any]:
        """Wait for the verdict of any rank, and return it."""
        untaken = True
        try:
            verdict = decode_verdict(self._await(self._io.submit(keys.read_verdict), keys, label))
            if not verdict.apart:
                untaken = verdict.error is not None
                return verdict
            future = self._io.submit(lambda store: keys.take_piece(store, self.rank))
            piece = self._await(future, keys, label)
            untaken = False
            return joined(verdict, piece)
        except CkptfsError:
            raise
        except Exception as error:
            raise StateError(
                f"the answer of {label} cannot be unpickled on this rank: {error}",
                rank=self.rank,
                hint="its class must be importable on every rank",
            ) from error
        finally:
            if untaken:  # Ctrl-C, or the coordinator died between the pieces and the verdict
                self._io.submit_short(lambda store: keys.drop_piece(store, self.rank))
            self._io.submit_short(keys.acknowledge)

    def _interrupted(self, keys: StepKeys, message: Message) -> None:
        """Tell the other ranks of Ctrl-C or an exit on this rank. Waits for none of them."""
        if self.rank:
            data = encode_message(message)
            self._shared.pulse.submit_short(lambda store: keys.arrive(store, self.rank, data))
        elif message.failure is not None:
            failed = collective_error(message.label, {0: message.failure}, self.worlds)
            data = encode_verdict(StepVerdict(error=failed))
            self._shared.pulse.submit_short(lambda store: keys.end(store, data))
        self._shared.pulse.flush(LEAVE_S)

    # -- waiting, and what ends it ---------------------------------------------------------

    def _await(self, future: Future[T], keys: StepKeys, label: str) -> T:
        """Wait for an operation that waits for other ranks, as long as they are alive."""
        try:
            return self._waits.result(future, keys, label)
        except BaseException:
            self._given_up = future
            raise

    def _working(self, keys: StepKeys, label: str) -> AbstractContextManager[None]:
        """Return a context in which this thread does its part of the step.

        The function that is called if it hangs (``hears``) is the one that is set now.
        """
        tell = partial(self._waits.hangs, keys, label, self.hears)
        return self._shared.monitor.hanging.working(keys, tell)

    # -- leaving ---------------------------------------------------------------------------

    def close(self) -> None:
        """As ``Control.close``."""
        if self._closed or os.getpid() != self._shared.pid:
            return
        self._closed = True
        for clone in self._clones:
            clone.close()
        shared = self._shared
        monitor = shared.monitor if self._is_root else None
        if self.rank == 0 and self._index:
            linger(shared.pulse, shared.monitor, replace(self._keys(), number=self._index - 1))
        if self._apart is not None:
            drop_pieces_of_dead(shared.pulse, shared.monitor, self._apart)
        if monitor is not None:
            monitor.stop()
        keys, rank = self._keys(), self.rank
        try:
            shared.pulse.call_short(lambda s: leave(s, keys, rank, shared.worlds, monitor), LEAVE_S)
        except CkptfsError as error:
            log.debug("left without a word: %s", error)  # the store is gone already
        self._io.close()
        if self._is_root:
            shared.pulse.close()
        atexit.unregister(self.close)
