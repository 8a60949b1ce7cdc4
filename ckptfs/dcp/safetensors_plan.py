"""Which file a tensor goes into, and which rank writes that file. Pure; the coordinator calls it.

    tensors of one set of holders  ->  files of up to max_bytes  ->  owners, the least loaded first

Only a rank that has a part of every tensor of a file can write it: with pipeline stages every stage
writes files of its own. A file belongs to one rank, because no object store lets two ranks write one;
several files are what makes it parallel, so there are at least as many as ranks where that leaves each
``_WORTH_A_FILE_BYTES``. ``order`` interleaves the owners: tensors are gathered one after another, by
all of their holders together, and every owner should have something to write all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfs.dcp.safetensors_format import Entry
from ckptfs.errors import StateError

__all__ = ["Held", "PlannedFile", "order", "plan_files"]

_WORTH_A_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor, and the ranks that hold it or a part of it."""

    entry: Entry
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file: who writes it, and its tensors in the order of their data."""

    name: str
    owner: int
    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(entry.size_bytes for entry in self.entries)


def plan_files(
    held: Sequence[Held],
    *,
    max_bytes: int,
    world: int,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
) -> tuple[PlannedFile, ...]:
    """The files, in the order of their numbers.

    held: in the order of the state dict. fqn_to_index_mapping: key -> number of its file, from 1, as
    torch's HuggingFaceStorageWriter takes it; max_bytes does not count then. StateError: a key has no
    number, or nobody holds all of a file.
    """
    groups = (
        _grouped(held, max_bytes, world)
        if fqn_to_index_mapping is None
        else _mapped(held, fqn_to_index_mapping)
    )
    highest = max((fqn_to_index_mapping or {}).values(), default=max(groups, default=1))
    load = [0] * world
    owners: dict[int, int] = {}
    for number in sorted(groups, key=lambda n: (-_size_of(groups[n]), n)):
        able = set(groups[number][0].ranks).intersection(*(h.ranks for h in groups[number]))
        if not able:
            raise StateError(
                f"no rank holds a part of every tensor of file {number}",
                hint="give what different groups of ranks hold different numbers",
            )
        owners[number] = min(able, key=lambda rank: (load[rank], rank))
        load[owners[number]] += _size_of(groups[number])
    single = highest == 1 and fqn_to_index_mapping is None
    return tuple(
        PlannedFile(
            "model.safetensors" if single else f"model-{number:05d}-of-{highest:05d}.safetensors",
            owners[number],
            # Wide dtypes first, as the header puts them.
            tuple(sorted((h.entry for h in groups[number]), key=lambda e: -e.dtype.itemsize)),
        )
        for number in sorted(groups)
    )


def order(files: Sequence[PlannedFile]) -> Iterator[tuple[int, Entry]]:
    """Every tensor once, with the number of its file: each owner's in order, the owners by turns."""
    lines: dict[int, Iterator[tuple[int, Entry]]] = {}
    for owner in sorted({file.owner for file in files}):
        lines[owner] = (
            (number, entry)
            for number, file in enumerate(files)
            if file.owner == owner
            for entry in file.entries
        )
    given = dict.fromkeys(lines, 0)
    while given:
        owner = min(given, key=lambda rank: (given[rank], rank))
        found = next(lines[owner], None)
        if found is None:
            del given[owner]
            continue
        given[owner] += found[1].size_bytes
        yield found


def _grouped(held: Sequence[Held], max_bytes: int, world: int) -> dict[int, list[Held]]:
    """Files that are filled in the order of the state dict; a larger tensor has one to itself."""
    total = _size_of(held)
    target = min(max_bytes, max(-(-total // world), _WORTH_A_FILE_BYTES))
    filling: dict[tuple[int, ...], list[Held]] = {}
    filled: dict[tuple[int, ...], int] = {}
    files: list[list[Held]] = []
    for one in held:
        size = filled.get(one.ranks, target) + one.entry.size_bytes
        if size > target or one.ranks not in filling:
            filling[one.ranks], size = [], one.entry.size_bytes
            files.append(filling[one.ranks])
        filling[one.ranks].append(one)
        filled[one.ranks] = size
    return dict(enumerate(files, start=1))


def _mapped(held: Sequence[Held], mapping: Mapping[str, int]) -> dict[int, list[Held]]:
    groups: dict[int, list[Held]] = {}
    for one in held:
        number = mapping.get(one.entry.key)
        if number is None or number < 1:
            raise StateError(
                f"fqn_to_index_mapping gives {one.entry.key!r} no file: {number}",
                hint="files are numbered from 1, and every key needs one",
            )
        groups.setdefault(number, []).append(one)
    return groups


def _size_of(held: Sequence[Held]) -> int:
    return sum(one.entry.size_bytes for one in held)
