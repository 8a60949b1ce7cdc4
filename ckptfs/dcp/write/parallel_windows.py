"""The write engine for files of known layout: several windows of a file are written at once.

    file     |--------- window 0 ---------|--------- window 1 ---------|-- 2 --|
    items    | o | head | payload |tail|head|         payload            |tail|
    thread A   digest, hand over: write_at(0, ...)           then 2
    thread B                                write_at(1, ...)

A thread takes the next window and hands its bytes to the storage piece by piece, without copying them
first. A block is digested right before the storage copies it, while it is in the cache. Blocks are
counted from the payload's start and may cross the border of two windows: the thread that has a block's
first byte digests all of it.

Most items are inside one window: they are resolved, written and released there. An item that extends over
several windows is shared by them and released after its last window. Data that is not contiguous host
memory is copied to the host for one window at a time, so a save needs one or two windows per thread in
addition to the state.

``run_all`` runs the jobs of one call on a few threads: it returns all their results or raises one error
that accounts for all of their errors. The first error stops the other jobs, and no error is lost. torch's
own writer loses the error of every thread but the first, and commits without the files of the lost ones
(pytorch #191391).
"""

from __future__ import annotations

import copy
import io
import logging
import queue
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.planner import WriteItem

from ckptfs import _torch
from ckptfs.commit.digests import BLOCK_SIZE_BYTES, ItemDigests
from ckptfs.dcp.write.file_layout import Framed, ItemLayout, Payload, blocks_of
from ckptfs.dcp.write.host_memory import Loan, Resolve
from ckptfs.errors import CkptfsError
from ckptfs.storage.inflight import with_task
from ckptfs.storage.io import ParallelWriter
from ckptfs.storage.threads import uninterrupted

__all__ = ["Cancelled", "DiffersError", "Windows", "run_all"]

_log = logging.getLogger("ckptfs.dcp")
T = TypeVar("T")


class _Stopped(Exception):  # noqa: N818 - not an error: another thread has the error
    """Another writer thread failed."""


@dataclass(slots=True)
class Cancelled:
    """A flag by which writer threads learn that one of them failed."""

    event: threading.Event = field(default_factory=threading.Event)

    def raise_if_set(self) -> None:
        """End this job if another one failed: its files will never be committed."""
        if self.event.is_set():
            raise _Stopped


def run_all(jobs: Sequence[Callable[[], T]], cancelled: Cancelled, at_once: int) -> list[T]:
    """Run jobs, ``at_once`` at the same time, and return their results in the order of the jobs.

    The calling thread works too, so the jobs also complete when no thread can be started. When this
    returns or raises, no job is running.

    Args:
        jobs: Callables without arguments.
        cancelled: Cancels the jobs. Set by the first failure, or by the caller.
        at_once: How many jobs run at the same time, the calling thread included.

    Returns:
        The results, one per job.

    Raises:
        CkptfsError: The first error of a job. If other jobs failed too, its message counts them, and the
            log has their errors.
        _Stopped: ``cancelled`` was set and no job of this call failed.
        BaseException: Any other error of a job, such as KeyboardInterrupt.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        waiting.put(number)

    def work() -> None:
        while not cancelled.event.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[number] = jobs[number]()
            except _Stopped:
                cancelled.event.set()  # the thread that failed has the error
            except BaseException as error:  # noqa: BLE001 - raised below, by the caller's thread
                errors.append(error)
                cancelled.event.set()

    ends = [threading.Event() for _ in range(min(at_once, len(jobs)) - 1)]

    def work_until(end: threading.Event) -> None:
        try:
            work()
        finally:
            end.set()

    threads = [
        threading.Thread(
            target=with_task(partial(work_until, end)), name=f"ckptfs-write-{n}", daemon=True
        )
        for n, end in enumerate(ends)
    ]
    started = _start(threads)

    def wait() -> None:
        for end in ends[: len(started)]:
            end.wait()

    try:
        work()  # also the jobs of threads that could not be started
        wait()
    except BaseException:
        # Ctrl-C while waiting: no thread may continue to write into a directory that is being cleaned
        # up, or through a descriptor that has become another file's.
        cancelled.event.set()
        uninterrupted(wait)
        raise
    if errors:
        raise _as_one(errors)
    if len(results) < len(jobs):
        cancelled.raise_if_set()
    return [results[number] for number in range(len(jobs))]


def _start(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Start the threads and return those that started.

    No thread can be started any more while the interpreter is ending.
    """
    started: list[threading.Thread] = []
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    return started


def _as_one(errors: Sequence[BaseException]) -> BaseException:
    """Return the first error; if several threads failed, its text counts the others.

    The log has the errors of the others.
    """
    first = next((e for e in errors if not isinstance(e, Exception)), errors[0])
    others = [e for e in errors if e is not first]
    if not others:
        return first
    details = "; ".join(f"{type(e).__name__}: {e}" for e in others)
    _log.error("%d writer threads failed; also: %s", len(errors), details)
    if isinstance(first, CkptfsError):
        combined = copy.copy(first)
        kinds = ", ".join(dict.fromkeys(type(e).__name__ for e in others))
        combined.message = (
            f"{first.message} (and {len(others)} more writer threads failed: {kinds})"
        )
        combined.__cause__ = first
        return combined
    return first


