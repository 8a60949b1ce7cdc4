"""Reading in parallel: the same bytes as one thread reads, every damage found, the first error stops."""

from __future__ import annotations

import dataclasses
import io
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ckptfs.dcp.metadata.metadata_reader import decode_metadata
from ckptfs.dcp.read.data_file import Source, Verify, verify_file
from ckptfs.dcp.read.read_plan import PlannedRead
from ckptfs.dcp.read.scheduler import fetch, fetch_reads
from ckptfs.errors import AccessError, IncompleteCheckpointError, IntegrityError
from ckptfs.storage.base import DataReader, Reach, Storage
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.storage.object_store import ObjectStorage
from ckptfs.storage.options import ObjectOptions
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, Plan
from ckptfs.testing.memory_object_store import MemoryObjectClient, MemoryObjects
from ckptfs.uri import Uri
from tests.dcp.fake_ranks import load, our_save, source, stock_save
from tests.measures import own_threads

MIB = 1 << 20
CALLS_PER_TENSOR = 15


class Wide(MemoryStorage):
    """A store that is worth reading with ``concurrency`` threads, in windows of one digest block."""

    concurrency = 4
    window_bytes = MIB
    reach = Reach.REMOTE

    def __init__(self) -> None:
        super().__init__(Uri.parse("memory://fetch/run"), stores=MemoryStoreRegistry())
        self.make_dir("")
        self.reads: list[tuple[int, int]] = []  # offset and size of every read of a data file
        self.spans: dict[str, list[tuple[int, int]]] = {}  # the same by file
        self.before_read: Callable[[], object] = lambda: None

    def open_read(self, key: str) -> DataReader:
        """The memory's reader; its reads are noted."""
        reader = super().open_read(key)
        reader.concurrency, reader.window_bytes = self.concurrency, self.window_bytes
        reader.reach = self.reach
        inner, storage = reader.read_into, self

        def read_into(offset: int, buffer: memoryview) -> None:
            storage.reads.append((offset, len(buffer)))
            storage.spans.setdefault(key, []).append((offset, len(buffer)))
            storage.before_read()
            inner(offset, buffer)

        reader.read_into = read_into  # type: ignore[method-assign]
        return reader

    def flip(self, key: str, at: int) -> None:
        """Change one bit of a file."""
        path = self._path(key)
        data = bytearray(self.tree.files[path][0])
        data[at] ^= 1
        self.tree.put(path, bytes(data))


class Asking:
    """A planner that asks for boxes of its own, and notes who calls it in which order."""

    def __init__(self, targets: dict[int, torch.Tensor]) -> None:
        self.targets = targets
        self.finished: list[int] = []
        self.objects: dict[int, Any] = {}
        self.threads: set[int] = set()

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """The target of the item's number, which is in its destination's index."""
        self.threads.add(threading.get_ident())
        return self.targets[_number(item)]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """It is there."""
        self.threads.add(threading.get_ident())
        self.finished.append(_number(item))

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """An object is there."""
        self.threads.add(threading.get_ident())
        self.finished.append(_number(item))
        self.objects[_number(item)] = torch.load(value, weights_only=True)


def _number(item: ReadItem) -> int:
    return int(item.dest_index.fqn)


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, lengths


def read_item(number: int, key: str, box: Box | None) -> ReadItem:
    """Item ``number`` of a plan: a box of a tensor, or (None) an object."""
    offsets, lengths = box or ((0,), (0,))
    kind = LoadItemType.BYTE_IO if box is None else LoadItemType.TENSOR
    zeros = torch.Size([0] * len(offsets))
    return ReadItem(
        type=kind,
        dest_index=MetadataIndex(str(number)),
        dest_offsets=zeros,
        storage_index=MetadataIndex(
            key, None if box is None else zeros, None if box is None else 0
        ),
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )


def run(
    storage: Wide, metadata: Metadata, items: list[ReadItem], verify: Verify, **to: Any
) -> Asking:
    """Fetch a plan into fresh targets."""
    targets = {
        _number(item): _target(item, metadata, **to)
        for item in items
        if item.type is not LoadItemType.BYTE_IO
    }
    planner: Any = Asking(targets)
    fetch(source(storage, verify=verify), LoadPlan(items), planner, metadata)
    assert planner.threads <= {threading.get_ident()}
    return planner  # type: ignore[no-any-return]


