"""Hooks, fixtures and helpers of the conformance suite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptfs.errors import (
    UnsupportedError,
)
from ckptfs.storage.base import Shape, Storage

__all__ = ["BAD_KEYS", "SIZES", "Conformance", "pattern", "together", "write_and_raise"]

# Sizes around those at which implementations change their behaviour: nothing, one byte, a buffered
# write, a whole buffer and one byte more, several buffers.
SIZES = (0, 1, 4095, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 7)
BAD_KEYS = ("../x", "/x", "a/../../x", "a//b", "./a", "a/", "a\0b")


def together(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Run all calls at the same time, each in a thread.

    Args:
        calls: Functions without arguments.

    Returns:
        What each call raised, in the order of the calls; None for one that raised nothing.
    """
    outcomes: list[BaseException | None] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def run(index: int, call: Callable[[], object]) -> None:
        gate.wait()
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the outcome is what the test looks at
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def pattern(size_bytes: int) -> bytes:
    """Return bytes in a pattern that shows shifted or repeated blocks; at least ``size_bytes``."""
    return bytes((i * 31 + (i >> 8) * 17) & 0xFF for i in range(min(size_bytes, 65536))) * (
        size_bytes // 65536 + 1
    )


def write_and_raise(store: Storage, key: str, data: bytes, error: type[BaseException]) -> None:
    with store.open_write(key) as writer:
        writer.write(data)
        raise error


class Conformance:
    """The hooks that a backend fills in, and the fixtures that the tests share."""

    def make_storage(self, place: Path) -> Storage:
        """Return a storage with a root that does not exist, in the empty directory ``place``."""
        raise NotImplementedError

    def raw_write(self, key: str, data: bytes) -> None:
        """Write ``data`` under ``key`` of the storage that was made last; make missing parents."""
        raise NotImplementedError

    def raw_read(self, key: str) -> bytes:
        """Return the bytes that the medium has under ``key``, without using the storage."""
        raise NotImplementedError

    def raw_exists(self, key: str) -> bool:
        """Whether the medium has a file, an object or a directory under ``key``."""
        raise NotImplementedError

    def raw_list(self) -> list[str]:
        """Return the keys of all files or objects below the root, temporary ones included."""
        raise NotImplementedError

    @pytest.fixture
    def fresh(self, tmp_path: Path) -> Iterator[Storage]:
        """A storage in ``tmp_path`` with a root that does not exist yet."""
        storage = self.make_storage(tmp_path)
        yield storage
        storage.close()

    @pytest.fixture
    def store(self, fresh: Storage) -> Storage:
        """The storage ``fresh`` with a root and the directories ``d`` and ``tmp``."""
        fresh.make_dir("d")
        fresh.make_dir("tmp")
        return fresh

    @pytest.fixture
    def tree(self, store: Storage) -> Storage:
        """Return ``store`` if it has real directories, else skip."""
        if store.capabilities.shape is not Shape.FILESYSTEM:
            pytest.skip("an object store has no directories")
        return store

    @pytest.fixture
    def exclusive(self, store: Storage) -> Storage:
        """Return ``store`` if create is exclusive, else skip; another test checks the refusal."""
        try:
            store.create("d/probe", b"", staging="tmp/probe")
        except UnsupportedError:
            pytest.skip("no exclusive create here")
        store.remove("d/probe")
        return store
