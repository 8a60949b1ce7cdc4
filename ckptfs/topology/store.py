"""StoreControl: the collective step over a c10d store; no collective of the user's group.

One step, over the keys of ``stepkeys`` (fresh for every control: see ``handshake``):

    rank r          local(), say the value; the last to arrive wakes the coordinator
    coordinator     claims the step ("decide"), reads all values, decides, offers the verdict
    every rank      waits for the verdict, obeys it, acknowledges it

    alarm (dead process, silence, stuck storage): whoever waits claims the step ("alarm") and offers the error as
    the verdict. The claim lets one of the two happen: once the coordinator decides, only its own
    death or silence may still end the step with an error.

The verdict is set once, by compare_set: whatever was meant by however many, everybody obeys what is
there. The coordinator deletes the keys of step k when all have arrived at k + 1; the last to close
deletes the rest. After an alarm some keys may stay, those of late values.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from ckptfs._version import __version__
from ckptfs.errors import CkptfsError, StateError
from ckptfs.topology.client import StoreClient
from ckptfs.topology.handshake import meet
from ckptfs.topology.heartbeat import Monitor, first_beat
from ckptfs.topology.leaving import bury, leave, linger
from ckptfs.topology.pulse import Tempo
from ckptfs.topology.stepkeys import StepKeys
from ckptfs.topology.verdict import (
    Said,
    Verdict,
    attempt,
    collective_error,
    decode_said,
    decode_verdict,
    encode_said,
    encode_verdict,
    failure_of,
    for_rank,
    joined,
    said_by,
    settle,
    split,
)
from ckptfs.topology.waits import LEAVE_S, Ground, Waits
from ckptfs.topology.world import World

__all__ = ["StoreControl"]

T = TypeVar("T")


log = logging.getLogger(__name__)


class _UnmadeError(CkptfsError):
    """A rank's piece cannot be pickled; why is its cause."""


