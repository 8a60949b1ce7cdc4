"""Every backend of ours does what every backend must do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import fsspec
import pytest

from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.memory import STORES, MemoryStorage, MemoryTree
from ckptfs.storage.registry import open_storage
from ckptfs.testing.conformance import StorageConformance
from ckptfs.testing.faults import FaultyStorage, Plan
from ckptfs.testing.memory_object_store import STORES as BUCKETS
from ckptfs.testing.memory_object_store import Manner, Manners
from ckptfs.uri import Uri


class OnDisk(StorageConformance):
    """The raw hooks of whatever ends in a directory."""

    root: Path

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def raw_exists(self, key: str) -> bool:
        return (self.root / key).exists()

    def raw_list(self) -> list[str]:
        return sorted(
            str(Path(folder, name).relative_to(self.root))
            for folder, _, names in os.walk(self.root)
            for name in names
        )


class TestLocal(OnDisk):
    """A directory."""

    def make_storage(self, place: Path) -> Storage:
        self.root = place / "some" / "run"
        return LocalStorage(Uri.parse(str(self.root)))


class TestLocalWithoutLinks(OnDisk):
    """A mount that knows no hard links: no exclusive create, everything else."""

    def make_storage(self, place: Path) -> Storage:
        class NoLinks(Posix):
            def link(self, source: str, target: str) -> None:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        self.root = place / "run"
        return _Local(self.root, NoLinks())


class TestLocalWithoutDirectoryRename(OnDisk):
    """A FUSE mount of an object store: no rename of directories, no fsync of them."""

    def make_storage(self, place: Path) -> Storage:
        class LikeABucket(Posix):
            def rename(self, source: str, target: str) -> None:
                if os.path.isdir(source):
                    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
                super().rename(source, target)

        self.root = place / "run"
        storage = _Local(self.root, LikeABucket())
        storage.make_dir("probe")
        os.rmdir(self.root / "probe")
        return storage


class _Local(LocalStorage):
    """A local storage with system calls that do not travel: pickling gives the usual ones."""

    def __init__(self, root: Path, posix: Posix) -> None:
        super().__init__(Uri.parse(str(root)), posix=posix)

    def __reduce__(self) -> tuple[object, ...]:
        return (LocalStorage, (self.root,))


class TestNodes(OnDisk):
    """A node-local disk of a simulated node."""

    @pytest.fixture(autouse=True)
    def _node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPTFS_NODE", "b")

    def make_storage(self, place: Path) -> Storage:
        self.root = place / "b" / "run"
        return open_storage(f"nodes+file://{place}/@node/run")


class TestFaultyWithoutFaults(OnDisk):
    """The fault wrapper with an empty plan adds and takes nothing."""

    def make_storage(self, place: Path) -> Storage:
        self.root = place / "run"
        return FaultyStorage(LocalStorage(Uri.parse(str(self.root))), Plan())


class TestFsspecLocal(OnDisk):
    """fsspec's local filesystem: a real directory through the code that object stores take."""

    def make_storage(self, place: Path) -> Storage:
        self.root = place / "run"
        return open_storage(f"fsspec+file://{self.root}")


class TestFsspecMemory(StorageConformance):
    """fsspec's memory filesystem."""

    def make_storage(self, place: Path) -> Storage:
        self.fs = fsspec.filesystem("memory")
        self.base = f"/{place.name}/run"
        if self.fs.exists(self.base):
            self.fs.rm(self.base, recursive=True)
        return FsspecStorage(Uri.parse(f"fsspec+memory://{self.base}"))

    def raw_write(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.base}/{key}", data)

    def raw_read(self, key: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.base}/{key}"))

    def raw_exists(self, key: str) -> bool:
        return bool(self.fs.exists(f"{self.base}/{key}".rstrip("/")))

    def raw_list(self) -> list[str]:
        return sorted(name.removeprefix(f"{self.base}/") for name in self.fs.find(self.base))


class InMemory(StorageConformance):
    """The raw hooks of the model."""

    shape: Shape
    held: MemoryTree

    def make_storage(self, place: Path) -> Storage:
        STORES.drop(place.name)
        storage = MemoryStorage(Uri.parse(f"memory://{place.name}/run"), shape=self.shape)
        self.held = storage.tree
        return storage

    def raw_write(self, key: str, data: bytes) -> None:
        parts = f"run/{key}".split("/")
        if self.shape is Shape.FILESYSTEM:
            self.held.dirs.update("/".join(parts[:n]) for n in range(1, len(parts)))
        self.held.put(f"run/{key}", data)

    def raw_read(self, key: str) -> bytes:
        return self.held.files[f"run/{key}"][0]

    def raw_exists(self, key: str) -> bool:
        path = f"run/{key}".rstrip("/")
        return path in self.held.files or path in self.held.dirs

    def raw_list(self) -> list[str]:
        return sorted(name.removeprefix("run/") for name in self.held.files)


class TestMemoryFilesystem(InMemory):
    """The model with directories."""

    shape = Shape.FILESYSTEM


class TestMemoryObject(InMemory):
    """The model with keys only."""

    shape = Shape.OBJECT


class TestObjectStore(StorageConformance):
    """The object store code over a bucket in memory; parts of 64 KiB, so that most files have some."""

    def make_storage(self, place: Path) -> Storage:
        BUCKETS.drop(place.name)
        self.bucket = BUCKETS.bucket(place.name)
        options = {"part_size_bytes": 64 << 10}
        return open_storage(f"objects+memory://{place.name}/some/run", options)

    def raw_write(self, key: str, data: bytes) -> None:
        self.bucket.put_behind(f"some/run/{key}", data)

    def raw_read(self, key: str) -> bytes:
        return self.bucket.objects[f"some/run/{key}"].data

    def raw_exists(self, key: str) -> bool:
        return f"some/run/{key}" in self.bucket.objects

    def raw_list(self) -> list[str]:
        assert not self.bucket.uploads  # nothing is left behind on the server
        return sorted(name.removeprefix("some/run/") for name in self.bucket.objects)


class TestObjectStoreWithoutConditions(TestObjectStore):
    """The same where the server ignores every condition."""

    def make_storage(self, place: Path) -> Storage:
        storage = super().make_storage(place)
        self.bucket.manners = Manners(Manner.IGNORES, Manner.IGNORES)
        storage.probe("d")
        assert not storage.capabilities.exclusive_create
        return storage
