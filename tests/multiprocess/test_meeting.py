"""How the ranks of a control meet: stale keys, every kind of store, deaths in the middle of it.

Ranks are threads of this process over a real store; where one dies they are processes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ckptfs.control.control import Control
from tests.multiprocess.harness import Rank, launch
from tests.multiprocess.store_keys import keys_of, until, until_key


def total(values: list[int]) -> int:
    """Of all ranks' numbers."""
    return sum(values)


def _open(store: Any, rank: int, size: int, timeout_s: float) -> Control:
    from dataclasses import replace

    from ckptfs.control.tcpstore_control import StoreControl
    from ckptfs.control.world import World

    return StoreControl(replace(World.solo(), rank=rank, size=size), store, timeout_s=timeout_s)


def _store() -> Any:
    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


class _Keeps:
    """A store that never deletes: what a run that was killed at any moment may leave behind."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clone(self) -> _Keeps:
        return _Keeps(self._inner.clone())

    def delete_key(self, _key: str) -> bool:
        return True


def _meet(store: Any, ranks: list[int], size: int, timeout_s: float) -> dict[int, object]:
    """Open a control on these ranks at once; what each got: the sum, or who was silent."""
    from ckptfs.errors import DeadlineError

    ends: dict[int, object] = {}

    def body(rank: int) -> None:
        try:
            with _open(store, rank, size, timeout_s) as control:
                ends[rank] = control.step("sum", lambda: rank, total)
        except DeadlineError as error:
            ends[rank] = error.silent

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def test_row23_leftovers_of_an_older_run_let_nobody_pass_alone() -> None:
    """Every key of a whole earlier run is still there; with one rank missing no rank passes, and
    with all of them all do.
    """
    store = _store()
    assert _meet(_Keeps(store), [0, 1, 2], 3, timeout_s=120.0) == {0: 3, 1: 3, 2: 3}
    assert any("/hello/" in key for key in keys_of(store))
    assert _meet(store, [0, 1], 3, timeout_s=4.0) == {0: (2,), 1: (2,)}
    assert _meet(store, [1, 2], 3, timeout_s=4.0) == {1: (0,), 2: (0,)}
    assert _meet(store, [0, 1, 2], 3, timeout_s=120.0) == {0: 3, 1: 3, 2: 3}


def test_a_hello_that_an_earlier_try_withdrew_is_said_again() -> None:
    """A try that gave up compares its hello with its own, and deletes the next one's: both meet all the same."""
    store = _store()
    ends: dict[int, object] = {}

    def body(rank: int) -> None:
        with _open(store, rank, 2, timeout_s=120.0) as control:
            ends[rank] = control.step("sum", lambda: rank, total)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in (1, 0)]
    threads[0].start()
    until_key(store, "/hello/1")
    (hello,) = [key for key in keys_of(store) if key.endswith("/hello/1")]
    store.delete_key(hello)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert ends == {0: 1, 1: 1}


@pytest.mark.parametrize("kind", ["hash", "file", "prefix"])
def test_every_kind_of_store_carries_a_control(kind: str, tmp_path: Path) -> None:
    """What init_process_group may have made: HashStore, FileStore, a PrefixStore over TCP."""
    from torch.distributed import FileStore, HashStore, PrefixStore

    makers: dict[str, Callable[[], Any]] = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), -1),
        "prefix": lambda: PrefixStore("group/", _store()),
    }
    store = makers[kind]()
    assert _meet(store, [0, 1, 2], 3, timeout_s=120.0) == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("kind", ["tcp", "hash", "file", "prefix"])
def test_stores_are_reopened_where_torch_has_no_clone(kind: str, tmp_path: Path) -> None:
    """torch 2.6 and 2.7: another client of the same store, prefixes dropped."""
    from torch.distributed import FileStore, HashStore, PrefixStore

    from ckptfs import _torch

    makers: dict[str, Callable[[], Any]] = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), -1),
    }
    base = makers.get(kind, _store)()
    again = _torch.reconnect_store(PrefixStore("x/", base) if kind == "prefix" else base)
    base.set("key", "value")
    assert again.get("key") == b"value"
    assert kind == "hash" or again is not base


def take_part_as(rank: Rank) -> list[int]:
    """Be the rank that the test says, when it says so."""
    who = rank.args["ranks"][rank.number]
    rank.hold("open")
    control = _open(rank.store(), who, 3, timeout_s=120.0)
    numbers: list[int] = control.step("who", lambda: rank.number)
    control.close()
    return numbers


def test_hello_of_a_dead_process_is_replaced_by_the_living_one() -> None:
    """Rank 1 dies after its hello: rank 0 offers, is not answered, and waits for the successor."""
    with launch(take_part_as, 4, args={"ranks": [0, 2, 1, 1]}) as ranks:
        ranks.release("open", rank=2)  # the first rank 1
        until_key(ranks.store, "/hello/1")
        ranks.kill(2)
        for number in (0, 1):
            ranks.release("open", rank=number)
        until_key(ranks.store, "/welcome/")  # the offer to the dead
        ranks.release("open", rank=3)  # the second rank 1
        results = ranks.results(ranks=[0, 1, 3])
    assert [r.value for r in results] == [[0, 3, 1]] * 3, results[0].log


