"""Simulated worlds: many ranks as threads of one process, with the semantics of real ranks.

    def save(control: Control) -> str: ...
    ends = simulate(4, save, nodes=["a", "a", "b", "b"])
    assert [end.get() for end in ends] == [...]           # get() raises what the rank raised

``ThreadControl`` is the in-process Control. It has the same verdicts, the same barrier, and the same
errors between ranks; these pass through the same codec, so a value that cannot be pickled fails here too.
If a rank ends early, leaves, or *dies* (``SimulatedDeath``, raised by a fault wrapper at its operation
k), the step of the others ends with the CollectiveError that a real control raises. Thousands of cases
take seconds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ckptfs.control.control import Control
from ckptfs.control.messages import (
    Message,
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
from ckptfs.errors import DeadlineError, Failure, StateError

__all__ = ["End", "SimulatedDeath", "ThreadControl", "simulate", "thread_worlds", "worlds_of"]

T = TypeVar("T")


class SimulatedDeath(BaseException):
    """This rank's process ends here, as if it was killed. No code under test may catch it.

    The wrapper that raised it must refuse every later operation of the same rank, because a thread runs
    ``finally`` blocks and a killed process does not.
    """


@dataclass(frozen=True)
class End(Generic[T]):
    """How one simulated rank ended: its value, its error, or its death.

    Attributes:
        rank: The rank.
        value: What it returned; None if it raised.
        error: What it raised; None if it returned.
    """

    rank: int
    value: T | None = None
    error: BaseException | None = None

    @property
    def died(self) -> bool:
        """Whether SimulatedDeath killed it."""
        return isinstance(self.error, SimulatedDeath)

    def get(self) -> T:
        """The value that the rank returned; raises what the rank raised."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value] # None is a value too


def simulate(
    size: int,
    fn: Callable[[Control], T],
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    job_id: str | None = "simulated",
) -> list[End[T]]:
    """Run ``fn(control)`` on simulated ranks, all at the same time, as threads of this process.

    Args:
        size: The number of ranks.
        fn: The function that each rank runs.
        nodes: The node of each rank; None puts all of them on one.
        timeout_s: How many seconds of real time a step waits for a rank that neither calls nor ends.
            After that the step ends with a ``DeadlineError``.
        job_id: The name of the job; None: it has none.

    Returns:
        How each rank ended, in order of rank.
    """
    controls = thread_worlds(size, nodes=nodes, timeout_s=timeout_s, job_id=job_id)
    ends: list[End[T]] = [End(rank, error=StateError("did not end")) for rank in range(size)]

    def run(control: ThreadControl) -> None:
        rank = control.rank
        try:
            ends[rank] = End(rank, value=fn(control))
        except SimulatedDeath as death:
            control.die()
            ends[rank] = End(rank, error=death)
        except BaseException as error:  # noqa: BLE001 - the rank's end, whatever it is
            ends[rank] = End(rank, error=error)
        finally:
            control.leave_all()

    threads = [
        threading.Thread(target=run, args=(c,), name=f"rank-{c.rank}", daemon=True)
        for c in controls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s + 60)  # if the code under test hangs, the End says which rank
    return ends


def thread_worlds(
    size: int,
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    job_id: str | None = "simulated",
) -> list[ThreadControl]:
    """The controls of one simulated world, for tests that run the threads themselves.

    Args:
        size: The number of ranks.
        nodes: The node of each rank; None puts all of them on one.
        timeout_s: How many seconds of real time a step waits for a rank.
        job_id: The name of the job; None: it has none.
    """
    shared = _SharedState(worlds_of(size, nodes, job_id), timeout_s)
    return [ThreadControl(shared, rank, "") for rank in range(size)]


