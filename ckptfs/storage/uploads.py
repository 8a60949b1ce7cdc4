"""One object on its way: parts in parallel, a bound on what is held, nothing visible before close.

    write(view) --copy--> the part that fills --+
    lend(view) --a part inside it, uncopied-----+--full--> pool: put_part, retried --> close: complete
                 else joined with its neighbours           up to ``concurrency`` at once

    one part or less    one PUT at close, no multipart upload at all
    a part fails        the next write or close raises its error; abort throws the parts away
    complete unanswered repeated; "no such upload" then means done, if the key has our size (one that
                        somebody aborted over an older object of that size would look the same: no
                        answer tells them apart, and data keys, each used once, have none before)

Held are the part that fills and the joined or copied parts under way. ``Route.memory_bytes`` bounds
their sum (or one part does, where the object's size asks for larger ones): write() waits until parts
that are under way are done. Waiting needs nothing but this upload's own parts, so no two uploads can
wait for each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ckptfs.errors import AnswerLostError, NotFoundError, StorageError
from ckptfs.storage.base import DataWriter
from ckptfs.storage.clients.base import ALWAYS, Buffer, ObjectClient, Upload
from ckptfs.storage.parts import Cut
from ckptfs.storage.retrying import Retrier, RetryPolicy
from ckptfs.uri import Uri, mask_credentials

__all__ = ["ObjectWriter", "Route"]

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


class _Room:
    """What one upload holds and has under way. Waits for its own parts only."""

    def __init__(self, memory_bytes: int, concurrency: int) -> None:
        self._memory_bytes = memory_bytes
        self._concurrency = concurrency
        self._changed = threading.Condition()
        self._spare: list[bytearray] = []
        self.held_bytes = 0
        self.under_way = 0
        self.error: BaseException | None = None
        self.stopped = threading.Event()

    def buffer(self, size_bytes: int) -> bytearray:
        """Memory for one part: one that a part has left, or fresh. Waits; raises a part's error."""
        with self._changed:
            while self._spare:
                found = self._spare.pop()
                if len(found) == size_bytes:
                    return found
                self.held_bytes -= len(found)
            self._changed.wait_for(lambda: self._fits(size_bytes))
            self._check()
            self.held_bytes += size_bytes
        return bytearray(size_bytes)

    def give_back(self, buffer: bytearray) -> None:
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

    def end(self, buffer: bytearray | None, error: BaseException | None) -> None:
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


class ObjectWriter(DataWriter):
    """Writes one object. See ``Storage.open_write``; nothing is requested before the first part."""

    def __init__(self, route: Route, key: str, uri: Uri, cut: Cut, *, kept: bool = False) -> None:
        self._route = route
        self._kept = kept and route.client.resumes  # parts outlive this writer
        self._spared: list[int] = []
        self._key = key
        self._uri = uri
        self._cut = cut
        self._room = _Room(route.memory_bytes, route.concurrency)
        self._upload: Upload | None = None
        self._number = 0  # of the part that fills
        self._offset = 0  # where it begins
        self._part_bytes = 0  # its size when full; 0 before its first byte
        self._filled = 0
        self._lent: memoryview | None = None  # the part so far, where it is one lent piece
        self._buffer: bytearray | None = None  # the part so far, joined
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
            if self._filled == self._part_bytes:
                if self._filled:
                    self._send()  # only now: the last part must be known as such
                self._part_bytes = self._next_part_bytes()
            taken = rest[: self._part_bytes - self._filled]
            self._keep(taken, lent=lent)
            rest = rest[len(taken) :]
        self._open = True
        return len(view)

    def _keep(self, piece: memoryview, *, lent: bool) -> None:
        if lent and not self._filled:
            self._lent, self._filled = piece, len(piece)
            return
        buffer = self._room_for(self._filled + len(piece))
        if self._lent is not None:
            buffer[: self._filled] = self._lent
            self._lent = None
        buffer[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)

    def _room_for(self, size_bytes: int) -> bytearray:
        """The buffer of the part that fills, at least so large. A small file gets a small one."""
        if self._buffer is None:
            told = (self._cut.told_bytes or 0) - self._offset
            self._buffer = self._room.buffer(
                told if size_bytes <= told < self._part_bytes else self._part_bytes
            )
        if len(self._buffer) < size_bytes:
            small, self._buffer = self._buffer, self._room.buffer(self._part_bytes)
            self._buffer[: self._filled] = memoryview(small)[: self._filled]
            self._room.give_back(small)
        return self._buffer

    def _send(self) -> None:
        """Hand the part that fills to the pool, and begin the next."""
        if self._upload is None:
            self._upload = self._begun()
        data, buffer = self._part()
        self._room.begin()
        upload, number = self._upload, self._number

        def put() -> None:
            failure: BaseException | None = None
            try:
                if self._room.stopped.is_set():
                    pass
                elif self._kept and upload.holds(number, data):
                    self._spared.append(len(data))
                else:
                    self._route.retrier.run(
                        lambda: upload.put_part(number, data), stop=self._room.stopped
                    )
            except BaseException as error:  # noqa: BLE001 - raised by the next write or close
                failure = error
            self._room.end(buffer, failure)

        try:
            sent = self._route.pool().submit(put)
        except BaseException as error:
            self._room.end(None, None)  # no thread took it: nobody else would say so
            if isinstance(error, RuntimeError):
                raise StorageError(f"no thread takes a part: {error}", uri=self._uri) from error
            raise
        sent.add_done_callback(lambda done: self._dropped(buffer) if done.cancelled() else None)
        self._number += 1
        self._offset += self._filled
        self._filled = 0
        self._lent = self._buffer = None

    def _begun(self) -> Upload:
        client, retrier = self._route.client, self._route.retrier
        left = retrier.run(lambda: client.resume_upload(self._key)) if self._kept else None
        if left is not None:
            return left
        return retrier.run(lambda: client.begin_upload(self._key, part_bytes=self._part_bytes))

    @property
    def spared_bytes(self) -> int:  # type: ignore[override]  # a number of the base class
        """Bytes of parts that the store had."""
        return sum(self._spared)

    def _dropped(self, buffer: bytearray | None) -> None:
        """A part that waited for a thread, and gets none: whoever waits for it must not wait on."""
        self._room.end(buffer, StorageError("the storage was closed meanwhile", uri=self._uri))

    def _next_part_bytes(self) -> int:
        try:
            return self._cut.part_bytes(self._number, self._offset)
        except StorageError as error:
            error.uri = str(self._uri)
            raise

    def _part(self) -> tuple[Buffer, bytearray | None]:
        if self._lent is not None:
            return self._lent, None
        if self._buffer is None:
            return b"", None
        return memoryview(self._buffer)[: self._filled], self._buffer

    # -- ending ------------------------------------------------------------------------

    def close(self) -> None:
        if self._done:
            return
        if not self._open:
            raise StorageError("the file cannot be closed: a write failed", uri=self._uri)
        self._open = False
        if self._upload is None:
            data, _ = self._part()
            self._route.retrier.run(lambda: self._route.client.put(self._key, data, ALWAYS))
        else:
            upload = self._upload
            self._send()
            self._room.drain()
            self._complete(upload)
        self._done = True
        self._drop_part()
        self._room.stop(0)

    def _drop_part(self) -> None:
        if self._buffer is not None:
            self._room.give_back(self._buffer)
        self._lent = self._buffer = None

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
