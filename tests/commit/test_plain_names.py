"""Files with plain names on an object store are never changed after they were committed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import ckptfs
from ckptfs.testing.faults import Fault, Hold
from ckptfs.testing.memory_object_store import STORES, MemoryObjects


@pytest.fixture
def bucket() -> Iterator[tuple[str, MemoryObjects]]:
    """A run in a bucket of its own."""
    name = uuid4().hex
    yield f"objects+memory://{name}/run", STORES.bucket(name)
    STORES.drop(name)


def _write(run: str, content: str, held: Any = None, name: str = "hf") -> None:
    with ckptfs.checkpoint_dir(f"{run}/{name}", run=held) as path:
        Path(path, "model.safetensors").write_text(content)


def _shown(store: MemoryObjects) -> bytes:
    return store.objects["run/hf/model.safetensors"].data


def test_of_two_that_begin_at_once_one_never_writes(bucket: tuple[str, MemoryObjects]) -> None:
    """The second sees the first's record and gets CommitConflictError before its block begins."""
    run, store = bucket
    with ckptfs.checkpoint_dir(f"{run}/hf") as path:
        with pytest.raises(ckptfs.CommitConflictError, match="in progress"):
            _write(run, "second")
        Path(path, "model.safetensors").write_text("first")
    assert _shown(store) == b"first"
    with pytest.raises(ckptfs.CommitConflictError):
        _write(run, "third")
    assert _shown(store) == b"first"


def test_a_fenced_writer_that_wakes_changes_no_file(bucket: tuple[str, MemoryObjects]) -> None:
    """It gets FencedError, and the new owner's files are as they were committed."""
    run, store = bucket
    older = ckptfs.prepare_run(run)
    with (  # noqa: PT012 - the block is what wakes up late
        pytest.raises(ckptfs.FencedError),
        ckptfs.checkpoint_dir(f"{run}/hf", run=older) as path,
    ):
        Path(path, "model.safetensors").write_text("older")
        with ckptfs.prepare_run(run, takeover="force") as newer:
            _write(run, "newer", newer)
    assert _shown(store) == b"newer"
    older.release()


def test_a_writer_that_stalls_after_its_look_at_the_log_is_refused(
    bucket: tuple[str, MemoryObjects],
) -> None:
    """Held between its fold and its put, over a takeover and a commit: the put meets another etag."""
    run, store = bucket
    older = ckptfs.prepare_run(run)
    hold = Hold()
    told: list[BaseException] = []

    def write() -> None:
        try:
            _write(run, "older", older)
        except ckptfs.CkptfsError as error:
            told.append(error)

    store.plan.add(Fault("put", "run/hf/model.safetensors", 1, hold))
    thread = threading.Thread(target=write)
    thread.start()
    assert hold.reached.wait(120)
    with ckptfs.prepare_run(run, takeover="force") as newer:
        _write(run, "newer", newer)
    hold.release.set()
    thread.join(60)
    assert [type(error) for error in told] == [ckptfs.FencedError]
    assert _shown(store) == b"newer"
    older.release()


def test_what_a_dead_attempt_left_is_written_over(bucket: tuple[str, MemoryObjects]) -> None:
    """A plain file of an attempt that failed does not keep the name forever."""
    run, store = bucket
    store.put_behind("run/hf/model.safetensors", b"left behind")
    with pytest.raises(ZeroDivisionError), ckptfs.checkpoint_dir(f"{run}/hf"):
        raise ZeroDivisionError
    _write(run, "new")
    assert _shown(store) == b"new"


def test_a_record_that_a_dead_process_left_is_settled_by_a_claim(
    bucket: tuple[str, MemoryObjects],
) -> None:
    """Until then the name is refused, because dead and slow look the same; then it is free."""
    run, store = bucket
    _write(run, "other", name="hf_other")
    record = b'{"save_id": "20260101T000000-dead", "name": "hf", "base": [0, ""]}'
    store.put_behind("run/.ckptfs/attempts/20260101T000000-dead/attempt.json", record)
    with pytest.raises(ckptfs.CommitConflictError, match=r"prepare_run\(\)"):
        _write(run, "new")
    with ckptfs.prepare_run(run) as held:
        _write(run, "new", held)
    assert _shown(store) == b"new"