def _target(item: ReadItem, metadata: Metadata, *, dtype: Any = None, strided: bool = False) -> Any:
    saved: Any = metadata.state_dict_metadata[item.storage_index.fqn]
    sizes = list(item.lengths)
    if strided and sizes:
        sizes[-1] *= 2
    target = torch.zeros(sizes, dtype=dtype or saved.properties.dtype)
    return target[..., ::2] if strided and sizes else target


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor in which every element differs from its neighbours."""
    count = 1
    for size in shape:
        count *= size
    return ((torch.arange(count) * 31 + seed) % 251).to(dtype).reshape(shape)


DTYPES = (torch.float32, torch.int8, torch.bfloat16, torch.complex64)
SHAPES = st.one_of(
    st.tuples(st.integers(0, 3000)),
    st.tuples(st.integers(1, 1500), st.integers(1, 900)),
    st.tuples(st.integers(1, 7), st.integers(1, 300), st.integers(1, 300)),
    st.just(()),
)


@st.composite
def plans(draw: Any) -> tuple[dict[str, Any], list[tuple[str, Box | None]]]:
    """A state, and boxes of its tensors in any order; several of one tensor may overlap."""
    state: dict[str, Any] = {}
    asked: list[tuple[str, Box | None]] = []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(SHAPES)
        key = f"t{number}"
        state[key] = values(shape, draw(st.sampled_from(DTYPES)), number)
        for _ in range(draw(st.integers(0, 3))):
            offsets = tuple(draw(st.integers(0, size)) for size in shape)
            lengths = tuple(
                draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True)
            )
            asked.append((key, (offsets, lengths)))
        if draw(st.booleans()):
            asked.append((key, (tuple(0 for _ in shape), shape)))
    for number in range(draw(st.integers(0, 2))):
        state[f"o{number}"] = "x" * draw(st.sampled_from((1, 1000, 3 * MIB)))
        asked.append((f"o{number}", None))
    return state, draw(st.permutations(asked))


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from(Verify), st.booleans(), st.sampled_from((None, torch.complex128)))
def test_any_plan_reads_its_bytes_once_however_many_threads_read(
    plan: tuple[dict[str, Any], list[tuple[str, Box | None]]],
    verify: Verify,
    strided: bool,
    dtype: torch.dtype | None,
) -> None:
    """Whatever boxes are asked for, overlapping ones too: what was saved, in the order of the file, and
    no byte of it is read twice, by one thread or by several, with the asking thread among them or not.
    """
    state, asked = plan
    storage = Wide()
    metadata = our_save(storage, 1, lambda _: state, threads=2)
    items = [read_item(number, key, box) for number, (key, box) in enumerate(asked)]
    to = {"strided": strided, "dtype": dtype}
    for reach, threads in (
        (Reach.REMOTE, 4),
        (Reach.REMOTE, 1),
        (Reach.LOCAL, 1),
        (Reach.LOCAL, 3),
    ):
        storage.reach, storage.concurrency = reach, threads
        storage.spans.clear()
        done = run(storage, metadata, items, verify, **to)
        assert sorted(done.finished) == list(range(len(items)))
        assert done.finished == _in_file_order(metadata, items)
        assert not sum(map(_read_twice, storage.spans.values()))
        for number, (key, box) in enumerate(asked):
            if box is None:
                assert done.objects[number] == state[key]
                continue
            part = state[key]
            for dim, (offset, length) in enumerate(zip(*box, strict=True)):
                part = part.narrow(dim, offset, length)
            assert torch.equal(done.targets[number], part.to(done.targets[number].dtype)), (
                key,
                box,
            )


def _in_file_order(metadata: Metadata, items: list[ReadItem]) -> list[int]:
    """Numbers of the items in the order in which a load commits them."""

    def place(item: ReadItem) -> tuple[str, int]:
        info = metadata.storage_data[item.storage_index]
        return info.relative_path, info.offset

    return [_number(item) for item in sorted(items, key=place)]


def _read_twice(reads: list[tuple[int, int]]) -> int:
    """Bytes of a file that were read more than once."""
    twice = end = 0
    for offset, size in sorted(reads):
        twice += max(0, min(end, offset + size) - offset)
        end = max(end, offset + size)
    return twice


def test_ranges_are_read_at_once_and_never_more_than_the_reader_wants() -> None:
    """Four reads wait for each other: they are under way together, and no fifth ever is."""
    storage = Wide()
    state = {"w": torch.arange(4.0 * MIB)}
    metadata = our_save(storage, 1, lambda _: state)
    together = threading.Barrier(4)
    under_way, most, lock = 0, 0, threading.Lock()

    def meet() -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        together.wait(120)
        with lock:
            under_way -= 1

    storage.before_read = meet
    run(storage, metadata, [read_item(0, "w", ((0,), (4 * MIB,)))], Verify.READ)
    assert (most, len(storage.reads)) == (4, 16)
    assert not own_threads("ckptfs-read")


def test_large_tensors_are_read_straight_into_their_memory() -> None:
    """Whole windows of a large tensor, and tensors of more than a quarter of a window: no scratch."""
    storage = Wide()
    storage.window_bytes = 4 * MIB
    sizes = (2 * MIB, 3 * MIB // 8, 3 * MIB // 8, 10)  # float32: 8 MiB, twice 1.5 MiB, 40 bytes
    state = {f"w{n}": torch.arange(float(size)) for n, size in enumerate(sizes)}
    metadata = our_save(storage, 1, lambda _: state)
    targets = {n: torch.zeros(size) for n, size in enumerate(sizes)}
    places: list[int] = []
    inner = storage.open_read

    def open_read(key: str) -> DataReader:
        reader = inner(key)
        read = reader.read_into

        def read_into(offset: int, buffer: memoryview) -> None:
            places.append(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr())
            read(offset, buffer)

        reader.read_into = read_into  # type: ignore[method-assign]
        return reader

    storage.open_read = open_read  # type: ignore[method-assign]
    planner: Any = Asking(targets)
    items = [read_item(n, f"w{n}", ((0,), (size,))) for n, size in enumerate(sizes)]
    fetch(source(storage), LoadPlan(items), planner, metadata)
    starts = [targets[n].data_ptr() for n in range(4)]
    assert sorted(places) == sorted([*starts, starts[0] + 4 * MIB])


@pytest.mark.parametrize("at", [0, 100, MIB // 4 - 1, MIB // 4])
def test_of_a_part_only_the_blocks_at_its_ends_are_copied(at: int) -> None:
    """A part that begins and ends inside a block is read straight into its memory, but for these two."""
    storage = Wide()
    storage.window_bytes = 4 * MIB
    whole = values((6 * MIB,), torch.float32, 3)  # 24 MiB
    metadata = our_save(storage, 1, lambda _: {"w": whole})
    count = 5 * MIB - 2 * at  # the part ends at 20 MiB less as much
    target = torch.zeros(count)
    copied: list[int] = []
    inner = storage.open_read

    def open_read(key: str) -> DataReader:
        reader = inner(key)
        read = reader.read_into

        def read_into(offset: int, buffer: memoryview) -> None:
            place = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() - target.data_ptr()
            if not 0 <= place < target.nbytes:
                copied.append(len(buffer))
            read(offset, buffer)

        reader.read_into = read_into  # type: ignore[method-assign]
        return reader

    storage.open_read = open_read  # type: ignore[method-assign]
    planner: Any = Asking({0: target})
    items = [read_item(0, "w", ((at,), (count,)))]
    fetch(source(storage, verify=Verify.READ), LoadPlan(items), planner, metadata)
    assert torch.equal(target, whole[at : at + count])
    assert sorted(copied) == ([] if at * 4 % MIB == 0 else [MIB, MIB])


def objects(options: ObjectOptions | None = None) -> tuple[MemoryObjects, ObjectStorage]:
    """An object store and a storage over it."""
    store = MemoryObjects()
    return store, ObjectStorage(Uri.parse("s3://b/run"), MemoryObjectClient(store), options)


def asked(store: MemoryObjects, op: str) -> int:
    """How many requests of a kind there were."""
    return len(store.requests(op))


def test_5000_small_tensors_are_not_5000_requests() -> None:
    """20 MB in 5000 tensors cost a few windows' requests, one open and one sidecar."""
    store, storage = objects()
    state = {f"w{n}": torch.full((1000 + n % 5,), float(n)) for n in range(5000)}
    our_save(storage, 1, lambda _: state)
    before = Counter(store.counts())
    blank = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    [got] = load(storage, 1, lambda _: blank)
    assert all(torch.equal(got[key], tensor) for key, tensor in state.items())
    spent = Counter(store.counts()) - before
    assert spent["get_range"] <= 6, spent
    assert (spent["head"], spent["get"]) == (1, 2), spent  # .metadata and the sidecar
    before = Counter(store.counts())
    verify_file(source(storage), "save-1/__0_0.distcp")
    assert (Counter(store.counts()) - before)["get_range"] <= 6


