"""Columns of integers and tables of strings as bytes, and back without trusting them.

    Packer      .ints(column, of) .texts(strings, of) .part(bytes)   -> .bytes()   StateError: too much
    Unpacker    .ints(), .texts(), .part(), .end()               ValueError for anything else

A column of integers is one byte that says how it is kept, its length, and its values in the fewest
bytes that hold them all: nothing for zeros, nothing for 0, 1, 2, ..., else 1, 2, 4 or 8 bytes each. A
table of strings is their lengths and one text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptfs.errors import StateError

__all__ = ["MOST", "Ints", "Packer", "Unpacker"]

Ints = NDArray[np.int64]

_COUNT = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_ZEROS, _COUNTING = 0, 9
_WIDTHS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}
# Numbers in a column, characters in a string. What a damaged length would make endless must not be made.
MOST = 1 << 24
_MOST_BYTES = (1 << 32) - 1  # what a part's length holds


class Packer:
    """Puts columns behind each other."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def ints(self, column: Ints, of: str) -> None:
        """One column of up to ``MOST`` numbers. of: what they are, for the StateError if there are more."""
        count = len(column)
        if count > MOST:
            raise StateError(
                f"this rank's save plan has {count} {of}, {count - MOST} more than fit into one",
                hint="save fewer and larger tensors, or several checkpoints",
            )
        if not count or not column.any():
            self._parts.append(_COUNT.pack(_ZEROS, count))
        elif np.array_equal(column, np.arange(count)):
            self._parts.append(_COUNT.pack(_COUNTING, count))
        else:
            width = _width(int(column.min()), int(column.max()))
            self._parts.append(_COUNT.pack(width, count))
            self._parts.append(column.astype(_WIDTHS[width]).tobytes())

    def texts(self, strings: Sequence[str], of: str) -> None:
        """A table of strings, lone surrogates included. of: as for ``ints``."""
        longest = max(strings, key=len, default="")
        if len(longest) >= MOST:
            raise StateError(
                f"{longest[:40]!r}... is one of the {of} and has {len(longest)} characters; "
                f"a save plan holds up to {MOST - 1}",
                hint="give it a shorter name",
            )
        self.ints(np.fromiter(map(len, strings), np.int64, len(strings)), of)
        self.part("".join(strings).encode("utf-8", "surrogatepass"))

    def part(self, data: bytes) -> None:
        """Bytes that somebody else understands."""
        if len(data) > _MOST_BYTES:
            raise StateError(
                f"a part of this rank's save plan has {len(data)} bytes, "
                f"{len(data) - _MOST_BYTES} more than fit into one",
                hint="save fewer and larger tensors under shorter names, or several checkpoints",
            )
        self._parts.append(_LENGTH.pack(len(data)))
        self._parts.append(data)

    def bytes(self) -> bytes:
        """All of it."""
        return b"".join(self._parts)


class Unpacker:
    """Takes columns apart again. ValueError for whatever no Packer made."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def ints(self, *, count: int | None = None, below: int | None = None) -> Ints:
        """One column. count: how many it must be; below: each is in 0 ... below - 1."""
        width, found = _COUNT.unpack(self._take(_COUNT.size))
        if count is not None and found != count:
            raise ValueError(f"a column of {found} numbers, not {count}")
        if found > MOST:
            raise ValueError(f"a column of {found} numbers, and at most {MOST} are read")
        if width == _ZEROS:
            column = np.zeros(found, np.int64)
        elif width == _COUNTING:
            column = np.arange(found, dtype=np.int64)
        elif width in _WIDTHS:
            raw = self._take(width * found)
            column = np.frombuffer(raw, _WIDTHS[width]).astype(np.int64)
        else:
            raise ValueError(f"no column is kept as {width}")
        if below is not None and found and (column.min() < 0 or column.max() >= below):
            raise ValueError(f"numbers of {column.min()}-{column.max()}, not 0-{below - 1}")
        return column

    def texts(self) -> list[str]:
        """A table of strings."""
        lengths = self.ints(below=MOST)
        text = self.part().decode("utf-8", "surrogatepass")
        ends = np.cumsum(lengths).tolist()
        if (ends[-1] if ends else 0) != len(text):
            raise ValueError("strings that are longer than their text")
        return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def part(self) -> bytes:
        """Bytes that somebody else understands."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._data):
            raise ValueError("more bytes than columns")

    def _take(self, length: int) -> bytes:
        taken = self._data[self._at : self._at + length]
        if len(taken) != length:
            raise ValueError("it ends too early")
        self._at += length
        return taken


def _width(least: int, most: int) -> int:
    if least < 0:
        return 8
    return next((w for w in (1, 2, 4) if most < 1 << (8 * w)), 8)
