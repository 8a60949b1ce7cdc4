"""Storages for topology tests: counted, cached like an NFS client, losing answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ckptfs.control.control import Control
from ckptfs.errors import AnswerLostError, NotFoundError
from ckptfs.storage.base import Stat
from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri

T = TypeVar("T")

RUN = Uri.parse("file:///run")  # what every rank is given, wherever its node keeps it


@dataclass
class Calls:
    """Which rank did what, in order."""

    seen: list[tuple[int, str, str]] = field(default_factory=list)

    def count(self, op: str, *, rank: int | None = None, key: str | None = None) -> int:
        """How many calls match."""
        return sum(o == op and rank in (None, r) and key in (None, k) for r, o, k in self.seen)

    def of(self, rank: int) -> int:
        """How many calls a rank made at all."""
        return sum(r == rank for r, _, _ in self.seen)


class Place(LocalStorage):
    """A directory that says which rank asked for what."""

    def __init__(self, directory: Path, rank: int = 0, calls: Calls | None = None) -> None:
        super().__init__(RUN, directory=str(directory))
        self.rank = rank
        self.calls = calls or Calls()

    def _note(self, op: str, key: str) -> None:
        self.calls.seen.append((self.rank, op, key))

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        """Counted."""
        self._note("read", key)
        return super().read_small(key, limit_bytes)

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """Counted."""
        self._note("create", key)
        super().create(key, data, staging=staging)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        """Counted."""
        self._note("replace", key)
        super().replace(key, data, if_match=if_match)

    def make_dir(self, key: str) -> None:
        """Counted."""
        self._note("make_dir", key)
        super().make_dir(key)

    def remove(self, key: str) -> None:
        """Counted."""
        self._note("remove", key)
        super().remove(key)

    def refresh(self, key: str) -> None:
        """Counted."""
        self._note("refresh", key)
        super().refresh(key)

    def stat(self, key: str) -> Stat:
        """Counted."""
        self._note("stat", key)
        return super().stat(key)


class NfsPlace(Place):
    """A directory behind a client that remembers what was missing, as NFS clients do for 30 s.

    An operation on the name itself, or opening its parent, makes it look again.
    """

    def __init__(self, directory: Path, missing: set[str], rank: int = 0) -> None:
        super().__init__(directory, rank)
        self.missing = missing  # one client's cache serves all ranks of its node

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        """Stale where the absence is cached."""
        return self._cached(key, lambda: super(NfsPlace, self).read_small(key, limit_bytes))

    def stat(self, key: str) -> Stat:
        """Stale where the absence is cached."""
        return self._cached(key, lambda: super(NfsPlace, self).stat(key))

    def make_dir(self, key: str) -> None:
        """An operation on the name: fresh."""
        super().make_dir(key)
        parts = key.split("/")
        self.missing -= {"/".join(parts[:n]) for n in range(1, len(parts) + 1)}

    def refresh(self, key: str) -> None:
        """Open the directory: what was missing in it is asked for again, unless it is missing."""
        if key not in self.missing:
            self.missing -= {k for k in set(self.missing) if os.path.dirname(k) == key}

    def _cached(self, key: str, look: Callable[[], T]) -> T:
        parts = key.split("/")
        if self.missing & {"/".join(parts[:n]) for n in range(1, len(parts) + 1)}:
            raise NotFoundError("cached absence", uri=self.uri(key))
        try:
            return look()
        except NotFoundError:
            self.missing.add(key)
            raise


class Flickers(Place):
    """From its second look on, a node's domain id is not there for so many looks."""

    def __init__(self, directory: Path, rank: int, hidden: int) -> None:
        super().__init__(directory, rank)
        self._looks = 0
        self._hidden = hidden

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        """There, gone, and there again."""
        if key == ".ckptfs/domain":
            self._looks += 1
            if 1 < self._looks <= 1 + self._hidden:
                raise NotFoundError("not there for now", uri=self.uri(key))
        return super().read_small(key, limit_bytes)


class LosesAnswers(Place):
    """Every first create of a key happens and its answer is lost."""

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """Do it, and say that the outcome is unknown."""
        super().create(key, data, staging=staging)
        raise AnswerLostError("no answer", uri=self.uri(key))


def on_disks(disks: dict[str, Path], calls: Calls | None = None) -> Callable[[Control], Place]:
    """A storage per rank: its node's directory."""
    return lambda control: Place(disks[control.world.node], control.rank, calls)
