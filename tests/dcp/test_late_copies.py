"""A copy into memory that has no pages yet: made while the writer writes, and never of a later moment.

The writer's side is played by hand where the order matters: ``resolve`` is what it does before it reads an item,
``done`` and ``back`` what it does after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItem

import ckptfs
from ckptfs.dcp.pending import PendingSave
from ckptfs.dcp.staging import staging as module
from ckptfs.dcp.staging.buffers import HostBuffers, Lease
from ckptfs.dcp.staging.staging import StagedState, stage
from ckptfs.dcp.write.host_memory import Loan
from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri
from tests.dcp.test_staging import _LateStorage, _Streams, background
from tests.measures import own_threads

MIB = 1 << 20
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def _any_size_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FRESH_BYTES", 0)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)


def _state() -> dict[str, Any]:
    return {key: torch.full((MIB,), float(n)) for n, key in enumerate("abcd")}


def _staged(
    state: dict[str, Any], buffers: HostBuffers | None = None, *, compare_ranks: bool = False
) -> tuple[StagedState, dict[str, WriteItem]]:
    buffers = buffers or HostBuffers(64 * MIB)
    made = stage(state, buffers, PendingSave("x", 1), compare_ranks=compare_ranks)
    items = made._state.plan.items
    return made, {item.index.fqn: item for item in items}


def _waiting(staged: StagedState) -> threading.Thread:
    caller = threading.Thread(target=staged.wait)
    caller.start()
    return caller


def _copies(staged: StagedState, items: dict[str, WriteItem], keys: str) -> list[float]:
    """What copies hold, once they are there: nothing is read from the caller's tensors."""
    staged._late_until = time.monotonic() + WAIT_S
    found = []
    for key in keys:
        loan = staged.resolve(items[key])
        assert loan.stays
        assert isinstance(loan.data, torch.Tensor)
        [value] = loan.data.unique().tolist()
        found.append(value)
    return found


def test_without_a_writer_everything_is_copied() -> None:
    """The call waits for no other save and no other rank: it copies, and is back."""
    state = _state()
    staged, items = _staged(state)
    staged.wait()
    assert staged.cut_short is None
    for tensor in state.values():
        tensor.fill_(-1.0)
    assert _copies(staged, items, "abcd") == [0.0, 1.0, 2.0, 3.0]


def test_what_is_written_meanwhile_is_not_copied_and_what_is_read_is_waited_for() -> None:
    """Two were taken by the writer before: the call is not back before both were written."""
    state = _state()
    staged, items = _staged(state)
    first, second = (staged.resolve(items[key]) for key in "ab")
    assert not first.stays
    caller = _waiting(staged)
    assert _copies(staged, items, "cd") == [2.0, 3.0]
    first.done()
    assert caller.is_alive()
    second.done()
    caller.join(WAIT_S)
    assert not caller.is_alive()
    assert staged.cut_short is None
    assert staged.size_bytes == 2 * 4 * MIB


