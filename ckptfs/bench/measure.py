"""The measurements, as every rank runs them.

    for each workload: make its tensors
        for each target, round 0 (a warm-up, which does not count), 1, 2, ...
            for each engine, in an order that changes every round:
                save                     timed
                fill the page cache      load_warm, timed      compare
                empty it, if possible    load_cold, timed      compare
                remove the files

Only the call is timed: not the making of data, comparing, deleting or cache handling. If an engine fails
that the user did not name, it leaves that target, with a note. If ckptfs fails, or an engine that the
user named, the benchmark ends.

The workload ``loop`` is a training loop that is saved while it runs:

    steps          the loop alone
    steps_saving   the same steps with an asynchronous save after every n-th
    stall          the call of one such save, until the tensors may be changed: the median of the round

    ckptfs   async_save into a held run          dcp   async_save in a thread, FileSystemWriter
    raw      a copy into memory that was touched before: the least that a save of CPU tensors costs

A step multiplies matrices and then changes every tensor of the state, as an optimizer does. The wait for
the last save is not timed. If a save is still under way when the next one is due, the wait for it is part
of the next one's stall.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckptfs
from ckptfs import _torch
from ckptfs.bench.clock import Clock, Spent, Wire, WireKind, together
from ckptfs.bench.engines import Attempt, Cached, Chosen, Driver, Setting, choose, ready
from ckptfs.bench.engines_checkpoint import Ckptfs, Fsspec
from ckptfs.bench.messages import Asked, LoopShape, Progress, Told, WorkloadAsked
from ckptfs.bench.rank import TorchGroup
from ckptfs.bench.results import Phase, Sample, Workload
from ckptfs.bench.target import Home, fsspec_uri, has_cold
from ckptfs.bench.workloads import (
    State,
    WorkloadSpec,
    clear,
    differences,
    local_of,
    locals_of,
    make_blank,
    make_state,
)
from ckptfs.errors import CkptfsError, IntegrityError
from ckptfs.text import size_text
from ckptfs.uri import mask_credentials

__all__ = ["LOOPERS", "Looped", "Looper", "loop_round", "measure_ranks", "open_looper"]

# -- a training loop -------------------------------------------------------------------------------


_MATRIX = 512
_MULTIPLICATIONS = 8

Wait = Callable[[], object]


class Looper(ABC):
    """An engine's saves in one loop. Its calls are collective."""

    @abstractmethod
    def save(self, state: State, step: int) -> Wait:
        """Save ``state`` as ``step``. Returns when the tensors may be changed.

        Returns:
            A function that waits until the save has ended.
        """

    def close(self) -> None:
        """Release resources. Called after the loop, when all its saves have ended."""


class _CkptfsLooper(Looper):
    def __init__(self, driver: Ckptfs, at: Attempt) -> None:
        self._at = at
        self._options = driver.options
        self._stack = contextlib.ExitStack()
        self._run = self._stack.enter_context(
            ckptfs.prepare_run(at.place.full, storage_options=self._options)
        )

    def save(self, state: State, step: int) -> Wait:
        pending = ckptfs.async_save(
            state, self._at.checkpoint(step), run=self._run, storage_options=self._options
        )
        return pending.result

    def close(self) -> None:
        self._stack.close()


class _DcpLooper(Looper):
    def __init__(self, driver: Driver, at: Attempt) -> None:
        self._driver, self._at = driver, at

    def save(self, state: State, step: int) -> Wait:
        writer: Any
        if isinstance(self._driver, Fsspec):
            uri = fsspec_uri(self._at.place / f"step_{step}")
            writer = _torch.fsspec_writer(uri, sync_files=False, **self._driver.options)
        else:
            durable = self._driver.setting.durable
            writer = dcp.FileSystemWriter(f"{self._at.path}/step_{step}", sync_files=durable)
        kind = AsyncCheckpointerType.THREAD
        answer: Any = dcp.async_save(
            dict(state), storage_writer=writer, async_checkpointer_type=kind
        )
        wait: Wait = getattr(answer, "upload_completion", answer).result
        return wait


class _CopyLooper(Looper):
    def __init__(self, state: State) -> None:
        self._copies = {name: torch.zeros_like(one) for name, one in locals_of(state).items()}

    def save(self, state: State, step: int) -> Wait:
        for name, tensor in locals_of(state).items():
            self._copies[name].copy_(tensor)
        return lambda: None


LOOPERS = ("ckptfs", "dcp", "raw")