def test_many_small_files_are_opened_ahead_of_their_turn() -> None:
    """A file's two first requests wait for no other file: four opens meet each other. Those of the first file
    come before, because its reader says how many threads there are.
    """
    storage = Wide()
    state = {f"w{n}": torch.full((10,), float(n)) for n in range(33)}
    metadata = our_save(storage, 1, lambda _: state, threads=33)
    together = threading.Barrier(4)
    inner = storage.read_small

    def read(key: str, limit_bytes: int) -> bytes:
        if key.endswith(".xxh3") and not key.endswith("/__0_0.xxh3"):
            together.wait(120)
        return inner(key, limit_bytes)

    storage.read_small = read  # type: ignore[method-assign]
    items = [read_item(n, f"w{n}", ((0,), (10,))) for n in range(33)]
    done = run(storage, metadata, items, Verify.READ)
    assert all(float(done.targets[n][0]) == n for n in range(33))
    assert len(storage.reads) == 33


DAMAGED = {
    "w": torch.arange(1.6 * MIB),
    "o": "y" * (2 * MIB),
    "s": torch.ones(70),
    "e": torch.ones(0),
}


def _payloads() -> Iterator[tuple[str, int]]:
    """A byte in every block of every item that a load reads, with the item's key."""
    storage = Wide()
    our_save(storage, 1, lambda _: DAMAGED)
    from ckptfs.dcp.read.data_file import read_digests

    digests = read_digests(source(storage), "save-1/__0_0.distcp") or {}
    for key, item in zip(("o", "w", "s"), digests.values(), strict=False):
        start = item.offset + item.payload_offset
        length = item.payload_length or item.length
        yield from ((key, at) for at in range(start, start + length, MIB))
        yield key, start + length - 1


