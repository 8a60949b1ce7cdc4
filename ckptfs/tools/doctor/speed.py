"""Latency of small operations, and bandwidth of writing and reading a large file.

The findings are mainly numbers; a warning is given only if something is badly wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from ckptfs.control.world import World
from ckptfs.errors import StorageError
from ckptfs.storage.base import Storage
from ckptfs.text import counted, size_text
from ckptfs.tools.doctor.report import Finding, Theme, Verdict, seconds
from ckptfs.tools.doctor.session import (
    FailedOperation,
    Findings,
    Need,
    ReadFailedError,
    Session,
    check,
    failure,
)

__all__ = ["Transfer", "bandwidth", "judge_bandwidth", "judge_latency", "latency"]

_SMALL = 8
_PIECE_BYTES = 8 << 20
_BLOCK_BYTES = 16 << 20
_SLOW_S = 1.0
_SLOW_BYTES_PER_S = 5e6
_LONG_S = 1.0  # shorter transfers measure latency, not bandwidth


# Seconds of the small operations, by name, in the order they were done.
Latency = Mapping[str, Sequence[float]]


@check(Need.WRITE)
def latency(session: Session) -> Findings:
    """Measure small operations of all ranks at once."""
    look = partial(_look_at_latency, session.storage, session.rank)
    return session.step("latency", Theme.SPEED, look, judge_latency)


def _look_at_latency(storage: Storage, rank: int) -> Latency:
    """Write a few small files durably, and stat and read each."""
    base = f"small/{rank}"
    times_s: dict[str, list[float]] = {"write": [], "stat": [], "read": []}

    def timed(what: str, act: Callable[[], object]) -> None:
        begun_s = time.perf_counter()
        act()
        times_s[what].append(time.perf_counter() - begun_s)

    try:
        storage.make_dir(base)
        for number in range(_SMALL):
            key = f"{base}/{number}"
            timed("write", partial(storage.replace, key, b"small"))
            timed("stat", partial(storage.stat, key))
            timed("read", partial(storage.read, key))
    except StorageError as error:
        if len(times_s["write"]) > len(times_s["read"]):
            raise ReadFailedError(error) from error
        raise
    return times_s


def judge_latency(_: Sequence[World], answers: Sequence[Latency]) -> Findings:
    """Return the finding on latency; a warning only if commits would be extremely slow."""
    name = "latency"
    texts, data, worst_s = [], {}, 0.0
    for what in answers[0]:
        times = [t for s in answers for t in s[what]]
        middle_s, most_s = median(times), max(times)
        texts.append(f"{what} {seconds(middle_s)} (at most {seconds(most_s)})")
        data[what] = {"median_s": middle_s, "max_s": most_s}
        worst_s = max(worst_s, middle_s)
    text = f"{', '.join(texts)}; {counted(len(answers), 'rank')} at once"
    if worst_s <= _SLOW_S:
        return (Finding(name, Theme.SPEED, Verdict.OK, text, data=data),)
    meaning = "every commit takes several such operations one after another"
    advice = "look at the load of the server, the distance to it, and proxies on the way"
    return (Finding(name, Theme.SPEED, Verdict.WARN, text, meaning, advice, data),)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One file written and read."""

    size_bytes: int
    write_s: float
    read_s: float = 0.0
    cached: str = ""  # the cache that may have served the read; "" if none


@check(Need.WRITE)
def bandwidth(session: Session) -> Findings:
    """Let each rank write a file durably, all at once, and read one back, if possible another's."""
    control, settings, storage = session.control, session.settings, session.storage
    size_bytes, rank = settings.size_bytes, session.rank
    if not size_bytes:
        return ()
    wanted = 2 * size_bytes * control.size
    if any(space.free_bytes is not None and space.free_bytes < wanted for space in session.rooms):
        why = "not measured: too little space"
        return (Finding("write-bandwidth", Theme.SPEED, Verdict.UNKNOWN, why, "", "--size 8MiB"),)
    written = control.step("doctor.write", lambda: _write_file(storage, rank, size_bytes))
    own_group = next(group for group in session.groups if rank in group)

    def look() -> Transfer | FailedOperation:
        return _read_back(storage, _reads(control.worlds, own_group, rank), written[rank])

    def judge(_: Sequence[World], answers: Sequence[Transfer]) -> Findings:
        return judge_bandwidth(answers, settings.needs_bytes)

    return session.step("write-bandwidth", Theme.SPEED, look, judge, _failed)


