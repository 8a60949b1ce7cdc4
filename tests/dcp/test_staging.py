"""Staging: what is copied, how much of it, and that nothing of the caller's is read once it is back.

packing    bytes that a tensor refers to, once each, wherever they are
buffers    never more than the bound, reused, waited for
rows       27: tensors that change at once; 28: nothing is staged beyond the bound
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfs
from ckptfs.commit.save.spec import SaveSpec
from ckptfs.commit.session import Place, RunSession, start_session
from ckptfs.control.control import SoloControl
from ckptfs.dcp.async_api import SaveResources, begin_in_background
from ckptfs.dcp.pending import PendingSave, Watch
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.dcp.staging.buffers import HostBuffers
from ckptfs.dcp.staging.staging import StagedState, copy_into, pack, packed_bytes, stage
from ckptfs.dcp.worker import SaveWorker
from ckptfs.errors import CollectiveError, NoSpaceError, StateError
from ckptfs.events import Event, SaveResult
from ckptfs.storage.base import DataWriter, Storage
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Hold, Plan
from ckptfs.uri import Uri

MIB = 1 << 20
WAIT_S = 120.0


# -- packing -------------------------------------------------------------------------------------


def _packed(tensors: dict[str, torch.Tensor]) -> tuple[dict[Any, torch.Tensor], int, int]:
    """The staged tensors, the memory that they take, and the bytes that were copied."""
    packing = pack(tensors)
    memory = HostBuffers(packing.size_bytes).lease(packing.size_bytes).memory
    copied = sum(copy.size_bytes for copy in packing.copies)
    return copy_into(memory, packing, is_pinned=False), packing.size_bytes, copied


def test_only_what_is_referred_to_is_copied_and_shared_memory_once() -> None:
    """A small view of a large tensor costs its own bytes; tied weights and overlaps cost one copy."""
    large = torch.arange(1 << 18, dtype=torch.float32)
    state = {"a": large[100:110], "b": large[100:110], "c": large[105:120], "d": large[1000:1001]}
    staged, size_bytes, copied = _packed(state)
    assert copied == 4 * (20 + 1)
    assert size_bytes <= packed_bytes(state.values())
    assert staged["a"].data_ptr() == staged["b"].data_ptr()
    assert all(torch.equal(staged[key], state[key]) for key in state)


@st.composite
def _views(draw: st.DrawFn) -> torch.Tensor:
    """A view of one of two storages: any dtype, offset, transposed, strided, expanded, empty."""
    base = _BASES[draw(st.integers(0, 1))]
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]))
    flat = base.view(dtype)
    begin = draw(st.integers(0, flat.numel() - 24))
    block = flat[begin : begin + 24]
    shapes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.reshape(4, 6),
        lambda t: t.reshape(4, 6).t(),
        lambda t: t[::3],
        lambda t: t[:0],
        lambda t: t[0],
        lambda t: t[:1].expand(5),
        lambda t: t.conj() if t.is_complex() else t,
    ]
    return draw(st.sampled_from(shapes))(block)


_BASES = [torch.randint(0, 255, (512,), dtype=torch.uint8) for _ in range(2)]


@given(st.lists(_views(), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_views_come_back_bit_for_bit(views: list[torch.Tensor]) -> None:
    """Whatever the tensors share and however they are placed: equal bits, shape and dtype, contiguous."""
    tensors = {str(number): view for number, view in enumerate(views)}
    staged, size_bytes, _ = _packed(tensors)
    assert size_bytes <= packed_bytes(views)
    for key, view in tensors.items():
        got, want = staged[key], view.resolve_conj().contiguous()
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) if want.dim() else True
        assert got.numel() == 0 or got.untyped_storage().data_ptr() != view.data_ptr()


# -- buffers -------------------------------------------------------------------------------------


def test_buffers_are_reused_and_never_exceed_the_bound() -> None:
    """Memory comes back with its pages; a larger piece takes the place of idle smaller ones."""
    buffers = HostBuffers(3 * MIB)
    first = buffers.lease(MIB)
    where = first.memory.data_ptr()
    first.release()
    again = buffers.lease(MIB // 2)
    assert again.memory.data_ptr() == where
    again.release()
    buffers.lease(3 * MIB).release()
    assert buffers.peak_bytes == buffers.held_bytes == 3 * MIB
    with pytest.raises(StateError, match="bound"):
        buffers.lease(3 * MIB + 1)
    buffers.close()
    assert buffers.held_bytes == 0


def test_who_needs_what_others_hold_waits_for_it() -> None:
    """A second save gets its buffers when the first one gives its own back, not before."""
    buffers = HostBuffers(2 * MIB)
    first = buffers.lease(2 * MIB)
    asked, got = threading.Event(), threading.Event()

    def second() -> None:
        asked.set()
        buffers.lease(MIB).release()
        got.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert asked.wait(WAIT_S)
    assert not got.is_set()
    first.release()
    assert got.wait(WAIT_S)
    thread.join()
    assert buffers.peak_bytes == 2 * MIB


def test_by_default_half_of_what_the_host_has_is_shared_by_its_ranks() -> None:
    """Ranks of one node together never take more than half of the memory that is available."""
    alone, shared = HostBuffers(), HostBuffers(local_ranks=8)
    assert 0 < 8 * shared.bound_bytes <= alone.bound_bytes * 1.5
    with pytest.raises(StateError, match="negative"):
        HostBuffers(-1)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no smaps of this process")
def test_memory_comes_in_huge_pages_and_stays_out_of_children() -> None:
    """By the kernel's own word: a first copy meets one fault in 2 MiB, not 512, and a fork copies none."""
    memory = HostBuffers(8 * MIB).lease(8 * MIB).memory
    address, mapping = memory.data_ptr(), dict[str, str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if mapping:
                break
        elif begin <= address < end:
            name, _, value = line.partition(":")
            mapping[name] = value.strip()
    assert {"hg", "dc"} <= set(mapping["VmFlags"].split())
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert mapping["THPeligible"] == "1"


# -- whole saves ---------------------------------------------------------------------------------


class Background:
    """A session in a run, and saves in the background on it, as a manager makes them."""

    def __init__(self, session: RunSession, bound_bytes: int | None) -> None:
        self.session = session
        self.events: list[Event] = []
        self.aside = SaveResources(SaveWorker(), HostBuffers(bound_bytes))

    def save(self, state: dict[str, Any], name: str = "step_1") -> PendingSave:
        """Start one."""
        target = self.session.storage.root / name
        pending = PendingSave(str(target), 1)

        def save(staged: StagedState, watch: Watch) -> SaveResult:
            options, tell = WriteOptions(), self.events.append
            return save_at(
                staged, self.session, target, SaveSpec(name, 1), options, tell=tell, watch=watch
            )

        return begin_in_background(
            state, pending, save, self.aside, compare_ranks=False, tell=self.events.append
        )


@contextlib.contextmanager
def background(storage: Storage, bound_bytes: int | None = None) -> Iterator[Background]:
    """Closed with everything in it done."""
    with SoloControl() as control:
        storage.make_dir("")
        made = Background(start_session(control, storage, Place(), write=True), bound_bytes)
        try:
            yield made
        finally:
            made.aside.close(WAIT_S)


class _LateWriter(DataWriter):
    """Reads what it is lent when it is closed, as late as it may."""

    def __init__(self, inner: DataWriter) -> None:
        self._inner = inner
        self._kept: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._kept.append(bytes(data))
        return len(data)

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        self._kept.append(data)
        return len(data)

    def close(self) -> None:
        for data in self._kept:
            self._inner.write(data)
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


class _Streams(LocalStorage):
    """Files are written in order, one large tensor a write: what these tests hold on to."""

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: FileEngine | None = None
    ) -> ParallelWriter | None:
        return None


