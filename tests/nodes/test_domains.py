"""Who shares what, on machines where the same path is the same disk, another disk, or a private one.

Three containers of one hostname, two ranks each, with equal process ids too; what is mounted where
is in conftest.py.
"""

from __future__ import annotations

from typing import Any

from tests.lab.nodes import Nodes
from tests.multiprocess.harness import Rank, launch

FOUND = {
    "/scratch": [[0, 1], [2, 3], [4, 5]],
    "/shared": [[0, 1, 2, 3, 4, 5]],
    "/bound": [[0, 1, 2, 3, 4, 5]],
    "/data": [[0, 1], [2, 3, 4, 5]],
    "/partly": [[0, 1, 2, 3], [4, 5]],
}


def look_around(rank: Rank) -> dict[str, Any]:
    """Probe each place, save there and load it; then read through the other path of one of them."""
    import os
    import socket

    import torch
    import torch.distributed as dist

    import ckptfs
    from ckptfs.control.control import open_control
    from ckptfs.storage.registry import open_storage
    from ckptfs.topology.storage_domains import probe_domains

    rank.init_group()
    seen: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    key = f"w{rank.number}"
    for step, place in enumerate(FOUND):
        with open_control(timeout_s=60) as control:
            placement = probe_domains(control, open_storage(f"{place}/domains"))
            nodes = len({world.node for world in control.worlds})
        target = f"{place}/domains/step_{step}"
        saved = ckptfs.save({key: torch.arange(9.0) + rank.number}, target)
        state = {key: torch.zeros(9)}
        ckptfs.load(state, target)
        files = os.listdir(f"{target}/{saved.save_id}")
        seen[place] = {
            "domains": [list(domain.ranks) for domain in placement.domains],
            "nodes": nodes,
            "whole": bool((state[key] == torch.arange(9.0) + rank.number).all()),
            "shards": sorted(int(name[2]) for name in files if name.endswith(".distcp")),
        }
        dist.barrier()
    through = ckptfs.latest("/bound/domains")
    assert through is not None
    seen["same"] = through.save_id == ckptfs.latest("/shared/domains").save_id  # type: ignore[union-attr]
    return seen


def arrive(rank: Rank) -> None:
    """Nothing: the process that ranks are forked from is warm afterwards."""


def test_row22_the_bytes_alone_say_who_shares_what(trainers: Nodes) -> None:
    """Row 22: private disks, one directory, a bind of it, two directories behind one path, and a path
    that only some share: with equal hostnames and process ids each is found for what it is, and a
    save has each rank's files exactly where that rank looks.
    """
    with launch(arrive, 6, warm=True, prefix=lambda rank: trainers[rank // 2].prefix) as ranks:
        ranks.values(timeout_s=180)
    for node in trainers:
        node.next_pid(20_000)
    with launch(look_around, 6, warm=True, prefix=lambda rank: trainers[rank // 2].prefix) as ranks:
        values = ranks.values(timeout_s=180)
    assert {value["host"] for value in values} == {"trainer"}
    assert values[0]["pid"] == values[2]["pid"] == values[4]["pid"], "no equal pids: nothing shown"
    for number, value in enumerate(values):
        assert value["same"]
        for place, domains in FOUND.items():
            mine = next(ranks for ranks in domains if number in ranks)
            assert value[place] == {
                "domains": domains,
                "nodes": 3,
                "whole": True,
                "shards": mine,
            }, (number, place)