def _made(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces. What pickle raises is told from what the store does."""
    try:
        yield from pieces
    except Exception as error:
        raise _UnmadeError("a piece cannot be pickled") from error


class StoreControl:
    """One rank's end of a control plane over a c10d store; see ``Control`` for every method.

    world: rank and size as the control shall have them. store: any c10d store that all ranks
    share; it is cloned, never used. ranks: the global ranks, so that groups do not meet by mistake.
    name: as in ``open_control``. closes_at_exit: False where somebody who has to end before it
    closes it at exit. Collective: returns when all ranks are there.
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
        ground = Ground(store, pulse, monitor, met.worlds, timeout_s, os.getpid(), closes_at_exit)
        self._setup(ground, met.worlds[world.rank], prefix)

    def _setup(self, ground: Ground, world: World, prefix: str) -> None:
        self.world = world
        self._ground = ground
        self._waits = Waits(ground, world.rank)
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
        self._io = StoreClient(ground.source, f"ckptfs-control-{world.rank}")
        # A control that was forgotten still says goodbye, so that nobody waits for its rank.
        if ground.closes_at_exit:
            atexit.register(self.close)

    @property
    def worlds(self) -> tuple[World, ...]:
        """Every rank's World, in order of rank."""
        return self._ground.worlds

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
        clone._setup(self._ground, self.world, f"{self._prefix}/clone{len(self._clones)}")
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
        if self._closed or os.getpid() != self._ground.pid:
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
    ) -> tuple[Verdict[Any], BaseException | None]:
        keys = self._keys()
        with self._working(keys, label):
            said, problem = attempt(label, local, self.world)
        self._index += 1
        if self._given_up is not None and not self._given_up.done():
            self._io.close()  # a client that still waits serves nobody else
            self._io = StoreClient(self._ground.source, f"ckptfs-control-{self.rank}")
        if problem is not None and not isinstance(problem, Exception):
            self._interrupted(keys, said)
            raise problem
        if self.rank:
            data = said_by(self.world, said)
            self._io.submit_short(lambda store: keys.arrive(store, self.rank, data))
            return self._obey(keys, label), problem
        try:
            verdict, raised = self._decide(keys, said, decide)
        except CkptfsError:
            raise
        except BaseException as error:  # Ctrl-C while waiting: nobody else would decide
            self._interrupted(keys, Said(label, failure=failure_of(error, self.world)))
            raise
        return verdict, problem or raised

    def _keys(self) -> StepKeys:
        """The keys of the step that comes next."""
        return StepKeys(self._prefix, self._index, self.size)

    def _decide(
        self, keys: StepKeys, own: Said, decide: Callable[[list[T]], Any] | None
    ) -> tuple[Verdict[Any], BaseException | None]:
        """The coordinator's part: gather, decide, offer the verdict. Also what decide raised."""
        label = own.label
        gathered = self._await(self._io.submit(keys.gather), keys, label)
        if not gathered:
            return self._obey(keys, label), None
        read = [name for _, names in gathered for name in names]
        heard = [
            own,
            *(self._heard(label, rank + 1, data) for rank, (data, _) in enumerate(gathered)),
        ]
        with self._working(keys, label):
            verdict, raised = settle(heard, decide, self.worlds)
        common, pieces = split(verdict)
        try:
            data = encode_verdict(common)
        except Exception as error:  # noqa: BLE001 - pickle raises anything
            raised, pieces = raised or error, iter(())
            verdict, data = self._failed(label, error)
        offered = self._io.submit_short(
            lambda store: keys.offer_verdict(store, data, _made(pieces))
        )
        # After the verdict: thousands of ranks wait for that, and nobody for this.
        self._io.submit_short(lambda store: keys.sweep(store, read))
        try:
            ours = self._await(offered, keys, label)
        except _UnmadeError as unmade:
            raised = raised or unmade.__cause__
            verdict, data = self._failed(label, unmade.__cause__ or unmade)
            again = self._io.submit_short(lambda store: keys.offer_verdict(store, data))
            ours = self._await(again, keys, label)
        if not ours:
            return self._obey(keys, label), raised  # the others gave us up while we were silent
        self._apart = keys if common.apart else self._apart
        self._io.submit_short(keys.acknowledge)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        return for_rank(verdict, 0), raised

    def _failed(self, label: str, error: BaseException) -> tuple[Verdict[Any], bytes]:
        """What the coordinator decided cannot travel: its failure is the answer."""
        failures = {0: failure_of(error, self.world)}
        verdict: Verdict[Any] = Verdict(error=collective_error(label, failures, self.worlds))
        return verdict, encode_verdict(verdict)

    def _heard(self, label: str, rank: int, data: bytes) -> Said:
        try:
            return decode_said(data)
        except Exception as error:  # noqa: BLE001 - unpickling raises anything
            # A class that only that rank can import. Raising here would leave the others waiting.
            return Said(label, failure=replace(failure_of(error, self.worlds[rank]), rank=rank))

    def _obey(self, keys: StepKeys, label: str) -> Verdict[Any]:
        """Wait for the verdict, whoever wrote it."""
        untaken = True
        try:
            verdict = decode_verdict(self._await(self._io.submit(keys.read_verdict), keys, label))
            if not verdict.apart:
                untaken = verdict.error is not None
                return verdict
            taken = self._io.submit(lambda store: keys.take_piece(store, self.rank))
            piece = self._await(taken, keys, label)
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

    def _interrupted(self, keys: StepKeys, said: Said) -> None:
        """Ctrl-C or exit on this rank: let the others know, wait for nobody."""
        if self.rank:
            data = encode_said(said)
            self._ground.pulse.submit_short(lambda store: keys.arrive(store, self.rank, data))
        elif said.failure is not None:
            failed = collective_error(said.label, {0: said.failure}, self.worlds)
            data = encode_verdict(Verdict(error=failed))
            self._ground.pulse.submit_short(lambda store: keys.end(store, data))
        self._ground.pulse.flush(LEAVE_S)

    # -- waiting, and what ends it ---------------------------------------------------------

    def _await(self, future: Future[T], keys: StepKeys, label: str) -> T:
        """Wait for an operation that waits for other ranks, as long as they are alive."""
        try:
            return self._waits.result(future, keys, label)
        except BaseException:
            self._given_up = future
            raise

    def _working(self, keys: StepKeys, label: str) -> AbstractContextManager[None]:
        """This thread does its part of the step; whoever is to hear of a hang of it is bound now."""
        tell = partial(self._waits.hangs, keys, label, self.hears)
        return self._ground.monitor.hanging.working(keys, tell)

    # -- leaving ---------------------------------------------------------------------------

    def close(self) -> None:
        """As ``Control.close``."""
        if self._closed or os.getpid() != self._ground.pid:
            return
        self._closed = True
        for clone in self._clones:
            clone.close()
        ground = self._ground
        monitor = ground.monitor if self._is_root else None
        if self.rank == 0 and self._index:
            linger(ground.pulse, ground.monitor, replace(self._keys(), number=self._index - 1))
        if self._apart is not None:
            bury(ground.pulse, ground.monitor, self._apart)
        if monitor is not None:
            monitor.stop()
        keys, rank = self._keys(), self.rank
        try:
            ground.pulse.call_short(lambda s: leave(s, keys, rank, ground.worlds, monitor), LEAVE_S)
        except CkptfsError as error:
            log.debug("left without a word: %s", error)  # the store went first: nobody listens
        self._io.close()
        if self._is_root:
            ground.pulse.close()
        atexit.unregister(self.close)
