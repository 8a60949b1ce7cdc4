"""Ranks of one job, a process each, on both clients: what torchrun would start, in a fraction of its time.

    values = in_ranks(lab, function, argument, per_node=2)     function(rank, argument) -> its value

They are forked from a process that has torch already (``lab.warm``) and meet in a TCPStore on client a;
the environment is torchrun's, so ckptfs finds its ranks by itself.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

from tests.lab.nfs import NfsLab

__all__ = ["in_ranks"]


def in_ranks(
    lab: NfsLab,
    function: Callable[..., Any],
    *args: Any,
    per_node: int = 1,
    timeout_s: float = 180.0,
) -> list[Any]:
    """What each rank returned, in order; raises what the first that failed raised, when all have ended."""
    lab.warm()
    port = 20_000 + int(uuid.uuid4().hex[:6], 16) % 10_000
    size = 2 * per_node
    forked = []
    for rank in range(size):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": lab.a.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "CKPTFS_TIMEOUT_S": "120",
        }
        node = lab.nodes[rank // per_node]
        forked.append(node.fork(_rank, function, rank, args, environment=environment))
    ended: list[Any] = []
    for process in forked:
        try:
            ended.append(process.result(timeout_s))
        except Exception as error:  # noqa: BLE001 - the others have to end too
            ended.append(error)
    for value in ended:
        if isinstance(value, Exception):
            raise value
    return ended


def _rank(function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> Any:
    store = _host_store() if rank == 0 else None
    try:
        return function(rank, *args)
    finally:
        del store


def _host_store() -> Any:
    """The store that all of them meet in, as an agent of torchrun would host it."""
    from torch.distributed import TCPStore

    port = int(os.environ["MASTER_PORT"])
    return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)  # noqa: S104
