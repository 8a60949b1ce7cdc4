"""The connections of this process to a store, kept for its next clients as long as it has that store.

    pool = pool_of(source)           None: it is no store of connections, or cannot be kept track of
    store = pool.take()              one that answers, or None: make a new one
    pool.expect(); pool.give(store)

A store's server has one thread. It looks up the name of every peer that connects before it serves anybody
else, and where an answer of the name server is lost that takes 5 s: so a process connects once for each
client that it has at a time, and not at each call. What is kept goes with the store that it was cloned
from. The child of a fork keeps nothing of its parent's: two processes would talk over one connection.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from ckptfs import _torch

__all__ = ["ConnectionPool", "pool_of"]

_RETURN_S = 1.0  # how long a client that was closed may take to give its connection back


class ConnectionPool:
    """The connections to one store that no client uses now. Any thread may call it."""

    def __init__(self) -> None:
        self._idle: list[Any] = []
        self._coming = 0
        self._news = threading.Condition()

    def take(self) -> Any:
        """A connection that answers, the caller's alone from now on; None: there is none."""
        while True:
            with self._news:
                # The call before this one closed its clients a moment ago.
                if not self._news.wait_for(lambda: self._idle or not self._coming, _RETURN_S):
                    self._coming = 0  # blocked in a wait that nobody ends: not waited for again
                if not self._idle:
                    return None
                store = self._idle.pop()
            if _answers(store):
                return store

    def expect(self) -> None:
        """A client is closing: it will ``give`` what it has."""
        with self._news:
            self._coming += 1

    def give(self, store: Any) -> None:
        """Keep a connection that no thread uses any more; None: there is none, or it is broken."""
        with self._news:
            self._coming = max(0, self._coming - 1)
            if store is not None:
                self._idle.append(store)
            self._news.notify_all()


def _answers(store: Any) -> bool:
    """Whether a connection that was idle, perhaps for hours, was not cut in between."""
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
    """The idle connections of a store; None where clients of it are no connections."""
    if not _torch.is_networked(source):
        return None
    with _kept.lock:
        return _kept.by_store.setdefault(source, ConnectionPool())
