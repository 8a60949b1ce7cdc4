"""The ranks of a benchmark, seen from one of them: a gloo group, and what measuring asks of it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["TorchGroup", "hosted_store", "joined_group"]

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)  # a slow storage is what is measured


class TorchGroup:
    """All ranks, as ``clock.Group``; the default group is left to the engines.

    An engine that saves in a thread runs its collectives there: on one group they would be mixed up with the
    barriers around the clock, and both would wait without end.

    Attributes:
        rank: This rank.
        size: How many ranks.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(timeout=_TIMEOUT) if self.size > 1 else None

    @property
    def is_first_of_node(self) -> bool:
        """True on one process of each machine."""
        return int(os.environ.get("LOCAL_RANK", self.rank)) == 0

    def barrier(self) -> None:
        """All are here."""
        if self.size > 1:
            dist.barrier(group=self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found


def hosted_store(port: int | None) -> Any:
    """Return the store that the ranks meet at, at ``port``; None hosts it here, at a port of the system's
    choice.
    """
    return dist.TCPStore(
        _HOST, port or 0, is_master=port is None, wait_for_workers=False, timeout=_TIMEOUT
    )


def joined_group(rank: int = -1, ranks: int = -1, store: Any = None) -> TorchGroup:
    """Return a member of the group.

    Args:
        rank: This rank, with ``store``.
        ranks: How many ranks, with ``store``.
        store: Where they meet; None: as torchrun's environment describes.
    """
    if store is None:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    return TorchGroup()
