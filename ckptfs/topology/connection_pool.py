"""The connections of this process to a store, kept for all its clients as long as it has that store.

    pool = pool_of(source)                None: it is no store of connections, or cannot be kept track of
    store = pool.shared(source)           for operations that never wait; all threads use this one
    store = pool.own(source)              for one that may wait for a key, the caller's alone; then
    pool.give(store)                      keep it; or, where something broke, pool.drop(store)

A store's server has one thread. It looks up the name of every peer that connects before it serves anybody
else, and where an answer of the name server is lost that takes 5 s. So the first call of a process makes
the connections that all later ones use: the shared one, and one for each of a few threads that wait at
the same time. What is kept goes with the store that it was cloned from. The child of a fork keeps nothing
of its parent's: two processes would talk over one connection.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from ckptfs import _torch

__all__ = ["WAITING", "ConnectionPool", "pool_of"]

# How many threads of a process wait for other ranks at the same time: a call, a save in the background,
# a manager's copies and its word on when to save. Another one makes a connection more, kept too.
WAITING = 4


class ConnectionPool:
    """The connections to one store. Any thread may call it; the store is handed in, never kept alive.

    idle_s: a connection that nobody used for so long may have been cut, by a firewall say.
    """

    def __init__(self, idle_s: float = 10.0) -> None:
        self.idle_s = idle_s
        self._lock = threading.Lock()
        self._connecting = threading.Lock()  # or two threads would each make all of them
        self._is_filled = False
        self._shared: Any = None
        self._shared_used = 0.0
        self._idle: list[tuple[Any, float]] = []  # and since when

    def own(self, source: Any) -> Any:
        """A connection that is the caller's alone until it gives it back."""
        store = self._take()
        if store is None:
            with self._connecting:
                self._fill(source)
                store = self._take()
                if store is None:
                    store = _torch.clone_store(source)
        return store

    def give(self, store: Any) -> None:
        """Keep a connection that no thread uses any more."""
        with self._lock:
            self._idle.append((store, time.monotonic()))

    def shared(self, source: Any) -> Any:
        """The connection that all threads share, until one of them says that it is broken."""
        store = self._common()
        if store is None:
            with self._connecting:
                self._fill(source)
                store = self._common()
                if store is None:
                    store = self._shared = _torch.clone_store(source)
        self._shared_used = time.monotonic()
        return store

    def drop(self, store: Any) -> None:
        """Hand a broken one out no more."""
        with self._lock:
            if self._shared is store:
                self._shared = None

    def _fill(self, source: Any) -> None:
        """The first operation of the process makes all of them: no later call connects again."""
        if not self._is_filled:
            shared = _torch.clone_store(source)
            own = [_torch.clone_store(source) for _ in range(WAITING)]
            self._shared, self._shared_used, self._is_filled = shared, time.monotonic(), True
            for store in own:
                self.give(store)

    def _take(self) -> Any:
        """An idle connection that answers; None: there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                store, since = self._idle.pop()
            if self._answers(store, since):
                return store

    def _common(self) -> Any:
        """The shared connection if it answers; None: there is none."""
        store = self._shared
        if store is not None and not self._answers(store, self._shared_used):
            self.drop(store)
            return None
        return store

    def _answers(self, store: Any, since: float) -> bool:
        """Whether a connection that was idle, perhaps for hours, was not cut in between."""
        if time.monotonic() - since < self.idle_s:
            return True
        try:
            store.check(["ckptfs/idle"])
        except (RuntimeError, OSError):
            return False
        return True


class _Kept:
    """What this process keeps, by store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_store: weakref.WeakKeyDictionary[Any, ConnectionPool] = weakref.WeakKeyDictionary()


_kept = _Kept()
_parents: list[_Kept] = []  # not closed in the child: the parent still uses them


def _forget() -> None:
    global _kept  # noqa: PLW0603 - the child of a fork begins with nothing
    _parents.append(_kept)
    _kept = _Kept()


os.register_at_fork(after_in_child=_forget)


def pool_of(source: Any) -> ConnectionPool | None:
    """The connections to a store; None where clients of it are no connections."""
    if not _torch.is_networked(source):
        return None
    with _kept.lock:
        return _kept.by_store.setdefault(source, ConnectionPool())
