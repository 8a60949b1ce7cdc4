"""A multipart upload through one ``obstore.put`` of an iterator, which a thread feeds part by part.

    put_part(0) put_part(2) put_part(1) ...      any order, any threads
             |       |       |
             Feed: part n is handed over when obstore asks for it      (in order; those after it wait)
                     |
             obstore.put in a thread: sends up to ``max_concurrency`` at once, retries by itself

A part may lie in pieces. obstore cuts what it is given into parts as large as it was told and copies
nothing: it holds the caller's buffers until the part has arrived, and ``put_part`` returns when it let go
of them. A smaller one, the last, it keeps until the end: ``put_part`` copies it, ``put_pieces`` does not. A part that failed in the end is told by a
later ``put_part`` or by ``complete``, and not as something to try again: the stream is gone. ``abort``
makes the iterator raise; obstore then aborts the upload on the server.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ckptfs.errors import AnswerLostError, CkptfsError, NotFoundError, StorageError, TransientError
from ckptfs.storage.clients.base import Buffer, Upload, whole
from ckptfs.storage.clients.failures import Asked, failed
from ckptfs.storage.clients.reasons import Reason

__all__ = ["Feed", "StreamUpload"]

_PATIENCE_S: Final = 0.5  # for the parts before one that came early, if one thread brings them all
_EARLY: Final = 4  # then so many wait as copies; more wait uncopied
_ABORT_S: Final = 30.0


_Piece = bytes | np.ndarray[Any, Any]


class _StoppedError(CkptfsError):
    """The upload was aborted here; obstore passes it through."""


class Feed:
    """Parts in order, for one consumer; any number of threads give them, in any order."""

    def __init__(self, part_bytes: int) -> None:
        self._changed = threading.Condition()
        self._part_bytes = part_bytes
        self._waiting: dict[int, list[_Piece]] = {}
        self._pieces: deque[_Piece] = deque()  # what is left of the part that is handed over
        self._handed = 0  # parts that the consumer got, the last one perhaps in part
        self._held: Counter[int] = Counter()  # pieces of each that it may still read
        self._end: int | None = None
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            if not self._pieces:
                self._changed.wait_for(
                    lambda: self._over or self._handed == self._end or self._handed in self._waiting
                )
            if self._over:
                raise _StoppedError("the upload was aborted")
            if not self._pieces:
                if self._handed not in self._waiting:
                    raise StopIteration
                self._pieces.extend(self._waiting.pop(self._handed))
                self._handed += 1
                self._changed.notify_all()
            return self._pieces.popleft()

    def give(self, number: int, pieces: Sequence[Buffer]) -> bool:
        """Hand over one part; returns when nobody reads its buffers, but those of a smaller one, the
        last, at once. False: the stream is over.
        """
        with self._changed:
            if self._over or number < self._handed:
                return not self._over  # a part that went already: the bytes are the same
            size_bytes = sum(memoryview(piece).nbytes for piece in pieces)
            if not size_bytes:
                return self._copy(number, [b""])
            if size_bytes != self._part_bytes:
                self._lend(number, pieces)
                return True
            try:
                # Other threads bring those before it, as a rule at once: then nothing is copied, and
                # what an upload holds is what its parts' owners know of.
                self._changed.wait_for(lambda: self._over or self._reaches(number), _PATIENCE_S)
                if not self._reaches(number) and len(self._waiting) < _EARLY:
                    return self._copy(number, pieces)
                self._changed.wait_for(lambda: self._over or self._reaches(number))
                if not self._over:
                    self._lend(number, pieces)
                    self._changed.wait_for(lambda: self._over or number not in self._held)
            except BaseException:
                # Ctrl-C: the stream must not go on with a buffer that is the caller's again.
                self._stop()
                raise
            return not self._over

    def _reaches(self, number: int) -> bool:
        """Every part before this one is here or was handed over."""
        return all(before in self._waiting for before in range(self._handed, number))

    def _copy(self, number: int, pieces: Sequence[Buffer]) -> bool:
        self._waiting[number] = [bytes(whole(pieces))]
        self._changed.notify_all()
        return True

    def finish(self) -> None:
        """No more parts. StorageError: one is missing."""
        with self._changed:
            end = self._handed + len(self._waiting)
            if self._waiting and max(self._waiting) != end - 1:
                raise StorageError(f"part {self._handed} was never put")
            self._end = end
            self._changed.notify_all()

    def stop(self) -> None:
        """The stream is over: the consumer's next step raises, whoever gives gets False."""
        with self._changed:
            self._stop()

    def _lend(self, number: int, pieces: Sequence[Buffer]) -> None:
        # Arrays only for their weak references: they die when the last reader of their bytes is gone.
        lent = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
        self._held[number] += len(lent)
        for array in lent:
            weakref.finalize(array, self._released, number).atexit = False
        self._waiting[number] = [*lent]
        self._changed.notify_all()

    def _released(self, number: int) -> None:
        with self._changed:
            self._held[number] -= 1
            if not self._held[number]:
                del self._held[number]
                self._changed.notify_all()

    def _stop(self) -> None:
        self._over = True
        self._pieces.clear()
        self._waiting.clear()
        self._changed.notify_all()