def _reads(worlds: Sequence[World], group: Sequence[int], rank: int) -> int:
    """Return the rank to read the file of: on another node if it sees one's files, else itself.

    A node may have its own file cached in memory.
    """
    others = [r for r in group if worlds[r].node != worlds[rank].node]
    return others[list(group).index(rank) % len(others)] if others else rank


def _failed(worlds: Sequence[World], refused: Mapping[int, FailedOperation]) -> Finding:
    # If only reads failed, saves still work.
    reads = all(refusal.is_read for refusal in refused.values())
    name = "read-bandwidth" if reads else "write-bandwidth"
    return failure(name, Theme.SPEED, worlds, refused)


def _write_file(storage: Storage, rank: int, size_bytes: int) -> Transfer | FailedOperation:
    """Write this rank's file durably. Its bytes are random and made before the clock starts."""
    block = memoryview(os.urandom(min(size_bytes, _BLOCK_BYTES)))
    try:
        storage.make_dir("large")
        begun_s = time.perf_counter()
        left = size_bytes
        with storage.open_write(f"large/{rank}", size_hint_bytes=size_bytes) as writer:
            while left > 0:
                at = (size_bytes - left) % len(block)
                piece = block[at : at + min(left, _PIECE_BYTES)]
                writer.lend(piece)
                left -= len(piece)
        storage.sync("large")
        duration_s = time.perf_counter() - begun_s
    except StorageError as error:
        return FailedOperation.of(error)
    return Transfer(size_bytes, duration_s, cached=_let_go(storage, rank))


def _let_go(storage: Storage, rank: int) -> str:
    """Ask the kernel to drop the cached file. Return the cache that may still serve the read."""
    path = storage.local_path(f"large/{rank}")
    if path is None:
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError:
        return "this node's memory"
    return "the server's or the disk's memory"


def _read_back(
    storage: Storage, rank: int, written: Transfer | FailedOperation
) -> Transfer | FailedOperation:
    """Read the file of ``rank`` in parallel ranges, like a load. Return ``written`` with the time."""
    if isinstance(written, FailedOperation):
        return written
    buffer = memoryview(bytearray(written.size_bytes))
    try:
        begun_s = time.perf_counter()
        with storage.open_read(f"large/{rank}") as reader:
            step = max(1, reader.window_bytes)
            spans = [(at, buffer[at : at + step]) for at in range(0, written.size_bytes, step)]
            with ThreadPoolExecutor(max(1, reader.concurrency)) as pool:
                list(pool.map(lambda span: reader.read_into(*span), spans))
        duration_s = time.perf_counter() - begun_s
    except StorageError as error:
        raise ReadFailedError(error) from error
    return replace(written, read_s=duration_s)


def judge_bandwidth(answers: Sequence[Transfer], needs_bytes: int | None) -> Findings:
    """Return the findings on bandwidth, with an estimated time for ``needs_bytes``.

    A transfer that is too short gets no warning.
    """
    total = sum(s.size_bytes for s in answers)
    each = f"{counted(len(answers), 'rank')} x {size_text(answers[0].size_bytes)}"
    write_s = max(s.write_s for s in answers)
    read_s = max(s.read_s for s in answers)
    cached = next((s.cached for s in answers if s.cached), "")
    written = _of("write-bandwidth", total, write_s, f"{each}, durable")
    read = _of(
        "read-bandwidth", total, read_s, each + (f"; from {cached} perhaps" if cached else "")
    )
    if needs_bytes is None:
        return written, read
    takes = f"{size_text(needs_bytes)} at this rate: {seconds(needs_bytes * write_s / total)}"
    return (
        Finding(written.name, written.theme, written.verdict, f"{written.seen}; {takes}",
                written.meaning, written.advice, written.data),
        read,
    )  # fmt: skip


def _of(name: str, total_bytes: int, duration_s: float, how: str) -> Finding:
    rate = total_bytes / max(duration_s, 1e-9)
    text = f"{size_text(rate)}/s ({how})"
    data = {"bytes_per_s": rate, "bytes": total_bytes, "seconds": duration_s}
    if rate >= _SLOW_BYTES_PER_S or duration_s < _LONG_S:
        return Finding(name, Theme.SPEED, Verdict.OK, text, data=data)
    meaning = "a checkpoint of 10 GB takes more than half an hour"
    advice = (
        "look at the network and the server's load; save in the background (async_save), less often"
    )
    return Finding(name, Theme.SPEED, Verdict.WARN, text, meaning, advice, data)
