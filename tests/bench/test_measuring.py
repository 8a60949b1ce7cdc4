"""What would make a measurement false or lost: each of it happens here."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch

from ckptfs.bench import engine_raw, measure, run
from ckptfs.bench.clock import Clock
from ckptfs.bench.engines import Attempt, Cached, Chosen, Setting, ready
from ckptfs.bench.measure import Looper, Wait, loop_round, open_looper
from ckptfs.bench.messages import Asked, LoopShape, TargetAsked, Told, WorkloadAsked
from ckptfs.bench.results import Sample
from ckptfs.bench.target import Home, resident_share
from ckptfs.bench.workloads import State, clear, make_blank, make_state
from ckptfs.errors import CkptfsError
from ckptfs.storage.registry import open_storage
from tests.bench.made import made_result
from tests.bench.test_engines import WORKLOAD, Solo, local_home, round_trip
from tests.lab.server import Server

TOLD = "https://user:hunter2@host/x?secret=SKLAB"


def test_all_that_a_client_needs_stands_in_the_query(radosgw: Server) -> None:
    """Endpoint and keys behind the "?": engines and loops of them write below the home."""
    options = radosgw.storage_options()
    flat = {name: str(options[name]) for name in ("key", "secret", "endpoint_url")}
    home = Home(TargetAsked(f"{radosgw.fresh()}?{urlencode(flat)}", "ckptfs-bench-t"))
    for name in ("ckptfs", "dcp", "torch.save"):
        round_trip(home, Chosen(name))
        home.clear("attempt")
    state = make_state(WORKLOAD)
    setting = Setting(home, Solo(), durable=True)
    for name in ("ckptfs", "dcp"):
        looper = open_looper(
            name, ready(Chosen(name), setting), Attempt(home, f"loop-{name}"), state
        )
        looper.save(state, 1)()
        looper.close()
        assert "step_1" in {entry.name for entry in home.storage.list(f"loop-{name}")}
    home.remove()
    home.storage.close()


class Died(BaseException):
    """As torch's CheckpointException: no Exception."""


class Breaking(Looper):
    """Its saves fail when they are waited for, with a secret in the message."""

    def __init__(self, *, breaks: bool) -> None:
        self.breaks = breaks

    def save(self, state: State, step: int) -> Wait:
        return self._wait

    def _wait(self) -> None:
        if self.breaks:
            raise Died(TOLD)


class Pair:
    """Two ranks that are threads."""

    size = 2
    met = threading.Barrier(2, timeout=120)
    values: dict[int, Any] = {}  # noqa: RUF012 - the two share it

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def barrier(self) -> None:
        """All are here."""
        self.met.wait()

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value."""
        self.values[self.rank] = value
        self.met.wait()
        found = [self.values[rank] for rank in range(2)]
        self.met.wait()
        return found


def test_a_save_that_fails_after_the_clock_is_the_same_error_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's save of a loop dies behind its last step: no rank continues alone, nothing is secret."""
    home = Home(TargetAsked(str(tmp_path), "ckptfs-bench-t"))
    monkeypatch.setattr(measure, "_train", lambda _: None)

    def one(rank: int) -> str:
        group: Any = Pair(rank)
        setting = Setting(home, group, durable=True)
        with pytest.raises(CkptfsError) as failed:
            loop_round(Clock(group), Breaking(breaks=rank == 1), {}, LoopShape(2, 1), setting)
        return str(failed.value)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(one, range(2)))
    assert told[0] == told[1]
    assert "Died" in told[0]
    assert "hunter2" not in told[0]
    assert "SKLAB" not in told[0]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory with files that cannot leave memory."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def test_what_stays_in_memory_is_no_cold_load(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filesystem that keeps its pages: such loads are left out, and a note says so."""
    (memory / "file").write_bytes(bytes(100_000))
    assert resident_share([memory / "file"]) == 1.0
    monkeypatch.setattr(measure, "has_cold", lambda _: True)
    told: list[Told] = []
    target = TargetAsked(str(memory), "ckptfs-bench-t")
    asked = Asked((target,), (WorkloadAsked("llm", params=20_000),), ("torch.save",), rounds=1)
    local_home(memory)
    measure.measure_ranks(asked, Solo(), told.append)
    assert {one.phase for one in told if isinstance(one, Sample)} == {"save", "load_warm"}
    assert len([one for one in told if isinstance(one, str) and "not cold" in one]) >= 1


@pytest.mark.parametrize("way", engine_raw._WARM_WAYS, ids=lambda way: way.__name__)
def test_each_way_of_the_warm_limit_fills_the_tensors(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is the fastest here, it moves all bytes to where they belong."""
    monkeypatch.setattr(engine_raw, "_WARM_WAYS", (way,))
    home = local_home(tmp_path)
    driver = ready(Chosen("raw"), Setting(home, Solo(), durable=False))
    target, at = make_blank(WORKLOAD), Attempt(home, "attempt")
    driver.save(make_state(WORKLOAD), at)
    (file,) = Path(at.path).iterdir()
    for _ in range(2):  # the round that chooses, and one that uses what was chosen
        clear(target)
        driver.load(target, at, Cached.WARM)
        loaded = [one.reshape(-1).view(torch.uint8).numpy().tobytes() for one in target.values()]
        assert b"".join(loaded) == file.read_bytes()


def test_a_limit_that_others_pass_is_called_none() -> None:
    """Only where it was passed."""
    result = made_result()
    assert list(run._beaten(result)) == []
    slow = [
        replace(one, wall_s=one.wall_s * 3)
        if one.engine == "raw" and one.phase == "load_warm" and one.workload == "llm"
        else one
        for one in result.samples
    ]
    told = list(run._beaten(made_result(samples=tuple(slow))))
    assert any("ckptfs took" in one for one in told)
    assert all("load, warm of llm" in one and "no limit there" in one for one in told)


def test_a_closed_terminal_ends_it_as_ctrl_c_does() -> None:
    """SIGHUP, but for programs that ignore it (nohup); afterwards all is as it was."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with run._terminable():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with run._terminable():
            assert signal.getsignal(signal.SIGHUP) is signal.default_int_handler
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_drawn_while_one_of_many_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun the process is the user's own: bars are off while it measures, and only then."""
    drawn: list[str | None] = []

    def look(*_: object) -> None:
        drawn.append(os.environ.get("CKPTFS_PROGRESS"))

    monkeypatch.delenv("CKPTFS_PROGRESS", raising=False)
    monkeypatch.setattr("ckptfs.bench.rank.joined_group", Solo)
    monkeypatch.setattr("ckptfs.bench.measure.measure_ranks", look)
    target = TargetAsked(str(tmp_path), "ckptfs-bench-t")
    asked = Asked((target,), (WorkloadAsked("llm", params=20_000),))
    run._as_one_of_many(asked, lambda _: None, None)
    assert drawn == ["0"]
    assert "CKPTFS_PROGRESS" not in os.environ


def test_a_filesystem_that_counts_nothing_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ramfs says zero blocks of zero: how much fits is not known."""
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, *[0] * 7, 255)))
    Home(TargetAsked(str(tmp_path), "ckptfs-bench-t")).check_space(1 << 40)
    storage = open_storage(str(tmp_path))
    assert storage.space() is None
    storage.close()
