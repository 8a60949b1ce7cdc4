"""A training loop that is saved while it runs: how long a save holds it, and how much slower it is.

    steps          the loop alone
    steps_saving   the same steps with an asynchronous save after every n-th
    stall          the call of one such save, until the tensors may be changed: the median of the round

    ckptfs   async_save into a held run          dcp   async_save in a thread, FileSystemWriter
    raw      a copy into memory that was touched before: the least that a save of CPU tensors costs

A step multiplies matrices and then changes every tensor of the state, as an optimizer does. The last
save is waited for outside the clock, and so is one that is still under way when the next is due: that
wait is part of the next one's stall.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckptfs
from ckptfs import _torch
from ckptfs.bench.ask import LoopShape
from ckptfs.bench.clock import Clock, Spent, together
from ckptfs.bench.engine_ckptfs import Ckptfs
from ckptfs.bench.engine_dcp import Fsspec
from ckptfs.bench.engines import Attempt, Driver, Setting
from ckptfs.bench.places import fsspec_uri
from ckptfs.bench.states import State, local_of, locals_of
from ckptfs.errors import CkptfsError

__all__ = ["LOOPERS", "Looped", "Looper", "loop_round", "open_looper"]

_MATRIX = 512
_MULTIPLICATIONS = 8

Wait = Callable[[], object]


class Looper(ABC):
    """Saves of one loop; collective."""

    @abstractmethod
    def save(self, state: State, step: int) -> Wait:
        """Save ``state`` as ``step``; returns when the tensors may be changed.

        Returns:
            A function that waits until the save is over.
        """

    def close(self) -> None:
        """The loop is over and its saves were waited for."""


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
    """Return the saves of an engine in a loop.

    Args:
        name: The engine.
        driver: Its driver.
        at: Where it saves.
        state: The state that is saved.
    """
    if name == "raw":
        return _CopyLooper(state)
    return _CkptfsLooper(driver, at) if isinstance(driver, Ckptfs) else _DcpLooper(driver, at)


class Looped:
    """What one round found.

    Args:
        alone: The loop alone.
        saving: The loop with saves.
        stalls: Every stall of this rank.

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
    """The loop with saves, as one call for the clock."""

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
    """Run one loop alone and one with saves, one after the other, since they are compared. Collective.

    Args:
        clock: Times them.
        looper: Saves.
        state: The state that is saved.
        shape: The loop.
        setting: What the engine works with.

    Returns:
        What the round found.

    Raises:
        CkptfsError: The same on every rank: a save failed, also one that did so after the clock stopped.
    """

    def alone() -> None:
        for _ in range(shape.steps):
            _train(state)

    without = clock.time(alone)
    saving = _Stalls(looper, state, shape)
    try:
        spent = clock.time(saving.run)
    except CkptfsError:
        with contextlib.suppress(CkptfsError):  # of the same save, or of one that nobody asks for
            together(setting.group, saving.wait)
        raise
    together(setting.group, saving.wait)
    told: list[list[Spent]] = setting.group.gather(saving.found)
    slowest = [
        Spent(max(s.wall_s for s in one), sum(s.cpu_s for s in one))
        for one in zip(*told, strict=True)
    ]
    return Looped(without, spent, slowest)


def _train(state: State) -> None:
    work = torch.full((_MATRIX, _MATRIX), 1.0 / _MATRIX)
    for _ in range(_MULTIPLICATIONS):
        work = work @ work
    for tensor in state.values():
        local_of(tensor).mul_(0.9999)
