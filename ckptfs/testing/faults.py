"""A storage that goes wrong on purpose, at an operation chosen from outside.

    FaultyStorage(inner, Plan([Fault("create", "*/log/*", 2, Kill(When.HALF))]))
    faults+file:///data/run      with CKPTFS_TEST_FAULT="kill-half:create:*/log/*:2"

Every storage operation is counted: those of ``Storage`` by their method's name, those of a writer
or reader as ``write``, ``close``, ``abort``, ``read_into``, ``close_read``, all under their key.

    ACTION:OP:KEY PATTERN:N[@RANK[.RESTART]]      several separated by ";"

    kill  kill-half  kill-after     SIGKILL to this process, before, half-way through or after it
    fail=NAME  fail-half=  fail-after=  raise: an errno (ENOSPC), a class of ckptfs.errors, or
                                    KeyboardInterrupt
    lose                            done, but AnswerLostError is raised
    lose-undone                     not done, AnswerLostError is raised
    lose-late=M                     AnswerLostError now, done just before the M-th operation after it
    hold=PATH                       PATH.reached is made, then it waits until PATH exists

OP and KEY PATTERN are shell patterns; N counts the operations that match both, from 1 (``kill:*:*:17``
is the 17th of all; ``*`` instead of N is every one). RANK and RESTART are torchrun's. ``write`` half-way
is half of its bytes; ``create`` and ``replace`` half-way leave half of a temporary file;
``remove_tree`` and ``remove_many`` half-way leave half of the names. CKPTFS_TEST_TRACE=PATH appends one line
"NUMBER OP KEY" per operation to PATH.RANK, which outlives a SIGKILL.

Only ``ckptfs.testing`` reads those variables. Production code never does.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ckptfs.errors import AnswerLostError, StorageError
from ckptfs.storage.base import (
    Capabilities,
    DataReader,
    DataWriter,
    Entry,
    Shape,
    Space,
    Stat,
    Storage,
    UnfinishedUpload,
)
from ckptfs.storage.io import Engine, ParallelWriter
from ckptfs.storage.os_errors import typed
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faulty_files import FaultyReader, FaultyWindows, FaultyWriter
from ckptfs.testing.plan import (
    Action,
    Fail,
    Fault,
    Hold,
    HoldFile,
    Kill,
    Lose,
    Operation,
    Plan,
    When,
    parse_faults,
)
from ckptfs.uri import Uri

__all__ = [
    "Action",
    "Fail",
    "Fault",
    "FaultyStorage",
    "Hold",
    "HoldFile",
    "Kill",
    "Lose",
    "Operation",
    "Plan",
    "When",
    "open_faulty",
    "parse_faults",
]

T = TypeVar("T")


def open_faulty(uri: Uri, storage_options: Mapping[str, Any]) -> FaultyStorage:
    """The registry's factory of ``faults+X``: X with the plan of the environment."""
    inner = open_storage(uri.with_protocol(uri.protocol.removeprefix("faults+")), storage_options)
    return FaultyStorage(inner, Plan.from_environment(), root=uri)


