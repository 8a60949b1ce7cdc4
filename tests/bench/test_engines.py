"""Each engine brings back what it saved, bit by bit, on a directory and on S3."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptfs.bench import measure
from ckptfs.bench.clock import Clock
from ckptfs.bench.engines import (
    ENGINES,
    Attempt,
    Cached,
    Chosen,
    Driver,
    Kind,
    Setting,
    choose,
    ready,
)
from ckptfs.bench.engines_checkpoint import TorchSave
from ckptfs.bench.messages import Asked, Progress, TargetAsked, Told, WorkloadAsked
from ckptfs.bench.rank import TorchGroup
from ckptfs.bench.results import Sample
from ckptfs.bench.target import Home, has_cold
from ckptfs.bench.workloads import State, clear, differences, make_blank, make_state, make_workload
from ckptfs.errors import IntegrityError, MissingDriverError, StateError
from ckptfs.uri import Uri
from tests.lab.server import Server

WORKLOAD = make_workload("llm", params=20_000)


class Solo(TorchGroup):
    """One rank that needs no process group."""

    def __init__(self) -> None:
        self.rank, self.size, self._group = 0, 1, None


def local_home(tmp_path: Path) -> Home:
    """A home on a directory."""
    home = Home(TargetAsked(str(tmp_path), "ckptfs-bench-t"))
    home.make()
    return home


@pytest.fixture
def s3_home(radosgw: Server) -> Iterator[Home]:
    """A home in a bucket; nothing may be left of it."""
    home = Home(TargetAsked(radosgw.fresh(), "ckptfs-bench-t", radosgw.storage_options()))
    yield home
    home.remove()
    assert home.storage.list("") == []
    home.storage.close()


def round_trip(home: Home, engine: Chosen, *, durable: bool = True) -> Driver:
    """Saves and loads twice, as from a cold and a warm cache; what is loaded is what was saved."""
    driver = ready(engine, Setting(home, Solo(), durable))
    state, target = make_state(WORKLOAD), make_blank(WORKLOAD)
    at = Attempt(home, "attempt")
    driver.save(state, at)
    for cached in Cached:
        clear(target)
        driver.load(target, at, cached)
        assert driver.about().is_limit or differences(state, target) == []
    return driver


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("name", ["ckptfs", "dcp", "torch.save", "safetensors", "raw"])
def test_an_engine_brings_back_what_it_saved_on_a_directory(
    name: str, durable: bool, tmp_path: Path
) -> None:
    """Bit-exact, fsynced or not; what it promises is said, and differs where it has the choice."""
    found = round_trip(local_home(tmp_path), Chosen(name), durable=durable).about()
    assert found.name == name
    assert ("no fsync" in found.durable) is (not durable and name != "ckptfs")


@pytest.mark.parametrize(
    "engine",
    [
        Chosen("ckptfs"),
        Chosen("ckptfs", "s3fs"),
        Chosen("dcp"),
        Chosen("torch.save"),
        Chosen("safetensors"),
        Chosen("raw"),
    ],
    ids=lambda engine: engine.label,
)
def test_an_engine_brings_back_what_it_saved_on_s3(engine: Chosen, s3_home: Home) -> None:
    """Bit-exact; the library that carried it is next to its name, and nothing stays behind."""
    found = round_trip(s3_home, engine).about()
    assert found.name == engine.label
    libraries = {"ckptfs": "obstore", "ckptfs:s3fs": "s3fs", "dcp": "s3fs", "raw": "obstore"}
    assert libraries.get(engine.label, "") in found.version


def test_the_limit_without_obstore_moves_every_byte(radosgw: Server) -> None:
    """Where only fsspec's library is there, or wanted: it reads whole objects, and says who did."""
    options = radosgw.storage_options(client="s3fs")
    home = Home(TargetAsked(radosgw.fresh(), "ckptfs-bench-t", options))
    try:
        assert "s3fs" in round_trip(home, Chosen("raw")).about().version
    finally:
        home.remove()
        home.storage.close()


def test_the_limit_moves_as_many_bytes_as_the_state_has(tmp_path: Path) -> None:
    """One file of that size, also where it is no multiple of a disk's block; warm, into the tensors."""
    home = local_home(tmp_path)
    driver = ready(Chosen("raw"), Setting(home, Solo(), durable=True))
    state, target = make_state(WORKLOAD), make_blank(WORKLOAD)
    at = Attempt(home, "attempt")
    driver.save(state, at)
    (file,) = Path(at.path).iterdir()
    assert file.stat().st_size == WORKLOAD.size_bytes
    driver.load(target, at, Cached.WARM)
    loaded = b"".join(t.reshape(-1).view(dtype=_bytes()).numpy().tobytes() for t in target.values())
    assert loaded == file.read_bytes()


