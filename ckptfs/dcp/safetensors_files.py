"""One rank's files of an export, written while the next tensors are gathered.

put    -> a queue of one tensor -> the thread: header, tensors, digests   -> FileRecords
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import xxhash

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.digests import BlockDigester, FileDigests, ItemDigests, encode_digests
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.sending import PlainNames
from ckptfs.dcp.resolve import host_tensor, memory_of
from ckptfs.dcp.safetensors_format import Entry, encode_header
from ckptfs.dcp.safetensors_plan import PlannedFile
from ckptfs.errors import StateError
from ckptfs.storage.base import Shape
from ckptfs.storage.inflight import with_task
from ckptfs.storage.threads import uninterrupted

__all__ = ["FileWriter", "PlannedExport"]

_SMALL_BYTES = 16 << 20  # on object stores: one conditional put, from memory


@dataclass(frozen=True, slots=True)
class PlannedExport:
    """What all ranks agreed on. aliases: tied key -> the key that is written for it."""

    files: tuple[PlannedFile, ...]
    aliases: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Item:
    """One whole tensor on its way to its file."""

    number: int
    entry: Entry
    data: torch.Tensor


class FileWriter:
    """This rank's files, written one after another by a thread of their own.

    After an error it goes on taking tensors, or ``put`` would block, and with it every rank that the
    next tensor is gathered from.
    """

    def __init__(self, attempt: Attempt, planned: PlannedExport) -> None:
        self._attempt = attempt
        self._planned = planned
        is_object = attempt.seat.caps.shape is Shape.OBJECT
        self._guard = PlainNames(attempt) if is_object else None
        self._domain = None if is_object else attempt.seat.placement.mine.id
        self._items: queue.Queue[_Item | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._records: list[FileRecord] = []
        rank = attempt.seat.control.rank
        self._mine = [n for n, file in enumerate(planned.files) if file.owner == rank]
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=with_task(self._run), name="ckptfs-export", daemon=True
        )

    def __enter__(self) -> Self:
        if self._mine:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[1] is not None and self._thread.is_alive():
            # What is half written is not to be closed as if it were whole.
            self._error = self._error or StateError(f"the export was left: {exc[1]}")
            self._items.put(None)
            uninterrupted(self._ended.wait)

    def put(self, number: int, entry: Entry, tensor: torch.Tensor) -> None:
        """Hand over the next tensor; it must stay as it is. Waits while one waits already."""
        if self._error is None:
            self._items.put(_Item(number, entry, host_tensor(tensor)))

    def finish(self) -> list[FileRecord]:
        """All files are durable; raises what writing one raised."""
        if self._mine:
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
            for number in self._mine:
                self._write(self._planned.files[number])
        except BaseException as error:  # noqa: BLE001 - raised by finish(), on the caller's thread
            self._error = error
            while self._items.get() is not None:
                pass
            return
        self._items.get()  # the None of finish()

    def _write(self, file: PlannedFile) -> None:
        told = {
            a: k for a, k in self._planned.aliases.items() if k in {e.key for e in file.entries}
        }
        head, header = encode_header(file.entries, {**self._planned.metadata, **told})
        size = header.size_bytes + file.size_bytes
        key = f"{self._attempt.directory}/{file.name}"
        items = [_digested(0, memoryview(head))]
        if self._guard is not None and size <= _SMALL_BYTES:
            whole = bytearray(head)
            for entry in header.entries:
                data = self._next(entry)
                items.append(_digested(entry.start, data))
                whole += data
            self._guard.put(key, bytes(whole))
        else:
            with self._attempt.storage.open_write(key, size_hint_bytes=size) as writer:
                writer.write(head)
                for entry in header.entries:
                    data = self._next(entry)
                    items.append(_digested(entry.start, data))
                    writer.lend(data)
                    del data
                if self._guard is not None:
                    self._guard.check()  # whoever lost the name stops before the file is whole
        self._records += self._with_digests(file.name, size, items)

    def _next(self, entry: Entry) -> memoryview:
        item = self._items.get()
        if item is None:
            self._items.put(None)  # for the end of _run
            raise self._error or StateError(f"no data came for {entry.key!r}")
        if item.entry.key != entry.key:
            raise AssertionError(f"{item.entry.key} came for {entry.key}")
        return memory_of(item.data)

    def _with_digests(self, name: str, size: int, items: Sequence[ItemDigests]) -> list[FileRecord]:
        """The records of a file and of its sidecar, which lies below the save's own id."""
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