@pytest.mark.parametrize(("key", "at"), [*_payloads()])
def test_damage_in_any_block_is_found_and_named(key: str, at: int) -> None:
    """One bit of any block that is read, in parallel: IntegrityError with file, key and rank."""
    storage = Wide()
    our_save(storage, 1, lambda _: DAMAGED)
    storage.flip("save-1/__0_0.distcp", at)
    blank = {k: torch.zeros_like(v) if torch.is_tensor(v) else "" for k, v in DAMAGED.items()}
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp is damaged") as caught:
        load(storage, 1, lambda _: blank)
    assert f"of '{key}', differ" in str(caught.value)
    assert caught.value.rank == 0
    with pytest.raises(IntegrityError):
        verify_file(source(storage), "save-1/__0_0.distcp")


class Stepping(Wide):
    """Fills a buffer block by block, telling after each, as the page cache is read."""

    window_bytes = 8 * MIB

    def open_read(self, key: str) -> DataReader:
        reader = super().open_read(key)

        def read_steps(offset: int, buffer: memoryview, step_bytes: int) -> Iterator[int]:
            view = buffer.cast("B")
            for at in range(0, len(view), step_bytes):
                end = min(at + step_bytes, len(view))
                reader.read_into(offset + at, view[at:end])
                yield end

        reader.read_steps = read_steps  # type: ignore[method-assign]
        return reader


