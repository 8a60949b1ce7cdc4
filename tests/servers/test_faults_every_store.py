"""Every kind of fault before every store: a save and a load come through bit-exact, or where no client
could know better, end with a typed error; never with wrong bytes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.errors import CkptfsError
from tests.faults.proxy import (
    LOSE,
    Action,
    Answer,
    At,
    Bandwidth,
    Cut,
    Delay,
    Each,
    FaultProxy,
    HttpFault,
    Nth,
    Reset,
    Trickle,
    Truncate,
)
from tests.lab.server import Server
from tests.servers.aftermath import through

STORES = ("radosgw", "moto", "azurite", "gcs")
ROWS = 300_000  # 1.2 MB


def state(seed: int) -> dict[str, Any]:
    """Random numbers: a byte out of place shows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.rand(ROWS, generator=generator),
        "b": torch.rand(7, generator=generator),
        "n": seed,
    }


def empty() -> dict[str, Any]:
    """Where a state is loaded into."""
    return {"w": torch.zeros(ROWS), "b": torch.zeros(7), "n": -1}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Bit for bit."""
    return a["n"] == b["n"] and all(torch.equal(a[k], b[k]) for k in "wb")


def now_and_then(action: Action, method: str = "*") -> list[HttpFault]:
    """Requests 2, 7, 15, 20, 28, ... of a method: in no step with anything that begins again."""
    numbers = itertools.accumulate(itertools.cycle((5, 8)), initial=2)
    return [HttpFault(method, "*", Nth(n), action) for n in itertools.islice(numbers, 40)]


FAULTS: dict[str, list[HttpFault]] = {
    "latency": [HttpFault("*", "*", Each(), Delay(0.01))],
    "bandwidth": [HttpFault("*", "*", Each(), Bandwidth(20e6))],
    "reset": now_and_then(Reset(At.BEFORE)),
    "reset in the request": now_and_then(Reset(At.REQUEST), "P*"),
    "reset in the answer": now_and_then(Reset(At.ANSWER)),
    "lost": now_and_then(LOSE),
    "500": now_and_then(Answer(500, code="InternalError")),
    "503 bursts": [HttpFault("*", "*", Nth(n, n + 2), Answer(503)) for n in (1, 12, 23, 34)],
    "503 with Retry-After": [HttpFault("*", "*", Nth(5), Answer(503, retry_after_s=1))],
    "truncated": [HttpFault("GET", "*", Nth(n), Truncate(11)) for n in range(2, 200, 4)],
    "slow loris": [HttpFault("GET", "*", Nth(n), Trickle(20_000)) for n in (2, 5)],
}


# On radosgw each by itself; on the others what differs between libraries and answers, at once.
TOGETHER = ("reset in the answer", "lost", "503 bursts", "truncated", "slow loris")
CASES = [("radosgw", [name]) for name in FAULTS]
CASES += [(store, list(TOGETHER)) for store in STORES if store != "radosgw"]


@pytest.mark.parametrize(("store", "faults"), CASES)
def test_a_save_and_a_load_come_through(
    store: str, faults: list[str], request: pytest.FixtureRequest
) -> None:
    """Two saves, one over the other, and a load, with faults now and then: all is there in the end."""
    server: Server = request.getfixturevalue(store)
    uri = server.fresh("faults")
    plan = [each for name in faults for each in FAULTS[name]]
    with FaultProxy(server.endpoint, plan) as proxy:
        options = through(server, proxy.url, retry_s=120)
        ckptfs.save(state(1), f"{uri}/step_1", storage_options=options)
        ckptfs.save(state(2), f"{uri}/step_1", if_exists="replace", storage_options=options)
        into = empty()
        ckptfs.load(into, f"{uri}/step_1", storage_options=options)
        assert same(into, state(2))
        assert any(e.done for e in proxy.log) or "bandwidth" in faults, "nothing went wrong"
    direct = server.storage_options()
    into = empty()
    ckptfs.load(into, f"{uri}/step_1", storage_options=direct)
    assert same(into, state(2))
    assert [c.step for c in ckptfs.list_checkpoints(uri, storage_options=direct)] == [1]


@pytest.mark.parametrize("store", STORES)
def test_bodies_that_lie_about_their_length(store: str, request: pytest.FixtureRequest) -> None:
    """Answers cut short with a Content-Length that fits, one GET after the other: each load is
    bit-exact or a typed error.
    """
    server: Server = request.getfixturevalue(store)
    uri, direct = server.fresh("lies"), server.storage_options()
    ckptfs.save(state(1), f"{uri}/step_1", storage_options=direct)
    with FaultProxy(server.endpoint) as proxy:
        options = through(server, proxy.url, retry_s=1)
        ckptfs.load(empty(), f"{uri}/step_1", storage_options=options)
        gets = len(proxy.requests("GET"))
        assert gets >= 4
        for nth in range(1, gets + 1):
            proxy.plan.clear()
            proxy.plan.add(HttpFault("GET", "*", Nth(nth), Truncate(40, Cut.LYING)))
            into = empty()
            with contextlib.suppress(CkptfsError):
                ckptfs.load(into, f"{uri}/step_1", storage_options=options)
                assert same(into, state(1)), f"wrong bytes after a lie in GET {nth}"
