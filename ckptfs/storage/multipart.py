"""One object that is being written: parts in parallel, bounded memory, nothing visible before close.

    write(view) --copied---------------------------+
    lend(view) --uncopied, in the part that fills; +--full--> pool: put, retried --> close: complete
                 or, where the client takes one    |          up to ``concurrency`` at once
                 buffer, if it is a part by itself-+

    one part or less    one PUT at close, no multipart upload at all
    a part fails        the next write or close raises its error; abort discards the parts
    no answer           a complete request without an answer is repeated. "No such upload" then means that the
                        first request succeeded, provided the object has the expected size. (If the upload was
                        aborted over an older object of that size, the answers would be the same. Data keys are
                        used once, so there is no older object.)

The writer holds the part that fills and the copied bytes of the parts in flight. ``Route.memory_bytes``
bounds their sum, unless a single part has to be larger because of the object's size: write() waits until
parts in flight are done. Waiting needs nothing but this upload's own parts, so no two uploads can wait for
each other.

Part sizes follow from the object's size, within the store's limits:

    size known      equal parts, 16 MiB or as much more as nine tenths of the allowed parts require
    size unknown    16 MiB, and from part 1500 (of 10,000) on parts that grow with the object

A part is no larger than needed, because an upload must hold it in memory. With S3's limits a file of 150 GB
still goes in parts of 16 MiB, one of 5 TiB in parts of 583 MiB. Growing parts reach 5 TiB too, the last of
them with 3.4 GiB: pass the size if it is known.

Lent bytes stay where they are; written bytes are copied into one buffer per part, in order:

    the client takes several pieces    lent | copied | lent | copied, sent one after the other
    it takes one                       a lent piece alone, uncopied; otherwise everything in one buffer

The buffer takes memory only as far as it is filled: the frames between two lent tensors cost a page.

``StreamUpload`` is a multipart upload through one ``obstore.put`` of an iterator. A thread runs it, and a queue
puts the parts in order:

    put_part(0) put_part(2) put_part(1) ...      any order, any threads
             |       |       |
             PartQueue: part n is consumed when obstore asks for it    (in order; later ones wait)
                     |
             obstore.put in a thread: sends up to ``max_concurrency`` at once, retries by itself

obstore copies nothing: it holds the caller's buffers until a part has arrived, and ``put_part`` returns when it
has released them. A part that is smaller than the others, the last, is held until the end: ``put_part`` copies
it, ``put_pieces`` does not. The error of a failed part is raised by a later ``put_part`` or by ``complete``, as
one that a retry does not cure: the stream is gone. ``abort`` makes the iterator raise, and obstore then aborts
the upload on the server.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ckptfs.errors import (
    AnswerLostError,
    CkptfsError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.base import DataWriter
from ckptfs.storage.clients.base import ALWAYS, Buffer, Limits, ObjectClient, Upload, join_buffers
from ckptfs.storage.clients.http_errors import Reason, RequestContext, reason_error
from ckptfs.storage.retry import Retrier, RetryPolicy
from ckptfs.uri import Uri, mask_credentials

__all__ = [
    "FillingPart",
    "ObjectWriter",
    "PartQueue",
    "PartSizes",
    "Route",
    "StreamUpload",
    "UploadBudget",
    "plan_parts",
]

log = logging.getLogger("ckptfs.storage")

_ABORT_S = 5.0  # for the request that discards the parts; if it fails, a sweep removes them by age
_ABORT_WAIT_S = 10.0  # for parts in flight: if the upload were aborted before them, they would stay


@dataclass(frozen=True, slots=True)
class Route:
    """How requests go out: the client, retries, threads, and the bounds of one transfer."""

    client: ObjectClient
    retrier: Retrier
    pool: Callable[[], Executor]
    concurrency: int
    memory_bytes: int


class ObjectWriter(DataWriter):
    """Writes one object. See ``Storage.open_write``; nothing is requested before the first part."""

    def __init__(self, route: Route, key: str, uri: Uri, plan: PartSizes) -> None:
        self._route = route
        self._key = key
        self._uri = uri
        self._plan = plan
        self._budget = UploadBudget(route.memory_bytes, route.concurrency)
        self._upload: Upload | None = None
        self._number = 0  # the number of the part that is being filled
        self._offset = 0  # where it begins
        self._part: FillingPart | None = None  # none before its first byte
        self._is_writable = True
        self._is_ended = False

    # -- writing -----------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> int:
        return self._append(memoryview(data).cast("B"), lent=False)

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        return self._append(memoryview(data).cast("B"), lent=True)

    def _append(self, view: memoryview, *, lent: bool) -> int:
        if not self._is_writable:
            raise self._failure("the file cannot be written any more")
        # Until this returns: a write that was interrupted must not be closed as if it were
        # complete.
        self._is_writable = False
        remaining = view
        while len(remaining):
            if self._part is not None and not self._part.left_bytes:
                self._send(self._part)  # only now: the last part must be known as such
            if self._part is None:
                self._part = self._next_part()
            chunk = remaining[: self._part.left_bytes]
            self._part.add(chunk, lent=lent)
            remaining = remaining[len(chunk) :]
        self._is_writable = True
        return len(view)

    def _next_part(self) -> FillingPart:
        try:
            size_bytes = self._plan.part_bytes(self._number, self._offset)
        except StorageError as error:
            error.uri = str(self._uri)
            raise
        declared_bytes = (self._plan.declared_bytes or 0) - self._offset
        gathers = self._route.client.gathers
        return FillingPart(self._budget, size_bytes, declared_bytes, gathers=gathers)

    def _send(self, part: FillingPart) -> None:
        """Hand the full part to the pool."""
        if self._upload is None:
            self._upload = self._begun(part.size_bytes)
        self._budget.begin()
        pieces, buffer = part.pieces(), part.take_buffer()
        upload, number = self._upload, self._number

        def put() -> None:
            failure: BaseException | None = None
            try:
                if self._budget.stopped.is_set():
                    pass
                else:
                    self._route.retrier.run(
                        lambda: upload.put_pieces(number, pieces), stop=self._budget.stopped
                    )
            except BaseException as error:  # noqa: BLE001 - raised by the next write or close
                failure = error
            self._budget.end(buffer, failure)

        try:
            sent = self._route.pool().submit(put)
        except BaseException as error:
            self._budget.end(buffer, None)  # no thread took it, so it is ended here
            if isinstance(error, RuntimeError):
                raise StorageError(f"no thread can send a part: {error}", uri=self._uri) from error
            raise
        sent.add_done_callback(lambda done: self._dropped(buffer) if done.cancelled() else None)
        self._number += 1
        self._offset += part.filled_bytes
        self._part = None

    def _begun(self, part_bytes: int) -> Upload:
        client, retrier = self._route.client, self._route.retrier
        return retrier.run(lambda: client.begin_upload(self._key, part_bytes=part_bytes))

    def _dropped(self, buffer: memoryview | None) -> None:
        """End a part that waited for a thread and gets none, so that nothing waits for it."""
        self._budget.end(buffer, StorageError("the storage was closed", uri=self._uri))

    # -- ending ------------------------------------------------------------------------

    def close(self) -> None:
        if self._is_ended:
            return
        if not self._is_writable:
            raise self._failure("the file cannot be closed: a write failed")
        self._is_writable = False
        upload, part = self._upload, self._part
        if upload is None:
            data = join_buffers(part.pieces()) if part is not None else b""
            self._route.retrier.run(lambda: self._route.client.put(self._key, data, ALWAYS))
        else:
            if part is not None:
                self._send(part)
            self._budget.drain()
            self._complete(upload)
        self._is_ended = True
        self._drop_part()
        self._budget.stop(0)

    def _failure(self, text: str) -> BaseException:
        """Return the error that broke the file, or a new one with ``text``.

        The first error must stay visible, for example that the store is full.
        """
        return self._budget.error or StorageError(text, uri=self._uri)

    def _drop_part(self) -> None:
        if self._part is not None:
            self._part.drop()
        self._part = None

    def _complete(self, upload: Upload) -> None:
        lost = False

        def once() -> None:
            nonlocal lost
            try:
                upload.complete()
            except AnswerLostError:
                lost = True
                raise
            except NotFoundError as error:
                # An earlier try without an answer completed it, or another process aborted it.
                if lost and self._is_complete():
                    return
                raise StorageError(
                    "the upload vanished before it was complete; a rule for incomplete "
                    f"uploads or a cleanup may have aborted it: {error.message}",
                    uri=self._uri,
                    hint=error.hint,
                ) from error

        self._route.retrier.run(once)

    def _is_complete(self) -> bool:
        try:
            return self._route.client.head(self._key).size_bytes == self._offset
        except NotFoundError:
            return False

    def abort(self) -> None:
        if self._is_ended:
            return
        self._is_writable, self._is_ended = False, True
        began = time.monotonic()
        ended = self._budget.stop(_ABORT_WAIT_S)
        upload, self._upload = self._upload, None
        self._drop_part()
        if upload is None:
            return
        brief = replace(self._route.retrier, policy=RetryPolicy(retry_s=_ABORT_S))
        try:
            brief.run(upload.abort)
        except Exception as error:  # noqa: BLE001 - the error that brought us here is the one to tell
            log.warning(
                "parts of %s were not removed; a later sweep removes them by their age: %s",
                self._uri,
                mask_credentials(str(error)),
            )
            return
        if not ended:
            log.warning(
                "parts of %s were still being sent %.0f s after the abort; a later sweep "
                "removes what they left by its age",
                self._uri,
                time.monotonic() - began,
            )


# -- part sizes --------------------------------------------------------------------------

_DEFAULT_PART_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PartSizes:
    """The sizes of one object's parts.

    Attributes:
        limits: What the store accepts.
        first_bytes: The size of the first part.
        declared_bytes: The size of the object, if the caller gave it.
    """

    limits: Limits
    first_bytes: int
    declared_bytes: int | None

    def part_bytes(self, number: int, offset: int) -> int:
        """Return the size of part ``number`` (from 0), which begins at ``offset``.

        The last part may be smaller.

        Raises:
            UnsupportedError: The store accepts no such part.
        """
        limits = self.limits
        if number >= limits.max_parts or offset >= limits.max_object_bytes:
            raise UnsupportedError(
                f"the file is larger than {offset} bytes, the most that the store takes in "
                f"{number} parts (it takes {limits.max_parts} parts, "
                f"{limits.max_object_bytes} bytes)",
                hint="use a larger part_size_bytes, more ranks or more files",
            )
        if limits.equal_parts or (self.declared_bytes is not None and offset < self.declared_bytes):
            return self.first_bytes
        steps = max(1, limits.max_parts * 3 // 20)
        return _fitted(limits, max(self.first_bytes, -(-offset // steps)))


def plan_parts(
    limits: Limits, *, size_hint_bytes: int | None, configured_bytes: int | None, memory_bytes: int
) -> PartSizes:
    """Decide how to cut an object of about that size.

    Args:
        limits: What the store accepts.
        size_hint_bytes: The size of the object, if the caller gave it.
        configured_bytes: The part size that the user configured; None: 16 MiB.
        memory_bytes: The memory of the upload. A part is larger only if the object's size requires
            it.

    Raises:
        UnsupportedError: The store accepts no object of this size.
    """
    size = size_hint_bytes or 0
    if size > limits.max_object_bytes:
        raise UnsupportedError(
            f"the file has {size} bytes, but the store takes at most {limits.max_object_bytes}",
            hint="save with more ranks, or in more files",
        )
    wanted = min(configured_bytes or _DEFAULT_PART_BYTES, memory_bytes)
    # A tenth of the parts is kept for a file that turns out larger than its declared size.
    needed = -(-size // max(1, limits.max_parts * 9 // 10))
    first = _fitted(limits, max(wanted, needed))
    return PartSizes(limits, first, size_hint_bytes)


def _fitted(limits: Limits, size_bytes: int) -> int:
    """Return the size within the limits, as a multiple of the unit if the store has one."""
    unit = limits.part_multiple_bytes
    most = min(limits.max_part_bytes, limits.max_single_put_bytes) // unit * unit
    least = -(-limits.min_part_bytes // unit) * unit
    return min(max(-(-size_bytes // unit) * unit, least), most)


# -- the bounds of one upload ----------------------------------------------------------------


class UploadBudget:
    """The limits of one upload.

    memory_bytes: The size of all buffers. concurrency: How many parts may be in flight.
    """

    def __init__(self, memory_bytes: int, concurrency: int) -> None:
        self._memory_bytes = memory_bytes
        self._concurrency = concurrency
        self._changed = threading.Condition()
        self._spare: list[memoryview] = []
        self.allocated_bytes = 0
        self.under_way = 0
        self.error: BaseException | None = None
        self.stopped = threading.Event()

    def buffer(self, size_bytes: int) -> memoryview:
        """Return memory for one part, with any content. Waits for memory; raises a part's error."""
        with self._changed:
            while self._spare:
                found = self._spare.pop()
                if len(found) == size_bytes:
                    return found
                self.allocated_bytes -= len(found)
            self._changed.wait_for(lambda: self._fits(size_bytes))
            self._check()
            self.allocated_bytes += size_bytes
        # Pages that no byte is copied to stay untouched: most of a part may be lent.
        return np.empty(size_bytes, dtype=np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Release a buffer of a part that was never sent."""
        with self._changed:
            self.allocated_bytes -= len(buffer)

    def begin(self) -> None:
        """Count a part that is sent. Waits while enough are in flight; raises a part's error."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or self.under_way < self._concurrency
            )
            self._check()
            self.under_way += 1

    def end(self, buffer: memoryview | None, error: BaseException | None) -> None:
        """Count a part that was sent or failed. Its buffer is free."""
        with self._changed:
            self.under_way -= 1
            if buffer is not None:
                self._spare.append(buffer)
            if error is not None and self.error is None:
                self.error = error
                self.stopped.set()
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when no part is in flight; raises a part's error."""
        with self._changed:
            self._changed.wait_for(lambda: self.under_way == 0)
            self._check()

    def stop(self, wait_s: float) -> bool:
        """Stop retries. Returns whether all parts in flight ended within ``wait_s``."""
        self.stopped.set()
        with self._changed:
            done = self._changed.wait_for(lambda: self.under_way == 0, wait_s)
            while self._spare:
                self.allocated_bytes -= len(self._spare.pop())
            return done

    def _fits(self, size_bytes: int) -> bool:
        while self._spare and self.allocated_bytes + size_bytes > self._memory_bytes:
            self.allocated_bytes -= len(self._spare.pop())
        return (
            self.error is not None
            or self.under_way == 0  # a part that is larger than the limit is sent alone
            or self.allocated_bytes + size_bytes <= self._memory_bytes
        )

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