@pytest.mark.parametrize("block", range(5))
def test_damage_in_any_step_of_one_read_is_found(block: int) -> None:
    """A range that arrives in steps is compared step by step, to its end."""
    storage = Stepping()
    metadata = our_save(storage, 1, lambda _: {"w": torch.arange(1.2 * MIB)})  # 4.8 MiB
    from ckptfs.dcp.read.data_file import read_digests

    [item] = (read_digests(source(storage), "save-1/__0_0.distcp") or {}).values()
    asked = [read_item(0, "w", ((0,), (round(1.2 * MIB),)))]
    run(storage, metadata, asked, Verify.READ)
    at = item.offset + item.payload_offset + min(block * MIB + 7, item.payload_length - 1)
    storage.flip("save-1/__0_0.distcp", at)
    with pytest.raises(IntegrityError, match="of 'w', differ"):
        run(storage, metadata, asked, Verify.READ)


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("size", [4, 12])
def test_a_tensor_that_is_not_as_large_as_described_is_an_error(verify: Verify, size: int) -> None:
    """The metadata gives another shape than the file has: neither a part of the saved tensor nor what
    is behind it is taken for it, compared or not.
    """
    storage, other = Wide(), Wide()
    our_save(storage, 1, lambda _: {"w": torch.arange(8.0), "x": torch.ones(100)})
    theirs = our_save(other, 1, lambda _: {"w": torch.zeros(size)})
    ours = decode_metadata(storage.read(".metadata"), "here")
    ours.state_dict_metadata["w"] = theirs.state_dict_metadata["w"]
    with pytest.raises(IntegrityError, match=rf"'w' has shape \(8,\) instead of \({size},\)"):
        run(storage, ours, [read_item(0, "w", ((0,), (size,)))], verify)


def test_digests_of_another_file_are_told_as_such() -> None:
    """A sidecar that was put next to the wrong file knows nothing of its contents: said so, where its
    items begin at the same places, too.
    """
    storage, other = Wide(), Wide()
    metadata = our_save(storage, 1, lambda _: {"w": torch.ones(1000)})
    our_save(other, 1, lambda _: {"w": torch.ones(2000)})
    storage.replace("save-1/__0_0.xxh3", other.read("save-1/__0_0.xxh3"))
    with pytest.raises(IntegrityError, match="digests do not know 'w': they are of another file"):
        run(storage, metadata, [read_item(0, "w", ((0,), (1000,)))], Verify.READ)


def test_a_range_that_fails_stops_the_others() -> None:
    """The third range is refused: that error, once, with file, key and rank; few begin after it."""
    store, storage = objects()
    state = {"big": torch.arange(80.0 * MIB)}  # 40 ranges of 8 MiB
    our_save(storage, 1, lambda _: state)
    store.plan = Plan([Fault("get_range", "*.distcp", 3, Fail(AccessError("refused")))])
    with pytest.raises(AccessError, match="refused") as caught:
        load(storage, 1, lambda _: {"big": torch.zeros(80 * MIB)})
    told = str(caught.value)
    assert "save-1/__0_0.distcp" in told
    assert "'big'" in told
    assert caught.value.rank == 0
    # Eight run, and what the eight threads take before they hear of it.
    assert asked(store, "get_range") <= 20
    assert not own_threads("ckptfs-read")


def test_nobody_writes_into_a_tensor_after_the_error() -> None:
    """A failed load returns when the reads that were under way are over, not before."""
    storage = Wide()
    metadata = our_save(storage, 1, lambda _: {"w": torch.arange(4.0 * MIB)})
    released, ended = threading.Event(), []
    turn = iter(range(100))

    def behave() -> None:
        if next(turn) == 3:  # three others are under way
            threading.Timer(0.3, released.set).start()
            raise AccessError("refused")
        released.wait(120)
        ended.append(1)

    storage.before_read = behave
    with pytest.raises(AccessError):
        run(storage, metadata, [read_item(0, "w", ((0,), (4 * MIB,)))], Verify.READ)
    assert (len(ended), len(storage.reads)) == (3, 4)


