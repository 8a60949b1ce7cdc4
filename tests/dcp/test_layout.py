"""Data files: torch's own blobs at known places; several writer threads with errors that all count."""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

import ckptfs.errors
from ckptfs.control.control import SoloControl
from ckptfs.dcp.torch_hooks.boundary import crossing
from ckptfs.dcp.write.host_memory import host_tensor, memory_of
from ckptfs.dcp.write.pipeline import storage_data_of, written_part
from ckptfs.dcp.write.rank_files import (
    Cancelled,
    FileTask,
    FileWritten,
    RankFiles,
    auto_engine,
    sidecar_name,
    sidecar_of,
    write_files,
)
from ckptfs.errors import CkptfsError, IncompleteCheckpointError, NoSpaceError
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.disk import SimulatedDisk
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.uri import Uri
from tests.dcp.fake_ranks import source
from tests.dcp.planned import plan_save
from tests.measures import own_threads

STATE = {f"w{n}": torch.arange(50_000.0) + n for n in range(8)} | {"step": 3}


def full_disk() -> OSError:
    """What a write gets when the disk is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_state(storage: Storage, threads: int = 1, state: Any = None) -> RankFiles:
    """All of STATE into save-1/ by this process alone."""
    planned = plan_save(STATE if state is None else state, SoloControl())
    storage.make_dir("save-1")
    return write_files(
        storage,
        "save-1/",
        0,
        planned.items,
        planned.resolve,
        engine=auto_engine,
        threads=threads,
    )


def test_items_are_exactly_what_torch_saves(tmp_path: Path) -> None:
    """At every place is what torch.save writes but for its CRC fields, which are 0, and its payload
    is the tensor's memory.
    """
    state = {"big": torch.randn(700_000), "small": torch.ones(3), "none": torch.empty(0)}
    written = write_state(open_storage(tmp_path), state=state)
    data = (tmp_path / "save-1" / "__0_0.distcp").read_bytes()
    digests = source(open_storage(tmp_path))
    assert digests.sidecars == {"save-1/__0_0.distcp": "save-1/__0_0.xxh3"}
    from ckptfs.commit.digests import decode_digests

    raw = (tmp_path / "save-1" / "__0_0.xxh3").read_bytes()
    items = decode_digests(raw, "x").items
    for (name, tensor), place, item in zip(
        state.items(), written.files[0].placed, items, strict=True
    ):
        blob = io.BytesIO()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensor, blob)
        finally:
            torch.serialization.set_crc32_options(True)
        assert data[place.offset : place.offset + place.length] == blob.getvalue(), name
        start = item.offset + item.payload_offset
        payload = data[start : start + item.payload_length]
        assert payload == bytes(memory_of(tensor)), name


def test_large_tensors_are_not_copied() -> None:
    """Contiguous host memory goes out as it is; only what has to be is copied."""
    wide = torch.arange(1000.0)
    assert host_tensor(wide).data_ptr() == wide.data_ptr()
    view = host_tensor(wide[10:20])
    assert view.data_ptr() == wide.data_ptr() + 40
    assert view.untyped_storage().nbytes() == 40
    assert host_tensor(wide[::2]).tolist() == wide[::2].tolist()
    assert host_tensor(torch.nn.Parameter(wide)).requires_grad is False


@contextmanager
def _stock_without_space() -> Iterator[type[FileSystem]]:
    """Stock's file system with a full disk below the second file of a rank."""

    class Full(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
            if "__0_1" in str(path):
                raise full_disk()
            with super().create_stream(path, mode) as stream:
                yield stream

    yield Full


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # stock's
def test_need_1_no_space_in_one_of_four_threads(tmp_path: Path) -> None:
    """needs.md row 1: ENOSPC in one writer thread is the save's error, and nothing is lost quietly.

    Stock DCP, in comparison, returns success, commits .metadata and misses a file.
    """
    with _stock_without_space() as full:
        writer = FileSystemWriter(tmp_path / "stock", thread_count=4)
        writer.fs = full()
        dcp.save(STATE, storage_writer=writer, no_dist=True)
        metadata = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
        files = {info.relative_path for info in metadata.storage_data.values()}
        # One thread's items are in no file and in no metadata, and there was no error.
        assert set(metadata.state_dict_metadata) > {i.fqn for i in metadata.storage_data}
        assert "__0_1.distcp" not in files
    inner = open_storage(tmp_path)
    fault = Fault("write", "*__0_1.distcp", 1, Fail(full_disk()))
    with pytest.raises(NoSpaceError, match="__0_1"):
        write_state(FaultyStorage(inner, Plan([fault])), threads=4)
    assert not [e.name for e in inner.list("save-1") if e.name.startswith("__0_1")]


def test_a_thread_that_fails_stops_the_others_at_once(tmp_path: Path) -> None:
    """The save has failed: what other threads would still write is never committed, and the disk may
    be full. Their error is not raised: it is no error.
    """
    stopped: list[bool] = []

    def engine(storage: Storage, task: FileTask, resolve: Any, cancelled: Cancelled) -> FileWritten:
        if task.key.endswith("__0_1.distcp"):
            raise NoSpaceError("full")
        stopped.append(cancelled.event.wait(120))  # between two items
        cancelled.raise_if_set()
        raise AssertionError("it writes on")

    storage = open_storage(tmp_path)
    planned = plan_save(STATE, SoloControl())
    storage.make_dir("save-1")
    with pytest.raises(NoSpaceError) as caught:
        write_files(storage, "save-1/", 0, planned.items, planned.resolve, engine=engine, threads=2)
    assert stopped == [True]
    assert "more writer threads" not in str(caught.value)


def test_every_failed_thread_is_named(tmp_path: Path) -> None:
    """Two threads fail: the error is typed and its text has both."""
    faults = [Fault("close", f"*__0_{n}.distcp", 1, Fail(full_disk())) for n in range(4)]
    with pytest.raises(NoSpaceError) as caught:
        write_state(FaultyStorage(open_storage(tmp_path), Plan(faults)), threads=4)
    told = str(caught.value)
    assert sum(f"__0_{n}.distcp" in told for n in range(4)) >= 1
    names = [e.name for e in open_storage(tmp_path).list("save-1")]
    assert not [name for name in names if name.endswith(".distcp")]


@pytest.mark.parametrize("number", [1, 2, 3, "close"])
def test_an_error_on_the_pumps_thread_is_the_saves(tmp_path: Path, number: Any) -> None:
    """Large pieces are written on a thread; what fails there fails the file, at any piece."""
    inner = open_storage(tmp_path)
    state = {f"w{n}": torch.ones(2 << 20) for n in range(3)}  # 8 MiB each
    fault = (
        Fault("close", "*.distcp", 1, Fail(full_disk()))
        if number == "close"
        else Fault("write", "*.distcp", number, Fail(full_disk()))
    )
    with pytest.raises(NoSpaceError, match="__0_0"):
        write_state(FaultyStorage(inner, Plan([fault])), state=state)
    assert os.listdir(tmp_path / "save-1") == []
    assert not own_threads("ckptfs-pump")


def test_nothing_is_left_of_a_file_that_failed(tmp_path: Path) -> None:
    """An error while resolving an item leaves no partial file."""
    storage = open_storage(tmp_path)
    planned = plan_save(STATE, SoloControl())
    storage.make_dir("save-1")

    def broken(item: Any) -> Any:
        if item.index.fqn == "w3":
            raise MemoryError("no memory for w3")
        return planned.resolve(item)

    with pytest.raises(MemoryError):
        write_files(storage, "save-1/", 0, planned.items, broken, engine=auto_engine)
    assert os.listdir(tmp_path / "save-1") == []


def test_planned_and_written_are_compared(tmp_path: Path) -> None:
    """A writer that loses an item does not get its save committed."""
    planned = plan_save(STATE, SoloControl())
    written = write_state(open_storage(tmp_path))
    part = written_part(written, "save-1", None)
    assert len(storage_data_of(planned.indexes, [part])) == 9
    import dataclasses

    lost = dataclasses.replace(part, payload=part.payload[:-20])
    with pytest.raises(IncompleteCheckpointError, match="planned 9 items but wrote 8"):
        storage_data_of(planned.indexes, [lost])
    more = dataclasses.replace(part, payload=part.payload + part.payload[-20:])
    with pytest.raises(IncompleteCheckpointError, match="planned 9 items but wrote 10"):
        storage_data_of(planned.indexes, [more])


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_rank_wrote_is_durable_when_it_says_so(tmp_path: Path, threads: int) -> None:
    """The power goes at a rank that has just written: its data files and sidecars are there, under
    their names. No other rank can see to that where each machine has its own journal of names, as
    the clients of some cluster filesystems.
    """
    (tmp_path / "disk" / "save-1").mkdir(parents=True)
    disk = SimulatedDisk(str(tmp_path / "disk"))
    storage = LocalStorage(Uri.parse(str(tmp_path / "disk")), posix=disk)
    written = write_state(storage, threads=threads)
    disk.cut()
    disk.materialise(str(tmp_path / "after"))
    left = (tmp_path / "after" / "save-1").iterdir()
    found = {f.name: f.stat().st_size for f in left if not f.name.startswith(".partial-")}
    data = {file.name: file.size_bytes for file in written.files}
    sidecars = {sidecar_name(file.name): sidecar_of(file).size_bytes for file in written.files}
    assert found == data | sidecars
    assert len(data) == threads


def test_counters_are_the_bytes_on_disk(tmp_path: Path) -> None:
    """Counted while writing, equal to what is there; no stat was needed."""
    written = write_state(open_storage(tmp_path), threads=2)
    on_disk = sum(f.stat().st_size for f in (tmp_path / "save-1").iterdir())
    assert written.counters.size_bytes == on_disk
    assert written.counters.files == 4
    assert written.counters.items == 9


# -- needs.md row 16: what crosses torch ---------------------------------------------------------


class Unpicklable(Exception):  # noqa: N818
    """An exception with a constructor that wants more than its text, as many libraries have."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{where}: {code}")


def test_need_16_errors_that_cross_torch_can_be_unpickled() -> None:
    """needs.md row 16: an exception class with its own __init__ becomes a plain error with its text."""
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Unpicklable(5, "s3://user:secret@bucket")))
    with pytest.raises(CkptfsError, match="Unpicklable") as caught, crossing(3):
        raise Unpicklable(5, "s3://user:secret@bucket")
    back = pickle.loads(pickle.dumps(caught.value))
    assert back.rank == 3
    assert "secret" not in str(back)


@pytest.mark.parametrize("name", ckptfs.errors.__all__)
def test_our_errors_cross_as_themselves(name: str) -> None:
    """Every error of the tree arrives as its own type, with the rank."""
    kind = getattr(ckptfs.errors, name)
    if not (isinstance(kind, type) and issubclass(kind, CkptfsError)):
        return
    with pytest.raises(kind) as caught, crossing(2):
        raise kind("it failed", uri="s3://b/k")
    back = pickle.loads(pickle.dumps(caught.value))
    assert (type(back), back.rank, str(back)) == (kind, 2, str(caught.value))