# -- the part that fills -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copied:
    """Bytes ``start`` to ``stop`` of the buffer."""

    start: int
    stop: int


class FillingPart:
    """One part of ``size_bytes`` that is being filled.

    declared_bytes: How much of the object is left, if its size was given: a small file gets a small
    buffer. gathers: Whether the client sends several pieces without a copy.
    """

    def __init__(
        self, budget: UploadBudget, size_bytes: int, declared_bytes: int, *, gathers: bool
    ) -> None:
        self.size_bytes = size_bytes
        self.filled_bytes = 0
        self._budget = budget
        self._declared_bytes = declared_bytes
        self._gathers = gathers
        self._pieces: list[memoryview | _Copied] = []
        self._buffer: memoryview | None = None
        self._copied_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How many more bytes fit."""
        return self.size_bytes - self.filled_bytes

    def add(self, piece: memoryview, *, lent: bool) -> None:
        """Append at most ``left_bytes``. May wait for memory; raises the error of an earlier part.

        lent: The memory does not change until the object is closed.
        """
        if lent and (self._gathers or not self._pieces):
            self._pieces.append(piece)
        else:
            first = self._pieces[0] if self._pieces else None
            if isinstance(first, memoryview) and not self._gathers:
                self._pieces.clear()
                self._copy(first)
            self._copy(piece)
        self.filled_bytes += len(piece)

    def pieces(self) -> list[memoryview]:
        """Return all bytes, in order, in at most one piece if the client does not gather."""
        buffer = self._buffer if self._buffer is not None else memoryview(b"")
        return [
            buffer[one.start : one.stop] if isinstance(one, _Copied) else one
            for one in self._pieces
        ]

    def take_buffer(self) -> memoryview | None:
        """Return the buffer, which now belongs to the caller.

        Pieces taken before are views of it.
        """
        buffer, self._buffer = self._buffer, None
        return buffer

    def drop(self) -> None:
        """Release the buffer of a part that will never be sent."""
        buffer = self.take_buffer()
        if buffer is not None:
            self._budget.give_back(buffer)
        self._pieces.clear()

    def _copy(self, piece: memoryview) -> None:
        start, stop = self._copied_bytes, self._copied_bytes + len(piece)
        self._buffer_for(stop)[start:stop] = piece
        self._copied_bytes = stop
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, _Copied):
            self._pieces[-1] = replace(last, stop=stop)
        else:
            self._pieces.append(_Copied(start, stop))

    def _buffer_for(self, size_bytes: int) -> memoryview:
        """Return the buffer, with at least this size."""
        if self._buffer is None:
            declared_bytes = self._declared_bytes
            small = size_bytes <= declared_bytes < self.size_bytes
            self._buffer = self._budget.buffer(declared_bytes if small else self.size_bytes)
        if len(self._buffer) < size_bytes:
            small_one, self._buffer = self._buffer, self._budget.buffer(self.size_bytes)
            self._buffer[: self._copied_bytes] = small_one[: self._copied_bytes]
            self._budget.give_back(small_one)
        return self._buffer


# -- parts in order, for obstore -----------------------------------------------------------------

_REORDER_WAIT_S: Final = (
    0.5  # for the parts before one that came early, if one thread brings them all
)
_MAX_EARLY: Final = 4  # so many wait as copies; further ones wait uncopied
_STREAM_ABORT_S: Final = 30.0


_Piece = bytes | np.ndarray[Any, Any]


class _StoppedError(CkptfsError):
    """The upload was aborted here. obstore passes this error through."""


class PartQueue:
    """Parts in order, for one consumer. Any number of threads add them, in any order."""

    def __init__(self, part_bytes: int) -> None:
        self._changed = threading.Condition()
        self._part_bytes = part_bytes
        self._waiting: dict[int, list[_Piece]] = {}
        self._pieces: deque[_Piece] = deque()  # what is left of the part that is handed over
        self._consumed = 0  # parts that the consumer got, the last one perhaps in part
        self._in_use: Counter[int] = Counter()  # pieces of each that it may still read
        self._end: int | None = None
        self._is_ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            if not self._pieces:
                self._changed.wait_for(
                    lambda: (
                        self._is_ended
                        or self._consumed == self._end
                        or self._consumed in self._waiting
                    )
                )
            if self._is_ended:
                raise _StoppedError("the upload was aborted")
            if not self._pieces:
                if self._consumed not in self._waiting:
                    raise StopIteration
                self._pieces.extend(self._waiting.pop(self._consumed))
                self._consumed += 1
                self._changed.notify_all()
            return self._pieces.popleft()

    def put(self, number: int, pieces: Sequence[Buffer]) -> bool:
        """Add one part, and return when its buffers are not read any more.

        For a smaller part, the last one, it returns at once.

        Returns:
            Whether the part was taken. False: the stream has ended.
        """
        with self._changed:
            if self._is_ended or number < self._consumed:
                return not self._is_ended  # a repeated part: the bytes are the same
            size_bytes = sum(memoryview(piece).nbytes for piece in pieces)
            if not size_bytes:
                return self._copy(number, [b""])
            if size_bytes != self._part_bytes:
                self._lend(number, pieces)
                return True
            try:
                # Other threads usually bring the parts before it soon. Then nothing is copied, and the upload
                # holds no memory that the owners of the parts do not know of.
                self._changed.wait_for(
                    lambda: self._is_ended or self._reaches(number), _REORDER_WAIT_S
                )
                if not self._reaches(number) and len(self._waiting) < _MAX_EARLY:
                    return self._copy(number, pieces)
                self._changed.wait_for(lambda: self._is_ended or self._reaches(number))
                if not self._is_ended:
                    self._lend(number, pieces)
                    self._changed.wait_for(lambda: self._is_ended or number not in self._in_use)
            except BaseException:
                # Ctrl-C: the stream must not read a buffer that belongs to the caller again.
                self._stop()
                raise
            return not self._is_ended

    def _reaches(self, number: int) -> bool:
        """Whether every part before this one is here or was handed over."""
        return all(before in self._waiting for before in range(self._consumed, number))

    def _copy(self, number: int, pieces: Sequence[Buffer]) -> bool:
        self._waiting[number] = [bytes(join_buffers(pieces))]
        self._changed.notify_all()
        return True

    def finish(self) -> None:
        """Declare that there are no more parts. StorageError: one is missing."""
        with self._changed:
            end = self._consumed + len(self._waiting)
            if self._waiting and max(self._waiting) != end - 1:
                raise StorageError(f"part {self._consumed} was never put")
            self._end = end
            self._changed.notify_all()

    def stop(self) -> None:
        """End the stream: the consumer's next step raises, and ``put`` returns False."""
        with self._changed:
            self._stop()

    def _lend(self, number: int, pieces: Sequence[Buffer]) -> None:
        # Arrays, because they support weak references: these die when the last reader of the bytes
        # is gone.
        lent = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
        self._in_use[number] += len(lent)
        for array in lent:
            weakref.finalize(array, self._released, number).atexit = False
        self._waiting[number] = [*lent]
        self._changed.notify_all()

    def _released(self, number: int) -> None:
        with self._changed:
            self._in_use[number] -= 1
            if not self._in_use[number]:
                del self._in_use[number]
                self._changed.notify_all()

    def _stop(self) -> None:
        self._is_ended = True
        self._pieces.clear()
        self._waiting.clear()
        self._changed.notify_all()