class _HoldsAt:
    """The store of a rank that stops right after, or right before, it sets a key of the handshake."""

    def __init__(self, inner: Any, part: str, *, before: Callable[[], None] | None = None) -> None:
        self._inner, self._part, self._before = inner, part, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clone(self) -> _HoldsAt:
        return _HoldsAt(self._inner.clone(), self._part, before=self._before)

    def set(self, key: str, value: Any) -> None:
        if self._part in key and self._before is not None:
            self._before()
        self._inner.set(key, value)
        if self._part in key and self._before is None:
            os.kill(os.getpid(), signal.SIGKILL)


def acknowledge_and_die(rank: Rank) -> object:
    """Rank 1 is this process first, which dies once it has answered rank 0's offer, and then another;
    rank 2 answers when the second one has said hello.
    """
    who, store = rank.args["ranks"][rank.number], rank.store()
    if rank.number == rank.args["dies"]:
        store = _HoldsAt(store, "/ack/")
    if who == 2:
        held: list[object] = []

        def until_said() -> None:
            if not held:
                rank.tell("offered")
                held.append(rank.hold("answer"))

        store = _HoldsAt(store, "/ack/", before=until_said)
    rank.hold("open")
    try:
        control = _open(store, who, 3, timeout_s=120.0)
        numbers: list[int] = control.step("who", lambda: rank.number)
        control.close()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return numbers


def test_a_process_that_dies_after_its_answer_is_replaced_by_the_living_one() -> None:
    """Rank 1 answers the offer and dies, its successor says hello before rank 2 has answered: rank 0
    looks at every hello again before it says "go", and repeats the offer to the successor.
    """
    with launch(acknowledge_and_die, 4, args={"ranks": [0, 2, 1, 1], "dies": 2}) as ranks:
        for number in (0, 1, 2):
            ranks.release("open", rank=number)
        until_key(ranks.store, "/ack/")  # the first rank 1 has answered
        (hello,) = [key for key in keys_of(ranks.store) if key.endswith("/hello/1")]
        first = ranks.store.get(hello)
        ranks.wait("offered", rank=1)
        ranks.release("open", rank=3)  # the second rank 1
        until(lambda: ranks.store.get(hello) != first, "a new hello of rank 1")
        ranks.release("answer", rank=1)
        results = ranks.results(ranks=[0, 1, 3])
    assert [r.value for r in results] == [[0, 3, 1]] * 3, results[0].log


class _DiesBetween:
    """The store of a rank 0 that is killed between its first and its second operation of a kind."""

    def __init__(self, inner: Any, operation: str, part: str, done: list[str]) -> None:
        self._inner, self._done = inner, done
        self._operation, self._part = operation, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clone(self) -> _DiesBetween:
        return _DiesBetween(self._inner.clone(), self._operation, self._part, self._done)

    def set(self, key: str, value: Any) -> None:
        self._meet("set", key)
        self._inner.set(key, value)

    def delete_key(self, key: str) -> Any:
        self._meet("delete_key", key)
        return self._inner.delete_key(key)

    def _meet(self, operation: str, key: str) -> None:
        if operation == self._operation and self._part in key:
            if self._done:
                os.kill(os.getpid(), signal.SIGKILL)
            self._done.append(key)


def lose_rank_0_between(rank: Rank) -> tuple[int, ...]:
    """Who was silent; none, where this rank met the others."""
    from ckptfs.errors import DeadlineError

    store = rank.store()
    if rank.number == 0:
        store = _DiesBetween(store, rank.args["operation"], rank.args["part"], [])
    try:
        _open(store, rank.number, rank.size, timeout_s=8.0).close()
    except DeadlineError as error:
        return error.silent
    return ()


@pytest.mark.parametrize(
    ("operation", "part", "blamed"),
    [
        pytest.param("set", "/welcome/", [0], id="welcomes"),
        pytest.param("delete_key", "/hello/", [0], id="tidying"),
        pytest.param("delete_key", "/ack/", [], id="after-go"),
    ],
)
def test_rank_0_that_dies_in_the_handshake_is_the_one_that_is_blamed(
    operation: str, part: str, blamed: list[int]
) -> None:
    """By all, and not those that have given it their answer, or who wait for their own welcome."""
    args = {"operation": operation, "part": part}
    with launch(lose_rank_0_between, 4, args=args) as ranks:
        first, *others = ranks.results()
    assert first.died
    assert [other.value for other in others] == [blamed] * 3, others[0].log


class _Overhears:
    """A store that keeps every value that was written into it."""

    def __init__(self, inner: Any, heard: list[bytes]) -> None:
        self._inner = inner
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clone(self) -> _Overhears:
        return _Overhears(self._inner.clone(), self._heard)

    def set(self, key: str, value: str | bytes) -> None:
        self._heard.append(value.encode() if isinstance(value, str) else value)
        self._inner.set(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._heard.append(desired.encode() if isinstance(desired, str) else desired)
        return bytes(self._inner.compare_set(key, expected, desired))


def test_ranks_agree_on_a_uri_and_keep_their_credentials() -> None:
    """Each opens with its own; a rank that reaches the store hears of none."""
    from ckptfs.commit.session import agree_uri

    heard: list[bytes] = []
    store = _Overhears(_store(), heard)
    ends: dict[int, str] = {}

    def body(rank: int) -> None:
        with _open(store, rank, 2, timeout_s=120.0) as control:
            ends[rank] = agree_uri(control, f"s3://key:secret{rank}@bucket/run?token=secret").full

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == {r: f"s3://key:secret{r}@bucket/run?token=secret" for r in range(2)}
    assert any(b"bucket/run" in value for value in heard)
    assert not any(b"secret" in value for value in heard)