def _bytes() -> Any:
    import torch

    return torch.uint8


def test_a_cold_load_finds_nothing_in_the_page_cache(tmp_path: Path) -> None:
    """What was just written is evicted; filled, it is there again."""
    home = local_home(tmp_path)
    if not has_cold(home):
        pytest.skip(f"{home.kind} is memory")
    file = tmp_path / home.asked.home / "attempt" / "data"
    file.parent.mkdir()
    file.write_bytes(os.urandom(1 << 20))
    assert is_cached(file)
    home.evict("attempt")
    assert not is_cached(file)
    home.fill("attempt")
    assert is_cached(file)


def is_cached(file: Path) -> bool:
    """Whether all of it can be read without waiting for the disk."""
    fd = os.open(file, os.O_RDONLY)
    try:
        buffer = bytearray(file.stat().st_size)
        return os.preadv(fd, [buffer], 0, os.RWF_NOWAIT) == len(buffer)
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this filesystem cannot tell: {error}")
    finally:
        os.close(fd)


def test_who_takes_part_and_why_others_do_not() -> None:
    """All that fit, by default; what was asked for by name and cannot be had is an error."""
    everyone, notes = choose((), Uri.parse("/data"))
    assert [one.name for one in everyone] == [n for n in ENGINES if n != "s3torchconnector"]
    assert any("s3torchconnector" in note for note in notes)
    named, _ = choose(("raw", "ckptfs:s3fs"), Uri.parse("s3://bucket/x"))
    assert [one.label for one in named] == ["raw", "ckptfs:s3fs"]
    with pytest.raises(StateError, match="no engine"):
        choose(("tar",), Uri.parse("/data"))


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note among all; an error that says what to install where it was asked for."""
    missing = Kind("nowhere:Nothing", ("no_such_module",))
    monkeypatch.setitem(ENGINES, "raw", missing)
    chosen, notes = choose((), Uri.parse("/data"))
    assert "raw" not in [one.name for one in chosen]
    assert any("no_such_module" in note for note in notes)
    with pytest.raises(MissingDriverError) as caught:
        choose(("raw",), Uri.parse("/data"))
    assert "no_such_module" in str(caught.value.hint)


# -- the rounds ----------------------------------------------------------------------------------


def in_clock() -> bool:
    """Whether this was called, however deep, from the measured part of ``Clock.time``."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Clock.time.__code__:
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True)
class Seen:
    """What was done, and whether the clock was running."""

    what: str
    timed: bool


class Watched(TorchSave):
    """torch.save that says when it is called; ``broken`` loads one wrong byte."""

    seen: list[Seen]
    broken = False

    def save(self, state: State, at: Attempt) -> None:
        self.seen.append(Seen("save", in_clock()))
        super().save(state, at)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        self.seen.append(Seen(f"load {cached.value}", in_clock()))
        super().load(target, at, cached)
        if self.broken:
            next(iter(target.values())).view(-1)[0] = 7.0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Everything that a round does, in order, with ``torch.save`` as the engine."""
    found: list[Seen] = []
    for name in ("make_state", "make_blank", "clear", "differences"):
        real = getattr(measure, name)

        def spied(*args: Any, _name: str = name, _real: Any = real) -> Any:
            found.append(Seen(_name, in_clock()))
            return _real(*args)

        monkeypatch.setattr(measure, name, spied)
    for name in ("evict", "fill", "clear"):
        method = getattr(Home, name)

        def watched(home: Home, at: str, _name: str = name, _method: Any = method) -> Any:
            found.append(Seen(f"files {_name}", in_clock()))
            return _method(home, at)

        monkeypatch.setattr(Home, name, watched)
    kind = Kind(f"{__name__}:Watched")
    monkeypatch.setitem(ENGINES, "torch.save", kind)
    monkeypatch.setattr(Watched, "seen", found, raising=False)
    monkeypatch.setattr("ckptfs.bench.engines.import_module", lambda _: _this_module())
    return found


def _this_module() -> Any:
    import sys

    return sys.modules[__name__]


def measured(
    tmp_path: Path,
    *,
    engines: tuple[str, ...] = ("torch.save",),
    kinds: tuple[str, ...] = ("llm",),
    within_s: float | None = None,
) -> list[Told]:
    """Two rounds of a small state on a directory, in this process."""
    told: list[Told] = []
    asked = Asked(
        (TargetAsked(str(tmp_path), "ckptfs-bench-t"),),
        tuple(WorkloadAsked(kind, params=20_000) for kind in kinds),
        engines,
        rounds=2,
        within_s=within_s,
    )
    local_home(tmp_path)
    measure.measure_ranks(asked, Solo(), told.append)
    return told


def test_nothing_but_the_call_is_in_the_measured_time(tmp_path: Path, seen: list[Seen]) -> None:
    """Making data, emptying tensors and caches, comparing and deleting: all outside of the clock."""
    told = measured(tmp_path)
    assert {one.what for one in seen if one.timed} == {"save", "load warm", "load cold"}
    untimed = [one.what for one in seen if not one.timed]
    assert set(untimed) == {
        *("make_state", "make_blank", "clear", "differences"),
        *("files evict", "files fill", "files clear"),
    }
    assert untimed.count("make_state") == 1
    order = [one.what for one in seen]
    assert max(order.index("make_state"), order.index("make_blank")) < order.index("save")
    samples = [one for one in told if isinstance(one, Sample)]
    # Of three rounds the first is the warm-up.
    assert sorted((one.round, one.phase) for one in samples) == [
        (number, phase) for number in (1, 2) for phase in ("load_cold", "load_warm", "save")
    ]
    assert all(one.wall_s > 0 and one.size_bytes > 200_000 for one in samples)
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.parametrize(("within_s", "rounds"), [(0.0, 1), (1e9, 2), (None, 2)])
def test_a_short_run_ends_after_the_rounds_that_there_is_time_for(
    tmp_path: Path, within_s: float | None, rounds: int
) -> None:
    """One round counts however slow it is, of each workload; what was left out is a note."""
    told = measured(tmp_path, kinds=("llm", "moe"), within_s=within_s)
    found = {(one.workload, one.round) for one in told if isinstance(one, Sample)}
    assert found == {(name, n + 1) for name in ("llm", "moe") for n in range(rounds)}
    notes = [one for one in told if isinstance(one, str) and "1 of 2 rounds fit into 0 s" in one]
    assert len(notes) == (2 if rounds == 1 else 0)


def test_every_workload_gets_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took longer than its share leaves less to the others; the last one has what is left."""
    now_s = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    targets = tuple(TargetAsked(f"/t{n}", "ckptfs-bench-t") for n in range(2))
    ends = measure._Ends(Asked(targets, (WorkloadAsked("llm"),) * 2, within_s=40.0))
    assert ends.next_s() == 110.0
    now_s[0] = 110.0
    assert ends.next_s() == 120.0
    now_s[0] = 130.0
    assert ends.next_s() == 135.0
    now_s[0] = 150.0
    assert ends.next_s() == 150.0