class StreamUpload(Upload):
    """A multipart upload by one call, which runs in a thread of its own.

    Nothing happens, and no thread exists, before the first part.

    Args:
        context: The request, for errors.
        part_bytes: The size of every part but the last.
        send: Consumes the queue. It returns the object's etag, or raises typed errors.
    """

    def __init__(
        self, context: RequestContext, part_bytes: int, send: Callable[[Iterator[Any]], str | None]
    ) -> None:
        self._context = context
        self._part_bytes = part_bytes
        self._send = send
        self._queue = PartQueue(part_bytes)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._etag: str | None = None
        self._failure: BaseException | None = None
        self._ended = False
        self._is_reported = False

    def put_part(self, number: int, data: Buffer) -> None:
        is_short = memoryview(data).nbytes != self._part_bytes
        self.put_pieces(number, [bytes(data) if is_short else data])

    def put_pieces(self, number: int, pieces: Sequence[Buffer]) -> None:
        with self._lock:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(
                    target=self._run, name=f"ckptfs-upload-{self._context.uri.name}", daemon=True
                )
                self._thread.start()
        if not self._queue.put(number, pieces):
            raise self._final_error()

    def complete(self) -> str | None:
        if self._thread is None:
            raise StorageError("an upload needs a part", uri=self._context.uri)
        if not self._ended:
            self._queue.finish()
            self._thread.join()
        failure = self._failure
        if failure is None:
            return self._etag
        if self._is_reported:
            raise NotFoundError("complete failed: the upload has ended", uri=self._context.uri)
        self._is_reported = True
        if isinstance(failure, NotFoundError) and failure.hint in self._no_upload_hints():
            # obstore repeated a request after its answer was lost, and found its own success.
            raise AnswerLostError("complete may have happened", uri=self._context.uri)
        raise failure

    def _no_upload_hints(self) -> tuple[str | None, ...]:
        """Return the hints of a 404 that means the upload.

        A missing bucket has another hint, and then nothing of ours is left.
        """
        return (None, reason_error(self._context, Reason.NO_UPLOAD).hint)

    def abort(self) -> None:
        self._queue.stop()
        with self._lock:
            thread = self._thread
            self._ended = self._ended or thread is None
        if thread is None:
            return
        thread.join(_STREAM_ABORT_S)
        if thread.is_alive():
            raise StorageError("the upload still waits for the server", uri=self._context.uri)
        if self._failure is None:
            return  # complete
        failure, self._failure = self._failure, _StoppedError("the upload was aborted")
        if not self._is_reported and not isinstance(failure, _StoppedError):
            raise failure

    def _run(self) -> None:
        try:
            self._etag = self._send(self._queue)
        except BaseException as error:  # noqa: BLE001 - raised by the next put_part or by complete
            self._failure = error
        self._ended = True
        self._queue.stop()

    def _final_error(self) -> BaseException:
        """Return why the stream ended, as an error that a retry does not cure."""
        failure, self._is_reported = self._failure, True
        if isinstance(failure, TransientError | AnswerLostError):
            return StorageError(
                f"{failure.message}, also after obstore's own retries",
                uri=failure.uri,
                hint=failure.hint,
            )
        if failure is None or isinstance(failure, _StoppedError):
            return StorageError("the upload was aborted", uri=self._context.uri)
        return failure
