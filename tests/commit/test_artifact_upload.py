"""checkpoint_dir on an object store: files go up several at a time, and all of them or none count."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptfs
from ckptfs.errors import AccessError, NotFoundError
from ckptfs.testing.faults import Fail, Fault, Hold, Plan
from ckptfs.testing.memory_object_store import STORES, MemoryObjects
from tests.measures import own_threads

MIB = 1 << 20


@pytest.fixture
def bucket() -> Iterator[tuple[str, MemoryObjects]]:
    """A run's URI in an object store of its own."""
    name = f"artifact-{uuid.uuid4().hex[:8]}"
    yield f"objects+memory://{name}/run", STORES.bucket(name)
    STORES.drop(name)


def write_files(path: str, sizes: dict[str, int]) -> None:
    """Files of these sizes, each of its own bytes."""
    for number, (name, size) in enumerate(sizes.items()):
        file = Path(path) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([number % 256]) * size)


def test_eight_small_files_go_up_at_once(bucket: tuple[str, MemoryObjects]) -> None:
    """The first and the eighth upload are under way together: none waits for another file."""
    uri, store = bucket
    first, eighth = Hold(), Hold()
    names = ("*/model/f0", "*/model/f7")
    store.plan = Plan([Fault("put", n, 1, h) for n, h in zip(names, (first, eighth), strict=True)])
    met: list[bool] = []

    def release() -> None:
        met.extend(held.reached.wait(120) for held in (first, eighth))
        for held in (first, eighth):
            held.release.set()

    watcher = threading.Thread(target=release)
    watcher.start()
    with ckptfs.checkpoint_dir(f"{uri}/model") as path:
        write_files(path, {f"f{n}": 1000 for n in range(12)})
    watcher.join()
    assert met == [True, True]
    [found] = ckptfs.list_checkpoints(uri)
    assert found.uri.name == "model"


def test_large_and_small_files_arrive_whole(bucket: tuple[str, MemoryObjects]) -> None:
    """Empty, small, one part, several parts: every byte under its plain name, sizes given up front."""
    uri, store = bucket
    sizes = {"empty": 0, "a/one": 1, "part": 16 * MIB, "parts": 40 * MIB + 3, "b/c/d": 70_000}
    with ckptfs.checkpoint_dir(f"{uri}/model") as path:
        write_files(path, sizes)
    for number, (name, size) in enumerate(sizes.items()):
        assert store.objects[f"run/model/{name}"].data == bytes([number]) * size, name


def test_one_file_that_fails_fails_all(bucket: tuple[str, MemoryObjects]) -> None:
    """A refused upload: its error, nothing committed, and no upload continues."""
    uri, store = bucket
    store.plan = Plan([Fault("put", "*/model/f103", 1, Fail(AccessError("refused")))])
    with (
        pytest.raises(ckptfs.CollectiveError, match="refused"),
        ckptfs.checkpoint_dir(f"{uri}/model") as path,
    ):
        write_files(path, {f"f{n}": 1000 for n in range(200)})
    assert not own_threads("ckptfs-upload")
    assert ckptfs.list_checkpoints(uri) == []
    with pytest.raises(NotFoundError):
        ckptfs.load({}, f"{uri}/model")
    # Eight at a time: those that ran when it failed, not all two hundred.
    assert len([k for k in store.requests("put") if "/model/f" in k.key]) < 60