_DENSE_ITEMS = 32  # with more items in a window, Python takes longer than the disk


class DiffersError(Exception):
    """A tensor does not have the dtype and shape that were planned: it does not fit into its place.

    The engine catches this error. It then writes the file in order, or raises StateError if memory that does
    not stay unchanged was released already.
    """


class _ResolvingError(Exception):
    """Carries an OSError of the planner out of a write.

    The storage would report the bare OSError as an error of its own.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Shared:
    """An item that extends over several windows; ``left`` is how many are not written yet."""

    payload: Payload
    loan: Loan
    left: int
    blocks: array[int]


class Windows:
    """One file that is written through ``writer``.

    Call ``write`` once; after that ``digests`` has the digests of the items. ``resolve`` is called from
    several threads, but never by two at the same time.

    Attributes:
        stage_s: Seconds spent on copying data that was not in contiguous host memory.
        gave_back: Whether a loan that does not stay unchanged was released.
    """

    def __init__(
        self,
        layout: Sequence[ItemLayout],
        writer: ParallelWriter,
        resolve: Resolve,
        cancelled: Cancelled,
    ) -> None:
        self.stage_s = 0.0
        self.gave_back = False
        self._layout = layout
        self._offsets = [one.offset for one in layout]
        self._size_bytes = layout[-1].offset + layout[-1].length if layout else 0
        self._writer = writer
        self._resolve = resolve
        self._outer = cancelled
        self._cancelled = Cancelled()
        self._lock = threading.Lock()
        self._resolving = threading.Lock()
        self._turn = threading.Lock()
        self._numbers = iter(range(-(-self._size_bytes // writer.window_bytes)))
        self._shared: dict[int, _Shared] = {}
        self._digests: list[ItemDigests | None] = [
            None if one.data is None else _of_object(one, one.data) for one in layout
        ]

    @property
    def digests(self) -> tuple[ItemDigests, ...]:
        """The digests of every item, in order. RuntimeError if an item was not written."""
        found = tuple(one for one in self._digests if one is not None)
        if len(found) != len(self._layout):
            # The file must not be published: its digests would be assigned to the wrong items.
            raise RuntimeError(f"{len(self._layout) - len(found)} items were not written")
        return found

    def write(self, threads: int) -> None:
        """Write all windows on ``threads`` threads, the calling thread included.

        Raises what any of them raised.
        """
        windows = -(-self._size_bytes // self._writer.window_bytes)
        # Other threads copy from the device on streams of their own: the work that this thread has
        # queued must be done first, or they would copy old values.
        _torch.wait_for_accelerator()
        jobs = [self._work] * max(1, min(threads, windows))
        run_all(jobs, self._cancelled, len(jobs))

    def _work(self) -> None:
        while (number := self._next()) is not None:
            self._outer.raise_if_set()
            self._cancelled.raise_if_set()
            start = number * self._writer.window_bytes
            stop = min(start + self._writer.window_bytes, self._size_bytes)
            written: list[Callable[[], None]] = []
            views = self._views(start, stop, written)
            try:
                self._writer.write_at(start, views)
            except _ResolvingError as failure:
                raise failure.error from None
            finally:
                views.close()  # otherwise, if the storage failed half-way, it would keep its turn
            for done in written:
                done()

    def _next(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def _views(
        self, start: int, stop: int, written: list[Callable[[], None]]
    ) -> Generator[memoryview, None, None]:
        """Yield a window's bytes; ``written`` gets the functions to call once they are written.

        Windows with many items take turns: most of torch's methods release the GIL, and threads that compete
        for it all the time are slower than one. The windows are still written at the same time.
        """
        index = max(0, bisect_right(self._offsets, start) - 1)
        is_dense = bisect_left(self._offsets, stop) - index > _DENSE_ITEMS
        with self._turn if is_dense else nullcontext():
            yield from self._items(index, start, stop, written)

    def _items(
        self, index: int, start: int, stop: int, written: list[Callable[[], None]]
    ) -> Iterator[memoryview]:
        layout, digests = self._layout, self._digests
        while index < len(layout) and (one := layout[index]).offset < stop:
            begin, around = one.offset, one.framed
            if one.data is not None:
                yield one.data[max(start - begin, 0) : stop - begin]
                if one.padding:
                    yield _zeros(one, start, stop)
            elif around is not None:
                length = around.frame.payload_length
                end = begin + one.length + one.padding
                if start <= begin and end <= stop and length <= BLOCK_SIZE_BYTES:
                    loan = self._loan(one)
                    payload = self._view(self._payload(loan, around), 0, length)
                    digests[index] = _of_tensor(one, around, _digest_of(payload))
                    yield around.head
                    yield payload
                    yield around.padded if one.padding else around.tail
                    written.append(self._then(loan))
                else:
                    yield from self._part(index, one, around, (start, stop))
                    written.append(lambda index=index: self._release(index))  # type: ignore[misc]
            index += 1

    # -- items -----------------------------------------------------------------------------

    def _resolved(self, item: WriteItem) -> torch.Tensor | io.BytesIO | Loan:
        try:
            return self._resolve(item)
        except OSError as error:
            raise _ResolvingError(error) from error

    def _loan(self, one: ItemLayout) -> Loan:
        with self._resolving:
            data = self._resolved(one.item)
        return data if isinstance(data, Loan) else Loan(data)

    def _payload(self, loan: Loan, around: Framed) -> Payload:
        data = loan.data
        if isinstance(data, io.BytesIO) or not _fits(data, around):
            raise DiffersError
        return Payload(data)

    def _view(self, payload: Payload, start: int, stop: int) -> memoryview:
        if payload.is_ready:
            return payload.view(start, stop)
        began = time.perf_counter()
        view = payload.view(start, stop)
        with self._lock:
            self.stage_s += time.perf_counter() - began
        return view

    def _then(self, loan: Loan) -> Callable[[], None]:
        if not loan.stays:
            self.gave_back = True
        return loan.done

    # -- items across windows, and large ones ------------------------------------------------

    def _part(
        self, index: int, one: ItemLayout, around: Framed, window: tuple[int, int]
    ) -> Iterator[memoryview]:
        """Yield the part of an item, and of the padding behind it, that is in this window."""
        shared = self._share(index, one, around)
        begin = one.offset + len(around.head)
        end = begin + around.frame.payload_length
        low, high = window[0] - one.offset, window[1] - one.offset
        if low < len(around.head):
            yield around.head[max(low, 0) : high]
        first, last = max(window[0], begin), min(window[1], end)
        if first < last:
            yield from self._digested(shared, end - begin, first - begin, last - begin)
        if window[1] > end:
            last = min(window[1] - end, len(around.tail) + one.padding)
            yield around.padded[max(window[0] - end, 0) : last]

    def _share(self, index: int, one: ItemLayout, around: Framed) -> _Shared:
        with self._resolving:
            shared = self._shared.get(index)
            if shared is None:
                data = self._resolved(one.item)
                loan = data if isinstance(data, Loan) else Loan(data)
                window = self._writer.window_bytes
                last = one.offset + one.length + one.padding - 1
                windows = last // window - one.offset // window + 1
                count = -(-around.frame.payload_length // BLOCK_SIZE_BYTES)
                blocks = array("Q", bytes(8 * count))
                shared = _Shared(self._payload(loan, around), loan, windows, blocks)
                self._shared[index] = shared
            return shared

    def _digested(
        self, shared: _Shared, length: int, start: int, stop: int
    ) -> Iterator[memoryview]:
        """Yield bytes of a payload, and digest the blocks that begin in this range."""
        first = -(-start // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES
        last = min(-(-stop // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES, length)
        memory = self._view(shared.payload, start, last if first < stop else stop)
        if first > start:
            yield memory[: min(first, stop) - start]
        for begin in range(first, stop, BLOCK_SIZE_BYTES):
            end = min(begin + BLOCK_SIZE_BYTES, length)
            block = memory[begin - start : end - start]
            shared.blocks[begin // BLOCK_SIZE_BYTES] = xxhash.xxh3_64_intdigest(block)
            yield memory[begin - start : min(end, stop) - start]

    def _release(self, index: int) -> None:
        """Count one more window with this item as written; release the item after its last one."""
        with self._lock:
            shared = self._shared[index]
            shared.left -= 1
            if shared.left:
                return
            del self._shared[index]
        one = self._layout[index]
        assert one.framed is not None  # noqa: S101 - objects are not shared
        self._digests[index] = _of_tensor(one, one.framed, shared.blocks)
        self._then(shared.loan)()


def _fits(tensor: torch.Tensor, around: Framed) -> bool:
    return (
        tensor.dtype is around.dtype
        and tensor.shape == around.sizes
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not _torch.is_wrapper_subclass(tensor)  # it reports memory but has none
    )


def _zeros(one: ItemLayout, start: int, stop: int) -> memoryview:
    """Return the part of the padding behind an object that is in this window."""
    begin = one.offset + one.length
    return memoryview(bytes(max(0, min(stop, begin + one.padding) - max(start, begin))))


def _digest_of(payload: memoryview) -> Sequence[int]:
    """Return the digests of a payload of at most one block."""
    return (xxhash.xxh3_64_intdigest(payload),) if len(payload) else ()


def _of_tensor(one: ItemLayout, around: Framed, blocks: Sequence[int]) -> ItemDigests:
    size = around.frame.payload_length
    return ItemDigests(
        one.offset,
        one.length,
        len(around.head) if size else 0,
        size,
        (*around.head_blocks, *blocks, *around.tail_blocks),
    )


def _of_object(one: ItemLayout, data: memoryview) -> ItemDigests:
    return ItemDigests(one.offset, one.length, 0, 0, blocks_of(data))
