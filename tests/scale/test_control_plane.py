"""What one step asks of the store that real ranks talk through: a formula in their number.

Ranks are threads here, each with clients of its own of one real TCPStore; the code is the real one.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckptfs.control.handshake import decode_table, encode_table
from ckptfs.control.messages import apart
from ckptfs.control.tcpstore_control import StoreControl
from ckptfs.control.world import World
from ckptfs.testing.world import worlds_of
from tests.scale.formulas import STEP_OPERATIONS, STEP_PIECES

STEPS = 5


class CountedStore:
    """A c10d store that counts its requests by the step that they are for. Clones count together."""

    def __init__(self, store: Any, counts: Counter[tuple[str, str]], lock: threading.Lock) -> None:
        self._store, self._counts, self._lock = store, counts, lock

    def clone(self) -> CountedStore:
        return CountedStore(self._store.clone(), self._counts, self._lock)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            key = args[0][0] if args and isinstance(args[0], list) else str(args[0]) if args else ""
            with self._lock:
                self._counts[_step_of(key), name] += 1
            return call(*args)

        return counted


def _step_of(key: str) -> str:
    """The number of the step that a key belongs to, "" for the keys of handshake and heartbeat."""
    parts = key.split("/")
    return parts[3] if len(parts) > 4 and parts[3].isdigit() else ""


@contextmanager
def _controls(ranks: int) -> Iterator[tuple[list[StoreControl], Counter[tuple[str, str]]]]:
    counts: Counter[tuple[str, str]] = Counter()
    wait = timedelta(seconds=60)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
    store = CountedStore(host, counts, threading.Lock())
    here = World.solo()
    worlds = [replace(here, rank=rank, size=ranks) for rank in range(ranks)]
    opened = _on_all(ranks, lambda rank: StoreControl(worlds[rank], store, timeout_s=60.0))
    try:
        yield opened, counts
    finally:
        _on_all(ranks, lambda rank: opened[rank].close())


def _on_all(ranks: int, fn: Callable[[int], Any]) -> list[Any]:
    values: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        values[rank] = fn(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return values


def _of_step(counts: Counter[tuple[str, str]], number: int) -> dict[str, int]:
    return {op: n for (step, op), n in sorted(counts.items()) if step == str(number)}


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_step_asks_the_store_as_often_as_the_formula_says(ranks: int) -> None:
    """Requests of one step, its keys deleted again, equal the formula at every size."""
    with _controls(ranks) as (controls, counts):
        _on_all(ranks, lambda r: [controls[r].step("s", lambda: r, len) for _ in range(STEPS)])
    # The last one is deleted by the rank that leaves last, by other means.
    for number in range(STEPS - 1):
        assert _of_step(counts, number) == {op: f(ranks) for op, f in STEP_OPERATIONS.items()}


def test_pieces_cost_each_rank_three_requests_more() -> None:
    """A piece of one's own is written once, read once, and deleted by its reader."""
    ranks = 6
    with _controls(ranks) as (controls, counts):
        told = _on_all(
            ranks,
            lambda r: [
                controls[r].step(
                    "s", lambda: r, lambda said: apart(sum(said), [s * s for s in said])
                )
                for _ in range(2)
            ],
        )
    assert [t[0] for t in told] == [(15, rank * rank) for rank in range(ranks)]
    plain = {op: f(ranks) for op, f in STEP_OPERATIONS.items()}
    with_pieces = {op: plain.get(op, 0) + f(ranks) for op, f in STEP_PIECES.items()}
    assert _of_step(counts, 0) == plain | with_pieces


def test_a_piece_larger_than_a_message_arrives_whole() -> None:
    """Pieces travel in chunks, as values do."""
    big = b"x" * (3 << 20)
    with _controls(2) as (controls, _):
        told = _on_all(
            2, lambda r: controls[r].step("s", lambda: r, lambda _: apart(1, [b"", big]))
        )
    assert told == [(1, b""), (1, big)]


def test_the_table_that_every_rank_reads_is_small() -> None:
    """Of 4096 ranks on 512 nodes it has less than 40 bytes for each, and loses nothing."""
    nodes = [f"{uuid.uuid4()}/mnt:[4026531841]" for _ in range(512)]
    worlds = worlds_of(4096, [nodes[rank // 8] for rank in range(4096)])
    hellos = [
        {
            "nonce": uuid.uuid4().hex,
            "version": "1",
            "world": asdict(replace(world, pid=uuid.uuid4().int % 400_000)),
            "life": {"pid": world.rank, "start_ticks": uuid.uuid4().int % 10**8},
        }
        for world in worlds
    ]
    table = encode_table(hellos)
    assert len(table) < 40 * 4096
    assert decode_table(table, 4096) == [{"world": h["world"], "life": h["life"]} for h in hellos]
