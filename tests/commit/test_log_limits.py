"""How much of a log a reader takes: so many entries, so many bytes of each kind, then a typed error."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from ckptfs.commit.log import append as log
from ckptfs.commit.log.append import append, catch_up
from ckptfs.commit.log.entries import Body, Pin, Snapshot, decode_entry
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import LOG, PLAIN_ENTRY_BYTES, log_key
from ckptfs.errors import ManifestError, StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.tools.runlog import Condition, lines_of
from ckptfs.uri import Uri
from tests.commit.logs import memory, write

PINS: list[Body] = [Pin(f"p{n}") for n in range(40)]
SNAPSHOTS: list[Body] = [Snapshot({"saves": []}) for _ in range(40)]


def _sizes(storage: Storage, count: int) -> int:
    return sum(storage.stat(log_key(n)).size_bytes for n in range(count))


@pytest.mark.parametrize(
    ("limit", "bodies"),
    [("LOG_ENTRIES", PINS), ("LOG_BYTES", PINS), ("LOG_SNAPSHOT_BYTES", SNAPSHOTS)],
)
def test_a_log_that_is_too_long_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, limit: str, bodies: list[Body]
) -> None:
    """By its count and by the bytes of each kind: what is just within is read, and one more is not. The fold and
    ``ckptfs log`` have the same limits.
    """
    storage = memory()
    write(storage, bodies)
    most = len(bodies) if limit == "LOG_ENTRIES" else _sizes(storage, len(bodies))
    monkeypatch.setattr(log, limit, most)
    assert drive(catch_up(), storage).next == len(bodies)
    assert len(lines_of(storage)) == len(bodies)
    monkeypatch.setattr(log, limit, most - 1)
    for read in (lambda: drive(catch_up(), storage), lambda: lines_of(storage)):
        with pytest.raises(ManifestError, match=f"it has more than {most - 1} ") as caught:
            read()
        assert caught.value.hint


def test_snapshots_do_not_count_as_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are passed over are not kept: a long run that lost its hint is read."""
    storage = memory()
    write(storage, SNAPSHOTS)
    monkeypatch.setattr(log, "LOG_BYTES", 100)
    assert drive(catch_up(), storage).next == len(SNAPSHOTS)


def test_a_large_entry_of_another_kind_is_refused_before_it_is_parsed() -> None:
    """JSON takes up to 20 times its length in memory: such an entry is refused for its kind alone, wherever in it
    that is.
    """
    filling = ",".join(["[]"] * (PLAIN_ENTRY_BYTES // 3))
    for text in (f'{{"kind": "pin", "x": [{filling}]}}', f'{{"x": [{filling}], "kind": "pin"}}'):
        data = text.encode()
        tracemalloc.start()
        try:
            with pytest.raises(ManifestError, match="only a snapshot"):
                decode_entry(data, "log/1")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < PLAIN_ENTRY_BYTES


@pytest.mark.parametrize("says", ['"kind": 1', '"kind": "pin", "kind": "dream"', '"x": ' + "[" * 9])
def test_what_says_no_kind_is_no_large_entry(says: str) -> None:
    """Neither a wrong type nor broken JSON gets past the look at the kind."""
    with pytest.raises(ManifestError):
        decode_entry(f"{{{says}, {' ' * PLAIN_ENTRY_BYTES}}}".encode(), "log/1")


def test_a_large_entry_is_not_written_either() -> None:
    """What no reader would read ends no run: the append is an error and takes no number."""
    storage = memory()
    write(storage, [])
    with pytest.raises(StorageError, match="is not appended"):
        drive(append(lambda _: Pin("x" * PLAIN_ENTRY_BYTES), write_id="w"), storage)
    assert not storage.list(LOG)


def test_a_large_snapshot_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of very many saves has one."""
    monkeypatch.setattr("ckptfs.commit.log.entries.PLAIN_ENTRY_BYTES", 1000)
    storage = memory()
    write(storage, [Snapshot({"saves": [{"save_id": f"{n:020}"} for n in range(100)]}), Pin("p")])
    assert drive(catch_up(), storage).next == 2
    assert [line.condition for line in lines_of(storage)] == [Condition.VALID] * 2


def test_the_log_of_large_entries_is_shown_one_by_one(tmp_path: Path) -> None:
    """Entries are decoded as they are read, so that one of them is in memory at a time and not all of their bytes."""
    storage = LocalStorage(Uri.parse(tmp_path / "run"))
    write(storage, [Pin("p")] * 8)
    junk = json.dumps({"kind": "x" * (4 << 20)}).encode()
    for n in range(8, 24):
        (tmp_path / "run" / log_key(n)).write_bytes(junk)
    tracemalloc.start()
    try:
        lines = lines_of(storage)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(lines) == 24
    assert peak < 4 * len(junk)
