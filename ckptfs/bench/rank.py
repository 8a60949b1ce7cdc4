"""One rank of a benchmark: its group, and the program that ``run`` starts for it.

    in    {"rank", "ranks", "port", "line", "asked"}      port null: this rank hosts the store
    out   {"port"}  {"kind", ...} of messages  {"done"} or {"failed"}       only rank 0 sends findings

Standard input stays open as long as the process that started this one lives. When it closes, this
process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptfs.bench.messages import decode_asked, encode_told
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
    """Measure as standard input orders. Ends the process."""
    orders = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    line = os.fdopen(orders["line"], "w", buffering=1)

    def tell(text: str) -> None:
        line.write(text + "\n")
        line.flush()

    try:
        _measure(orders, tell)
    except CkptfsError as error:
        tell(json.dumps({"failed": failed_document(error)}))
        os._exit(1)  # threads of libraries may still wait for dead ranks
    tell(json.dumps({"done": True}))
    line.close()
    os._exit(0)


def _measure(orders: dict[str, Any], tell: Any) -> None:
    # Imported here, so that the import of torch is not paid before the orders are read.
    from ckptfs.bench.measure import measure_ranks

    store = hosted_store(orders["port"])
    if orders["port"] is None:
        tell(json.dumps({"port": store.port}))
    group = joined_group(orders["rank"], orders["ranks"], store)
    measure_ranks(decode_asked(orders["asked"]), group, lambda report: tell(encode_told(report)))
    group.barrier()


def failed_document(error: CkptfsError) -> dict[str, Any]:
    """Return the error as JSON values, without credentials."""
    return {
        "type": type(error).__name__,
        "message": mask_credentials(error.message),
        "uri": error.uri,
        "hint": error.hint and mask_credentials(error.hint),
        "rank": error.rank,
    }


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
