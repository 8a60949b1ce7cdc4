"""The stream of a file towards a writer that takes bytes in order: counts, digests, gathers, pumps.

    append --> digests, count --> gathered up to 1 MiB, large pieces as they are --> Pump --> DataWriter

Large pieces are *lent* to the writer: it sends them from where they lie and lets go of them when it
has. The pump writes one piece on a thread of its own while the next is digested or copied from a device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ckptfs.commit.digests import BlockDigester, ItemDigests
from ckptfs.storage.base import DataWriter
from ckptfs.storage.inflight import with_task
from ckptfs.storage.threads import uninterrupted

__all__ = ["FileStream", "Pump"]

_DIRECT_BYTES = 256 << 10  # pieces of at least this go to the file by themselves, uncopied
_GATHER_BYTES = 1 << 20  # smaller ones are gathered up to this
_PUMP_BYTES = 4 << 20  # files with a piece of this get a thread; smaller ones are not worth it
_AHEAD = 1  # pieces that wait for the pump: one staged tensor more in memory, no two


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes for the writer. is_lent: nobody changes them until the file is closed."""

    data: bytearray | memoryview
    is_lent: bool


class Pump:
    """Writes pieces in order, on a thread once a large one comes; their memory must stay as it is."""

    def __init__(self, writer: DataWriter) -> None:
        self._writer = writer
        self._pieces: queue.SimpleQueue[_Piece | Callable[[], None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def put(self, piece: _Piece) -> None:
        """Write this piece, now or soon. Raises what writing an earlier one raised."""
        if self._thread is None and (len(piece.data) < _PUMP_BYTES or not self._start()):
            self._write(piece)
            return
        if self._error is not None:
            raise self._error
        self._room.acquire()
        self._pieces.put(piece)

    def then(self, done: Callable[[], None]) -> None:
        """Call ``done`` when all that was put is written; never, when writing fails."""
        if self._thread is None:
            done()
        else:
            self._pieces.put(done)

    def _start(self) -> bool:
        thread = threading.Thread(target=with_task(self._run), name="ckptfs-pump", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False  # no threads left, or the interpreter is ending: written without one
        self._thread = thread
        return True

    def _write(self, piece: _Piece) -> None:
        if piece.is_lent:
            self._writer.lend(piece.data)
        else:
            self._writer.write(piece.data)

    def finish(self) -> None:
        """Return when all is written; raises what writing raised."""
        if self._thread is not None:
            self._pieces.put(None)
            try:
                self._ended.wait()
            except BaseException as error:
                self.stop(error)
                raise
            self._thread = None
        if self._error is not None:
            raise self._error

    def stop(self, why: BaseException) -> None:
        """Write nothing more and return when nothing is being written."""
        self._error = self._error or why
        if self._thread is not None:
            self._pieces.put(None)
            uninterrupted(self._ended.wait)  # or it would write through a writer that was aborted
            self._thread = None

    def _run(self) -> None:
        try:
            self._pump()
        finally:
            self._ended.set()

    def _pump(self) -> None:
        # After an error it goes on taking pieces, or put() would block for ever.
        while (piece := self._pieces.get()) is not None:
            if isinstance(piece, _Piece):
                self._room.release()
            if self._error is None:
                try:
                    if isinstance(piece, _Piece):
                        self._write(piece)
                    else:
                        piece()
                except BaseException as error:  # noqa: BLE001 - raised by put() or finish()
                    self._error = error
            del piece  # while waiting for the next, this one may be the last to hold a staged copy


@dataclass(slots=True)
class FileStream:
    """The one place where bytes meet the file: it counts, digests, and gathers small pieces."""

    pump: Pump
    position: int = 0
    items: list[ItemDigests] = field(default_factory=list)
    _gathered: bytearray = field(default_factory=bytearray)
    _digester: BlockDigester = field(default_factory=BlockDigester)
    _item_offset: int = 0
    _stays: bool = True
    _direct: bool = False  # bytes of the current item went to the pump from where they lie

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc is not None:
            self.pump.stop(exc)
            return
        try:
            self._flush()
        except BaseException as error:
            self.pump.stop(error)
            raise
        self.pump.finish()

    def pad(self, size_bytes: int) -> None:
        """So many zeros between two items: of neither, and not digested."""
        self._gathered += bytes(size_bytes)
        self.position += size_bytes

    def begin_item(self, *, stays: bool = True) -> None:
        """stays: whether its memory stays as it is until the file is closed."""
        self._item_offset = self.position
        self._stays, self._direct = stays, False
        self._digester = BlockDigester()

    def append(self, data: bytearray | memoryview) -> None:
        """Bytes of the current item; of large ones the memory goes to the writer, uncopied."""
        self._digester.update(data)
        self.position += len(data)
        if len(data) >= _DIRECT_BYTES:
            self._flush()
            self._direct = True
            self.pump.put(_Piece(data, is_lent=self._stays))
            return
        self._gathered += data
        if len(self._gathered) >= _GATHER_BYTES:
            self._flush()

    def after_item(self, done: Callable[[], None]) -> None:
        """Call ``done`` when nobody reads the memory of the item that just ended any more."""
        if self._direct:
            self.pump.then(done)
        else:
            done()  # it was copied

    def cut(self) -> int:
        """Begin a region of digests here; returns the offset within the item."""
        self._digester.cut()
        return self.position - self._item_offset

    def end_item(self, payload_offset: int, payload_length: int) -> ItemDigests:
        """The digests of the item that ends here; its payload as told, (0, 0) where it has none."""
        item = ItemDigests(
            offset=self._item_offset,
            length=self.position - self._item_offset,
            payload_offset=payload_offset,
            payload_length=payload_length,
            blocks=self._digester.finish(),
        )
        self.items.append(item)
        return item

    def _flush(self) -> None:
        if self._gathered:
            full, self._gathered = self._gathered, bytearray()
            self.pump.put(_Piece(full, is_lent=False))
