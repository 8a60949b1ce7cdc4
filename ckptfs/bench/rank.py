"""One rank of a benchmark: its group, and the program that ``run`` starts for it.

    receives    Asked, then StoreAt, unless this is rank 0
    sends       StoreAt and what it finds, if this is rank 0; the CkptfsError that it failed with

Its argument is the descriptor of its connection to the process that started it, which stays open as long
as that process lives. When it closes, this process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from ckptfs.bench.messages import StoreAt
from ckptfs.errors import CkptfsError
from ckptfs.uri import mask_credentials

__all__ = ["TorchGroup", "hosted_store", "joined_group", "main"]

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)  # long, because the storage to measure may be slow


class TorchGroup:
    """All ranks, as ``clock.Group``, in a group of its own; the engines use the default group.

    An engine that saves in a thread runs its collectives there. In one group they would be mixed up with
    the barriers around the clock, and both would wait forever.

    Attributes:
        rank: The number of this rank.
        size: The number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(timeout=_TIMEOUT) if self.size > 1 else None

    @property
    def is_first_of_node(self) -> bool:
        """Whether this is the first process of its machine."""
        return int(os.environ.get("LOCAL_RANK", self.rank)) == 0

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
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
    """Return the store that the ranks meet at, on ``port``; None hosts it here, on a free port."""
    return dist.TCPStore(
        _HOST, port or 0, is_master=port is None, wait_for_workers=False, timeout=_TIMEOUT
    )


def joined_group(rank: int = -1, ranks: int = -1, store: Any = None) -> TorchGroup:
    """Return this rank's member of the group, after the process group was initialised.

    Args:
        rank: The number of this rank; needed with ``store``.
        ranks: The number of ranks; needed with ``store``.
        store: The store that the ranks meet at; None: as torchrun's environment describes.
    """
    if store is None:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    return TorchGroup()


def main() -> None:
    """Measure what the process that started this one asks for. Ends the process."""
    connection = Connection(int(sys.argv[1]))
    try:
        _measure(connection)
    except CkptfsError as error:
        connection.send(_masked(error))
        os._exit(1)  # threads of libraries may still wait for dead ranks
    os._exit(0)


def _measure(connection: Connection) -> None:
    from ckptfs.bench.measure import measure_ranks

    asked, rank = connection.recv(), int(os.environ["RANK"])
    if rank == 0:
        store = hosted_store(None)
        connection.send(StoreAt(store.port))
    else:
        store = hosted_store(connection.recv().port)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    group = joined_group(rank, asked.ranks, store)
    measure_ranks(asked, group, connection.send)
    group.barrier()


def _masked(error: CkptfsError) -> CkptfsError:
    error.message = mask_credentials(error.message)
    error.hint = error.hint and mask_credentials(error.hint)
    return error


def _end_with_parent(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.recv()  # nothing more is sent
    os._exit(1)


if __name__ == "__main__":
    main()