class StreamUpload(Upload):
    """``send`` consumes the feed in a thread of its own and returns the object's etag, or raises
    typed errors. Nothing happens, and no thread exists, before the first part.
    """

    def __init__(
        self, asked: Asked, part_bytes: int, send: Callable[[Iterator[Any]], str | None]
    ) -> None:
        self._asked = asked
        self._part_bytes = part_bytes
        self._send = send
        self._feed = Feed(part_bytes)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._etag: str | None = None
        self._failure: BaseException | None = None
        self._ended = False
        self._told = False

    def put_part(self, number: int, data: Buffer) -> None:
        is_short = memoryview(data).nbytes != self._part_bytes
        self.put_pieces(number, [bytes(data) if is_short else data])

    def put_pieces(self, number: int, pieces: Sequence[Buffer]) -> None:
        with self._lock:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(
                    target=self._run, name=f"ckptfs-upload-{self._asked.uri.name}", daemon=True
                )
                self._thread.start()
        if not self._feed.give(number, pieces):
            raise self._for_good()

    def complete(self) -> str | None:
        if self._thread is None:
            raise StorageError("an upload needs a part", uri=self._asked.uri)
        if not self._ended:
            self._feed.finish()
            self._thread.join()
        failure = self._failure
        if failure is None:
            return self._etag
        if self._told:
            raise NotFoundError("complete failed: the upload has ended", uri=self._asked.uri)
        self._told = True
        if isinstance(failure, NotFoundError) and failure.hint in self._no_upload_hints():
            # obstore asked again after an answer that was lost, and met its own success.
            raise AnswerLostError("complete may have happened", uri=self._asked.uri)
        raise failure

    def _no_upload_hints(self) -> tuple[str | None, ...]:
        """Of a 404 that means the upload; a missing bucket has another, and nothing of ours."""
        return (None, failed(self._asked, Reason.NO_UPLOAD).hint)

    def abort(self) -> None:
        self._feed.stop()
        with self._lock:
            thread = self._thread
            self._ended = self._ended or thread is None
        if thread is None:
            return
        thread.join(_ABORT_S)
        if thread.is_alive():
            raise StorageError("the upload still waits for the server", uri=self._asked.uri)
        if self._failure is None:
            return  # complete
        failure, self._failure = self._failure, _StoppedError("the upload was aborted")
        if not self._told and not isinstance(failure, _StoppedError):
            raise failure

    def _run(self) -> None:
        try:
            self._etag = self._send(self._feed)
        except BaseException as error:  # noqa: BLE001 - told by the next put_part or by complete
            self._failure = error
        self._ended = True
        self._feed.stop()

    def _for_good(self) -> BaseException:
        """Why the stream is over, as something that trying again does not cure."""
        failure, self._told = self._failure, True
        if isinstance(failure, TransientError | AnswerLostError):
            return StorageError(
                f"{failure.message}, also after obstore's own retries",
                uri=failure.uri,
                hint=failure.hint,
            )
        if failure is None or isinstance(failure, _StoppedError):
            return StorageError("the upload was aborted", uri=self._asked.uri)
        return failure
