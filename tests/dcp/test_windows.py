"""The engine that writes windows: the same file as a stream's, whatever is where, and what it costs."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import WriteItem

from ckptfs.commit.digests import FileDigests, decode_digests, encode_digests, first_bad_block
from ckptfs.control.control import SoloControl
from ckptfs.dcp.write.file_layout import Payload
from ckptfs.dcp.write.host_memory import Loan, host_tensor, memory_of
from ckptfs.dcp.write.rank_files import (
    Cancelled,
    FileTask,
    FileWritten,
    WriteEngineName,
    auto_engine,
    engine_for,
    split_items,
    stream_engine,
)
from ckptfs.errors import NoSpaceError, StateError
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.uri import Uri
from tests.dcp.planned import plan_save

MIB = 1 << 20
DTYPES = (
    torch.bool,
    torch.int8,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.complex64,
)


class Cut(ParallelWriter):
    """Windows of any size, in memory; ``file`` once it is closed."""

    def __init__(self, store: Windowed, size_bytes: int) -> None:
        self.store = store
        self.window_bytes, self.concurrency = store.window_bytes, store.threads
        self.parts: dict[int, bytes] = {}
        self.size_bytes = size_bytes

    @property
    def engine(self) -> FileEngine:
        """As a file."""
        return FileEngine.BUFFERED

    @property
    def direct_bytes(self) -> int:
        """None."""
        return 0

    def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
        """All are held at once, as pwritev has them; the first of a window may have gone by then."""
        held = list(views)
        self.store.on_window(offset)
        assert offset % self.window_bytes == 0
        self.parts[offset] = b"".join(held)

    def close(self) -> None:
        """Whole windows, side by side."""
        data = b"".join(self.parts[offset] for offset in sorted(self.parts))
        assert len(data) == self.size_bytes
        self.store.file = data

    def abort(self) -> None:
        """Nothing stays."""
        self.store.aborted = True


class Windowed(MemoryStorage):
    """A store of one data file, written in windows of so many bytes, and of its sidecar."""

    def __init__(self, window_bytes: int, threads: int = 1) -> None:
        super().__init__(Uri.parse("memory://windows/run"), stores=MemoryStoreRegistry())
        self.make_dir("")
        self.window_bytes, self.threads = window_bytes, threads
        self.file = b""
        self.aborted = False
        self.on_window: Callable[[int], object] = lambda offset: None

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        return Cut(self, size_bytes)


def task_of(state: dict[str, Any]) -> tuple[FileTask, Callable[[WriteItem], Any]]:
    """One file with all of a state, and how its data is got."""
    planned = plan_save(state, SoloControl())
    [items] = split_items(planned.items, 1)
    return FileTask("f", items), planned.resolve


def both(state: dict[str, Any], window_bytes: int, threads: int) -> tuple[bytes, FileWritten]:
    """The file by windows, after it was compared with what the stream engine writes."""
    task, resolve = task_of(state)
    stream = MemoryStorage(Uri.parse("memory://stream/run"), stores=MemoryStoreRegistry())
    stream.make_dir("")
    expected = stream_engine(stream, task, resolve, Cancelled())
    store = Windowed(window_bytes, threads)
    written = auto_engine(store, task, resolve, Cancelled())
    assert written.engine is FileEngine.BUFFERED
    assert store.file == stream.read("f")
    assert written.placed == expected.placed
    assert encode_digests(written.digests) == encode_digests(expected.digests)
    assert (written.size_bytes, written.payload_bytes) == (
        expected.size_bytes,
        expected.payload_bytes,
    )
    return store.file, written


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, shape and strides: slices with steps, transposed, expanded, views into wider memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    seed = draw(st.integers(0, 99))
    wide = [size * 2 + 1 for size in shape]
    made = torch.Generator().manual_seed(seed)
    count = torch.Size(wide).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    flat = torch.randint(0, high, (count,), generator=made, dtype=torch.uint8).view(dtype)
    tensor = flat.reshape(wide)
    for dim in range(len(shape)):
        step = draw(st.sampled_from((1, 2)))
        tensor = tensor.narrow(dim, draw(st.integers(0, 1)), shape[dim] * step)
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, draw(st.integers(0, len(shape) - 1)))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor


LEAVES = st.one_of(tensors(), st.integers(), st.text(max_size=3000), st.just(""))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(LEAVES, min_size=1, max_size=12),
    st.sampled_from((512, 1000, 4096, 100_000)),
    st.integers(1, 3),
)
def test_windows_of_any_size_make_the_file_of_a_stream(
    leaves: list[Any], window_bytes: int, threads: int
) -> None:
    """Whatever crosses windows, of one thread or several: the same bytes, places and digests."""
    both({f"k{n}": leaf for n, leaf in enumerate(leaves)}, window_bytes, threads)


@settings(max_examples=80, deadline=None)
@given(tensors(), st.data())
def test_any_range_of_a_payload_is_that_range_of_its_contiguous_bytes(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    """Bytes that begin and end inside elements and rows, of views of all kinds."""
    whole = bytes(memory_of(host_tensor(tensor)))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert bytes(Payload(tensor).view(start, stop)) == whole[start:stop]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window_bytes", [700_001, 2 * MIB, 3 * MIB + 17])
def test_blocks_across_windows_have_the_digest_of_the_whole_block(
    window_bytes: int, threads: int
) -> None:
    """Tensors of several blocks, contiguous and not, at odd places: each block's digest is right."""
    state = {
        "a": torch.arange(3.0 * MIB),
        "b": torch.arange(900_000.0).reshape(900, 1000).t(),
        "c": torch.ones(MIB // 4),
        "d": torch.zeros(MIB // 4 + 1),
        "o": "x" * 3_000_000,
    }
    data, written = both(state, window_bytes, threads)
    raw = encode_digests(written.digests)
    items: FileDigests = decode_digests(raw, "x")
    for item in items.items:
        blob = memoryview(data)[item.offset : item.offset + item.length]
        assert first_bad_block(item, 0, blob) is None
    for place, tensor in zip(written.placed[1:], list(state.values())[:4], strict=True):
        file = io.BytesIO(data[place.offset : place.offset + place.length])
        assert torch.equal(torch.load(file, weights_only=True), torch.as_tensor(tensor))


def test_padding_may_lie_across_windows_and_in_one_of_its_own() -> None:
    """Wherever a window ends between two tensors: nothing is written twice, no digest is lost."""
    state = {"a": torch.ones(5), "b": torch.ones(7)}
    _, written = both(state, MIB, 1)
    first, second = written.placed
    assert first.offset + first.length < second.offset
    for window_bytes in range(first.length - 1, second.offset + 2):
        both(state, window_bytes, 1)


@pytest.mark.parametrize("name", list(WriteEngineName))
def test_every_engine_writes_the_same_file(tmp_path: Path, name: WriteEngineName) -> None:
    """On a disk: direct, buffered and by choice, in several windows, all as the stream engine does."""
    state = {f"w{n}": torch.randn(1_500_000 + n) for n in range(4)} | {"o": [1, 2]}
    task, resolve = task_of(state)
    for engine, key in ((stream_engine, "stream"), (engine_for(name), "f")):
        storage = LocalStorage(Uri.parse(str(tmp_path)))
        written = engine(storage, FileTask(key, task.items), resolve, Cancelled())
        (tmp_path / f"{key}.digests").write_bytes(encode_digests(written.digests))
    assert (tmp_path / "f").read_bytes() == (tmp_path / "stream").read_bytes()
    assert (tmp_path / "f.digests").read_bytes() == (tmp_path / "stream.digests").read_bytes()
    if name is WriteEngineName.BUFFERED:
        assert (written.engine, written.direct_bytes) == (FileEngine.BUFFERED, 0)


def test_memory_is_given_back_once_its_last_window_is_written() -> None:
    """The lender of memory gets word when all windows with it are written, and never before."""
    state = {f"w{n}": torch.full((MIB // 4,), float(n)) for n in range(6)}
    task, _ = task_of(state)
    store = Windowed(1_500_000, 2)
    given_back: list[str] = []

    def lent(item: WriteItem) -> Loan:
        key = item.index.fqn
        tensor = state[key]

        def done() -> None:
            tensor.fill_(-1.0)  # its owner may change it at once
            given_back.append(key)

        return Loan(tensor, stays=False, done=done)

    written = auto_engine(store, task, lent, Cancelled())
    assert sorted(given_back) == sorted(state)
    for place, item in zip(written.placed, written.digests.items, strict=True):
        start = place.offset + item.payload_offset
        payload = bytearray(store.file[start : start + item.payload_length])
        values = torch.frombuffer(payload, dtype=torch.float32).unique().tolist()
        assert values == [float(place.position)]


def test_a_failing_window_stops_the_others_and_gives_nothing_back() -> None:
    """The disk is full at the third window: its error comes out, the file is aborted."""
    state = {f"w{n}": torch.zeros(MIB // 4) for n in range(8)}
    task, resolve = task_of(state)
    store = Windowed(MIB, 3)
    given_back: list[None] = []

    def full(offset: int) -> None:
        if offset >= 2 * MIB:
            raise NoSpaceError("no space left")

    def lent(item: WriteItem) -> Loan:
        return Loan(resolve(item), done=lambda: given_back.append(None))

    store.on_window = full
    with pytest.raises(NoSpaceError):
        auto_engine(store, task, lent, Cancelled())
    assert store.aborted
    assert store.file == b""
    assert len(given_back) < 8


def test_a_window_of_many_items_that_fails_half_way_lets_the_others_go_on() -> None:
    """Windows of many items take turns; one that is given up in its middle keeps no other from its turn,
    though its error still knows the frames it came through.
    """
    state = {f"w{n}": torch.zeros(3000) for n in range(400)}
    task, resolve = task_of(state)
    store, others = Windowed(MIB, 3), threading.Event()

    class Stumbling(Cut):
        def write_at(self, offset: int, views: Iterable[memoryview]) -> None:
            """Gives up after one view, when another thread waits, and holds on to the others."""
            taken = iter(views)
            if offset:
                others.set()  # from here it waits for the first one's turn to end
            next(taken)
            assert offset or others.wait(60)
            raise NoSpaceError("no space left")

    store.open_parallel = (  # type: ignore[method-assign]
        lambda key, *, size_bytes, engine=None: Stumbling(store, size_bytes)
    )
    failed: list[BaseException] = []

    def save() -> None:
        try:
            auto_engine(store, task, resolve, Cancelled())
        except NoSpaceError as error:
            failed.append(error)

    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    thread.join(120)
    assert len(failed) == 1
    assert store.aborted


def test_another_file_that_failed_stops_this_one() -> None:
    """Once cancelled, a file writes no window more, and is aborted."""
    state = {f"w{n}": torch.zeros(MIB // 4) for n in range(8)}
    task, resolve = task_of(state)
    store, cancelled, seen = Windowed(MIB, 1), Cancelled(), []

    def window(offset: int) -> None:
        seen.append(offset)
        cancelled.event.set()

    store.on_window = window
    with pytest.raises(Exception, match=r"^$"):  # no error: the thread that failed has that
        auto_engine(store, task, resolve, cancelled)
    assert seen == [0]
    assert store.aborted


def test_a_tensor_that_is_not_what_was_planned_is_written_in_order(tmp_path: Path) -> None:
    """A planner that converts what it resolves gets the file it always got: a stream."""
    state = {"w": torch.arange(5000.0), "x": torch.arange(7.0)}
    task, resolve = task_of(state)

    def halved(item: WriteItem) -> torch.Tensor:
        data = resolve(item)
        assert isinstance(data, torch.Tensor)
        return data.to(torch.float16)

    storage = LocalStorage(Uri.parse(str(tmp_path)))
    written = auto_engine(storage, task, halved, Cancelled())
    assert written.engine is FileEngine.STREAMED
    data = (tmp_path / "f").read_bytes()
    for place, tensor in zip(written.placed, state.values(), strict=True):
        blob = io.BytesIO(data[place.offset : place.offset + place.length])
        assert torch.equal(torch.load(blob, weights_only=True), tensor.half())


def test_a_tensor_that_changed_its_shape_after_others_were_given_back_fails(tmp_path: Path) -> None:
    """What was given back cannot be read again: StateError, and nothing is left of the file."""
    state = {f"w{n}": torch.zeros(MIB) for n in range(4)}
    task, resolve = task_of(state)

    def lent(item: WriteItem) -> Loan:
        data = resolve(item)
        assert isinstance(data, torch.Tensor)
        return Loan(data[1:] if item.index.fqn == "w3" else data, stays=False)

    with pytest.raises(StateError, match="planned"):
        auto_engine(LocalStorage(Uri.parse(str(tmp_path))), task, lent, Cancelled())
    assert list(tmp_path.iterdir()) == []


# -- what it costs --------------------------------------------------------------------------------


def test_what_is_not_contiguous_is_copied_a_window_at_a_time() -> None:
    """A transposed tensor of 32 MiB is written with copies of a window and a block, not of all of it."""
    tensor = torch.zeros(4096, 2048).t()
    task, _ = task_of({"w": tensor})
    store = Windowed(2 * MIB, 1)
    copied: list[int] = []

    class Copies(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.Tensor.contiguous:
                copied.append(made.numel() * made.element_size())
            return made

    with Copies():
        auto_engine(store, task, lambda item: tensor, Cancelled())
    assert len(store.file) > 32 * MIB
    # Every window begins with the part of a block that another one digested.
    assert 32 * MIB <= sum(copied) <= 32 * MIB + 16 * MIB
    assert max(copied) <= 3 * MIB


def test_the_python_calls_per_small_tensor_are_few() -> None:
    """Calls of Python functions in the engine for each of 2,000 small tensors, counted exactly."""
    state = {f"w{n}": torch.zeros(64) for n in range(2000)}
    task, _ = task_of(state)
    ready = {item.index: state[item.index.fqn] for _, item in task.items}
    store = Windowed(8 * MIB, 1)
    auto_engine(store, task, lambda item: ready[item.index], Cancelled())  # frames are made once
    calls = 0

    def count(frame: Any, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        auto_engine(store, task, lambda item: ready[item.index], Cancelled())
    finally:
        sys.setprofile(None)
    assert calls / len(state) < 40