def open_looper(name: str, driver: Driver, at: Attempt, state: State) -> Looper:
    """Return the ``Looper`` of an engine.

    Args:
        name: The engine.
        driver: Its driver.
        at: Where it saves.
        state: The state to save.
    """
    if name == "raw":
        return _CopyLooper(state)
    return _CkptfsLooper(driver, at) if isinstance(driver, Ckptfs) else _DcpLooper(driver, at)


class Looped:
    """The results of one round of a loop.

    Args:
        alone: The cost of the loop alone.
        saving: The cost of the loop with saves.
        stalls: All stalls of the round.

    Attributes:
        stall_wall_s: The median of the stalls, in seconds.
        stall_cpu_s: The median of the stalls' CPU time, in seconds.
    """

    def __init__(self, alone: Spent, saving: Spent, stalls: list[Spent]) -> None:
        self.alone = alone
        self.saving = saving
        self.stall_wall_s = statistics.median(one.wall_s for one in stalls)
        self.stall_cpu_s = statistics.median(one.cpu_s for one in stalls)


class _Stalls:
    """The loop with saves, as one call that the clock can measure."""

    def __init__(self, looper: Looper, state: State, shape: LoopShape) -> None:
        self._looper, self._state, self._shape = looper, state, shape
        self.wait: Wait = lambda: None
        self.found: list[Spent] = []

    def run(self) -> None:
        for step in range(1, self._shape.steps + 1):
            _train(self._state)
            if step % self._shape.every == 0 and step < self._shape.steps:
                cpu, began = time.process_time(), time.perf_counter()
                self.wait()
                self.wait = self._looper.save(self._state, step)
                now = time.perf_counter()
                self.found.append(Spent(now - began, time.process_time() - cpu))


def loop_round(
    clock: Clock, looper: Looper, state: State, shape: LoopShape, setting: Setting
) -> Looped:
    """Run one loop alone and, directly after it, one with saves, so that they compare. Collective.

    Args:
        clock: Measures both.
        looper: Makes the saves.
        state: The state to save.
        shape: The shape of the loop.
        setting: The target, the ranks and the durability.

    Returns:
        The results of the round.

    Raises:
        CkptfsError: A save failed, perhaps after the measured time. The same on every rank.
    """

    def alone() -> None:
        for _ in range(shape.steps):
            _train(state)

    without = clock.time(alone)
    saving = _Stalls(looper, state, shape)
    try:
        spent = clock.time(saving.run)
    except CkptfsError:
        with contextlib.suppress(CkptfsError):  # the same error, or one that no longer matters
            together(setting.group, saving.wait)
        raise
    together(setting.group, saving.wait)
    stalls: list[list[Spent]] = setting.group.gather(saving.found)
    slowest = [
        Spent(max(s.wall_s for s in one), sum(s.cpu_s for s in one))
        for one in zip(*stalls, strict=True)
    ]
    return Looped(without, spent, slowest)


def _train(state: State) -> None:
    work = torch.full((_MATRIX, _MATRIX), 1.0 / _MATRIX)
    for _ in range(_MULTIPLICATIONS):
        work = work @ work
    for tensor in state.values():
        local_of(tensor).mul_(0.9999)


Tell = Callable[[Told], None]
# -- rounds ----------------------------------------------------------------------------------------


_OF_A_LOOP: tuple[Phase, ...] = ("stall", "steps", "steps_saving")
_MAY_STAY = 0.05  # the share of pages that may stay in memory without changing a cold load


@dataclass(frozen=True, slots=True)
class _Moved:
    """One workload's tensors on this rank."""

    spec: WorkloadSpec
    state: State
    target: State


def measure_ranks(asked: Asked, group: TorchGroup, tell: Tell) -> None:
    """Measure everything that ``asked`` names. Collective.

    Args:
        asked: What to measure.
        group: The ranks.
        tell: Called with each result, only on rank 0.

    Raises:
        CkptfsError: The benchmark failed; the error is the same on every rank.
    """
    say: Tell = tell if group.rank == 0 else lambda _: None
    homes = [Home(target) for target in asked.targets]
    for home in homes:
        say(home.describe())
        if home.wire is WireKind.LOOPBACK:
            say(
                f"bytes on the wire of {home.place}: of the loopback, where both directions are one "
                "number, and other programs' and ranks' are in it"
            )
        elif home.wire is WireKind.NETWORK:
            say(f"bytes on the wire of {home.place}: of this machine, other programs' are in it")
    ends = _Ends(asked)
    for workload in asked.workloads:
        moved = _made(workload, group)
        say(Progress(f"{moved.spec.name}: {size_text(moved.spec.size_bytes)} were made"))
        say(
            Workload(
                moved.spec.name,
                len(moved.spec.tensors),
                moved.spec.size_bytes,
                moved.spec.told,
                *moved.spec.tensor_sizes_bytes,
            )
        )
        for home in homes:
            at_target = _AtTarget(asked, group, say, home, moved)
            at_target.ends_s = ends.next_s()
            if workload.kind == "loop":
                at_target.run_loop()
            else:
                at_target.run()


