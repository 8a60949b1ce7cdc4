"""One object that is being written: parts in parallel, bounded memory, nothing visible before close.

    write(view) --copied---------------------------+
    lend(view) --uncopied, in the part that fills; +--full--> pool: put, retried --> close: complete
                 or, where the client takes one    |          up to ``concurrency`` at once
                 buffer, if it is a part by itself-+

    one part or less    one PUT at close, no multipart upload at all
    a part fails        the next write or close raises its error; abort discards the parts
    no answer           a complete request without an answer is repeated. "No such upload" then means that the
                        first request succeeded, provided the object has the expected size. (If somebody
                        aborted the upload over an older object of that size, the answers would be the same.
                        Data keys are used once, so there is no older object.)

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
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from ckptfs.errors import AnswerLostError, NotFoundError, StorageError, UnsupportedError
from ckptfs.storage.base import DataWriter
from ckptfs.storage.clients.base import ALWAYS, Limits, ObjectClient, Upload, whole
from ckptfs.storage.retry import Retrier, RetryPolicy
from ckptfs.uri import Uri, mask_credentials

__all__ = ["Cut", "FillingPart", "ObjectWriter", "Room", "Route", "plan_parts"]

log = logging.getLogger(__name__)

_ABORT_S = 5.0  # for the request that throws the parts away; what it misses goes by age
_ABORT_WAIT_S = 10.0  # for parts under way: aborted before them, they would stay behind


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

    def __init__(self, route: Route, key: str, uri: Uri, cut: Cut, *, kept: bool = False) -> None:
        self._route = route
        self._kept = kept and route.client.resumes  # parts outlive this writer
        self._spared: list[int] = []
        self._key = key
        self._uri = uri
        self._cut = cut
        self._room = Room(route.memory_bytes, route.concurrency)
        self._upload: Upload | None = None
        self._number = 0  # of the part that fills
        self._offset = 0  # where it begins
        self._part: FillingPart | None = None  # none before its first byte
        self._open = True
        self._done = False

    # -- writing -----------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> int:
        return self._append(memoryview(data).cast("B"), lent=False)

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        return self._append(memoryview(data).cast("B"), lent=True)

    def _append(self, view: memoryview, *, lent: bool) -> int:
        if not self._open:
            raise StorageError("the file cannot be written any more", uri=self._uri)
        # Until this returns: what was interrupted half-way must not be closed as if it were whole.
        self._open = False
        rest = view
        while len(rest):
            if self._part is not None and not self._part.left_bytes:
                self._send(self._part)  # only now: the last part must be known as such
            if self._part is None:
                self._part = self._next_part()
            taken = rest[: self._part.left_bytes]
            self._part.add(taken, lent=lent)
            rest = rest[len(taken) :]
        self._open = True
        return len(view)

    def _next_part(self) -> FillingPart:
        try:
            size_bytes = self._cut.part_bytes(self._number, self._offset)
        except StorageError as error:
            error.uri = str(self._uri)
            raise
        told_bytes = (self._cut.told_bytes or 0) - self._offset
        gathers = self._route.client.gathers
        return FillingPart(self._room, size_bytes, told_bytes, gathers=gathers)

    def _send(self, part: FillingPart) -> None:
        """Hand the part that filled to the pool."""
        if self._upload is None:
            self._upload = self._begun(part.size_bytes)
        self._room.begin()
        pieces, buffer = part.pieces(), part.take_buffer()
        upload, number = self._upload, self._number

        def put() -> None:
            failure: BaseException | None = None
            try:
                if self._room.stopped.is_set():
                    pass
                elif self._kept and upload.holds(number, whole(pieces)):
                    self._spared.append(sum(map(len, pieces)))
                else:
                    self._route.retrier.run(
                        lambda: upload.put_pieces(number, pieces), stop=self._room.stopped
                    )
            except BaseException as error:  # noqa: BLE001 - raised by the next write or close
                failure = error
            self._room.end(buffer, failure)

        try:
            sent = self._route.pool().submit(put)
        except BaseException as error:
            self._room.end(buffer, None)  # no thread took it: nobody else would say so
            if isinstance(error, RuntimeError):
                raise StorageError(f"no thread takes a part: {error}", uri=self._uri) from error
            raise
        sent.add_done_callback(lambda done: self._dropped(buffer) if done.cancelled() else None)
        self._number += 1
        self._offset += part.filled_bytes
        self._part = None

    def _begun(self, part_bytes: int) -> Upload:
        client, retrier = self._route.client, self._route.retrier
        left = retrier.run(lambda: client.resume_upload(self._key)) if self._kept else None
        if left is not None:
            return left
        return retrier.run(lambda: client.begin_upload(self._key, part_bytes=part_bytes))

    @property
    def spared_bytes(self) -> int:  # type: ignore[override]  # a number of the base class
        """Bytes of parts that the store had."""
        return sum(self._spared)

    def _dropped(self, buffer: memoryview | None) -> None:
        """A part that waited for a thread, and gets none: whoever waits for it must not wait on."""
        self._room.end(buffer, StorageError("the storage was closed meanwhile", uri=self._uri))

    # -- ending ------------------------------------------------------------------------

    def close(self) -> None:
        if self._done:
            return
        if not self._open:
            raise StorageError("the file cannot be closed: a write failed", uri=self._uri)
        self._open = False
        upload, part = self._upload, self._part
        if upload is None:
            data = whole(part.pieces()) if part is not None else b""
            self._route.retrier.run(lambda: self._route.client.put(self._key, data, ALWAYS))
        else:
            if part is not None:
                self._send(part)
            self._room.drain()
            self._complete(upload)
        self._done = True
        self._drop_part()
        self._room.stop(0)

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
                # An earlier try that was not answered completed it, or somebody aborted it.
                if lost and self._is_there():
                    return
                raise StorageError(
                    "the upload vanished before it was complete, by a rule for incomplete uploads "
                    f"or a cleanup perhaps: {error.message}",
                    uri=self._uri,
                    hint=error.hint,
                ) from error

        self._route.retrier.run(once)

    def _is_there(self) -> bool:
        try:
            return self._route.client.head(self._key).size_bytes == self._offset
        except NotFoundError:
            return False

    def abort(self) -> None:
        if self._done:
            return
        self._open, self._done = False, True
        began = time.monotonic()
        ended = self._room.stop(_ABORT_WAIT_S)
        upload, self._upload = self._upload, None
        self._drop_part()
        if upload is None or self._kept:
            return
        brief = replace(self._route.retrier, policy=RetryPolicy(retry_s=_ABORT_S))
        try:
            brief.run(upload.abort)
        except Exception as error:  # noqa: BLE001 - the error that brought us here is the one to tell
            log.warning(
                "parts of %s are left behind and go by age: %s",
                self._uri,
                mask_credentials(str(error)),
            )
            return
        if not ended:
            log.warning(
                "parts of %s were under way %.0f s after the abort: some may be left behind, "
                "and go by age",
                self._uri,
                time.monotonic() - began,
            )


# -- part sizes --------------------------------------------------------------------------

_USUAL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes of one object's parts. first_bytes: of the first. told_bytes: the size that was told."""

    limits: Limits
    first_bytes: int
    told_bytes: int | None

    def part_bytes(self, number: int, offset: int) -> int:
        """The size of part ``number`` (from 0), which begins at ``offset``; the last may be smaller.

        UnsupportedError: the store takes no such part.
        """
        limits = self.limits
        if number >= limits.max_parts or offset >= limits.max_object_bytes:
            raise UnsupportedError(
                f"the file is larger than {offset} bytes, the most that the store takes in "
                f"{number} parts (it takes {limits.max_parts} parts, "
                f"{limits.max_object_bytes} bytes)",
                hint="a larger part_size_bytes, more ranks, or more files",
            )
        if limits.equal_parts or (self.told_bytes is not None and offset < self.told_bytes):
            return self.first_bytes
        steps = max(1, limits.max_parts * 3 // 20)
        return _fitted(limits, max(self.first_bytes, -(-offset // steps)))


def plan_parts(
    limits: Limits, *, size_hint_bytes: int | None, asked_bytes: int | None, room_bytes: int
) -> Cut:
    """How to cut an object of about that size.

    asked_bytes: what the user set, else 16 MiB. room_bytes: what the upload may hold; a part is
    larger only where the object's size leaves no choice. UnsupportedError: no object may be so large.
    """
    size = size_hint_bytes or 0
    if size > limits.max_object_bytes:
        raise UnsupportedError(
            f"a file of {size} bytes: the store takes at most {limits.max_object_bytes}",
            hint="save with more ranks, or in more files",
        )
    wanted = min(asked_bytes or _USUAL_BYTES, room_bytes)
    # A tenth of the parts is kept for a file that turns out larger than it was told to be.
    needed = -(-size // max(1, limits.max_parts * 9 // 10))
    first = _fitted(limits, max(wanted, needed))
    return Cut(limits, first, size_hint_bytes)


def _fitted(limits: Limits, size_bytes: int) -> int:
    """Within the limits, and a multiple where the store asks for one."""
    unit = limits.part_multiple_bytes
    most = min(limits.max_part_bytes, limits.max_single_put_bytes) // unit * unit
    least = -(-limits.min_part_bytes // unit) * unit
    return min(max(-(-size_bytes // unit) * unit, least), most)


# -- the bounds of one upload ----------------------------------------------------------------


class Room:
    """The bounds of one upload. memory_bytes: of all buffers. concurrency: parts under way at once."""

    def __init__(self, memory_bytes: int, concurrency: int) -> None:
        self._memory_bytes = memory_bytes
        self._concurrency = concurrency
        self._changed = threading.Condition()
        self._spare: list[memoryview] = []
        self.held_bytes = 0
        self.under_way = 0
        self.error: BaseException | None = None
        self.stopped = threading.Event()

    def buffer(self, size_bytes: int) -> memoryview:
        """Memory for one part, whatever is in it. Waits; raises a part's error."""
        with self._changed:
            while self._spare:
                found = self._spare.pop()
                if len(found) == size_bytes:
                    return found
                self.held_bytes -= len(found)
            self._changed.wait_for(lambda: self._fits(size_bytes))
            self._check()
            self.held_bytes += size_bytes
        # Nobody touches what no byte is copied to: most of a part may be lent.
        return np.empty(size_bytes, dtype=np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """A buffer that never went out."""
        with self._changed:
            self.held_bytes -= len(buffer)

    def begin(self) -> None:
        """A part goes out. Waits while enough are under way; raises a part's error."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or self.under_way < self._concurrency
            )
            self._check()
            self.under_way += 1

    def end(self, buffer: memoryview | None, error: BaseException | None) -> None:
        """A part is done, or failed; its buffer is free."""
        with self._changed:
            self.under_way -= 1
            if buffer is not None:
                self._spare.append(buffer)
            if error is not None and self.error is None:
                self.error = error
                self.stopped.set()
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when nothing is under way; raises a part's error."""
        with self._changed:
            self._changed.wait_for(lambda: self.under_way == 0)
            self._check()

    def stop(self, wait_s: float) -> bool:
        """No part is tried again; whether all under way ended within ``wait_s``."""
        self.stopped.set()
        with self._changed:
            done = self._changed.wait_for(lambda: self.under_way == 0, wait_s)
            while self._spare:
                self.held_bytes -= len(self._spare.pop())
            return done

    def _fits(self, size_bytes: int) -> bool:
        while self._spare and self.held_bytes + size_bytes > self._memory_bytes:
            self.held_bytes -= len(self._spare.pop())
        return (
            self.error is not None
            or self.under_way == 0  # a part that is larger than the bound goes alone
            or self.held_bytes + size_bytes <= self._memory_bytes
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
    """One part that takes ``size_bytes``. told_bytes: what is left of the object, as far as its size was
    told: a small file gets a small buffer. gathers: whether the client sends pieces as they lie.
    """

    def __init__(self, room: Room, size_bytes: int, told_bytes: int, *, gathers: bool) -> None:
        self.size_bytes = size_bytes
        self.filled_bytes = 0
        self._room = room
        self._told_bytes = told_bytes
        self._gathers = gathers
        self._pieces: list[memoryview | _Copied] = []
        self._buffer: memoryview | None = None
        self._copied_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How many more bytes fit."""
        return self.size_bytes - self.filled_bytes

    def add(self, piece: memoryview, *, lent: bool) -> None:
        """Append at most ``left_bytes``. lent: it stays as it is until the object is closed.

        May wait for room; raises the error of an earlier part.
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
        """All bytes, in order; at most one piece where the client does not gather."""
        whole = self._buffer if self._buffer is not None else memoryview(b"")
        return [
            whole[one.start : one.stop] if isinstance(one, _Copied) else one for one in self._pieces
        ]

    def take_buffer(self) -> memoryview | None:
        """The buffer, which is the caller's now; pieces taken before lie in it."""
        buffer, self._buffer = self._buffer, None
        return buffer

    def drop(self) -> None:
        """It will never go out."""
        buffer = self.take_buffer()
        if buffer is not None:
            self._room.give_back(buffer)
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
        """The buffer, at least so large."""
        if self._buffer is None:
            told = self._told_bytes
            small = size_bytes <= told < self.size_bytes
            self._buffer = self._room.buffer(told if small else self.size_bytes)
        if len(self._buffer) < size_bytes:
            small_one, self._buffer = self._buffer, self._room.buffer(self.size_bytes)
            self._buffer[: self._copied_bytes] = small_one[: self._copied_bytes]
            self._room.give_back(small_one)
        return self._buffer
