"""One object on its way: parts in parallel, a bound on what is held, nothing visible before close.

    write(view) --copied---------------------------+
    lend(view) --uncopied, in the part that fills; +--full--> pool: put, retried --> close: complete
                 or, where the client takes one    |          up to ``concurrency`` at once
                 buffer, if it is a part by itself-+

    one part or less    one PUT at close, no multipart upload at all
    a part fails        the next write or close raises its error; abort throws the parts away
    complete unanswered repeated; "no such upload" then means done, if the key has our size (one that
                        somebody aborted over an older object of that size would look the same: no
                        answer tells them apart, and data keys, each used once, have none before)

Held are the part that fills and the copied bytes of those under way. ``Route.memory_bytes`` bounds
their sum (or one part does, where the object's size asks for larger ones): write() waits until parts
that are under way are done. Waiting needs nothing but this upload's own parts, so no two uploads can
wait for each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ckptfs.errors import AnswerLostError, NotFoundError, StorageError
from ckptfs.storage.base import DataWriter
from ckptfs.storage.clients.base import ALWAYS, ObjectClient, Upload, whole
from ckptfs.storage.part import FillingPart
from ckptfs.storage.parts import Cut
from ckptfs.storage.retry import Retrier, RetryPolicy
from ckptfs.storage.room import Room
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
