"""Thousands of ranks in one process, one at a time: the control plane, counted.

    ends, steps = lockstep(4096, fn, nodes=[...])          fn(control) on every rank
    steps[3].label, .said_bytes, .verdict_bytes            what each collective step would have sent

    rank 0 runs to its next step -> rank 1 -> ... -> rank n-1 -> rank 0: all are there, it decides,
    reads the answer, and runs to its next step -> rank 1 reads the answer, ...

A rank is a thread, and exactly one of them runs: a step costs one switch per rank, no rank is woken for
nothing, and what the ranks do to storage comes in the order of their numbers, the same every time. So
counts are exact, and races are never seen (``simulate`` is for those). Values and errors go through
the codec of the real control plane, and its sizes are what is counted. The answer is decoded once and
all ranks get the same object: code that changed what it received would be found out at small sizes,
under ``simulate``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from ckptfs.control.control import Control
from ckptfs.control.messages import (
    StepVerdict,
    attempt,
    decode_message,
    decode_verdict,
    encode_verdict,
    joined,
    message_by,
    settle,
    split,
)
from ckptfs.control.rank_errors import collective_error, failure_of
from ckptfs.control.world import World
from ckptfs.errors import CkptfsError, Failure, StateError
from ckptfs.testing.world import End, worlds_of

__all__ = ["LockstepControl", "StepCost", "lockstep"]

T = TypeVar("T")

_STACK_BYTES = 512 << 10  # 4096 stacks of the usual 8 MiB are more than some machines map


@dataclass(frozen=True, slots=True)
class StepCost:
    """One collective step, encoded as the real control plane sends it.

    Attributes:
        label: The step.
        said_bytes: Bytes that ranks 1, 2, ... send to the coordinator, together.
        verdict_bytes: Bytes of the one answer, which each of them reads.
        pieces_bytes: Bytes that are for one of them alone, together.
        decide_s: Seconds from the last arrival to the answer, on the coordinator.
    """

    label: str
    said_bytes: int
    verdict_bytes: int
    pieces_bytes: int
    decide_s: float

    def read_bytes(self, ranks: int) -> int:
        """Return the bytes that ``ranks`` ranks read from the store: values and pieces once, the answer by all
        but the coordinator.
        """
        return self.said_bytes + (ranks - 1) * self.verdict_bytes + self.pieces_bytes


def lockstep(
    size: int,
    fn: Callable[[Control], T],
    *,
    nodes: Sequence[str] | None = None,
    job_id: str | None = "simulated",
) -> tuple[list[End[T]], list[StepCost]]:
    """Run ``fn(control)`` on ranks in turn.

    One call at a time per process: the size of the threads' stacks is the process's.

    Args:
        size: How many ranks.
        fn: What each rank does.
        nodes: The node of each rank; None puts all of them on one.
        job_id: The name of the job; None: it has none.

    Returns:
        How each rank ended, and what each step sent.
    """
    ring = _Ring(worlds_of(size, nodes, job_id))
    ends: list[End[T]] = [End(rank, error=StateError("did not end")) for rank in range(size)]

    def run(rank: int) -> None:
        ring.wait_for_turn(rank)
        try:
            ends[rank] = End(rank, value=fn(LockstepControl(ring, rank, "")))
        except BaseException as error:  # noqa: BLE001 - the rank's end, whatever it is
            ends[rank] = End(rank, error=error)
        finally:
            ring.leave(rank)

    with _small_stacks():
        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
    ring.begin()
    for thread in threads:
        thread.join()
    return ends, ring.costs


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


@dataclass(slots=True)
class _Step:
    """One step under way: what was said so far, and the answer once there is one."""

    said: dict[int, bytes] = field(default_factory=dict)
    verdict: StepVerdict[Any] | None = None
    pieces: list[bytes] = field(default_factory=list)


class _Ring:
    """Which rank has the turn. Only that rank touches anything here, so nothing is locked."""

    def __init__(self, worlds: tuple[World, ...]) -> None:
        self.worlds = worlds
        self.costs: list[StepCost] = []
        self._steps: dict[tuple[str, int], _Step] = {}
        self._gates = [threading.Lock() for _ in worlds]
        self._next = [(rank + 1) % len(worlds) for rank in range(len(worlds))]
        self._before = [(rank - 1) % len(worlds) for rank in range(len(worlds))]
        self._ended: dict[int, str] = {}
        for gate in self._gates:
            gate.acquire()

    def begin(self) -> None:
        """Rank 0's turn."""
        self._gates[0].release()

    def wait_for_turn(self, rank: int) -> None:
        """Sleep until it comes."""
        self._gates[rank].acquire()

    def leave(self, rank: int) -> None:
        """This rank has ended: the next one's turn, and it will never come back here."""
        self._ended[rank] = f"left: {self.worlds[rank].place}"
        before, after = self._before[rank], self._next[rank]
        self._next[before], self._before[after] = after, before
        if after != rank:
            self._gates[after].release()

    def arrive(self, key: tuple[str, int], rank: int, data: bytes) -> _Step:
        """Say it, let the others run, return when it is this rank's turn again."""
        step = self._steps.setdefault(key, _Step())
        step.said[rank] = data
        self._gates[self._next[rank]].release()
        self.wait_for_turn(rank)
        return step

    def decide(
        self, step: _Step, label: str, decide: Callable[[list[Any]], Any] | None, rank: int
    ) -> BaseException | None:
        """The first to have its turn when all have said something, or ended, makes the answer."""
        began = time.perf_counter()
        raised = None
        pieces: list[bytes] = []
        missing = [r for r in range(len(self.worlds)) if r not in step.said]
        if missing or rank:
            verdict: StepVerdict[Any] = StepVerdict(error=self._lost(label, missing))
        else:
            said = [decode_message(step.said[r]) for r in range(len(self.worlds))]
            verdict, raised = settle(said, decide, self.worlds)
        try:
            common, each = split(verdict)
            data, pieces = encode_verdict(common), list(each)
        except Exception as error:  # noqa: BLE001 - pickle raises anything
            failures = {0: failure_of(error, self.worlds[0])}
            data = encode_verdict(StepVerdict(error=collective_error(label, failures, self.worlds)))
        sizes = sum(len(value) for r, value in step.said.items() if r)
        apart = sum(map(len, pieces[1:]))
        self.costs.append(StepCost(label, sizes, len(data), apart, time.perf_counter() - began))
        step.said.clear()
        step.pieces = pieces
        step.verdict = decode_verdict(data)
        return raised

    def forget(self, key: tuple[str, int]) -> None:
        """Drop the step before this one: everybody has read its answer."""
        self._steps.pop((key[0], key[1] - 1), None)

    def _lost(self, label: str, missing: Sequence[int]) -> CkptfsError:
        kind = "ckptfs.errors.CollectiveError"
        failures = {
            r: Failure(r, self.worlds[r].node, kind, self._ended[r])
            for r in missing
            if r in self._ended
        }
        if not failures:
            return StateError(f"{label}: ranks {missing[:8]} wait in another control")
        return collective_error(label, failures, self.worlds)


