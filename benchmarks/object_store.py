"""ckptfs beside torch's FsspecWriter, s3torchconnector and bare obstore, over S3-shaped servers.

    python -m benchmarks.object_store                         radosgw, the sink and moto: minutes
    python -m benchmarks.object_store --mib 8 --rounds 1 --servers sink       does it still run?

    radosgw   Ceph's gateway on this machine, which shares its cores     the comparison of record
    sink      forgets nothing and checks nothing (tests/lab): what a client costs
    moto      where s3torchconnector works

The servers are those of tests/lab, started for the run. One client process per server and state
(object_worker.py); medians, ranges, ratios and a table (object_report.py); one JSON file with machine,
versions, date, command and every single measurement in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import machine, object_report
from benchmarks.object_peers import AT_ONCE, PART_BYTES
from tests import lab
from tests.lab.server import Server

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
DCP = ["s3fs", "obstore", "fsspec", "fsspec8"]


@dataclass(frozen=True)
class Job:
    """One server, one state, and who is measured on it."""

    server: str
    state: str
    mib: int
    peers: tuple[str, ...]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What is measured; moto answers at 40 MB/s, so it gets less."""
    everything = {
        "radosgw": [
            Job("radosgw", "large", options.mib, (*DCP, "raw")),
            Job("radosgw", "small", options.small_mib, (*DCP, "raw")),
        ],
        "sink": [
            Job("sink", "large", options.mib, (*DCP, "raw")),
            Job("sink", "small", options.small_mib, (*DCP, "raw")),
        ],
        "moto": [Job("moto", "large", min(options.mib, 128), (*DCP, "s3torch", "raw"))],
    }
    asked = set(options.peers) - missing_peers()
    return [
        Job(job.server, job.state, job.mib, tuple(p for p in job.peers if p in asked))
        for name in options.servers
        for job in everything[name]
    ]


def missing_peers() -> set[str]:
    """Peers that are not installed; the result says so by their versions."""
    needed = {"s3torch": ("s3torchconnector", "tenacity"), "obstore": ("obstore",)}
    needed["raw"] = needed["obstore"]
    return {peer for peer, names in needed.items() if not all(map(find_spec, names))}


def main() -> int:
    """Measure, write the result, print the tables."""
    options = _options()
    result = measure(options)
    out = options.out or HERE / "results" / f"object_store-{result['date'][:10]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    object_report.show(result)
    print(f"every measurement: {os.path.relpath(out)}")
    return 0 if object_report.holds(result) or not options.check else 1


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every job; the whole result as it goes into the file."""
    started, load_before = datetime.now(UTC), os.getloadavg()
    found = []
    for name in options.servers:
        with _server(name) as server:
            for job in jobs_of(options):
                if job.server == name:
                    print(f"{name}, {job.state} ...", file=sys.stderr, flush=True)
                    found.append(object_report.summary(job, _run(job, server, options)))
    return {
        "what": "ckptfs.save and load beside other ways to put the same bytes into a bucket",
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.object_store", *sys.argv[1:]]),
        "note": options.note,
        "requests_at_once": AT_ONCE,
        "part_bytes": PART_BYTES,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "machine": machine.describe(Path(tempfile.gettempdir())),
        "versions": machine.versions(
            "s3fs", "aiobotocore", "obstore", "s3torchconnector", "moto", "fsspec"
        ),
        "jobs": found,
        "verdicts": object_report.verdicts({"jobs": found}),
    }


@contextlib.contextmanager
def _server(name: str) -> Iterator[Server]:
    starting: dict[str, AbstractContextManager[Server]] = {
        "radosgw": lab.radosgw(),
        "sink": lab.sink(keep="all"),
        "moto": lab.moto(),
    }
    with starting[name] as server:
        yield server


def _run(job: Job, server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """One client process; its result."""
    asked = {
        "peers": job.peers,
        "state": job.state,
        "size_bytes": job.mib * MIB,
        "rounds": options.rounds,
        "bucket": server.bucket,
        "options": server.storage_options(),
    }
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="ckptfs-bench-") as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "benchmarks.object_worker", json.dumps(asked), str(result)]
        done = subprocess.run(
            command,
            env=environment,
            cwd=HERE.parent,
            capture_output=True,
            text=True,
            timeout=options.timeout_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the client of {job} failed:\n{done.stderr[-8000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ckptfs beside other ways to an object store")
    parser.add_argument("--servers", type=_names, default=["radosgw", "sink", "moto"])
    parser.add_argument("--peers", type=_names, default=[*DCP, "s3torch", "raw"])
    parser.add_argument("--mib", type=int, default=512, help="MiB of the state of large tensors")
    parser.add_argument("--small-mib", type=int, default=20, help="MiB of the state of small ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--note", default="", help="what else ran, and what was special")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of each client process")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
