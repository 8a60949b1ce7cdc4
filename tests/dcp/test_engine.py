"""The write engine towards the storage: how large it says a file will be, what it lends, what it keeps."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.control.control import SoloControl
from ckptfs.dcp.write.host_memory import Loan
from ckptfs.dcp.write.rank_files import (
    Cancelled,
    FileTask,
    FileWritten,
    sidecar_of,
    split_items,
    stream_engine,
)
from ckptfs.errors import NoSpaceError
from ckptfs.storage.base import DataWriter, Shape
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.testing.faults import FaultyStorage, Plan
from ckptfs.uri import Uri
from tests.dcp.planned import plan_save

MIB = 1 << 20


class Noting(DataWriter):
    """Takes everything and remembers how it came; lent memory is looked at when it is closed."""

    def __init__(self, storage: NotingStorage) -> None:
        self.storage = storage
        self.pieces: list[tuple[str, bytes | memoryview]] = []

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """A copy, as the contract allows the caller to reuse its buffer."""
        self.pieces.append(("write", bytes(data)))
        return len(data)

    def lend(self, data: bytes | bytearray | memoryview) -> int:
        """No copy: the caller promised."""
        self.pieces.append(("lend", memoryview(data).cast("B")))
        self.storage.on_lend(data)
        return len(data)

    def close(self) -> None:
        """Only now are lent bytes read."""
        self.storage.bytes = b"".join(bytes(piece) for _, piece in self.pieces)
        self.storage.kinds = [(kind, len(piece)) for kind, piece in self.pieces]

    def abort(self) -> None:
        """Nothing stays."""


class NotingStorage(MemoryStorage):
    """A store of one data file that is not kept, and of its sidecar."""

    def __init__(self) -> None:
        super().__init__(Uri.parse("memory://engine/run"), stores=MemoryStoreRegistry())
        self.make_dir("")
        self.hint: int | None = None
        self.bytes = b""
        self.kinds: list[tuple[str, int]] = []
        self.on_lend: Callable[[Any], object] = lambda data: None

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        """A writer that notes, but for the sidecar."""
        if key.endswith(".xxh3"):
            return super().open_write(key, size_hint_bytes=size_hint_bytes)
        self.hint = size_hint_bytes
        return Noting(self)


def written(
    state: dict[str, Any], storage: NotingStorage | None = None
) -> tuple[NotingStorage, FileWritten]:
    """One file of a state, through the engine."""
    storage = storage or NotingStorage()
    planned = plan_save(state, SoloControl())
    [items] = split_items(planned.items, 1)
    task = FileTask("f", items)
    return storage, stream_engine(storage, task, planned.resolve, Cancelled())


LEAVES = st.one_of(
    st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        st.lists(st.integers(0, 9), max_size=8),
        st.sampled_from((torch.float32, torch.bool, torch.bfloat16, torch.complex128)),
    ),
    st.integers(),
    st.text(max_size=2000),
    st.integers(0, 300_000).map("x".__mul__),
    st.lists(st.floats(), max_size=50),
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=40), LEAVES, min_size=1, max_size=20))
def test_the_size_that_is_told_is_no_less_than_the_files(state: dict[str, Any]) -> None:
    """Stores limit a file's parts: a hint that is too small would break the last ones."""
    storage, done = written({f"k{n}": value for n, value in enumerate(state.values())})
    assert storage.hint is not None
    assert done.size_bytes == len(storage.bytes)
    assert done.size_bytes <= storage.hint <= done.size_bytes + 5000 * len(state)


def test_large_pieces_are_lent_where_they_lie_and_small_ones_are_not() -> None:
    """What is lent is the tensor's own memory: no byte of it was copied on the way."""
    big = torch.arange(2.0 * MIB)
    addresses: list[int] = []
    storage = NotingStorage()
    storage.on_lend = lambda data: addresses.append(
        torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    )
    state = {"a": torch.ones(10), "big": big, "z": torch.ones(1000), "o": "text"}
    storage, done = written(state, storage)
    assert addresses == [big.data_ptr()]
    assert ("lend", 8 * MIB) in storage.kinds
    assert sum(size for kind, size in storage.kinds if kind == "write") < 16 << 10
    assert len(storage.bytes) == done.size_bytes


def test_what_is_lent_is_as_it_was_when_the_file_is_closed() -> None:
    """Copies that were staged (here: not contiguous) stay whole until close, also where memory is reused."""
    state = {f"w{n}": (torch.arange(1.0 * MIB) + n).reshape(1024, 1024).t() for n in range(6)}
    storage, done = written(state)
    assert [kind for kind, size in storage.kinds if size == 4 * MIB] == ["lend"] * 6
    for place, item, tensor in zip(done.placed, done.digests.items, state.values(), strict=True):
        start = place.offset + item.payload_offset
        payload = bytearray(storage.bytes[start : start + item.payload_length])
        assert torch.equal(torch.frombuffer(payload, dtype=torch.float32), tensor.flatten())


@pytest.mark.parametrize("shape", Shape)
def test_a_file_is_closed_once(shape: Shape) -> None:
    """A second close is an error to some storages. On object stores the sidecar is written while the file
    is closed.
    """
    plan, side_by_side = Plan(), list[int]()
    root = Uri.parse("memory://engine/closed")
    inner = MemoryStorage(root, shape=shape, stores=MemoryStoreRegistry())
    inner.make_dir("")
    planned = plan_save({"w": torch.ones(3)}, SoloControl())
    task = FileTask("f.distcp", split_items(planned.items, 1)[0])

    class Counting(FaultyStorage):
        def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
            side_by_side.append(len(calls))
            return super().at_once(calls)

    wrote = stream_engine(Counting(inner, plan), task, planned.resolve, Cancelled())
    closed = [one.key for one in plan.trace if one.op == "close"]
    assert sorted(closed) == ["f.distcp", "f.xxh3"]
    assert inner.stat("f.xxh3").size_bytes == sidecar_of(wrote).size_bytes
    assert side_by_side == ([2] if shape is Shape.OBJECT else [])