class LockstepControl:
    """The Control of one rank of ``lockstep``; see ``Control`` for what each call means.

    Args:
        ring: All ranks.
        rank: This one.
        path: Names this control among its clones.

    Attributes:
        world: This rank.
    """

    def __init__(self, ring: _Ring, rank: int, path: str) -> None:
        self.world = ring.worlds[rank]
        self._ring = ring
        self._path = path
        self._index = 0
        self._clones = 0

    @property
    def worlds(self) -> tuple[World, ...]:
        """Every simulated rank's World."""
        return self._ring.worlds

    @property
    def rank(self) -> int:
        """0 ... size - 1."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.worlds)

    def step(
        self, label: str, local: Callable[[], T], decide: Callable[[list[T]], Any] | None = None
    ) -> Any:
        """Return what ``decide`` makes of the values of ``local`` on all ranks, in the step ``label``; None:
        nothing. As ``Control.step``.
        """
        key = (self._path, self._index)
        self._index += 1
        said, problem = attempt(label, local, self.world)
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        step = self._ring.arrive(key, self.rank, message_by(self.world, said))
        raised = None
        if step.verdict is None:
            raised = self._ring.decide(step, label, decide, self.rank)
            self._ring.forget(key)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        verdict: StepVerdict[Any] = step.verdict  # type: ignore[assignment] # decided above or before
        if verdict.apart:
            verdict = joined(verdict, step.pieces[self.rank])
        return verdict.unwrap(problem or raised)

    def clone(self) -> LockstepControl:
        """Return a clone, as ``Control.clone``; but there is one turn for all, so it serves the same thread."""
        self._clones += 1
        return LockstepControl(self._ring, self.rank, f"{self._path}/{self._clones}")

    def close(self) -> None:
        """Nothing to leave: the rank leaves when its function returns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