def worlds_of(
    size: int, nodes: Sequence[str] | None = None, job_id: str | None = "simulated"
) -> tuple[World, ...]:
    """Return the World of every simulated rank.

    Args:
        size: The number of ranks.
        nodes: The node of each rank; None puts all of them on one.
        job_id: The name of the job; None: it has none.

    Raises:
        StateError: The number of nodes is not the number of ranks.
    """
    names = list(nodes or ["node0"] * size)
    if len(names) != size:
        raise StateError(f"{size} ranks, but {len(names)} node names")
    sizes, placed = Counter(names), Counter[str]()
    worlds = []
    for rank, node in enumerate(names):
        here = World(rank, size, placed[node], sizes[node], node, f"host-{node}", rank + 1, job_id)
        worlds.append(replace(here, has_group=True))
        placed[node] += 1
    return tuple(worlds)


@dataclass
class _Step:
    """One step under way: the messages so far, and the answer once there is one."""

    messages: dict[int, bytes] = field(default_factory=dict)
    answer: bytes | None = None
    pieces: list[bytes] = field(default_factory=list)
    deciding: bool = False


class _SharedState:
    """The shared state of all ranks. ``news`` guards all fields."""

    def __init__(self, worlds: tuple[World, ...], timeout_s: float) -> None:
        self.worlds = worlds
        self.timeout_s = timeout_s
        self.news = threading.Condition()
        self.steps: dict[tuple[str, int], _Step] = {}
        self.gone: dict[tuple[str, int], str] = {}  # (clone, rank) -> why it will never call again
        self.dead: set[int] = set()

    def step(self, key: tuple[str, int]) -> _Step:
        return self.steps.setdefault(key, _Step())

    def lost(self, clone: str, received: dict[int, bytes]) -> dict[int, Failure]:
        """Return the ranks that can never complete this step, with the reasons.

        These are the dead ranks, and those that left before they sent their message.
        """
        lost = {}
        for rank, world in enumerate(self.worlds):
            why = "the process is gone" if rank in self.dead else None
            if why is None and rank not in received:
                why = self.gone.get((clone, rank))
            if why is not None:
                kind = "ckptfs.errors.CollectiveError"
                lost[rank] = Failure(rank=rank, node=world.node, type=kind, message=why)
        return lost


