"""Export a state dict to safetensors files: the ranks' agreement, and what each of them writes.

    plan_export (a step)   every rank describes its tensors; the coordinator decides files and owners
    Export.write           every rank: gather in the agreed order; owners: a thread that writes
    Export.finish          the coordinator: what was planned was written

    plan_files             tensors of one set of holders -> files of up to max_bytes -> owners, least loaded
    FileWriter.put         -> a queue of one tensor -> the thread: header, tensors, digests -> FileRecords

Only a rank that has a part of every tensor of a file can write it: with pipeline stages, every stage writes
files of its own. A file is written by one rank, because no object store lets two ranks write one. The export
is parallel only if there are several files, so there are at least as many as ranks if that leaves each
``_WORTH_A_FILE_BYTES``. ``order`` alternates between the owners: tensors are gathered one after another, by
all of their holders together, and every owner should always have something to write.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import xxhash
from torch.distributed.tensor import DTensor

from ckptfs._torch import is_sharded_tensor
from ckptfs.commit.digests import BlockDigester, FileDigests, ItemDigests, encode_digests
from ckptfs.commit.directory_checkpoints.write import PlainNames
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.paths import MANIFEST
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import WrittenPart
from ckptfs.control.control import Control
from ckptfs.dcp.metadata.torch_names import dtype_of
from ckptfs.dcp.planning.leaves import check_tensor, fingerprint_of
from ckptfs.dcp.safetensors.safetensors_format import (
    INDEX,
    SUFFIX,
    TensorEntry,
    dtype_name,
    encode_header,
    encode_index,
)
from ckptfs.dcp.write.host_memory import host_tensor, memory_of
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.events import Counters
from ckptfs.storage.base import Shape
from ckptfs.storage.inflight import with_task
from ckptfs.storage.threads import uninterrupted

__all__ = ["Export", "HeldTensor", "PlannedFile", "order", "plan_export", "plan_files"]

_WORTH_A_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor, and the ranks that hold it or a part of it."""

    entry: TensorEntry
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file: the rank that writes it, and its tensors in the order of their data."""

    name: str
    owner: int
    entries: tuple[TensorEntry, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(entry.size_bytes for entry in self.entries)


def plan_files(
    held: Sequence[HeldTensor],
    *,
    max_bytes: int,
    world: int,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
) -> tuple[PlannedFile, ...]:
    """Return the files, in the order of their numbers.

    Args:
        held: The tensors, in the order of the state dict.
        max_bytes: The largest size of a file in bytes; ignored with ``fqn_to_index_mapping``.
        world: The number of ranks.
        fqn_to_index_mapping: Key -> number of its file, from 1, as torch's HuggingFaceStorageWriter takes it.
            None: the files follow from the sizes.

    Returns:
        The files.

    Raises:
        StateError: A key has no number, or no rank holds a part of every tensor of a file.
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


def order(files: Sequence[PlannedFile]) -> Iterator[tuple[int, TensorEntry]]:
    """Yield every tensor once, with the number of its file.

    Each owner's tensors are in order; the owners take turns.
    """
    lines: dict[int, Iterator[tuple[int, TensorEntry]]] = {}
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


