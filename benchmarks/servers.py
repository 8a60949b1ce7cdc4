"""Servers that speak S3, started for a row: radosgw, moto, and a sink over http and https.

    radosgw   Ceph's gateway on this machine, which shares its cores     the comparison of record
    sink      forgets nothing and checks nothing (tests/lab): what a client costs
    sink-tls  the same over https, with an authority of its own
    moto      honours If-Match, which radosgw 16.2 does not

They are those of tests/lab; ckptfs.bench measures. Everybody has eight requests at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from benchmarks import tables
from ckptfs.bench.messages import Asked, WorkloadAsked
from ckptfs.bench.results import Result
from ckptfs.bench.run import measure, target_asked
from tests import lab
from tests.faults.proxy import Delay, Each, FaultProxy, HttpFault
from tests.lab.server import Server

AT_ONCE = 8
NEEDS = {"ckptfs:obstore": "obstore", "s3torchconnector": "s3torchconnector", "raw": "obstore"}
_CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"


def at_server(
    name: str,
    sizes: Mapping[str, int],
    engines: Sequence[str],
    rounds: int,
    options: Mapping[str, Any] | None = None,
    *,
    delay_s: float = 0.0,
) -> Result:
    """At a server that is started for it. sizes: bytes of each workload; 0 leaves it out. options: of
    the storage, for everybody who takes any. delay_s: how long a proxy holds each request, as a network does.

    Engines that are not installed, or are known to fail there, are left out.
    """
    starting: dict[str, Callable[[], AbstractContextManager[Server]]] = {
        "radosgw": lab.radosgw,
        "sink": lambda: lab.sink(keep="all"),
        "sink-tls": lambda: lab.sink(keep="all", tls=True),
        "moto": lab.moto,
    }
    engines = [one for one in engines if find_spec(NEEDS.get(one, "ckptfs"))]
    # It fails on radosgw 16.2, and cannot be given an authority.
    engines = [e for e in engines if e != "s3torchconnector" or name in ("moto", "sink")]
    with starting[name]() as server, _checksums(name), _delayed(server, delay_s) as delayed:
        told = server.storage_options(**delayed, **(options or {}), concurrency=AT_ONCE)
        place = target_asked(server.uri(name), told)
        asked = Asked(
            (place,),
            tuple(WorkloadAsked(kind, size_bytes=n) for kind, n in sizes.items() if n),
            engines=tuple(engines),
            rounds=rounds,
        )
        result = measure(asked, progress=tables.say)
    assert result is not None, "torchrun has no part in this"
    # A port of the day is no property of the server: two results of one server are of one target.
    kind = f"s3: {name}, on this machine"
    if delay_s:
        kind += f", {delay_s * 1000:g} ms in front of each request"
    kinds = tuple(replace(one, kind=kind) for one in result.targets)
    return replace(result, targets=kinds)


@contextmanager
def _delayed(server: Server, delay_s: float) -> Iterator[dict[str, Any]]:
    """Options that lead to the server through a proxy that waits before each request; none without a delay."""
    if not delay_s:
        yield {}
        return
    with FaultProxy(server.endpoint, [HttpFault("*", "*", Each(), Delay(delay_s))]) as proxy:
        yield {"endpoint_url": proxy.url}


@contextmanager
def _checksums(server: str) -> Iterator[None]:
    """Over https s3fs sends a checksum behind a body without a length, which the sink does not read:
    there it sends none, which costs it less.
    """
    before = os.environ.get(_CHECKSUMS)
    if server == "sink-tls":
        os.environ[_CHECKSUMS] = "when_required"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CHECKSUMS, None)
        else:
            os.environ[_CHECKSUMS] = before