def test_what_is_read_from_the_middle_of_its_copy_on_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy is there, and the writer still reads the caller's tensor: the call is not back."""
    copying, go, back = threading.Event(), threading.Event(), threading.Event()
    real = module._StagingCopy.pieces

    def pieces(copy: Any, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        copying.set()
        assert go.wait(WAIT_S)
        yield from real(copy, memory)

    monkeypatch.setattr(module._StagingCopy, "pieces", pieces)
    staged, items = _staged(_state())

    def call() -> None:
        staged.wait()
        back.set()

    caller = threading.Thread(target=call)
    caller.start()
    assert copying.wait(WAIT_S)  # of the last
    loan = staged.resolve(items["d"])
    go.set()
    assert _copies(staged, items, "abcd") == [0.0, 1.0, 2.0, 3.0]
    assert not back.wait(0.2)  # it must not come: this is how long it has the chance to
    loan.done()
    assert back.wait(WAIT_S)
    caller.join(WAIT_S)


def test_what_is_not_contiguous_is_written_from_its_copy_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From where it is it would need one more copy, beyond the bound: the writer waits for the one that is made."""
    copying, go = threading.Event(), threading.Event()
    real = module._StagingCopy.pieces

    def pieces(copy: Any, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        copying.set()
        assert go.wait(WAIT_S)
        yield from real(copy, memory)

    monkeypatch.setattr(module._StagingCopy, "pieces", pieces)
    state = {"a": torch.arange(6.0).reshape(2, 3).t()}
    staged, items = _staged(state)
    caller = _waiting(staged)
    assert copying.wait(WAIT_S)
    loans: list[Loan] = []
    writer = threading.Thread(target=lambda: loans.append(staged.resolve(items["a"])))
    writer.start()
    writer.join(0.2)  # it must not end: this is how long it has the chance to
    go.set()
    writer.join(WAIT_S)
    caller.join(WAIT_S)
    [loan] = loans
    assert loan.stays
    assert isinstance(loan.data, torch.Tensor)
    assert torch.equal(loan.data, torch.arange(6.0).reshape(2, 3).t())


def test_what_was_put_back_is_copied() -> None:
    """It was looked at, not written: it is as it was at the call when it is written later."""
    state = _state()
    staged, items = _staged(state)
    looked = staged.resolve(items["a"])
    caller = _waiting(staged)
    assert _copies(staged, items, "bcd") == [1.0, 2.0, 3.0]
    looked.back()
    caller.join(WAIT_S)
    state["a"].fill_(-1.0)
    assert _copies(staged, items, "a") == [0.0]


def test_what_another_rank_writes_is_not_copied() -> None:
    """Once the ranks have agreed, what belongs to no rank here is left out."""
    staged, items = _staged(_state())
    staged.take_on([items["d"]])
    staged.wait()
    assert staged.size_bytes == 4 * MIB
    assert _copies(staged, items, "d") == [3.0]


def test_the_caller_stays_while_values_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints for other ranks may be those of the caller's own tensors."""
    reading, go = threading.Event(), threading.Event()

    def fingerprints(items: list[WriteItem], value: Callable[[WriteItem], Any]) -> dict[str, int]:
        values = [value(item) for item in items]
        reading.set()
        assert go.wait(WAIT_S)
        return {item.index.fqn: int(v[0]) for item, v in zip(items, values, strict=True)}

    state = _state()
    staged, items = _staged(state, compare_ranks=True)
    monkeypatch.setattr(module, "fingerprints", fingerprints)
    planning = threading.Thread(target=staged.plan, args=(0, ()))
    planning.start()
    assert reading.wait(WAIT_S)
    caller = _waiting(staged)
    assert _copies(staged, items, "abcd") == [0.0, 1.0, 2.0, 3.0]
    assert caller.is_alive()
    go.set()
    caller.join(WAIT_S)
    planning.join(WAIT_S)
    assert staged.cut_short is None


def test_the_memory_is_not_given_away_under_the_callers_hands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save that fails while its caller copies: the next save gets the memory after the piece."""
    copying, go, given = threading.Event(), threading.Event(), threading.Event()

    class Target:
        def copy_(self, _: torch.Tensor) -> None:
            copying.set()
            assert go.wait(WAIT_S)
            assert not given.is_set()

    def pieces(copy: object, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, Target]]:
        yield torch.zeros(1), Target()

    monkeypatch.setattr(module._StagingCopy, "pieces", pieces)
    staged, _ = _staged(_state())
    lease = staged._lease
    assert lease is not None
    release = lease._give_back

    def give(one: Lease) -> None:
        given.set()
        release(one)

    lease._give_back = give
    caller = _waiting(staged)
    assert copying.wait(WAIT_S)
    closing = threading.Thread(target=staged.close)
    closing.start()
    go.set()
    closing.join(WAIT_S)
    caller.join(WAIT_S)
    assert given.is_set()
    assert staged.complete  # as with every save that is over


@pytest.mark.parametrize("kind", [_LateStorage, _Streams, LocalStorage])
def test_saves_have_the_values_of_the_call(tmp_path: Path, kind: type[LocalStorage]) -> None:
    """Views, ties, transposed and empty tensors and objects, changed as soon as the call is back."""

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        large = torch.rand(300_000)
        state: dict[str, Any] = {f"t{n}": torch.rand(1000 * n + 1) for n in range(40)}
        state |= {
            "large": large,
            "tied": large,
            "view": large[70:90],
            "turned": torch.rand(300, 200).t(),
        }
        return state | {
            "empty": torch.empty(0, 3),
            "half": torch.rand(999).bfloat16(),
            "n": {"lr": seed},
        }

    for number in range(8):
        with background(kind(Uri.parse(tmp_path / f"run_{number}"))) as saves:
            state, want = build(number), build(number)
            pending = saves.save(state)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-7.0)
            uri = pending.result(WAIT_S).uri
        got = build(99)
        ckptfs.load(got, uri)
        tensors = [key for key, value in want.items() if isinstance(value, torch.Tensor)]
        assert [key for key in tensors if not torch.equal(got[key], want[key])] == []
        assert got["n"] == {"lr": number}


def test_what_the_writer_took_leaves_memory_to_touch_and_the_next_save_copies_at_once() -> None:
    """A thread touches what was not copied into, once the save is over."""
    buffers = HostBuffers(64 * MIB)
    staged, items = _staged(_state(), buffers)
    for item in items.values():
        staged.resolve(item).done()
    staged.wait()
    assert staged.size_bytes == 0
    staged.close()
    for thread in own_threads("ckptfs-reserve"):
        thread.join(WAIT_S)
    [slab] = buffers._idle
    assert slab.is_touched
    again, _ = _staged(_state(), buffers)
    assert again.complete is False
    assert again._late is None
    assert buffers.peak_bytes == buffers.held_bytes == slab.size_bytes


def test_memory_that_was_copied_into_is_touched() -> None:
    """It is not touched again, and the next save copies at once."""
    buffers = HostBuffers(64 * MIB)
    staged, _ = _staged(_state(), buffers)
    staged.wait()
    staged.close()
    [slab] = buffers._idle
    assert slab.is_touched