def test_no_read_begins_after_the_error_while_the_planner_is_busy() -> None:
    """The calling thread is inside the planner: the others stop by themselves."""
    storage = Wide()
    storage.concurrency = 2
    state = {f"w{n}": torch.arange(MIB / 4) for n in range(6)}
    metadata = our_save(storage, 1, lambda _: state)
    busy, third = threading.Event(), threading.Event()
    turn = iter(range(100))

    def behave() -> None:
        if next(turn) >= 2:
            third.set()
        busy.wait(120)
        raise AccessError("refused")

    class Busy(Asking):
        def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
            if _number(item) == 4:  # two are read, two wait
                busy.set()
                third.wait(0.5)
            return super().resolve_tensor(item)

    storage.before_read = behave
    planner: Any = Busy({n: torch.zeros(MIB // 4) for n in range(6)})
    items = [read_item(n, f"w{n}", ((0,), (MIB // 4,))) for n in range(6)]
    with pytest.raises(AccessError):
        fetch(source(storage), LoadPlan(items), planner, metadata)
    assert not third.is_set()


@pytest.mark.parametrize("what", ["resolve_tensor", "commit_tensor"])
def test_an_error_of_the_planner_ends_the_load(what: str) -> None:
    """The planner raises on the calling thread: that error, and no thread is left."""
    storage = Wide()
    state = {f"w{n}": torch.arange(0.5 * MIB) for n in range(8)}
    metadata = our_save(storage, 1, lambda _: state)

    class Broken(Asking):
        pass

    def fail(*_: Any) -> Any:
        raise ValueError("the planner's own")

    setattr(Broken, what, fail)
    targets = {n: torch.zeros(MIB // 2) for n in range(8)}
    planner: Any = Broken(targets)
    items = [read_item(n, f"w{n}", ((0,), (MIB // 2,))) for n in range(8)]
    with pytest.raises(ValueError, match="the planner's own"):
        fetch(source(storage), LoadPlan(items), planner, metadata)
    assert not own_threads("ckptfs-read")


@pytest.mark.parametrize("missing", ["save-1/__0_5.distcp", "save-1/__0_5.xxh3"])
def test_a_missing_file_of_many_is_named(missing: str) -> None:
    """One of eight files, or its digests, is gone: IncompleteCheckpointError that names it."""
    storage = Wide()
    state = {f"w{n}": torch.full((10,), float(n)) for n in range(8)}
    our_save(storage, 1, lambda _: state, threads=8)
    files = source(storage)
    storage.remove(missing)
    metadata = our_metadata(storage)
    items = [read_item(n, f"w{n}", ((0,), (10,))) for n in range(8)]
    planner: Any = Asking({n: torch.zeros(10) for n in range(8)})
    with pytest.raises(IncompleteCheckpointError, match=r"__0_5") as caught:
        fetch(files, LoadPlan(items), planner, metadata)
    assert caught.value.rank == 0


def our_metadata(storage: Storage) -> Metadata:
    """What ``our_save`` stored."""
    from ckptfs.dcp.metadata.metadata_reader import decode_metadata

    return decode_metadata(storage.read(".metadata"), "here")


def test_whole_items_wait_for_room() -> None:
    """Objects of more than 64 MiB together: what is read and not yet loaded never exceeds that."""
    storage = Wide()
    storage.window_bytes = 8 * MIB
    state = {f"o{n}": chr(ord("a") + n) * (24 * MIB) for n in range(6)}
    metadata = our_save(storage, 1, lambda _: state)
    waiting: list[int] = []

    class Counting(Asking):
        def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
            waiting.append(sum(size for _, size in storage.reads) - len(waiting) * 24 * MIB)
            super().load_bytes(item, value)

    planner: Any = Counting({})
    items = [read_item(n, f"o{n}", None) for n in range(6)]
    fetch(source(storage), LoadPlan(items), planner, metadata)
    assert all(planner.objects[n] == state[f"o{n}"] for n in range(6))
    assert max(waiting) <= 64 * MIB, [size / MIB for size in waiting]


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("at", [3, MIB - 1, MIB, 3 * MIB - 2])
def test_damage_beside_the_range_in_its_blocks_is_found(concurrency: int, at: int) -> None:
    """A range that begins and ends inside blocks is believed only with the whole of them."""
    storage = Wide()
    storage.concurrency = concurrency
    metadata = our_save(storage, 1, lambda _: {"w": torch.arange(1.0 * MIB)})
    from ckptfs.dcp.read.data_file import read_digests

    [item] = (read_digests(source(storage), "save-1/__0_0.distcp") or {}).values()
    storage.flip("save-1/__0_0.distcp", item.offset + item.payload_offset + at)
    asked = read_item(0, "w", ((100,), (3 * MIB // 4 - 200,)))  # in blocks 0, 1 and 2 of four
    with pytest.raises(IntegrityError, match="of 'w', differ"):
        run(storage, metadata, [asked], Verify.READ)


def test_tensors_of_inference_mode_can_be_filled() -> None:
    """Threads do not inherit inference_mode; converting into such a tensor works all the same."""
    storage = Wide()
    metadata = our_save(storage, 1, lambda _: {"w": torch.arange(2.0 * MIB)})
    with torch.inference_mode():
        target = torch.zeros(2 * MIB, dtype=torch.float64)
        planner: Any = Asking({0: target})
        fetch(source(storage), LoadPlan([read_item(0, "w", ((0,), (2 * MIB,)))]), planner, metadata)
        assert torch.equal(target, torch.arange(2.0 * MIB).double())


def test_a_column_shard_of_each_rank_reads_every_block_once() -> None:
    """Four ranks ask for their columns of a matrix that was saved whole: each reads it once, not more."""
    storage = Wide()
    storage.reach, storage.concurrency = Reach.LOCAL, 2
    matrix = values((1500, 2000), torch.float32, 3)
    metadata = our_save(storage, 1, lambda _: {"w": matrix})
    for rank in range(4):
        storage.spans.clear()
        [item] = [read_item(0, "w", ((0, 500 * rank), (1500, 500)))]
        done = run(storage, metadata, [item], Verify.READ)
        assert torch.equal(done.targets[0], matrix[:, 500 * rank : 500 * (rank + 1)])
        [spans] = storage.spans.values()
        assert sum(size for _, size in spans) == matrix.nbytes
        assert not _read_twice(spans)


def test_rows_that_lie_far_apart_are_read_alone() -> None:
    """A few columns of a wide matrix, unverified: the rows' own bytes and not what is between."""
    storage = Wide()
    storage.reach, storage.concurrency = Reach.LOCAL, 2
    matrix = values((20, 100_000), torch.float32, 5)
    metadata = our_save(storage, 1, lambda _: {"w": matrix})
    done = run(storage, metadata, [read_item(0, "w", ((2, 70), (9, 100)))], Verify.OFF)
    assert torch.equal(done.targets[0], matrix[2:11, 70:170])
    assert sum(size for _, size in storage.reads) == 9 * 400


def stock_files(tmp_path: Path, state: dict[str, Any]) -> tuple[Storage, Metadata, str]:
    """What stock DCP wrote of it, as a storage; and its one data file."""
    stock_save(tmp_path, 1, lambda _: state)
    storage = open_storage(tmp_path)
    metadata = decode_metadata(storage.read(".metadata"), "here")
    return storage, metadata, "__0_0.distcp"


def filled(storage: Storage, metadata: Metadata, state: dict[str, Any]) -> dict[str, Any]:
    """What a fetch of all of its tensors brings."""
    keys = [*state]
    items = [read_item(n, key, (tuple(0 for _ in state[key].shape), tuple(state[key].shape)))
             for n, key in enumerate(keys)]  # fmt: skip
    targets = {n: torch.zeros_like(state[key]) for n, key in enumerate(keys)}
    planner: Any = Asking(targets)
    fetch(Source(storage, ""), LoadPlan(items), planner, metadata)
    return {key: targets[n] for n, key in enumerate(keys)}


def test_stock_files_are_read_straight_into_tensors(tmp_path: Path) -> None:
    """Files without digests: no read touches the end of a large blob, where torch.load begins."""
    state = {
        "big": values((1200, 700), torch.float32, 1),
        "wide": values((900_000,), torch.int8, 2),
    }
    storage, metadata, _ = stock_files(tmp_path, state)
    seen: list[tuple[int, int]] = []
    inner = storage.open_read

    def open_read(key: str) -> DataReader:
        reader = inner(key)
        read = reader.read_views  # every read of a local file passes here

        def read_views(offset: int, views: Sequence[memoryview]) -> None:
            seen.append((offset, offset + sum(map(len, views))))
            read(offset, views)

        reader.read_views = read_views  # type: ignore[method-assign]
        return reader

    storage.open_read = open_read  # type: ignore[method-assign]
    got = filled(storage, metadata, state)
    assert all(torch.equal(got[key], state[key]) for key in state)
    ends = [info.offset + info.length for info in metadata.storage_data.values()]
    assert seen
    assert not [end for end in ends for low, high in seen if low < end - 22 < high]


@pytest.mark.parametrize("is_large", [True, False])
def test_a_head_that_torch_writes_otherwise_is_left_to_torch(
    tmp_path: Path, is_large: bool
) -> None:
    """A transposed tensor's blob is as long as the usual one, its memory another: the right values all
    the same, of its neighbours too.
    """
    shape = (600, 700) if is_large else (40, 50)  # their strides take as many bytes in a pickle
    state = {f"t{n}": values(shape, torch.float32, n) for n in range(4)}
    state["t2"] = values((shape[1], shape[0]), torch.float32, 9).t()
    storage, metadata, _ = stock_files(tmp_path, state)
    lengths = {info.length for info in metadata.storage_data.values()}
    assert len(lengths) == 1
    got = filled(storage, metadata, state)
    assert all(torch.equal(got[key], state[key]) for key in state)


def test_a_load_of_many_small_tensors_costs_few_calls_of_python(tmp_path: Path) -> None:
    """Each more of them costs at most so many calls, and no system call of its own."""

    def cost(count: int) -> int:
        place = tmp_path / str(count)
        state = {f"t{n}": torch.full((1500 + n % 7,), float(n)) for n in range(count)}
        storage = open_storage(place)
        metadata = our_save(storage, 1, lambda _: state)
        blank = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        reads = [
            PlannedRead(i.fqn, at.relative_path, at.offset, at.length, state[i.fqn].shape, torch.float32,
                 torch.Size([0]), state[i.fqn].shape, blank[i.fqn])
            for i, at in metadata.storage_data.items()
        ]  # fmt: skip
        calls = 0

        def count_calls(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        threading.setprofile(count_calls)
        sys.setprofile(count_calls)
        try:
            fetch_reads(source(storage), reads, lambda _read, _stream: None)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert all(torch.equal(blank[key], state[key]) for key in state)
        return calls

    few, many = cost(1000), cost(3000)
    assert (many - few) / 2000 < CALLS_PER_TENSOR, (few, many)


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_several_ranks_load_is_left_in_the_page_cache(tmp_path: Path, ranks: int) -> None:
    """A rank that loads alone may read past it; of several none does: the next finds the bytes there."""
    storage = open_storage(tmp_path)
    state = {"w": torch.arange(4.0 * MIB)}
    metadata = our_save(storage, 1, lambda _: state)
    told: list[str] = []
    inner = storage.open_read

    def open_read(key: str) -> DataReader:
        reader = inner(key)
        reader.keep_cached = lambda: told.append(key)  # type: ignore[method-assign]
        return reader

    storage.open_read = open_read  # type: ignore[method-assign]
    planner: Any = Asking({0: torch.zeros(4 * MIB)})
    files = dataclasses.replace(source(storage), ranks=ranks)
    fetch(files, LoadPlan([read_item(0, "w", ((0,), (4 * MIB,)))]), planner, metadata)
    assert torch.equal(planner.targets[0], state["w"])
    assert len(told) == (ranks > 1)