def _grouped(held: Sequence[HeldTensor], max_bytes: int, world: int) -> dict[int, list[HeldTensor]]:
    """Fill files in the order of the state dict; a tensor larger than a file gets its own."""
    total = _size_of(held)
    target = min(max_bytes, max(-(-total // world), _WORTH_A_FILE_BYTES))
    filling: dict[tuple[int, ...], list[HeldTensor]] = {}
    filled: dict[tuple[int, ...], int] = {}
    files: list[list[HeldTensor]] = []
    for one in held:
        size = filled.get(one.ranks, target) + one.entry.size_bytes
        if size > target or one.ranks not in filling:
            filling[one.ranks], size = [], one.entry.size_bytes
            files.append(filling[one.ranks])
        filling[one.ranks].append(one)
        filled[one.ranks] = size
    return dict(enumerate(files, start=1))


def _mapped(held: Sequence[HeldTensor], mapping: Mapping[str, int]) -> dict[int, list[HeldTensor]]:
    groups: dict[int, list[HeldTensor]] = {}
    for one in held:
        number = mapping.get(one.entry.key)
        if number is None or number < 1:
            raise StateError(
                f"fqn_to_index_mapping gives {one.entry.key!r} no file: {number}",
                hint="files are numbered from 1, and every key needs one",
            )
        groups.setdefault(number, []).append(one)
    return groups


def _size_of(held: Sequence[HeldTensor]) -> int:
    return sum(one.entry.size_bytes for one in held)


_SMALL_BYTES = 16 << 20  # on object stores, files up to this are one conditional put from memory


@dataclass(frozen=True, slots=True)
class PlannedExport:
    """What all ranks agreed on; ``aliases``: tied key -> the key that is written for it."""

    files: tuple[PlannedFile, ...]
    aliases: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _ExportedTensor:
    """One whole tensor on its way to its file."""

    number: int
    entry: TensorEntry
    data: torch.Tensor


class FileWriter:
    """This rank's files, written one after another by a thread of their own.

    After an error it continues to take tensors. Otherwise ``put`` would block, and with it every rank that
    takes part in gathering the next tensor.
    """

    def __init__(self, attempt: SaveAttempt, planned: PlannedExport) -> None:
        self._attempt = attempt
        self._planned = planned
        is_object = attempt.session.caps.shape is Shape.OBJECT
        self._guard = PlainNames(attempt) if is_object else None
        self._domain = None if is_object else attempt.session.placement.mine.id
        self._items: queue.Queue[_ExportedTensor | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._records: list[FileRecord] = []
        rank = attempt.session.control.rank
        self._own_numbers = [n for n, file in enumerate(planned.files) if file.owner == rank]
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=with_task(self._run), name="ckptfs-export", daemon=True
        )

    def __enter__(self) -> Self:
        if self._own_numbers:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[1] is not None and self._thread.is_alive():
            # A partly written file must not be closed as if it were complete.
            self._error = self._error or StateError(f"the export was interrupted: {exc[1]}")
            self._items.put(None)
            uninterrupted(self._ended.wait)

    def put(self, number: int, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Hand over the next tensor, which must not change. Waits while another tensor is queued."""
        if self._error is None:
            self._items.put(_ExportedTensor(number, entry, host_tensor(tensor)))

    def finish(self) -> list[FileRecord]:
        """Return once all files are durable; raise what writing one raised."""
        if self._own_numbers:
            self._items.put(None)
            self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._records

    def small(self, name: str, data: bytes) -> FileRecord:
        """Write one small file by its plain name."""
        key = f"{self._attempt.directory}/{name}"
        if self._guard is not None:
            self._guard.put(key, data)
        else:
            self._attempt.storage.make_dir(key.rpartition("/")[0])
            with self._attempt.storage.open_write(key, size_hint_bytes=len(data)) as writer:
                writer.write(data)
        return FileRecord(name, len(data), self._domain, None, xxhash.xxh3_128_hexdigest(data))

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            self._ended.set()

    def _write_all(self) -> None:
        try:
            for number in self._own_numbers:
                self._write(self._planned.files[number])
        except BaseException as error:  # noqa: BLE001 - raised by finish(), on the caller's thread
            self._error = error
            while self._items.get() is not None:
                pass
            return
        self._items.get()  # the None of finish()

    def _write(self, file: PlannedFile) -> None:
        aliases = {
            a: k for a, k in self._planned.aliases.items() if k in {e.key for e in file.entries}
        }
        head, header = encode_header(file.entries, {**self._planned.metadata, **aliases})
        size = header.size_bytes + file.size_bytes
        key = f"{self._attempt.directory}/{file.name}"
        items = [_digested(0, memoryview(head))]
        if self._guard is not None and size <= _SMALL_BYTES:
            contents = bytearray(head)
            for entry in header.entries:
                data = self._next(entry)
                items.append(_digested(entry.start, data))
                contents += data
            self._guard.put(key, bytes(contents))
        else:
            with self._attempt.storage.open_write(key, size_hint_bytes=size) as writer:
                writer.write(head)
                for entry in header.entries:
                    data = self._next(entry)
                    items.append(_digested(entry.start, data))
                    writer.lend(data)
                    del data
                if self._guard is not None:
                    self._guard.check()  # stop before the file is complete if the name was lost
        self._records += self._with_digests(file.name, size, items)

    def _next(self, entry: TensorEntry) -> memoryview:
        item = self._items.get()
        if item is None:
            self._items.put(None)  # for the end of _run
            raise self._error or StateError(f"no data came for {entry.key!r}")
        if item.entry.key != entry.key:
            raise AssertionError(f"{item.entry.key} came for {entry.key}")
        return memory_of(item.data)

    def _with_digests(self, name: str, size: int, items: Sequence[ItemDigests]) -> list[FileRecord]:
        """Write the sidecar of a file, below the save's own id; return the records of both."""
        storage, folder = self._attempt.storage, f"{self._attempt.directory}/"
        path = f"{self._attempt.save_id}/{name}.xxh3"
        data = encode_digests(FileDigests(tuple(items)))
        storage.make_dir(f"{folder}{self._attempt.save_id}")
        with storage.open_write(f"{folder}{path}", size_hint_bytes=len(data)) as writer:
            writer.write(data)
        return [
            FileRecord(name, size, self._domain, path),
            FileRecord(path, len(data), self._domain, None, xxhash.xxh3_128_hexdigest(data)),
        ]


def _digested(offset: int, data: memoryview) -> ItemDigests:
    digester = BlockDigester()
    digester.update(data)
    return ItemDigests(offset, len(data), 0, len(data), digester.finish())


# Dtypes that gloo or NCCL do not support, and ones of equal width that both do: only bits are copied.
_CARRIERS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.bool: torch.uint8,
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex64: torch.int64,
}


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as one rank has it.

    Attributes:
        entry: Key, dtype and shape.
        is_sharded: Whether it is a DTensor.
        tied_to: The first key with the same memory; "" if there is none, None if this rank has no element.
        fingerprint: The fingerprint of a plain tensor's values; None for a DTensor.
    """

    entry: TensorEntry
    is_sharded: bool
    tied_to: str | None
    fingerprint: int | None


def plan_export(
    state_dict: Mapping[str, Any],
    control: Control,
    *,
    max_bytes: int,
    fqn_to_index_mapping: Mapping[str, int] | None,
    metadata: Mapping[str, str],
    beside: Collection[str] = (),
) -> PlannedExport:
    """Agree on the files and their owners, with every check that needs no file. Collective.

    ``max_bytes`` and ``fqn_to_index_mapping`` are as for ``plan_files``; ``metadata`` is put into the header
    of each file; ``beside`` has the names of further files in the directory.

    StateError: a value cannot be exported, the ranks disagree, or a name is not possible.
    """

    def describe() -> list[_Described]:
        for name in beside:
            if name in (INDEX, MANIFEST) or name.endswith(SUFFIX) or not _is_plain(name):
                raise StateError(f"{name!r} cannot be the name of a file next to the tensors")
        return _describe(state_dict)

    def decide(answers: list[list[_Described]]) -> PlannedExport:
        held, aliases = _agreed(answers)
        files = plan_files(
            held,
            max_bytes=max_bytes,
            world=control.size,
            fqn_to_index_mapping=fqn_to_index_mapping,
        )
        return PlannedExport(files, aliases, metadata)

    return control.step("plan the export", describe, decide)


def _describe(state_dict: Mapping[str, Any]) -> list[_Described]:
    first: dict[object, str] = {}
    found = []
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or is_sharded_tensor(value):
            raise StateError(
                f"{key!r} is a {type(value).__name__}, but the format holds only tensors",
                hint="pass model.state_dict(); ShardedTensors of FSDP1 as full tensors",
            )
        local = value.to_local() if isinstance(value, DTensor) else value
        reason = check_tensor(local)
        if reason is None and dtype_name(dtype_of(value.dtype)) is None:
            reason = f"safetensors has no {value.dtype}"
        if reason is not None:
            raise StateError(f"{key!r}: {reason}")
        tied: str | None = None
        if local.numel():
            memory = (local.device, local.data_ptr(), value.dtype, value.shape, local.stride())
            tied = first.setdefault(memory, key)
        is_sharded = isinstance(value, DTensor)
        found.append(
            _Described(
                TensorEntry(key, dtype_of(value.dtype), tuple(value.shape)),
                is_sharded,
                "" if tied == key else tied,
                None if is_sharded else fingerprint_of(value),
            )
        )
    return found


def _agreed(answers: Sequence[Sequence[_Described]]) -> tuple[list[HeldTensor], dict[str, str]]:
    """Return every key once with its holders, and the keys that are tied on all of them."""
    ranks: dict[str, list[int]] = defaultdict(list)
    descriptions: dict[str, list[_Described]] = defaultdict(list)
    for rank, described in enumerate(answers):
        for one in described:
            ranks[one.entry.key].append(rank)
            descriptions[one.entry.key].append(one)
    if not descriptions:
        raise StateError("there is no tensor to export", hint="pass model.state_dict()")
    for key, each in descriptions.items():
        for rank, one in zip(ranks[key], each, strict=True):
            if (one.entry, one.is_sharded) != (each[0].entry, each[0].is_sharded):
                raise StateError(
                    f"{key!r} is {_text(each[0])} on rank {ranks[key][0]} and {_text(one)} on {rank}"
                )
            if one.fingerprint != each[0].fingerprint:
                raise StateError(
                    f"{key!r} has other values on rank {rank} than on rank {ranks[key][0]}",
                    hint="one of the values would be lost; make them equal, or use DTensors of "
                    "one tensor",
                )
    aliases: dict[str, str] = {}
    for key, each in descriptions.items():
        to = {one.tied_to for one in each} - {None}
        stored_key = next(iter(to)) if len(to) == 1 else None
        if stored_key and ranks[stored_key] == ranks[key] and stored_key not in aliases:
            aliases[key] = stored_key
    held = [
        HeldTensor(each[0].entry, tuple(ranks[key]))
        for key, each in descriptions.items()
        if key not in aliases
    ]
    return held, aliases


def _is_plain(name: str) -> bool:
    """Return whether it is a relative path that stays in its directory, on every storage."""
    parts = name.split("/")
    return not ({"", ".", ".."} & set(parts)) and not any(c in name for c in "\\\0:")


def _text(one: _Described) -> str:
    kind = "sharded " if one.is_sharded else ""
    return f"{kind}{one.entry.dtype} {list(one.entry.shape)}"


class Export:
    """One rank's part of an export: ``write`` and ``finish`` for ``SaveAttempt.commit``."""

    def __init__(
        self,
        attempt: SaveAttempt,
        planned: PlannedExport,
        state_dict: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:
        self._attempt = attempt
        self._planned = planned
        self._state = state_dict
        self._extra = dict(files)

    def write(self) -> WrittenPart:
        """Gather every tensor in the agreed order and write this rank's files; durable on return.

        A rank that fails to write its files continues to gather, because the others need it for theirs.
        """
        started = time.perf_counter()
        rank = self._attempt.session.control.rank
        files = self._planned.files
        self._attempt.storage.make_dir(self._attempt.directory)
        with FileWriter(self._attempt, self._planned) as writer, torch.no_grad():
            for number, entry in order(files):
                value = self._state.get(entry.key)
                if value is None:
                    continue  # it belongs to another pipeline stage
                tensor = _gathered(value) if isinstance(value, DTensor) else value
                if files[number].owner == rank:
                    writer.put(number, entry, tensor)
                # Otherwise two of them would be in memory while the next one is gathered.
                del tensor
            records = writer.finish()
        if rank == 0:
            records += [writer.small(name, data) for name, data in self._small_files().items()]
        self._sync()
        size = sum(record.size_bytes for record in records)
        counters = Counters(
            size_bytes=size,
            payload_bytes=sum(f.size_bytes for f in files if f.owner == rank),
            files=len(records),
            items=sum(len(f.entries) for f in files if f.owner == rank),
            write_s=time.perf_counter() - started,
        )
        return WrittenPart(tuple(records), counters)

    def finish(self, parts: list[WrittenPart]) -> Mapping[str, bytes]:
        """Check that every planned file was written once. Coordinator."""
        found = Counter(record.path for part in parts for record in part.files)
        wrong = [file.name for file in self._planned.files if found[file.name] != 1]
        if wrong:
            raise IncompleteCheckpointError(
                f"{wrong[0]} was planned, but {found[wrong[0]]} was written"
            )
        return {}

    def _small_files(self) -> dict[str, bytes]:
        found = dict(self._extra)
        if len(self._planned.files) > 1:
            names = {e.key: file.name for file in self._planned.files for e in file.entries}
            total = sum(file.size_bytes for file in self._planned.files)
            found[INDEX] = encode_index(names, total)
        return found

    def _sync(self) -> None:
        directory = self._attempt.directory
        for folder in (directory, f"{directory}/{self._attempt.save_id}"):
            self._attempt.storage.sync(folder)


def _gathered(value: DTensor) -> torch.Tensor:
    """Return the whole tensor, on every rank of its mesh. Collective on that mesh."""
    carrier = _CARRIERS.get(value.dtype)
    if carrier is None or any(placement.is_partial() for placement in value.placements):
        return value.full_tensor()
    moved = DTensor.from_local(
        value.to_local().view(carrier),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return moved.full_tensor().view(value.dtype)
