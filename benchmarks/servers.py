"""ckptfs beside torch's FsspecWriter, s3torchconnector and bare obstore, over S3-shaped servers.

    python -m benchmarks.servers                         radosgw, the sink and moto: minutes
    python -m benchmarks.servers --mib 8 --rounds 1 --servers sink       does it still run?

    radosgw   Ceph's gateway on this machine, which shares its cores     the comparison of record
    sink      forgets nothing and checks nothing (tests/lab): what a client costs
    sink-tls  the same over https, with an authority of its own
    moto      honours If-Match, which radosgw 16.2 does not

The servers are those of tests/lab, started for the run; ckptfs.bench measures. A server is a target, two
workloads go to each, and everybody has eight requests at once. One result file, which ``ckptfs bench
report`` draws; the goals are told last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import goals, tables
from ckptfs.bench.messages import Asked, WorkloadAsked
from ckptfs.bench.results import Result
from ckptfs.bench.run import measure, target_asked
from tests import lab
from tests.faults.proxy import Delay, Each, FaultProxy, HttpFault
from tests.lab.server import Server

MIB = 1 << 20
AT_ONCE = 8
ENGINES = ("ckptfs:obstore", "dcp", "s3torchconnector", "raw")
NEEDS = {"ckptfs:obstore": "obstore", "s3torchconnector": "s3torchconnector", "raw": "obstore"}
_CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"
MOTO_MIB = 128  # it answers at 40 MB/s


def asked_goals() -> list[goals.Asked]:
    """On radosgw, with large tensors: a third of FsspecWriter's seconds and half of its CPU; at most 15 % more
    than bare obstore.
    """

    def record(workload: str, target: str) -> bool:
        return workload.startswith("llm") and target.endswith("/radosgw")

    ours = "ckptfs:obstore"
    return [
        goals.Asked(ours, ("dcp",), 1 / 3, where=record),
        goals.Asked(ours, ("dcp",), 0.5, goals.What.CPU_SECONDS, where=record),
        goals.Asked(ours, ("raw",), 1.15, where=record),
    ]


def main() -> int:
    """Measure, write the result, print the tables."""
    options = _options()
    command = shlex.join(["python", "-m", "benchmarks.servers", *sys.argv[1:]])
    result = tables.joined(
        [_measured(name, options) for name in options.servers],
        what="ckptfs.save and load beside other ways to put the same bytes into a bucket",
        command=command,
        note=options.note,
    )
    found = goals.goals_of(result, asked_goals())
    tables.finish(result, options.out, "servers", found)
    return 0 if goals.holds(found) or not options.check else 1


def _measured(name: str, options: argparse.Namespace) -> Result:
    mib = min(options.mib, MOTO_MIB) if name == "moto" else options.mib
    sizes = {"llm": mib * MIB, "many": options.small_mib * MIB}
    return at_server(name, sizes, tuple(options.engines), options.rounds)


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
    # It fails on radosgw 16.2, and can be told of no authority.
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
        result = measure(asked, progress=lambda text: print(text, file=sys.stderr, flush=True))
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


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ckptfs beside other ways to an object store")
    parser.add_argument("--servers", type=_names, default=["radosgw", "sink", "moto"])
    parser.add_argument("--engines", type=_names, default=ENGINES)
    parser.add_argument("--mib", type=int, default=512, help="MiB of the state of large tensors")
    parser.add_argument("--small-mib", type=int, default=20, help="of small ones; 0: none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--note", default="", help="what else ran, and what was special")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