class OfTwo(Solo):
    """A rank that hears of rank 0 what this call gives."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self._first = first

    def gather(self, value: Any) -> list[Any]:
        """Rank 0's value, then that of this one."""
        return [self._first, value]


@pytest.mark.parametrize("late", [False, True])
def test_all_ranks_end_after_the_same_round(tmp_path: Path, late: bool) -> None:
    """Their clocks differ, so rank 0's decides: else one would wait for a round that no other rank begins."""
    asked = Asked((TargetAsked(str(tmp_path), "x"),), (WorkloadAsked("llm", params=20_000),))
    moved = measure._made(asked.workloads[0], Solo())
    at = measure._AtTarget(asked, OfTwo(late), lambda _: None, Home(asked.targets[0]), moved)
    at.ends_s = -1e9 if not late else 1e12
    assert at._is_late() is late


def test_a_person_is_told_what_is_under_way(tmp_path: Path, seen: list[Seen]) -> None:
    """Each engine's turn, before it, and how long the rest takes at most as soon as a round was timed."""
    told = [one.text for one in measured(tmp_path) if isinstance(one, Progress)]
    assert "200 kB were made" in told[0]
    rounds = [text.partition(": ")[2] for text in told[1:]]
    assert rounds[0] == "warm-up, torch.save"
    assert [text.partition(";")[0] for text in rounds[1:]] == [
        f"round {number} of 2, torch.save" for number in (1, 2)
    ]
    assert all(re.search(r"; less than \d+ s left here$", text) for text in rounds[1:])


def test_an_engine_that_loads_something_else_is_no_result(
    tmp_path: Path, seen: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong number: an error where it was asked for, else a note instead of its samples."""
    monkeypatch.setattr(Watched, "broken", True)
    with pytest.raises(IntegrityError, match="did not load"):
        measured(tmp_path)
    assert list(tmp_path.glob("*/*")) == []
    for name in set(ENGINES) - {"torch.save"}:
        monkeypatch.delitem(ENGINES, name)
    told = measured(tmp_path, engines=())
    assert [one for one in told if isinstance(one, Sample)] == []
    assert any("torch.save failed" in one for one in told if isinstance(one, str))


def test_each_round_begins_with_another_engine() -> None:
    """So that no engine always comes after the same one."""
    turn = measure._turn
    assert [turn(["a", "b", "c"], n) for n in range(4)] == [
        ["a", "b", "c"],
        ["b", "a", "c"],
        ["c", "a", "b"],
        ["a", "c", "b"],
    ]
    assert turn([], 1) == []
