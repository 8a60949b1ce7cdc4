"""Records of a pickle that differ in numbers only, made by the million.

    record = Record(b"...").number("offset", 4).fixed(b"...")     opcodes with holes
    fill([record, ...], kinds, columns)                           one after another, holes filled

A record's length does not depend on its numbers, so that a block of them is an array of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np

from ckptfs.dcp.packed import Ints

__all__ = ["Record", "fill", "number_width", "text"]

_BLOCK = 1 << 16  # rows made at once: what is copied twice stays small
_SHORT = 256


def text(string: str) -> bytes:
    """Opcodes that push a string."""
    data = string.encode("utf-8", "surrogatepass")
    if len(data) < _SHORT:
        return b"\x8c%c" % len(data) + data
    return b"X" + len(data).to_bytes(4, "little") + data


def number_width(*columns: Ints) -> int:
    """Bytes that hold every number of a region: 4 where they can, else 8."""
    most = max((int(column.max(initial=0)) for column in columns), default=0)
    return 4 if most < 1 << 31 else 8


class Record:
    """Opcodes with holes for numbers."""

    def __init__(self, start: bytes) -> None:
        self.opcodes = bytearray(start)
        self.holes: list[tuple[str, int | None, int, int]] = []  # column, its part, place, width

    def fixed(self, opcodes: bytes) -> Self:
        """Opcodes that all have."""
        self.opcodes += opcodes
        return self

    def number(self, column: str, width: int, part: int | None = None) -> Self:
        """An int of the column: BININT, or LONG1 of 8 bytes."""
        return self._hole(b"J" if width == 4 else b"\x8a\x08", column, width, part)  # noqa: PLR2004

    def numbers(self, column: str, count: int, width: int) -> Self:
        """A tuple of the first ``count`` ints of a row of the column."""
        if count > 3:  # noqa: PLR2004 - TUPLE1, TUPLE2, TUPLE3, and MARK ... TUPLE
            self.opcodes += b"("
        for part in range(count):
            self.number(column, width, part)
        self.opcodes += (b")", b"\x85", b"\x86", b"\x87")[count] if count <= 3 else b"t"  # noqa: PLR2004
        return self

    def memo_number(self, column: str) -> Self:
        """What lies in the memo under the column's number."""
        return self._hole(b"j", column, 4, None)

    def _hole(self, opcode: bytes, column: str, width: int, part: int | None) -> Self:
        self.opcodes += opcode
        self.holes.append((column, part, len(self.opcodes), width))
        self.opcodes += bytes(width)
        return self


def fill(
    records: Sequence[Record], kinds: Ints, columns: Mapping[str, Callable[[Ints], Ints]]
) -> tuple[memoryview, Ints]:
    """One record for each row, and where each begins; one more number tells the end.

    kinds: which record each row is. columns: the values of some rows, by the holes' names.
    """
    lengths = np.array([len(record.opcodes) for record in records], np.int64)[kinds]
    ends = np.append(0, np.cumsum(lengths))
    whole = np.empty(int(ends[-1]), np.uint8)
    for number in np.unique(kinds).tolist():
        record = records[number]
        size = len(record.opcodes)
        mine = np.flatnonzero(kinds == number)
        for at in range(0, len(mine) if size else 0, _BLOCK):
            rows = mine[at : at + _BLOCK]
            block = np.empty((len(rows), size), np.uint8)
            block[:] = np.frombuffer(bytes(record.opcodes), np.uint8)
            found = {name: columns[name](rows) for name in {hole[0] for hole in record.holes}}
            for name, part, place, width in record.holes:
                values = found[name] if part is None else found[name][:, part]
                raw = np.ascontiguousarray(values, f"<i{width}").view(np.uint8)
                block[:, place : place + width] = raw.reshape(len(rows), width)
            first, last = int(ends[rows[0]]), int(ends[rows[-1] + 1])
            if last - first == block.size:  # they stand together
                whole[first:last] = block.reshape(-1)
            else:
                whole[ends[rows][:, None] + np.arange(size)] = block
    return whole.data, ends