class ThreadControl:
    """The in-process Control of one simulated rank; see ``Control`` for the meaning of each call.

    Args:
        hall: The shared state of all ranks.
        rank: The number of this rank.
        path: Identifies this control among its clones.

    Attributes:
        world: The World of this rank.
    """

    def __init__(self, hall: _SharedState, rank: int, path: str) -> None:
        self.world = hall.worlds[rank]
        self._shared = hall
        self._path = path
        self._index = 0
        self._clones: list[ThreadControl] = []

    @property
    def worlds(self) -> tuple[World, ...]:
        """The World of every simulated rank."""
        return self._shared.worlds

    @property
    def rank(self) -> int:
        """The number of this rank, from 0 to size - 1."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return len(self.worlds)

    def step(
        self, label: str, local: Callable[[], T], decide: Callable[[list[T]], Any] | None = None
    ) -> Any:
        """Return what ``decide`` makes of the values of ``local`` on all ranks; None: these values.
        As ``Control.step``; ``label`` names the step in messages.
        """
        key = (self._path, self._index)
        message, problem = attempt(label, local, self.world)
        if isinstance(problem, SimulatedDeath):
            self.die()
            raise problem
        self._say(key, message)
        if problem is not None and not isinstance(problem, Exception):
            if self.rank == 0:
                self._interrupted(key, message)  # no other rank would decide
            raise problem
        if self.rank == 0:
            self._decide(key, label, decide)
        answer = self._await_answer(key, label)
        verdict = decode_verdict(answer)
        if verdict.apart:
            verdict = joined(verdict, self._shared.step(key).pieces[self.rank])
        return verdict.unwrap(problem)

    def clone(self) -> ThreadControl:
        """Return a clone, like ``Control.clone``."""
        self._clones.append(
            ThreadControl(self._shared, self.rank, f"{self._path}/{len(self._clones)}")
        )
        return self._clones[-1]

    def close(self) -> None:
        """Leave, like ``Control.close``, but without waiting: no store has to be kept alive."""
        with self._shared.news:
            self._shared.gone.setdefault((self._path, self.rank), f"left: {self.world.place}")
            self._shared.news.notify_all()

    def leave_all(self) -> None:
        """Close this control and all its clones, because this rank's function has returned."""
        for control in self._family():
            control.close()

    def die(self) -> None:
        """Mark this rank's process as dead: the others' steps fail, even if it sent its message."""
        with self._shared.news:
            self._shared.dead.add(self.rank)
            self._shared.news.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _family(self) -> Iterator[ThreadControl]:
        yield self
        for clone in self._clones:
            yield from clone._family()  # noqa: SLF001 - one class

    def _say(self, key: tuple[str, int], message: Message) -> None:
        data = message_by(self.world, message)
        self._index += 1
        with self._shared.news:
            self._shared.step(key).messages[self.rank] = data
            self._shared.news.notify_all()

    def _interrupted(self, key: tuple[str, int], message: Message) -> None:
        if message.failure is None:
            return
        error = collective_error(message.label, {0: message.failure}, self._shared.worlds)
        with self._shared.news:
            step = self._shared.step(key)
            step.answer = step.answer or encode_verdict(StepVerdict(error=error))
            self._shared.news.notify_all()

    def _decide(
        self, key: tuple[str, int], label: str, decide: Callable[[list[T]], Any] | None
    ) -> None:
        shared = self._shared
        with shared.news:
            step = shared.step(key)
            complete = shared.news.wait_for(
                lambda: (
                    len(step.messages) == self.size
                    or step.answer is not None
                    or bool(shared.lost(self._path, step.messages))
                ),
                shared.timeout_s,
            )
            lost = shared.lost(self._path, step.messages)
            if step.answer is None and (lost or not complete):
                error = (
                    collective_error(label, lost, shared.worlds)
                    if lost
                    else self._silent(label, step.messages)
                )
                step.answer = encode_verdict(StepVerdict(error=error))
            if step.answer is not None:
                shared.news.notify_all()
                return
            step.deciding = True
            messages = [decode_message(step.messages[rank]) for rank in range(self.size)]
        verdict, raised = settle(messages, decide, shared.worlds)
        if isinstance(raised, SimulatedDeath):
            self.die()
            raise raised
        pieces: list[bytes] = []
        try:
            common, each = split(verdict)
            data, pieces = encode_verdict(common), list(each)
        except Exception as error:  # noqa: BLE001 - pickle raises anything
            failure = failure_of(error, self.world)
            failed = collective_error(label, {0: failure}, shared.worlds)
            data = encode_verdict(StepVerdict(error=failed))
        with shared.news:
            if step.answer is None:
                step.answer, step.pieces = data, pieces
            shared.news.notify_all()
        if raised is not None and not isinstance(raised, Exception):
            raise raised

    def _await_answer(self, key: tuple[str, int], label: str) -> bytes:
        shared = self._shared
        with shared.news:
            step = shared.step(key)
            while step.answer is None:
                lost = shared.lost(self._path, step.messages)
                # Once all ranks have sent their messages, only the coordinator's end can fail the step.
                if lost and (not step.deciding or 0 in lost):
                    failed = collective_error(label, lost, shared.worlds)
                    step.answer = encode_verdict(StepVerdict(error=failed))
                elif not shared.news.wait(shared.timeout_s) and not step.deciding:
                    error = self._silent(label, step.messages)
                    step.answer = encode_verdict(StepVerdict(error=error))
            shared.news.notify_all()
            return step.answer

    def _silent(self, label: str, received: dict[int, bytes]) -> DeadlineError:
        silent = tuple(rank for rank in range(self.size) if rank not in received)
        return DeadlineError(
            f"{label}: ranks {list(silent)} were silent for {self._shared.timeout_s:g} s",
            silent=silent,
        )
