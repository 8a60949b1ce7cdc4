"""The write engine for files: the layout is known, so windows of the file are written at once.

    file     |--------- window 0 ---------|--------- window 1 ---------|-- 2 --|
    items    | o | head | payload |tail|head|         payload            |tail|
    thread A   digest, hand over: write_at(0, ...)           then 2
    thread B                                write_at(1, ...)

A thread takes the next window and hands its bytes to the storage piece by piece, from where they lie;
a block is digested right before the storage copies it, while it is in the cache. Blocks are counted
from the payload's start and may lie across windows: whoever has a block's first byte digests all of it.

Most items lie inside one window: they are resolved, written and let go of there. One that lies across
windows is shared by them, and let go of after its last. What is not contiguous host memory is copied
there for one window at a time, so what a save needs beyond the state is a window or two per thread.

``run_all`` runs the jobs of one call on a few threads: all their results, or one error that names all of theirs.
The first error stops the others; none is lost. torch's own writer loses the error of every thread but
the first, and commits without the files of the lost ones (pytorch #191391).
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


class _Stopped(Exception):  # noqa: N818 - not an error: another thread has that
    """Another writer thread failed."""


@dataclass(slots=True)
class Cancelled:
    """Tells writer threads that one of them failed."""

    event: threading.Event = field(default_factory=threading.Event)

    def raise_if_set(self) -> None:
        """Leave this thread when another one failed: its files will never be committed."""
        if self.event.is_set():
            raise _Stopped


def run_all(jobs: Sequence[Callable[[], T]], cancelled: Cancelled, at_once: int) -> list[T]:
    """Run every job, so many at once, the caller's thread among them; their results in order.

    Raises one error for all; the thread's own _Stopped where somebody else set ``cancelled``. No job
    runs any more when this returns or raises.
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
        work()  # also what is left where threads did not start
        wait()
    except BaseException:
        # Ctrl-C while waiting: no thread may go on writing into a directory that is cleaned up, or
        # through a descriptor that is another file's by then.
        cancelled.event.set()
        uninterrupted(wait)
        raise
    if errors:
        raise _as_one(errors)
    if len(results) < len(jobs):
        cancelled.raise_if_set()
    return [results[number] for number in range(len(jobs))]


def _start(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Start them; those that started. None starts any more while the interpreter is ending."""
    started: list[threading.Thread] = []
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:
            break
        started.append(thread)
    return started


def _as_one(errors: Sequence[BaseException]) -> BaseException:
    """The first error; where several threads failed, its text counts the others, and the log has them."""
    first = next((e for e in errors if not isinstance(e, Exception)), errors[0])
    others = [e for e in errors if e is not first]
    if not others:
        return first
    told = "; ".join(f"{type(e).__name__}: {e}" for e in others)
    _log.error("%d writer threads failed; also: %s", len(errors), told)
    if isinstance(first, CkptfsError):
        whole = copy.copy(first)
        kinds = ", ".join(dict.fromkeys(type(e).__name__ for e in others))
        whole.message = f"{first.message} (and {len(others)} more writer threads failed: {kinds})"
        whole.__cause__ = first
        return whole
    return first


_DENSE_ITEMS = 32  # more in a window, and Python takes longer over it than the disk


class DiffersError(Exception):
    """A tensor is not of the dtype and shape that was planned: it does not fit into its place.

    Caught by the engine, which writes the file in order; nobody else sees it.
    """


class _ResolvingError(Exception):
    """An OSError of the planner's: raised inside a write, it would be told as the storage's."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Shared:
    """An item that lies across windows. left: windows that are not written yet."""

    payload: Payload
    loan: Loan
    left: int
    blocks: array[int]


class Windows:
    """One file on its way through ``writer``. ``write`` once; then ``digests`` are those of its items.

    resolve: called from several threads, one at a time. stage_s: seconds spent copying what was not
    ready. gave_back: whether memory that does not stay was given back.
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
        self._crew = Cancelled()
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
        """Of every item, in order."""
        found = tuple(one for one in self._digests if one is not None)
        if len(found) != len(self._layout):
            # Never published: its digests would be of other items than they say.
            raise RuntimeError(f"{len(self._layout) - len(found)} items were not written")
        return found

    def write(self, threads: int) -> None:
        """Write all windows, the caller's thread among so many. Raises what any of them raised."""
        windows = -(-self._size_bytes // self._writer.window_bytes)
        # Other threads copy from the device on streams of their own: what this one has queued must be
        # done, or they would copy what was there before.
        _torch.wait_for_accelerator()
        jobs = [self._work] * max(1, min(threads, windows))
        run_all(jobs, self._crew, len(jobs))

    def _work(self) -> None:
        while (number := self._next()) is not None:
            self._outer.raise_if_set()
            self._crew.raise_if_set()
            start = number * self._writer.window_bytes
            stop = min(start + self._writer.window_bytes, self._size_bytes)
            written: list[Callable[[], None]] = []
            views = self._views(start, stop, written)
            try:
                self._writer.write_at(start, views)
            except _ResolvingError as told:
                raise told.error from None
            finally:
                views.close()  # or, where the storage gave up half-way, it would keep its turn
            for done in written:
                done()

    def _next(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def _views(
        self, start: int, stop: int, written: list[Callable[[], None]]
    ) -> Generator[memoryview, None, None]:
        """The bytes of a window. written: gets what is to be called once they are written.

        Windows of many items take turns: most of torch's methods let go of the GIL, and threads that
        fight for it all the time are slower than one. They still write at the same time.
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
        """What of an item, and of the padding behind it, lies in a window."""
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
        """Bytes of a payload, and the digests of the blocks that begin among them."""
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
        """One more window with this item is written."""
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
        and not _torch.is_wrapper_subclass(tensor)  # it says that it has memory, and has none
    )


def _zeros(one: ItemLayout, start: int, stop: int) -> memoryview:
    """What of the padding behind an object lies in a window."""
    begin = one.offset + one.length
    return memoryview(bytes(max(0, min(stop, begin + one.padding) - max(start, begin))))


def _digest_of(payload: memoryview) -> Sequence[int]:
    """Of a payload of one block at most."""
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
