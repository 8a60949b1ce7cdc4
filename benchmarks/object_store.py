"""ckptfs beside torch's FsspecWriter, s3torchconnector and bare obstore, over S3-shaped servers.

    python -m benchmarks.object_store                         radosgw, the sink and moto: minutes
    python -m benchmarks.object_store --mib 8 --rounds 1 --servers sink       does it still run?

    radosgw   Ceph's gateway on this machine, which shares its cores     the comparison of record
    sink      forgets nothing and checks nothing (tests/lab): what a client costs
    moto      where s3torchconnector works

The servers are those of tests/lab, started for the run; ckptfs.bench measures. A server is a target, two
workloads go to each, and everybody has eight requests at once. One result file, which ``ckptfs bench
report`` draws; the goals are told last.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks import goals, telling
from ckptfs.bench.ask import Asked, WorkloadAsked
from ckptfs.bench.results import Result
from ckptfs.bench.running import measure, target_asked
from tests import lab
from tests.lab.server import Server

MIB = 1 << 20
AT_ONCE = 8
ENGINES = ("ckptfs:s3fs", "ckptfs:obstore", "dcp", "s3torchconnector", "raw")
NEEDS = {"ckptfs:obstore": "obstore", "s3torchconnector": "s3torchconnector", "raw": "obstore"}
MOTO_MIB = 128  # it answers at 40 MB/s


def asked_goals() -> list[goals.Asked]:
    """On radosgw, with large tensors: a third of FsspecWriter's seconds and half of its CPU, with
    either client; at most 15 % more than bare obstore with obstore, which is taken where it is there.
    """

    def record(workload: str, target: str) -> bool:
        return workload.startswith("llm") and target.endswith("/radosgw")

    found = []
    for ours in ("ckptfs:s3fs", "ckptfs:obstore"):
        found += [
            goals.Asked(ours, ("dcp",), 1 / 3, where=record),
            goals.Asked(ours, ("dcp",), 0.5, goals.What.CPU_SECONDS, where=record),
            goals.Asked(ours, ("raw",), 1.15, counts=ours == "ckptfs:obstore", where=record),
        ]
    return found


def main() -> int:
    """Measure, write the result, print the tables."""
    options = _options()
    command = shlex.join(["python", "-m", "benchmarks.object_store", *sys.argv[1:]])
    result = telling.joined(
        [_measured(name, options) for name in options.servers],
        what="ckptfs.save and load beside other ways to put the same bytes into a bucket",
        command=command,
        note=options.note,
    )
    found = goals.goals_of(result, asked_goals())
    path = telling.save(result, options.out, "object_store")
    telling.show(result, found)
    print(f"every measurement: {path}")
    return 0 if goals.holds(found) or not options.check else 1


def _measured(name: str, options: argparse.Namespace) -> Result:
    starting: dict[str, AbstractContextManager[Server]] = {
        "radosgw": lab.radosgw(),
        "sink": lab.sink(keep="all"),
        "moto": lab.moto(),
    }
    engines = [e for e in options.engines if find_spec(NEEDS.get(e, "ckptfs"))]
    if name != "moto":  # s3torchconnector fails on radosgw 16.2, and on the sink
        engines = [engine for engine in engines if engine != "s3torchconnector"]
    mib = min(options.mib, MOTO_MIB) if name == "moto" else options.mib
    sizes = {"llm": mib, "many": options.small_mib}
    with starting[name] as server:
        place = target_asked(server.uri(name), server.storage_options(concurrency=AT_ONCE))
        asked = Asked(
            (place,),
            tuple(WorkloadAsked(kind, size_bytes=n * MIB) for kind, n in sizes.items() if n),
            engines=tuple(engines),
            rounds=options.rounds,
        )
        result = measure(asked, progress=lambda text: print(text, file=sys.stderr, flush=True))
    assert result is not None, "torchrun has no part in this"
    # A port of the day is no property of the server: two results of one server are of one target.
    kinds = tuple(replace(one, kind=f"s3: {name}, on this machine") for one in result.targets)
    return replace(result, targets=kinds)


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
