"""The files of a load, opened in order: ahead of their turn where there are lanes for it.

A data file begins with two requests, one that opens it and one for its digests. They do not wait for
each other, nor one file's for another's: a checkpoint of a thousand small files is not read in two
thousand steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from ckptfs.commit.digests import ItemDigests
from ckptfs.dcp.datafile import DataFile, Source, open_data, read_digests
from ckptfs.dcp.lanes import Lanes
from ckptfs.storage.base import DataReader

__all__ = ["Readers", "opened"]


class Readers:
    """Readers that are open, by path; leaving the block closes those that are left."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: dict[str, DataReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for path in list(self._open):
            self.close(path)

    def open(self, path: str) -> DataReader:
        """The reader of a file. Any thread, one for a path. IncompleteCheckpointError."""
        if path not in self._open:
            self._open[path] = open_data(self._source, path)
        return self._open[path]

    def close(self, path: str) -> None:
        """Nobody reads this file any more."""
        self._open.pop(path).close()


@dataclass(slots=True)
class _Opening:
    """A file on its way: what its two requests have brought."""

    path: str
    missing: int = 2
    reader: DataReader | None = None
    digests: Mapping[int, ItemDigests] | None = None

    def has_reader(self, reader: DataReader) -> None:
        self.reader, self.missing = reader, self.missing - 1

    def has_digests(self, digests: Mapping[int, ItemDigests] | None) -> None:
        self.digests, self.missing = digests, self.missing - 1


def opened(
    source: Source, paths: Sequence[str], readers: Readers, lanes: Lanes
) -> Iterator[DataFile]:
    """The files in order; as many are on their way ahead as there are lanes."""
    left, ahead = deque(paths), deque[_Opening]()
    while left or ahead:
        while left and len(ahead) < lanes.count:
            opening = _Opening(left.popleft())
            lanes.submit(partial(readers.open, opening.path), opening.has_reader)
            lanes.submit(partial(read_digests, source, opening.path), opening.has_digests)
            ahead.append(opening)
        opening = ahead.popleft()
        while opening.missing:
            lanes.wait()
        if opening.reader is not None:
            yield DataFile(opening.reader, source, opening.path, opening.digests)