class FaultyStorage(Storage):
    """A storage with a plan of what goes wrong, at which operation.

    Args:
        inner: The real storage.
        plan: What goes wrong; its trace has every operation.
        root: The URI that it calls itself; None: that of ``inner``.

    Attributes:
        inner: The real storage.
        plan: What goes wrong, and the trace.
    """

    def __init__(self, inner: Storage, plan: Plan, *, root: Uri | None = None) -> None:
        self.inner = inner
        self.plan = plan
        self.root = root or inner.root

    @property
    def capabilities(self) -> Capabilities:
        """Those of inner; not counted."""
        return self.inner.capabilities

    def probe(self, key: str) -> Capabilities:
        """That of inner; not counted."""
        return self.inner.probe(key)

    def read(self, key: str) -> bytes:
        return self._do("read", key, lambda: self.inner.read(key))

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        return self._do("read", key, lambda: self.inner.read_small(key, limit_bytes))

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        self._do(
            "create",
            key,
            lambda: self.inner.create(key, data, staging=staging),
            lambda: self._half_file(staging, data, plain=True),
        )

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        self._do(
            "replace",
            key,
            lambda: self.inner.replace(key, data, if_match=if_match),
            lambda: self._half_file(key, data, plain=False),
        )

    def stat(self, key: str) -> Stat:
        return self._do("stat", key, lambda: self.inner.stat(key))

    def list(self, key: str) -> list[Entry]:
        return self._do("list", key, lambda: self.inner.list(key))

    def refusing_links(self, top: str) -> Storage:
        strict = copy.copy(self)
        strict.inner = self.inner.refusing_links(top)
        return strict

    def refuse_link(self, key: str) -> None:
        self._do("refuse_link", key, lambda: self.inner.refuse_link(key))

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        def opened() -> DataWriter:
            writer = self.inner.open_write(key, size_hint_bytes=size_hint_bytes)
            return FaultyWriter(self._do, key, writer)

        return self._do("open_write", key, opened)

    def files_at_once(self, key: str, size_bytes: int) -> int:
        """As the inner storage."""
        return self.inner.files_at_once(key, size_bytes)

    def open_parallel(
        self, key: str, *, size_bytes: int, engine: Engine | None = None
    ) -> ParallelWriter | None:
        """Counted as ``open_write``, whose place it takes; not where inner has none."""
        writer = self.inner.open_parallel(key, size_bytes=size_bytes, engine=engine)
        if writer is None:
            return None
        try:
            return self._do("open_write", key, lambda: FaultyWindows(self._do, key, writer))
        except BaseException:
            writer.abort()
            raise

    def open_kept(self, key: str, *, size_bytes: int) -> DataWriter:
        """Counted as ``open_write``."""

        def opened() -> DataWriter:
            return FaultyWriter(self._do, key, self.inner.open_kept(key, size_bytes=size_bytes))

        return self._do("open_write", key, opened)

    def open_read(self, key: str) -> DataReader:
        return self._do(
            "open_read", key, lambda: FaultyReader(self._do, key, self.inner.open_read(key))
        )

    def make_dir(self, key: str) -> None:
        parent = key.rpartition("/")[0]
        self._do(
            "make_dir",
            key,
            lambda: self.inner.make_dir(key),
            lambda: self.inner.make_dir(parent) if parent else None,
        )

    def rename(self, source: str, target: str) -> None:
        self._do("rename", source, lambda: self.inner.rename(source, target))

    def link(self, source: str, target: str) -> None:
        self._do("link", target, lambda: self.inner.link(source, target))

    def remove(self, key: str) -> None:
        self._do("remove", key, lambda: self.inner.remove(key))

    def remove_many(self, keys: Sequence[str]) -> None:
        self._do(
            "remove_many",
            keys[0] if keys else "",
            lambda: self.inner.remove_many(keys),
            lambda: self.inner.remove_many(keys[: (len(keys) + 1) // 2]),
        )

    def remove_dir(self, key: str) -> None:
        self._do("remove_dir", key, lambda: self.inner.remove_dir(key))

    def remove_tree(self, key: str) -> None:
        self._do(
            "remove_tree",
            key,
            lambda: self.inner.remove_tree(key),
            lambda: self._half_tree(key),
        )

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        return self._do("unfinished_uploads", "", self.inner.unfinished_uploads)

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        return self._do("sweep_uploads", "", lambda: self.inner.sweep_uploads(older_than_s, keys))

    def sync(self, key: str) -> None:
        self._do("sync", key, lambda: self.inner.sync(key))

    def refresh(self, key: str) -> None:
        self._do("refresh", key, lambda: self.inner.refresh(key))

    def touch(self, key: str) -> None:
        self._do("touch", key, lambda: self.inner.touch(key))

    def space(self) -> Space | None:
        return self._do("space", "", self.inner.space)

    def local_path(self, key: str) -> str | None:
        """That of inner; what is done there passes the plan by."""
        return self.inner.local_path(key)

    def close(self) -> None:
        self.inner.close()

    def _do(
        self, op: str, key: str, act: Callable[[], T], half: Callable[[], object] | None = None
    ) -> T:
        action = self.plan.begin(op, key)
        match action:
            case Kill(when) | Fail(_, when):
                if when is When.HALF and half is not None:
                    half()
                elif when is When.AFTER:
                    act()
                self._end(action, op, key)
            case Lose(done, later, after):
                if later:
                    self.plan.later(after, act)
                elif done:
                    act()
                raise AnswerLostError(f"{op}: the test lost the answer", uri=self.uri(key))
            case Hold(reached, release):
                reached.set()
                release.wait()
            case HoldFile(path):
                _hold(path)
            case None:
                pass
        return act()

    def _end(self, action: Kill | Fail, op: str, key: str) -> NoReturn:
        if isinstance(action, Kill):
            _die()
        error = action.error
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise typed(error, self.uri(key), op)
        raise error

    def _half_file(self, key: str, data: bytes, *, plain: bool) -> None:
        """What a crash in the middle of writing ``key`` leaves: half of a temporary file."""
        if self.inner.capabilities.shape is not Shape.FILESYSTEM:
            return
        half = data[: len(data) // 2]
        if plain:
            self.inner.replace(key, half)
            return
        path = self.inner.local_path(key)
        if path is not None:
            with open(f"{os.path.dirname(path)}/.partial-half", "wb") as file:
                file.write(half)

    def _half_tree(self, key: str) -> None:
        mounted = self.inner.capabilities.shape is Shape.FILESYSTEM
        if mounted and not self.inner.stat(key).is_dir:
            return  # of one file there is no half
        names = self.inner.list(key)
        for entry in names[: (len(names) + 1) // 2]:
            self.inner.remove_tree(f"{key}/{entry.name}")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a SIGKILL is not survived")


def _hold(path: str) -> None:
    with open(f"{path}.reached", "wb"):
        pass
    while not os.path.exists(path):
        time.sleep(0.005)