@pytest.mark.parametrize("failing", [0, 2, 5])
def test_a_write_that_failed_on_the_thread_fails_a_file_whose_writer_forgets_it(
    failing: int,
) -> None:
    """A writer may take the close after a write that failed, as clients of stores do: the file is
    aborted all the same, at whichever of its pieces it was, the last one too.
    """
    ends: list[str] = []
    lent = 0

    class Forgetting(Noting):
        def lend(self, data: bytes | bytearray | memoryview) -> int:
            nonlocal lent
            lent += 1
            if lent == failing + 1:
                raise NoSpaceError("full")
            return len(data)

        def close(self) -> None:
            ends.append("closed")

        def abort(self) -> None:
            ends.append("aborted")

    storage = NotingStorage()
    storage.open_write = lambda key, **_: Forgetting(storage)  # type: ignore[method-assign]
    with pytest.raises(NoSpaceError, match="full"):
        written({f"w{n}": torch.ones(2 * MIB) for n in range(6)}, storage)
    assert ends == ["aborted"]


def test_staged_copies_go_as_soon_as_the_writer_lets_go() -> None:
    """A writer that releases at once never sees more than three staged copies alive."""
    made: list[weakref.ref[Any]] = []  # the memory itself, not torch's wrappers of it
    most = 0
    storage = NotingStorage()

    class Dropping(Noting):
        def lend(self, data: bytes | bytearray | memoryview) -> int:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in made))
            return len(data)

    storage.open_write = lambda key, *, size_hint_bytes=None: Dropping(storage)  # type: ignore[method-assign]
    state = {f"w{n}": torch.zeros(8 * MIB // 4) for n in range(12)}
    planned = plan_save(state, SoloControl())
    [items] = split_items(planned.items, 1)

    def staged(item: Any) -> torch.Tensor:
        memory = np.zeros(8 * MIB // 4, dtype=np.float32)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    stream_engine(storage, FileTask("f", items), staged, Cancelled())
    assert 1 <= most <= 3  # in the writer, waiting for it, and being made
    assert len(made) == 12
    assert not any(ref() is not None for ref in made)


def test_memory_that_does_not_stay_is_written_and_given_back_one_by_one() -> None:
    """A loan that does not stay is never lent on; its owner gets word once its bytes are taken, while
    the file is still open, and may change it then.
    """
    storage = NotingStorage()
    state = {f"w{n}": torch.full((2 * MIB,), float(n)) for n in range(4)} | {"z": torch.ones(10)}
    planned = plan_save(state, SoloControl())
    [items] = split_items(planned.items, 1)
    given_back: list[str] = []

    def lent(item: Any) -> Loan:
        tensor = state[item.index.fqn]

        def done() -> None:
            tensor.fill_(-1.0)
            given_back.append(item.index.fqn)

        return Loan(tensor, stays=False, done=done)

    wrote = stream_engine(storage, FileTask("f", items), lent, Cancelled())
    assert [key for key in given_back if key != "z"] == ["w0", "w1", "w2", "w3"]
    assert "z" in given_back  # it is small: copied at once
    assert {kind for kind, _ in storage.kinds} == {"write"}
    for place, item in zip(wrote.placed, wrote.digests.items, strict=True):
        start = place.offset + item.payload_offset
        payload = bytearray(storage.bytes[start : start + item.payload_length])
        values = torch.frombuffer(payload, dtype=torch.float32).unique().tolist()
        assert values == ([float(place.position)] if place.position < 4 else [1.0])


def test_what_was_lent_is_not_given_back_when_writing_fails() -> None:
    """A writer that failed may still read: no owner gets word that the memory is free."""
    storage = NotingStorage()

    class Full(Noting):
        def write(self, data: bytes | bytearray | memoryview) -> int:
            raise NoSpaceError("no space left")

    storage.open_write = lambda key, *, size_hint_bytes=None: Full(storage)  # type: ignore[method-assign]
    planned = plan_save({"w": torch.zeros(2 * MIB)}, SoloControl())
    [items] = split_items(planned.items, 1)
    given_back: list[None] = []
    loan = Loan(torch.zeros(2 * MIB), stays=False, done=lambda: given_back.append(None))
    with pytest.raises(NoSpaceError):
        stream_engine(storage, FileTask("f", items), lambda _: loan, Cancelled())
    assert given_back == []


@pytest.mark.parametrize("is_loan", [False, True], ids=["object", "loan"])
def test_what_refers_to_an_objects_bytes_is_no_view_of_its_stream(is_loan: bool) -> None:
    """From Python 3.13 on a stream that is collected together with its view counts as an error of the code that runs."""
    storage = NotingStorage()
    pieces: list[memoryview] = []
    storage.on_lend = lambda data: pieces.append(memoryview(data))
    planned = plan_save({"o": "x" * MIB}, SoloControl())
    [items] = split_items(planned.items, 1)
    data = io.BytesIO(b"x" * MIB)
    resolve = (lambda _: Loan(data, stays=True)) if is_loan else (lambda _: data)
    stream_engine(storage, FileTask("f", items), resolve, Cancelled())
    assert pieces, "nothing was lent: this test proves nothing"
    data.close()
    assert storage.bytes == b"x" * MIB
