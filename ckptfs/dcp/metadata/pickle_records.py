"""The records that make up most of a ``.metadata``, each recognised by one regular expression.

    PATTERNS        the usual form of a chunk, of a tensor's header, and of the place of an item
    Numbers         the numbers in them, by their opcodes
    RecordColumns   many records that differ only in some numbers: columns of these

``ckptfs.dcp.metadata.metadata_pickle`` gives them their meaning in the pickle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BINGET",
    "LONG_BINGET",
    "LONG_BINPUT",
    "MEMOIZE",
    "NEW",
    "PATTERNS",
    "SHORT_BINUNICODE",
    "STOP",
    "TENSOR_HEAD",
    "TUPLE1",
    "Ints",
    "Numbers",
    "RecordColumns",
    "tuples_of",
]

_GET = rb"(h.|j.{4})"
_TEXT = rb"\x8c(?:%b)" % rb"|".join(
    re.escape(bytes([size])) + rb".{%d}" % size for size in range(256)
)
_INT_ = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_INT = rb"(" + _INT_ + rb")"
TENSOR_HEAD = 12  # the group that ends where a tensor's chunks begin


def _record_patterns(memo: bytes) -> dict[str, re.Pattern[bytes]]:
    """Return the pattern of each record.

    ``memo`` is the opcode after each value that a pickler keeps: MEMOIZE or nothing.
    """
    i = _INT_
    filled = rb"|".join(
        [i + rb"\x85", i * 2 + rb"\x86", i * 3 + rb"\x87", rb"\((?:" + i + rb"){4,64}t"]
    )
    numbers = rb"(\)|(?:" + filled + rb")" + memo + rb")"
    size = _GET + numbers + rb"\x85" + memo + rb"R" + memo
    begin = rb"\)\x81" + memo + rb"\}" + memo + rb"\("
    flag = rb"([\x88\x89])"
    # The same text from several ranks occurs several times, and each occurrence is kept.
    text = rb"(h.|j.{4}|" + _TEXT + memo + rb")"
    chunk = begin + (_GET + size) * 2 + rb"ub"
    patterns = {
        "chunk": chunk,
        "tensor": begin
        + rb"".join([_GET, _GET, rb"\)\x81", memo])
        # The state: five values, or in a fast pickle one value from the memo.
        + (
            rb"".join([rb"\(", _GET, _GET, flag, _GET, flag, rb"t", memo])
            if memo
            else _GET + rb"()()()()"
        )
        + rb"".join([rb"b", _GET, size, _GET, rb"\]", memo, rb"()"])
        # One chunk and the end of the tensor, as APPEND and as APPENDS have it.
        + rb"(?:(\()?%b%b(?(%d)e|a)ub)?" % (_GET, chunk, TENSOR_HEAD + 1),
        "item": begin
        + rb"".join([_GET, text, _GET, rb"(N|", _INT_, rb")(?:", _GET, size, rb")?ub", _GET, begin])
        + rb"".join([_GET, text, _GET, _INT, _GET, _INT, rb"ub"]),
    }
    return {name: re.compile(pattern, re.DOTALL) for name, pattern in patterns.items()}


_BININT, _BININT1, _BININT2 = 0x4A, 0x4B, 0x4D
BINGET, LONG_BINGET, LONG_BINPUT, MEMOIZE = 0x68, 0x6A, 0x72, 0x94
SHORT_BINUNICODE, TUPLE1, STOP = 0x8C, 0x85, 0x2E
NEW = b")\x81"  # EMPTY_TUPLE, NEWOBJ
PATTERNS = {True: _record_patterns(rb"\x94"), False: _record_patterns(rb"")}
_NUMBER = re.compile(_INT, re.DOTALL)
_MOST_CACHED = 1 << 16


def _int_of(raw: bytes) -> int:
    """Return the number that BININT1, BININT2, BININT or LONG1 push."""
    op = raw[0]
    if op == _BININT1:
        return raw[1]
    if op == _BININT2:
        return raw[1] | raw[2] << 8
    return int.from_bytes(raw[1:] if op == _BININT else raw[2:], "little", signed=True)


class Numbers(dict[bytes, "tuple[int, ...]"]):
    """Tuples of integers by their opcodes, because most chunks have one of a few sizes."""

    __slots__ = ()

    def __missing__(self, raw: bytes) -> tuple[int, ...]:
        made = tuple([_int_of(one) for one in _NUMBER.findall(raw, 1 if raw[:1] == b"(" else 0)])
        if len(self) < _MOST_CACHED:
            self[raw] = made
        return made


class Ints(dict[bytes, "int | None"]):
    """Integers, or None, by their opcodes."""

    __slots__ = ()

    def __missing__(self, raw: bytes) -> int | None:
        made = None if raw == b"N" else _int_of(raw)
        if len(self) < _MOST_CACHED:
            self[raw] = made
        return made


# -- records of one length -------------------------------------------------------------------------

# By opcode: how many bytes precede the number (or the number of a memo entry), and the number's type.
_COLUMN: Mapping[int, tuple[int, np.dtype[Any]]] = {
    ord("K"): (1, np.dtype("u1")),
    ord("M"): (1, np.dtype("<u2")),
    ord("J"): (1, np.dtype("<i4")),
    ord("h"): (1, np.dtype("u1")),
    ord("j"): (1, np.dtype("<u4")),
    0x8A: (2, np.dtype("<i8")),
}
_PARTS = re.compile(_GET + rb"|" + _INT, re.DOTALL)
_FIRST_BLOCK = 16


class RecordColumns:
    """Records that differ only in some numbers, read as columns.

    The bulk writer writes the records of all tensors with the same number of dimensions like this. ``groups``
    are groups of the pattern that matched the first record, which begins at ``start``.
    """

    def __init__(
        self, data: bytes, start: int, found: re.Match[bytes], groups: Sequence[int]
    ) -> None:
        self.length = found.end() - start
        self._data = data
        self._is_usable = True
        self._columns: list[list[tuple[int, np.dtype[Any]]]] = []
        self._is_fixed = np.ones(self.length, dtype=bool)
        for group in groups:
            columns = []
            for part in _PARTS.finditer(data, *found.span(group)):
                skipped, dtype = _COLUMN[data[part.start()]]
                # A number of 5 to 7 bytes makes no column: our own writer makes none of these widths.
                self._is_usable &= skipped + dtype.itemsize == len(part[0])
                at = part.start() + skipped - start
                columns.append((at, dtype))
                self._is_fixed[at : at + dtype.itemsize] = False
            self._columns.append(columns)
        self._first = np.frombuffer(data, np.uint8, self.length, start)[self._is_fixed]

    def blocks(self, at: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the records from ``at`` on, many at a time.

        Each block is twice as large as the one before, so that no more bytes are looked at in vain than were
        useful.
        """
        count = _FIRST_BLOCK
        while self._is_usable and (count := min(count, (len(self._data) - at) // self.length)):
            block = np.frombuffer(self._data, np.uint8, count * self.length, at)
            block = block.reshape(count, self.length)
            other = (block[:, self._is_fixed] != self._first).any(axis=1)
            alike = int(other.argmax()) if other.any() else count
            if alike:
                yield block[:alike]
            if alike < count:
                return
            at += count * self.length
            count *= 2

    def numbers(self, block: NDArray[np.uint8], group: int) -> list[list[int]]:
        """Return the columns of one of the groups."""
        return [
            block[:, at : at + dtype.itemsize].copy().view(dtype)[:, 0].tolist()
            for at, dtype in self._columns[group]
        ]


def tuples_of(columns: list[list[int]], count: int) -> Iterable[tuple[int, ...]]:
    """Return one tuple for each row; the same one repeated if all are equal."""
    if all(min(column) == max(column) for column in columns):
        return repeat(tuple([column[0] for column in columns]), count)
    return zip(*columns, strict=True)