def _made(workload: WorkloadAsked, group: TorchGroup) -> _Moved:
    spec = workload.made()
    state = make_state(spec, group.rank, group.size)
    return _Moved(spec, state, make_blank(spec, group.rank, group.size))


class _Ends:
    """The time limits of workloads at targets: those that are left share the remaining time."""

    def __init__(self, request: Asked) -> None:
        self._left = len(request.workloads) * len(request.targets)
        self._end_s = None if request.within_s is None else time.perf_counter() + request.within_s

    def next_s(self) -> float | None:
        """Return when the next one has to end, on this rank's clock; None: no limit."""
        if self._end_s is None:
            return None
        now_s = time.perf_counter()
        share_s = max(0.0, self._end_s - now_s) / self._left
        self._left -= 1
        return now_s + share_s


class _AtTarget:
    """One workload at one target.

    Attributes:
        ends_s: When the last round should have ended, on this rank's clock; None: no limit.
    """

    ends_s: float | None = None

    def __init__(
        self, request: Asked, group: TorchGroup, say: Tell, home: Home, moved: _Moved
    ) -> None:
        self._request, self._group, self._say = request, group, say
        self._home, self._moved = home, moved
        self._setting = Setting(home, group, request.durable)
        self._clock = Clock(
            group, Wire(home.wire, counts=group.is_first_of_node), request.memory_from
        )
        self._samples: list[Sample] = []
        self._round_s = 0.0

    # -- saves and loads

    def run(self) -> None:
        """Run all rounds."""
        chosen, notes = choose(self._request.engines, self._home.place)
        self._note(notes)
        drivers = self._drivers(chosen)
        for number in self._rounds():
            for label in _turn(list(drivers), number):
                self._tell_round(number, label)
                try:
                    self._once(label, drivers[label], number)
                except CkptfsError as error:
                    del drivers[label]
                    self._leave(label, error)
        self._finish()

    def _once(self, label: str, driver: Driver, number: int) -> None:
        at = self._attempt(label, number)
        try:
            save = self._clock.time(lambda: driver.save(self._moved.state, at))
            self._sample(label, "save", number, save)
            if "load_warm" in self._request.phases:
                self._load(label, driver, number, at, Cached.WARM)
            if "load_cold" in self._request.phases and has_cold(self._home):
                self._load(label, driver, number, at, Cached.COLD)
        except CkptfsError:
            with contextlib.suppress(CkptfsError):
                self._clear(at)
            raise
        if not (self._request.keep and number == self._request.rounds):
            self._clear(at)

    def _load(self, label: str, driver: Driver, number: int, at: Attempt, cached: Cached) -> None:
        clear(self._moved.target)
        if cached is Cached.COLD:
            if not self._evicted(at):
                return
        elif self._group.is_first_of_node:
            self._home.fill(at.name)
        spent = self._clock.time(lambda: driver.load(self._moved.target, at, cached))
        if not driver.about().is_limit:
            self._check(label)
        self._sample(label, "load_cold" if cached is Cached.COLD else "load_warm", number, spent)

    def _evicted(self, at: Attempt) -> bool:
        """Evict an attempt's files from the page cache. Collective.

        False: too much stayed in memory, so a load would not be cold.
        """
        stayed = self._group.gather(self._home.evict(at.name))
        if max((one for one in stayed if one is not None), default=0.0) <= _MAY_STAY:
            return True
        self._say(
            f"{self._home.place}: files stayed in memory after they were taken out of the page cache; "
            "such loads are not cold and were left out"
        )
        return False

    def _check(self, label: str) -> None:
        """Raise IntegrityError on all ranks if a loaded tensor is not as saved. Collective."""
        wrong = self._group.gather(differences(self._moved.state, self._moved.target)[:1])
        names = [name for one in wrong for name in one]
        if names:
            raise IntegrityError(
                f"{label} did not load {names[0]} as it was saved", uri=self._home.place
            )

    def _clear(self, at: Attempt) -> None:
        self._group.barrier()
        here = self._group.is_first_of_node if self._home.place.is_local else self._group.rank == 0
        together(self._group, lambda: self._home.clear(at.name) if here else None)

    # -- a training loop

    def run_loop(self) -> None:
        """Run all rounds of a loop. Engines without asynchronous saves take no part."""
        chosen, notes = choose(self._request.engines, self._home.place)
        self._note(notes)
        quiet = [one.label for one in chosen if one.name not in LOOPERS]
        self._note(f"{name} takes no part in a training loop" for name in quiet)
        drivers = self._drivers([one for one in chosen if one.name in LOOPERS])
        names = {one.label: one.name for one in chosen}
        for number in self._rounds():
            for label in _turn(list(drivers), number):
                self._tell_round(number, label)
                try:
                    self._loop_once(label, names[label], drivers[label], number)
                except CkptfsError as error:
                    del drivers[label]
                    self._leave(label, error)
        self._finish()

    def _loop_once(self, label: str, name: str, driver: Driver, number: int) -> None:
        at = self._attempt(label, number)
        try:
            with contextlib.closing(open_looper(name, driver, at, self._moved.state)) as looper:
                found = loop_round(
                    self._clock, looper, self._moved.state, self._request.loop, self._setting
                )
        finally:
            self._clear(at)
        self._sample(label, "stall", number, Spent(found.stall_wall_s, found.stall_cpu_s))
        if name != "raw":
            self._sample(label, "steps", number, found.alone)
            self._sample(label, "steps_saving", number, found.saving)

    # -- both

    def _rounds(self) -> Iterator[int]:
        """Yield the rounds' numbers, warm-ups first; after round 1, only while there is time."""
        for number in range(1 - self._request.warm_ups, self._request.rounds + 1):
            if number > 1 and self._is_late():
                self._say(
                    f"{self._moved.spec.name} at {self._home.place}: {number - 1} of {self._request.rounds} "
                    f"rounds fit into {self._request.within_s:g} s"
                )
                return
            began_s = time.perf_counter()
            yield number
            self._round_s = time.perf_counter() - began_s

    def _is_late(self) -> bool:
        """Whether another round would end too late, by the clock of rank 0. Collective."""
        if self.ends_s is None:
            return False
        late: bool = self._group.gather(time.perf_counter() + self._round_s > self.ends_s)[0]
        return late

    def _drivers(self, chosen: Sequence[Chosen]) -> dict[str, Driver]:
        drivers: dict[str, Driver] = {}
        made: list[Driver] = []
        for one in chosen:
            try:
                together(self._group, partial(self._open, one, made))
            except CkptfsError as error:
                self._leave(one.label, error)
                continue
            drivers[one.label] = made[-1]
            self._say(made[-1].about())
        return drivers

    def _open(self, one: Chosen, made: list[Driver]) -> None:
        made.append(ready(one, self._setting))

    def _leave(self, label: str, error: CkptfsError) -> None:
        """Handle an engine's failure: leave it out at this target, or end the benchmark."""
        if label in self._request.engines or label == "ckptfs":
            raise error
        self._samples = [one for one in self._samples if one.engine != label]
        reason = mask_credentials(str(error))
        self._say(f"{label} failed at {self._home.place} and was left out there: {reason}")

    def _attempt(self, label: str, number: int) -> Attempt:
        name = f"{self._moved.spec.name}-{label.replace(':', '-')}-{number}"
        return Attempt(self._home, name)

    def _sample(self, label: str, phase: Phase, number: int, spent: Spent) -> None:
        if number < 1 or phase not in (*self._request.phases, *_OF_A_LOOP):
            return
        sent, received = spent.sent_bytes, spent.received_bytes
        if self._home.wire is WireKind.LOOPBACK:
            sent, received = (sent, None) if phase == "save" else (None, received)
        self._samples.append(
            Sample(
                label,
                self._moved.spec.name,
                str(self._home.place),
                phase,
                number,
                spent.wall_s,
                spent.cpu_s,
                self._moved.spec.size_bytes,
                sent,
                received,
                spent.peak_memory_bytes,
            )
        )

    def _tell_round(self, number: int, label: str) -> None:
        turn = f"round {number} of {self._request.rounds}" if number > 0 else "warm-up"
        text = f"{self._moved.spec.name} at {self._home.place}: {turn}, {label}"
        if self._round_s:
            left_s = self._round_s * (self._request.rounds - max(number, 1) + 1)
            if self.ends_s is not None:
                left_s = min(left_s, max(self._round_s, self.ends_s - time.perf_counter()))
            text += f"; less than {left_s:.0f} s left here"
        self._say(Progress(text))

    def _note(self, notes: Iterable[str]) -> None:
        for note in notes:
            self._say(note)

    def _finish(self) -> None:
        for sample in self._samples:
            self._say(sample)


def _turn(labels: list[str], number: int) -> list[str]:
    """Return a round's order: each begins with another engine, every second one runs backwards.

    So the neighbours of each engine change.
    """
    way = -1 if number % 2 else 1
    return [labels[(number + way * i) % len(labels)] for i in range(len(labels))]
