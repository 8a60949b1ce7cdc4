"""Several ranks behind a bad network: the save completes bit-exact, or fails on every rank in time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import ckptfs
from tests.faults.proxy import (
    LOSE,
    At,
    Chance,
    FaultProxy,
    HttpFault,
    Nth,
    Refuse,
    Reset,
)
from tests.lab.server import Server
from tests.multiprocess.harness import Rank, describe, launch, torchrun
from tests.servers.aftermath import through
from tests.servers.looking import keys_below, pending_uploads

RANKS = 2
ONE_PERCENT = [
    HttpFault("*", "*", Chance(0.01), Reset(At.REQUEST)),
    HttpFault("*", "*", Chance(0.01), LOSE),
]
# So that a short run meets both faults, and the commit itself does.
FOR_SURE = [
    HttpFault("PUT", "*partNumber=*", Nth(3), Reset(At.REQUEST)),
    HttpFault("PUT", "*partNumber=*", Nth(5), LOSE),
    HttpFault("POST", "*uploads*", Nth(1), LOSE),
    HttpFault("POST", "*uploadId=*", Nth(1), LOSE),
    HttpFault("PUT", "*/.ckptfs/log/*", Nth(1), LOSE),
]


def shard(rank: int, size_bytes: int) -> torch.Tensor:
    """One rank's share, random: a byte out of place shows."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 1 << 62, (size_bytes // 8,), generator=generator)


def save_and_load(rank: Rank) -> Any:
    """Save a sharded tensor through the proxy, load it directly; whether all bits are right."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    args = rank.args
    if rank.args.get("torchrun"):
        torch.distributed.init_process_group("gloo")
    else:
        rank.init_group()
    mesh = DeviceMesh("cpu", list(range(rank.size)))
    mine = shard(rank.number, args["bytes"] // rank.size)
    saved = {"w": DTensor.from_local(mine, mesh, [Shard(0)])}
    ckptfs.save(saved, f"{args['uri']}/step_1", storage_options=args["bad"])
    found = []
    for options in (args["good"], args["bad"]):
        into = torch.zeros_like(mine)
        ckptfs.load(
            {"w": DTensor.from_local(into, mesh, [Shard(0)])},
            f"{args['uri']}/step_1",
            storage_options=options,
        )
        found.append(torch.equal(into, mine))
    return found


def check_bad_network(server: Server, size_bytes: int, *, real_launcher: bool) -> None:
    """Save and load; then look at what is left."""
    uri = server.fresh("bad")
    with FaultProxy(server.endpoint, [*FOR_SURE, *ONE_PERCENT], seed=7) as proxy:
        args = {
            "uri": uri,
            "bytes": size_bytes,
            "good": server.storage_options(part_size_bytes=5 << 20),
            "bad": through(server, proxy.url, part_size_bytes=5 << 20),
            "torchrun": real_launcher,
        }
        if real_launcher:
            results = torchrun(save_and_load, RANKS, args=args, timeout_s=600)
            assert [r.error for r in results] == [None] * RANKS, results[0].log
            values = [r.value for r in results]
        else:
            with launch(save_and_load, RANKS, args=args) as ranks:
                values = ranks.values()
        hurt = [e for e in proxy.log if e.done]
        assert len(hurt) >= len(FOR_SURE), "the network was not that bad"
    assert values == [[True, True]] * RANKS
    files = [size for key, size in keys_below(server, uri).items() if key.endswith(".distcp")]
    assert len(files) == RANKS
    assert sum(files) >= size_bytes


def test_two_ranks_behind_a_bad_network(radosgw: Server) -> None:
    """128 MB over 2 ranks with resets and lost answers, those of the upload's begin and end and of the
    commit among them: bit-exact.
    """
    check_bad_network(radosgw, 128 << 20, real_launcher=False)


@pytest.mark.campaign
@pytest.mark.parametrize("store", ["radosgw", "moto"])
def test_two_ranks_of_torchrun_and_2_gb(store: str, request: pytest.FixtureRequest) -> None:
    """The same with 2 GB, one percent of each fault, and the real launcher."""
    check_bad_network(request.getfixturevalue(store), 2 << 30, real_launcher=True)


# -- a dead server -------------------------------------------------------------------------------

RETRY_S = 0.5
# The request that fails, then what cleans up: parts under way (10 s at most), their upload (5 s), the
# attempt (another request, 5 s and a last pause of 2 s); and what starting threads takes, which is 12 s where
# ten times as many processes run as there are cores; and as much again for the requests themselves.
DEADLINE_S = 3 * RETRY_S + 75


def save_to_the_dead(rank: Rank) -> Any:
    """How the save failed, and after how long."""
    rank.init_group()
    began = time.monotonic()
    try:
        ckptfs.save(
            {"w": shard(rank.number, 12 << 20), "r": 0},
            f"{rank.args['uri']}/step_1",
            per_rank=["w"],
            storage_options=rank.args["options"],
        )
    except ckptfs.CkptfsError as error:
        return describe(error) | {"took_s": time.monotonic() - began}
    return None


@pytest.mark.parametrize("dies", ["before the save", "while it writes"])
def test_a_dead_server(radosgw: Server, dies: str) -> None:
    """The server stops answering: within the deadline every rank has the same error, which names the
    endpoint, and nothing under the name was committed.
    """
    uri = radosgw.fresh("dead")
    with FaultProxy(radosgw.endpoint) as proxy:
        if dies == "before the save":
            proxy.refuse()
        else:
            proxy.plan.add(HttpFault("PUT", "*.distcp*", Nth(2), Refuse()))
        args = {
            "uri": uri,
            "options": through(radosgw, proxy.url, part_size_bytes=5 << 20, retry_s=RETRY_S),
        }
        with launch(save_to_the_dead, RANKS, args=args) as ranks:
            values = ranks.values()
        where = proxy.url
    assert values[0]["type"] == values[1]["type"]
    for value in values:
        assert where in value["message"], value["message"]
        assert value["took_s"] < DEADLINE_S, value["took_s"]
    direct = radosgw.storage_options()
    assert ckptfs.list_checkpoints(uri, storage_options=direct) == []
    left = keys_below(radosgw, uri)
    # Data and digests are sent together: of the digests something may be there, as the attempt's own.
    attempts = {key.split("/")[2] for key in left if key.startswith(".ckptfs/attempts/")}
    inside = tuple(f"step_1/{save_id}/" for save_id in attempts)
    assert not [key for key in left if key.startswith("step_1/") and not key.startswith(inside)]
    ckptfs.prepare_run(uri, storage_options=direct)
    swept = keys_below(radosgw, uri)
    assert not [key for key in swept if key.startswith("step_1/")], swept
    assert pending_uploads(radosgw, uri) is not None
