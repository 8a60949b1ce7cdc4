"""One word that processes agree on without waiting for each other: the id of a save by its topic.

    agreed_id(topic)            the first to ask chooses it, everybody gets the same
    renew_id(topic, spent)      it is used up: the next to ask get another one
    is_first(topic)             True for one caller of all, once

No collective and no order of calls: processes of one group agree through the group's store, by
compare_set, from any thread. A process without a group agrees with itself. Made for writers that
know nothing of each other but their common group (fsspec files of ``torch.distributed.checkpoint``).
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any

from ckptfs import _torch
from ckptfs.commit.spec import fresh_save_id
from ckptfs.topology.client import StoreClient
from ckptfs.topology.control import default_timeout_s

__all__ = ["agreed_id", "fresh_id", "is_first", "renew_id"]

_ANSWER_S = 60.0  # one small request to a process that lives


def agreed_id(topic: str) -> str:
    """The id of ``topic``, alike in all processes of the default group. ControlPlaneLostError."""
    return _HERE.ask(fresh_id(), topic, "")


def is_first(topic: str) -> bool:
    """Whether nobody asked for this topic before, in any process of the default group."""
    mine = fresh_id()
    return _HERE.ask(mine, topic, "") == mine


def renew_id(topic: str, spent: str) -> str:
    """The id of ``topic`` after ``spent``; a fresh one unless somebody renewed it before."""
    return _HERE.ask(fresh_id(), topic, spent)


def fresh_id() -> str:
    """An id that nobody else has."""
    return fresh_save_id()


class _Process:
    """What one process agreed on: with its group where there is one, else with itself.

    The one thing here that outlives a call: all threads of a process are one writer.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a file that is collected may ask while its thread asks
        self._pid = os.getpid()
        self._alone: dict[str, str] = {}
        self._client: tuple[Any, StoreClient] | None = None

    def ask(self, mine: str, topic: str, spent: str) -> str:
        """Replace ``spent`` ("": nothing yet) by ``mine``, if it still stands; what stands then."""
        key = f"ckptfs/agreed/{hashlib.sha256(topic.encode()).hexdigest()[:32]}"
        client = self._connected()
        if client is None:
            with self._lock:
                if self._alone.get(key, "") == spent:
                    self._alone[key] = mine
                return self._alone[key]
        wait_s = min(default_timeout_s(), _ANSWER_S)
        told: bytes = client.call_short(lambda store: store.compare_set(key, spent, mine), wait_s)
        return bytes(told).decode()

    def _connected(self) -> StoreClient | None:
        with self._lock:
            if self._pid != os.getpid():
                # In the child of a fork neither the thread nor what the parent is writing is ours.
                self._pid, self._alone, self._client = os.getpid(), {}, None
            if not _torch.has_default_group():
                return None
            store = _torch.group_store(None)
            if self._client is None or self._client[0] is not store:
                if self._client is not None:
                    self._client[1].close()
                self._client = store, StoreClient(store, "ckptfs-agreement")
            return self._client[1]


_HERE = _Process()