class _LateStorage(_Streams):
    """An upload that continues in the background until it is completed."""

    def open_write(  # type: ignore[override]  # another writer
        self, key: str, *, size_hint_bytes: int | None = None
    ) -> DataWriter:
        return _LateWriter(super().open_write(key, size_hint_bytes=size_hint_bytes))


def _state(value: float, count: int = 8, numel: int = MIB // 4) -> dict[str, Any]:
    return {f"t{n}": torch.full((numel,), value + n) for n in range(count)} | {"lr": value}


def _same(uri: str, value: float, **shape: int) -> bool:
    got, want = _state(-1.0, **shape), _state(value, **shape)
    ckptfs.load(got, uri)
    return all(
        torch.equal(got[key], want[key]) if key != "lr" else got[key] == value for key in want
    )


@pytest.mark.parametrize("bound", [None, 3 * MIB, MIB // 2, 0])
def test_row27_tensors_may_change_as_soon_as_the_call_returns(
    tmp_path: Path, bound: int | None
) -> None:
    """CPU tensors that change at once, in place and by another thread, are saved as they were."""
    plan, uploading = Plan(), Hold()
    plan.add(Fault("close", "*.distcp", 1, uploading))
    storage = FaultyStorage(_LateStorage(Uri.parse(tmp_path / "run")), plan)
    with background(storage, bound) as saves:
        state = _state(1.0)
        pending = saves.save(state)
        thread = threading.Thread(target=lambda: [t.fill_(-7.0) for t in list(state.values())[:4]])
        thread.start()
        for tensor in list(state.values())[4:8]:
            tensor.fill_(-8.0)
        thread.join()
        uploading.release.set()  # what was lent to the storage is read now
        result = pending.result(WAIT_S)
    assert pending.staged.result(0) is None
    assert _same(result.uri, 1.0)


def test_row27_what_is_being_written_when_the_rest_is_copied_is_waited_for(tmp_path: Path) -> None:
    """Seven of eight tensors fit the bound: the eighth is under the writer's hands, and the call does
    not return before it is written.
    """
    plan, writing, back = Plan(), Hold(), threading.Event()
    plan.add(Fault("write", "*.distcp", 2, writing))  # the first is the leaf
    storage = FaultyStorage(_Streams(Uri.parse(tmp_path / "run")), plan)
    with background(storage, 7 * MIB + 65536) as saves:

        def let_go() -> None:
            assert writing.reached.wait(WAIT_S)
            [slab] = saves.aside.buffers._leased
            while slab.memory[: 7 * MIB].view(torch.float32)[::4096].unique().numel() < 7:
                back.wait(0.01)  # the seven are not copied yet
            back.wait(0.5)  # it must not come: this is how long it has the chance to
            writing.release.set()

        thread = threading.Thread(target=let_go)
        thread.start()
        state = _state(1.0)
        pending = saves.save(state)
        for tensor in list(state.values())[:8]:
            tensor.fill_(-7.0)
        back.set()
        result = pending.result(WAIT_S)
        thread.join()
    assert _same(result.uri, 1.0)


def test_row28_nothing_is_staged_beyond_the_bound(tmp_path: Path) -> None:
    """A state of four times the bound: the call is held while more than the bound is unwritten, and
    the buffers never hold more.
    """
    plan, first = Plan(), Hold()
    plan.add(Fault("write", "*.distcp", 1, first))
    storage = FaultyStorage(_Streams(Uri.parse(tmp_path / "run")), plan)
    bound = 2 * MIB + 4096  # two of eight tensors
    with background(storage, bound) as saves:
        back: list[PendingSave] = []
        caller = threading.Thread(target=lambda: back.append(saves.save(_state(1.0))))
        caller.start()
        assert first.reached.wait(WAIT_S)
        assert back == []  # nothing is written, and eight do not fit
        assert saves.aside.buffers.held_bytes <= bound
        fourth = Hold()
        plan.add(Fault("write", "*.distcp", 3, fourth))
        first.release.set()
        assert fourth.reached.wait(WAIT_S)
        assert back == []
        last = Hold()
        plan.add(Fault("close", "*.distcp", 1, last))
        fourth.release.set()
        assert last.reached.wait(WAIT_S)  # written, but not durable: the caller is free
        caller.join(WAIT_S)
        assert len(back) == 1
        assert not back[0].durable.done()
        assert back[0].progress().written_items == 9
        last.release.set()
        result = back[0].result(WAIT_S)
        assert saves.aside.buffers.peak_bytes <= bound
    assert _same(result.uri, 1.0)


def test_what_was_looked_at_and_put_back_goes_beside_what_was_copied() -> None:
    """A second window does not overwrite the first: each copy is what its tensor was."""
    sizes = {"looked at": 24_000, "written": MIB // 4, "b": MIB // 4, "c": MIB // 4, "d": MIB // 4}
    state = {key: torch.full((numel,), float(n)) for n, (key, numel) in enumerate(sizes.items())}
    staged = stage(state, HostBuffers(3 * MIB + 200_000), PendingSave("x", 1), compare_ranks=False)
    items = {item.index.fqn: item for item in staged.plan(0, ()).items}
    looked, written = (staged.resolve(items[key]) for key in ("looked at", "written"))
    staged.take_on(list(items.values()))
    caller = threading.Thread(target=staged.wait)
    caller.start()
    written.done()
    looked.back()
    caller.join(WAIT_S)
    assert staged.cut_short is None
    for n, (key, tensor) in enumerate(state.items()):
        tensor.fill_(-1.0)
        if key != "written":
            data = staged.resolve(items[key]).data
            assert isinstance(data, torch.Tensor)
            assert data.unique().tolist() == [float(n)]


def test_a_tensor_larger_than_the_bound_is_written_where_it_lies(tmp_path: Path) -> None:
    """One tensor of eight times the bound needs no buffer at all."""
    with background(LocalStorage(Uri.parse(tmp_path / "run")), MIB // 2) as saves:
        state = {"w": torch.arange(MIB, dtype=torch.float32)}
        pending = saves.save(state)
        state["w"].zero_()
        result = pending.result(WAIT_S)
        assert saves.aside.buffers.peak_bytes <= MIB // 2
    got = {"w": torch.zeros(MIB)}
    ckptfs.load(got, result.uri)
    assert torch.equal(got["w"], torch.arange(MIB, dtype=torch.float32))


def test_the_second_save_uses_the_pages_of_the_first(tmp_path: Path) -> None:
    """Saves of one state use one piece of memory, one after the other."""
    with background(LocalStorage(Uri.parse(tmp_path / "run"))) as saves:
        for number in range(3):
            saves.save(_state(float(number)), f"step_{number}")
        saves.aside.worker.wait(WAIT_S)
        size = saves.aside.buffers.peak_bytes
        # A save that comes before the one before is done gets a piece of its own, or waits for it.
        assert size <= 3 * (8 * MIB + 1024)
        saves.save(_state(9.0), "step_9").result(WAIT_S)
        assert saves.aside.buffers.peak_bytes == size
    assert all(_same(str(tmp_path / f"run/step_{n}"), float(n)) for n in (0, 1, 2, 9))


@pytest.mark.parametrize("late", [False, True], ids=["while-it-waits", "before-it-sleeps"])
def test_ctrl_c_while_the_call_is_held_commits_nothing(tmp_path: Path, *, late: bool) -> None:
    """The caller gets its KeyboardInterrupt; a save that it may have torn fails.

    late: the signal does not interrupt the wait, as one that comes just before the thread sleeps: another thread
    takes it. Python then hears of it when the main thread wakes.
    """
    plan, first = Plan(), Hold()
    plan.add(Fault("write", "*.distcp", 1, first))
    storage = FaultyStorage(_Streams(Uri.parse(tmp_path / "run")), plan)
    with background(storage, 0) as saves:

        def interrupt() -> None:
            assert first.reached.wait(WAIT_S)
            taker = threading.current_thread() if late else threading.main_thread()
            signal.pthread_kill(taker.ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            saves.save(_state(1.0, count=1))
        thread.join()
        first.release.set()
        saves.aside.worker.wait(WAIT_S)
        assert ckptfs.list_checkpoints(str(tmp_path / "run")) == []
        saves.save(_state(2.0), "step_2").result(WAIT_S)
    assert [c.uri.name for c in ckptfs.list_checkpoints(str(tmp_path / "run"))] == ["step_2"]


def test_a_failure_frees_a_caller_that_is_held(tmp_path: Path) -> None:
    """The storage fails while the caller waits for its turn: it is back with the error in the futures."""
    full = NoSpaceError("no space left")
    plan = Plan([Fault("write", "*.distcp", 2, Fail(full))])
    storage = FaultyStorage(_Streams(Uri.parse(tmp_path / "run")), plan)
    with background(storage, 0) as saves:
        pending = saves.save(_state(1.0))
        assert pending.staged.exception() is not None
        for future in (pending.committed, pending.durable):
            error = future.exception(WAIT_S)
            assert isinstance(error, CollectiveError)
            assert error.all_are(NoSpaceError)
        assert saves.aside.buffers.held_bytes == 0
        assert saves.save(_state(2.0), "step_2").result(WAIT_S).uri.endswith("step_2")


def test_a_pool_that_shrinks_tells_whoever_waits_for_more() -> None:
    """Another save of the process may lower the bound: what no longer fits is an error, not waited for."""
    buffers = HostBuffers(2 * MIB)
    first = buffers.lease(2 * MIB)
    told: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(StateError, match="the bound is"):
            buffers.lease(2 * MIB)
        told.append(StateError("told"))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    buffers.resize(MIB)
    first.release()
    waiting.join(120)
    assert told
