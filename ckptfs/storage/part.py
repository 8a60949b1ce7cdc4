"""The part of an upload that fills: what is lent stays where it lies, what is written is copied.

    gathers         lent | copied | lent | copied     pieces in order, sent one after the other
    does not        lent alone, uncopied; else everything behind each other in one buffer

What is copied lies in one buffer of the upload's ``Room``, in order, and takes memory only as far as it
is filled: the frames between two lent tensors cost a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptfs.storage.room import Room

__all__ = ["FillingPart"]


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
