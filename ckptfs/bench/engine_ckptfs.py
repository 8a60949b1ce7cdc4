"""ckptfs itself: a committed, verified checkpoint in a run of its own."""

from __future__ import annotations

from typing import Any

import ckptfs
from ckptfs.bench.choosing import OBJECT_STORES
from ckptfs.bench.engines import Attempt, Cached, Driver, Setting, version_text
from ckptfs.bench.results import Engine
from ckptfs.bench.states import State

__all__ = ["Ckptfs"]


class Ckptfs(Driver):
    """``ckptfs.save`` and ``ckptfs.load``.

    Args:
        setting: What it works with.
        client: The library of an object store, by name; None: the default.

    Attributes:
        options: The storage_options.
    """

    def __init__(self, setting: Setting, client: str | None = None) -> None:
        super().__init__(setting)
        self._client = client
        self.options: dict[str, Any] = dict(self.home.asked.storage_options)
        if client is not None:
            self.options["client"] = client

    def about(self) -> Engine:
        stored = self.home.place.protocol in OBJECT_STORES
        library = self._library() if stored else None
        return Engine(
            f"ckptfs:{self._client}" if self._client else "ckptfs",
            version_text("ckptfs", *([library] if library else [])),
            "always: every object's answer, then the commit"
            if stored
            else "always: files and directories fsynced, then the commit",
            "every block's digest",
        )

    def save(self, state: State, at: Attempt) -> None:
        # A new run each time: its log, its domain and its probe are made anew, and in the time.
        ckptfs.save(state, at.checkpoint(), storage_options=self.options)

    def load(self, target: State, at: Attempt, cached: Cached) -> None:
        ckptfs.load(dict(target), at.checkpoint(), storage_options=self.options)

    def _library(self) -> str | None:
        path: str = getattr(self.home.storage, "data_path", "")  # "obstore, because ..."
        return (self._client or path.partition(",")[0]) if path else None
