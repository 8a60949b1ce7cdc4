"""Measure one call on all ranks: seconds, CPU time, bytes on the network, memory.

    spent = clock.time(call)      collective: a barrier, the call, a barrier

Only the call is timed. wall_s is the slowest rank's, cpu_s the sum over all ranks with all their threads
and the processes that they waited for, and memory what the call added to the largest rank. If the call
fails on one rank, all ranks raise the same error.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from ckptfs.bench.messages import Baseline
from ckptfs.errors import CkptfsError
from ckptfs.uri import mask_credentials

__all__ = ["Clock", "Group", "Spent", "Wire", "WireKind", "together"]

_KIB = 1024
_LOOPBACK = "lo"


class Group(Protocol):
    """The operations on ranks that measuring needs; all of them are collective.

    Attributes:
        rank: The number of this rank.
        size: The number of ranks.
    """

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until all ranks have called it."""

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, on every rank."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one call cost; see ``results.Sample``.

    Attributes:
        wall_s: Seconds of the slowest rank.
        cpu_s: Seconds of all ranks, threads included.
        sent_bytes: Bytes sent on the network; None if they could not be measured.
        received_bytes: Bytes received from the network; None if they could not be measured.
        peak_memory_bytes: Bytes that the call added to the largest rank's resident memory; None if they
            could not be measured.
    """

    wall_s: float
    cpu_s: float
    sent_bytes: int | None = None
    received_bytes: int | None = None
    peak_memory_bytes: int | None = None


class WireKind(Enum):
    """Which network interfaces carry the bytes.

    Attributes:
        NONE: No interface.
        NETWORK: All interfaces but the loopback.
        LOOPBACK: The loopback, which counts both directions as one number.
    """

    NONE = "none"
    NETWORK = "network"
    LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class Wire:
    """The byte counters of this machine's network interfaces; they include all programs' traffic.

    Attributes:
        kind: Which interfaces are read.
        counts: Whether this process reads them; True for one process of each machine.
    """

    kind: WireKind = WireKind.NONE
    counts: bool = True

    def read(self) -> tuple[int, int] | None:
        """Return the bytes sent and received until now; None if they are not known."""
        if self.kind is WireKind.NONE or not self.counts:
            return None
        try:
            with open("/proc/net/dev", encoding="ascii") as file:
                lines = file.read().splitlines()[2:]
        except OSError:
            return None
        sent = received = 0
        for line in lines:
            name, _, numbers = line.partition(":")
            counted = numbers.split()
            if (name.strip() == _LOOPBACK) is (self.kind is WireKind.LOOPBACK):
                received += int(counted[0])
                sent += int(counted[8])
        return sent, received


@dataclass(frozen=True, slots=True)
class _OwnReading:
    wall_s: float = 0.0
    cpu_s: float = 0.0
    sent_bytes: int | None = None
    received_bytes: int | None = None
    peak_bytes: int | None = None
    error: CkptfsError | None = None


class Clock:
    """Measures calls of a group of ranks.

    Args:
        group: The ranks.
        wire: Counts bytes on the network; None counts nothing.
        memory_from: What peak memory is compared with, "call" or "start"; see ``Baseline``.
    """

    def __init__(
        self, group: Group, wire: Wire | None = None, memory_from: Baseline = "call"
    ) -> None:
        self._group = group
        self._wire = wire or Wire()
        self._start_bytes: int | None = None
        if memory_from == "start":
            gc.collect()  # garbage that is freed later would hide new memory
            self._start_bytes = _restart_peak()

    def time(self, call: Callable[[], None]) -> Spent:
        """Measure a call. Collective.

        Args:
            call: The call to measure.

        Returns:
            What it cost.

        Raises:
            CkptfsError: The error of the lowest failed rank, on every rank.
        """
        gc.collect()
        before_bytes = _restart_peak()
        if before_bytes is not None and self._start_bytes is not None:
            before_bytes = self._start_bytes
        self._group.barrier()
        wire = self._wire.read()
        cpu, started = _cpu_s(), time.perf_counter()
        error = _error_of(call, self._group.rank)
        wall_s = time.perf_counter() - started
        self._group.barrier()
        cpu_s = _cpu_s() - cpu
        now = self._wire.read()
        sent = received = None
        if wire is not None and now is not None:
            sent, received = now[0] - wire[0], now[1] - wire[1]
        own = _OwnReading(wall_s, cpu_s, sent, received, _added_bytes(before_bytes), error)
        return _spent(self._group.gather(own))


def together(group: Group, call: Callable[[], object]) -> None:
    """Make a call on all ranks without measuring it. Collective.

    Args:
        group: The ranks.
        call: The function to call.

    Raises:
        CkptfsError: The error of the lowest failed rank, on every rank.
    """
    _raise_first(group.gather(_error_of(call, group.rank)))


def _error_of(call: Callable[[], object], rank: int) -> CkptfsError | None:
    try:
        call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:  # noqa: BLE001 - torch's CheckpointException is no Exception, and a rank that says nothing leaves the others waiting
        return _plain(raised, rank)
    return None


def _raise_first(errors: Iterable[CkptfsError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _spent(readings: list[_OwnReading]) -> Spent:
    _raise_first(one.error for one in readings)
    return Spent(
        max(one.wall_s for one in readings),
        sum(one.cpu_s for one in readings),
        _sum(one.sent_bytes for one in readings),
        _sum(one.received_bytes for one in readings),
        max((one.peak_bytes for one in readings if one.peak_bytes is not None), default=None),
    )


def _sum(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _plain(raised: BaseException, rank: int) -> CkptfsError:
    """Return an error that can be pickled: an exception of another library may not survive that."""
    if isinstance(raised, CkptfsError):
        return raised
    where = traceback.extract_tb(raised.__traceback__)[-1]
    found = CkptfsError(mask_credentials(f"{type(raised).__name__}: {raised}"), rank=rank)
    found.add_note(f"{os.path.basename(where.filename)}:{where.lineno}")
    return found


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _restart_peak() -> int | None:
    """Reset the kernel's memory peak to what is resident now; return that in bytes, or None."""
    if sys.platform != "linux":
        return None
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return None
    return _status_bytes("VmRSS:")


def _added_bytes(before_bytes: int | None) -> int | None:
    peak = None if before_bytes is None else _status_bytes("VmHWM:")
    return None if peak is None or before_bytes is None else max(0, peak - before_bytes)


def _status_bytes(name: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            found = [line.split()[1] for line in file if line.startswith(name)]
    except OSError:
        return None
    return int(found[0]) * _KIB if found else None
