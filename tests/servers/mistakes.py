"""Mistakes made on purpose, so that the judge of the deaths is known to see them.

make("projects before it commits")     patches this process; its forks make the mistake too
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ckptfs.commit.ownership.recovery as recovery_module
import ckptfs.commit.save.attempt as attempt_module
from ckptfs.commit.catalog.catalog import read_view
from ckptfs.commit.operations import drive
from ckptfs.storage.base import DataWriter
from ckptfs.storage.object_store import ObjectStorage

__all__ = ["MISTAKES", "make"]


def _before_the_seal(wrong: Callable[[Any, Any], None]) -> None:
    right = vars(attempt_module)["seal_everywhere"]

    def seal_everywhere(session: Any, keys: Any, *rest: Any, **more: Any) -> Any:
        wrong(session, keys)
        return right(session, keys, *rest, **more)

    vars(attempt_module)["seal_everywhere"] = seal_everywhere


def _projects_first() -> None:
    def wrong(session: Any, keys: Any) -> None:
        data = session.storage.read(f"{keys.projected_data}/.metadata")
        session.storage.replace(f"{keys.name}/.metadata", data)

    _before_the_seal(wrong)


def _deletes_first() -> None:
    def wrong(session: Any, keys: Any) -> None:
        view = drive(read_view(), session.storage)
        for save in view[1].saves.values() if view else ():
            if save.seal is not None and save.seal.name == keys.name:
                session.storage.remove_tree(f"{keys.name}/{save.save_id}")

    _before_the_seal(wrong)


def _writes_in_place() -> None:
    right = ObjectStorage.open_write

    def open_write(
        self: ObjectStorage, key: str, *, size_hint_bytes: int | None = None
    ) -> DataWriter:
        if key.endswith(".distcp"):
            self.replace(key, b"the first half")
        return right(self, key, size_hint_bytes=size_hint_bytes)

    ObjectStorage.open_write = open_write  # type: ignore[method-assign]


def _leaves_attempts() -> None:
    def discard_attempt(*_: Any, **__: Any) -> Iterator[Any]:
        yield from ()

    vars(recovery_module)["discard_attempt"] = discard_attempt


def _leaves_uploads() -> None:
    ObjectStorage.sweep_uploads = lambda self, older_than_s, keys=None: 0  # type: ignore[method-assign]


MISTAKES: dict[str, Callable[[], None]] = {
    "projects before it commits": _projects_first,
    "deletes before it commits": _deletes_first,
    "writes in place": _writes_in_place,
    "leaves attempts": _leaves_attempts,
    "leaves uploads": _leaves_uploads,
}


def make(name: str) -> None:
    """Make one of them from now on."""
    MISTAKES[name]()
