"""The requests of a small save on an object store, and how many of them wait for another, are those of the page.

A request that began after another one ended comes after it: the longest chain of these is what a slow network
multiplies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.replication.copier import copy_to
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from ckptfs.testing.memory_object_store import STORES, MemoryObjectClient

PAGE = Path(__file__).parents[2] / "docs/scale.md"
DELAY_S = 0.02
TRIES = 3  # on a machine that does not run a thread for so long, two requests at once may look like a chain


@dataclass(frozen=True, slots=True)
class Request:
    """One request, on the clock of this process."""

    key: str
    began_s: float
    ended_s: float


@dataclass
class Wire:
    """Every request takes a while, as over a network, and is written down."""

    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def slow(self, method: Any) -> Any:
        """The method of a client, behind this wire."""

        def call(client: Any, key: Any, *given: Any, **named: Any) -> Any:
            began_s = time.monotonic()
            time.sleep(DELAY_S)  # the way to a server and back
            try:
                return method(client, key, *given, **named)
            finally:
                with self.lock:
                    self.requests.append(Request(str(key), began_s, time.monotonic()))

        return call

    def taken(self) -> list[Request]:
        """Everything since the last call of this, but for the lease, which is the clock's."""
        with self.lock:
            found, self.requests[:] = [*self.requests], []
        return [request for request in found if not request.key.endswith("/lease")]


def longest_chain(requests: list[Request]) -> int:
    """So many requests waited for each other at least."""
    ordered = sorted(requests, key=lambda request: request.began_s)
    lengths: list[int] = []
    for request in ordered:
        before = zip(ordered, lengths, strict=False)
        ended = [length for one, length in before if one.ended_s <= request.began_s]
        lengths.append(1 + max(ended, default=0))
    return max(lengths, default=0)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """A bucket behind a wire; ``URI`` leads there."""
    wire = Wire()
    for name in ("get", "get_range", "put", "head", "list_keys", "delete"):
        monkeypatch.setattr(MemoryObjectClient, name, wire.slow(getattr(MemoryObjectClient, name)))
    for bucket in BUCKETS:
        STORES.drop(bucket)
    yield wire
    for bucket in BUCKETS:
        STORES.drop(bucket)


BUCKETS = ("wired", "other")
URI, OTHER = (f"objects+memory://{bucket}/run" for bucket in BUCKETS)
STATE = {"w": torch.zeros(8)}


def _listed(begin: str, cells: int = 2) -> list[int]:
    """Requests and those in sequence, as the page has them in the row that begins so; and what follows."""
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {begin} |"))
    return [int(cell) for cell in row.strip("| ").split("|")[1 : 1 + cells]]


def _save(run: Any, wire: Wire, name: str, if_exists: Any = "error") -> list[int]:
    """Requests of one save, with what runs behind it, and how many of those before it returned waited."""
    assert run.session.background.drain(60)
    wire.taken()
    ckptfs.save(STATE, f"{URI}/{name}", run=run, if_exists=if_exists)
    waited_for = wire.taken()
    assert run.session.background.drain(60)
    return [len(waited_for) + len(wire.taken()), longest_chain(waited_for)]


def test_a_held_save_asks_as_often_as_the_page_says(wire: Wire) -> None:
    """What no call waits for runs behind, and what does not depend on each other is asked at once."""
    with ckptfs.prepare_run(URI) as run:
        _save(run, wire, "step_0")  # the first one of a process probes the store
        found = [_save(run, wire, f"step_{n}") for n in range(1, 1 + TRIES)]
    assert [requests for requests, _ in found] == [_listed("a small save")[0]] * TRIES
    assert min(chain for _, chain in found) == _listed("a small save")[1]


def test_a_name_that_is_taken_costs_what_the_page_says(wire: Wire) -> None:
    """The projection looks at both names at once, and folds once."""
    with ckptfs.prepare_run(URI) as run:
        _save(run, wire, "step_1")
        found = [_save(run, wire, "step_1", "replace")]
    assert found[0][0] == _listed("a small save over an existing name")[0]
    assert found[0][1] >= _listed("a small save over an existing name")[1]


def test_reading_asks_as_often_as_the_page_says(wire: Wire) -> None:
    """What was saved last, what else is there, and whether the log is whole are asked at once."""
    with ckptfs.prepare_run(URI) as run:
        _save(run, wire, "step_1")
    latest, load = [], []
    for _ in range(TRIES):
        wire.taken()
        newest = ckptfs.latest(URI)
        assert newest is not None
        latest.append(wire.taken())
        ckptfs.load(STATE, newest.uri)
        load.append(wire.taken())
    for row, tries in (("`latest` of a short log", latest), ("a small load, of a short log", load)):
        assert [len(asked) for asked in tries] == [_listed(row)[0]] * TRIES
        assert min(map(longest_chain, tries)) == _listed(row)[1]


def test_an_older_save_goes_as_the_page_says(wire: Wire) -> None:
    """Its entry is tried before the log is read, and what is under its names is read with the fence."""
    found = []
    with ckptfs.prepare_run(URI) as run:
        retirer = Retirer(run, Keep(latest=1), lambda _: True)
        _save(run, wire, "step_0")
        for n in range(1, 1 + TRIES):
            _save(run, wire, f"step_{n}")
            wire.taken()
            retirer.after_commit(run.session)
            assert retirer.make_room()
            found.append(wire.taken())
        retirer.close()
    row = _listed("let an older save go, bytes and all")
    assert [len(asked) for asked in found] == [row[0]] * TRIES
    assert min(map(longest_chain, found)) == row[1]


def _copy(wire: Wire, source: object, target: object) -> list[Request]:
    wire.taken()
    copy_to(source, target)
    return wire.taken()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_asks_as_often_as_the_page_says(wire: Wire, tmp_path: Path, threads: int) -> None:
    """To a store, from it, from one to another, and where the checkpoint is there already."""
    names = [f"step_{n}" for n in range(1 + TRIES)]
    disk = tmp_path / "run"
    for name in names:
        ckptfs.save({"a": torch.zeros(8), "b": torch.ones(8)}, disk / name, threads=threads)
    more = threads - 1
    places = {
        "to an object store": (disk, URI),
        "from an object store": (URI, tmp_path / "back"),
        "from one object store to another": (URI, OTHER),
        "to an object store that has it": (disk, URI),
    }
    for row, (source, target) in places.items():
        # The first copy of a process into a store probes it.
        found = [_copy(wire, f"{source}/{name}", f"{target}/{name}") for name in names][1:]
        requests, in_sequence, for_each_file = _listed(row, 3)
        assert [len(asked) for asked in found] == [requests + more * for_each_file] * TRIES, row
        if not more:
            assert min(map(longest_chain, found)) == in_sequence, row
