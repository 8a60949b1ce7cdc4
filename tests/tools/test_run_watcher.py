"""RunWatcher: what it asks for, what it takes for the death of an owner, and what it survives."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.commit.log.entries import (
    Abort,
    Delete,
    Entry,
    Fence,
    Generation,
    Release,
    Stamp,
    encode_entry,
)
from ckptfs.commit.paths import LEASE, log_key
from ckptfs.errors import TransientError
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.testing.memory_object_store import STORES, MemoryObjects
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.tools.runlog import EventKind, RunEvent, RunWatcher

ELSEWHERE = Fence(Generation(7, "n"), host="far", pid=3, node="another node", started="1")


def _save(run: Path | str, step: int) -> None:
    ckptfs.save({"w": torch.ones(2)}, f"{run}/step_{step}")


def _meanwhile(*happenings: Callable[[], object]) -> Callable[[float], bool]:
    """A rest during which the next of these happens; after the last the watcher is stopped."""
    left = iter(happenings)

    def rest(seconds: float) -> bool:
        assert 0 < seconds <= 2
        happening = next(left, None)
        if happening is not None:
            happening()
        return happening is None

    return rest


def _append(run: Path, body: Fence | Abort | Delete | Release) -> None:
    """One more entry, as somebody on another machine writes it."""
    log = run / ".ckptfs" / "log"
    number = len(list(log.iterdir()))
    entry = Entry(f"w{number}", body, Stamp("2026-01-01T00:00:00Z", "far", 3))
    (run / log_key(number)).write_bytes(encode_entry(entry))


def _told(events: list[RunEvent]) -> list[tuple[str, str | None]]:
    return [(event.event.value, event.name) for event in events]


def test_only_what_comes_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    """Read permission is enough; a run that is not there yet is waited for."""
    _save(tmp_path / "a", 1)
    storage = ReadOnlyStorage(open_storage(tmp_path / "a"))
    rest = _meanwhile(lambda: None, lambda: _save(tmp_path / "a", 2))
    with RunWatcher(tmp_path / "a", storage=storage, wait=rest) as watcher:
        assert _told(list(watcher)) == [("commit", "step_2")]
    assert storage.refused == 0
    rest = _meanwhile(lambda: None, lambda: _save(tmp_path / "b", 1))
    with RunWatcher(tmp_path / "b", wait=rest) as watcher:
        assert _told(list(watcher)) == [("commit", "step_1")]


def test_aborts_and_deletes_are_told_once_and_void_entries_never(tmp_path: Path) -> None:
    """A save that never got a seal is named by its own record, where that is still there."""
    run = tmp_path / "run"
    _save(run, 1)
    save_id = ckptfs.latest(run).save_id or ""  # type: ignore[union-attr]
    holder = ELSEWHERE.generation

    def entries() -> None:
        _append(run, ELSEWHERE)
        _append(run, Fence(Generation(6, "older")))
        _append(run, Abort(save_id, holder))  # after its seal
        _append(run, Abort("20260101T000000-0123456789ab", holder))
        _append(run, Delete(save_id, holder, "keep_latest=1"))
        _append(run, Delete(save_id, holder, "twice"))
        _append(run, Release(Generation(6, "older")))
        _append(run, Release(holder))

    with RunWatcher(run, wait=_meanwhile(entries)) as watcher:
        events = list(watcher)
    assert _told(events) == [
        ("fence", None),
        ("failure", None),
        ("delete", "step_1"),
        ("release", None),
    ]
    assert [event.number for event in events] == [1, 4, 5, 8]
    assert events[1].what == "aborted save 20260101T000000-0123456789ab"


def test_an_owner_elsewhere_is_dead_once_its_lease_stood_still(tmp_path: Path) -> None:
    """Twenty seconds by the watcher's own clock, reported once; one that moves again may die again."""
    run = tmp_path / "run"
    _save(run, 1)
    _append(run, ELSEWHERE)
    (run / LEASE).write_text("7 n 1\n")
    now = [0.0]

    def later(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    def alive() -> None:
        later(6.0)()
        (run / LEASE).write_text(f"7 n {now[0]}\n")

    still = [later(6.0)] * 3
    with RunWatcher(run, wait=_meanwhile(*still), clock=lambda: now[0]) as watcher:
        assert list(watcher) == []
    with RunWatcher(run, wait=_meanwhile(*still, alive, *still), clock=lambda: now[0]) as watcher:
        assert list(watcher) == []
    dead = [later(6.0)] * 6
    with RunWatcher(run, wait=_meanwhile(*dead, alive, *dead), clock=lambda: now[0]) as watcher:
        events = list(watcher)
    assert [(one.event, one.number) for one in events] == [(EventKind.FAILURE, None)] * 2
    assert events[0].what == "the owner died: host far pid 3 (generation 7)"
    rest = _meanwhile(*dead, lambda: _append(run, Release(ELSEWHERE.generation)))
    with RunWatcher(run, wait=rest, until_end=True, clock=lambda: now[0]) as watcher:
        assert [one.event for one in watcher] == [EventKind.FAILURE]


def test_a_log_without_exclusive_creates_is_watched(tmp_path: Path) -> None:
    """An entry that appears below one that was read is reported too."""
    run = tmp_path / "run"
    _save(run, 1)  # for the domain's id
    log = run / ".ckptfs" / "log"
    shutil.rmtree(log)
    log.mkdir()

    def entry(number: int, name: str, save_id: str) -> None:
        made = Entry(name, Abort(save_id, Generation(1, "x")), Stamp("2026-01-01T00:00:00Z"))
        (run / f"{log_key(number)}.{name}").write_bytes(encode_entry(made))

    entry(0, "a", "save_a")

    def two() -> None:
        entry(1, "c", "save_c")
        entry(2, "d", "save_d")

    rest = _meanwhile(two, lambda: entry(1, "b", "save_b"))
    with RunWatcher(run, wait=rest) as watcher:
        assert [one.save_id for one in watcher] == ["save_c", "save_d", "save_b"]


def test_a_run_that_was_removed_and_begun_anew_is_watched_anew(tmp_path: Path) -> None:
    """A watcher that remembers a place in a log that is gone would hang."""
    run = tmp_path / "run"
    for step in range(3):
        _save(run, step)

    def anew() -> None:
        shutil.rmtree(run)
        _save(run, 0)

    idle = [lambda: None] * 9
    with RunWatcher(run, wait=_meanwhile(anew, *idle)) as watcher:
        assert _told(list(watcher)) == [("commit", "step_0")]


def test_failures_of_the_storage_are_waited_out_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three entries the last one cannot be read at first: each is reported once."""
    run = tmp_path / "run"
    _save(run, 1)
    fault = Fault("read", "*/log/00000003", 1, Fail(TransientError("not now")))
    storage = FaultyStorage(open_storage(run), Plan([fault]))

    def three() -> None:
        for step in (2, 3, 4):
            _save(run, step)

    rest = _meanwhile(three, lambda: None)
    with RunWatcher(run, storage=storage, wait=rest) as watcher:
        assert _told(list(watcher)) == [("commit", f"step_{n}") for n in (2, 3, 4)]
    assert caplog.text.count("not now") == 1


@pytest.fixture
def bucket() -> Iterator[MemoryObjects]:
    """An object store that counts its requests."""
    yield STORES.bucket("watched")
    STORES.drop("watched")


def test_an_idle_poll_of_an_object_store_is_one_request(bucket: MemoryObjects) -> None:
    """And one more each eighth time, whatever is there."""
    uri = "objects+memory://watched/run"
    for step in range(4):
        _save(uri, step)
    asked: list[int] = []

    def rest(_: float) -> bool:
        asked.append(len(bucket.requests()))
        return len(asked) > 16

    with RunWatcher(uri, wait=rest) as watcher:
        assert list(watcher) == []
    assert asked[-1] - asked[0] == 16 + 2
    assert {one.op for one in bucket.requests()[-18:]} <= {"get", "head"}
